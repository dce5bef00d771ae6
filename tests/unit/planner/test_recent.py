"""The step to plan for, of those that were seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from offload.planner.work import Ran, RecentSteps, StepWork
from offload.policy.actions import Action
from offload.policy.lengths import STEPS
from tests.unit.planner.test_work import Profiled


def end_step(recent: RecentSteps, lengths: Sequence[int], *, timed: bool) -> None:
    """A step of one microbatch of so many bytes in each stage. timed: the seconds of the one before it are
    known."""
    actions = [Action(kind, stage, 0) for stage in range(len(lengths)) for kind in ("F", "B")]
    ran = {(stage, 0): [Ran(Profiled(), 0, length)] for stage, length in enumerate(lengths)}
    seconds = {Action(kind, stage, 0): 2.0 for stage in range(2) for kind in ("F", "B")}
    recent.ended(actions, ran, seconds if timed else None)


def test_work_is_made_of_the_steps_that_are_asked_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = list[object](), StepWork.of

    def counted(*arguments: Any) -> StepWork | None:
        made.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(StepWork, "of", counted)
    recent = RecentSteps()
    for _ in range(5):
        end_step(recent, (10, 10), timed=True)
    assert not made
    work = recent.step()
    assert work is not None
    assert recent.step() is work
    assert len(made) == 1


def test_a_step_with_blocks_that_are_not_known_yet_is_not_planned_for() -> None:
    recent = RecentSteps()
    for _ in range(3):
        end_step(recent, (10,), timed=True)
    known = recent.step()
    actions = [Action("F", 0, 0), Action("B", 0, 0)]
    for _ in range(2):
        recent.ended(actions, {(0, 0): [Ran(None, 0, 10)]}, dict.fromkeys(actions, 2.0))
    assert recent.step() is not known  # of the last step before, timed since
    assert recent.step() is not None


def test_a_stage_that_the_last_steps_lack_is_not_planned_for() -> None:
    """A run goes on with one of its two stages, whose steps vary and are not timed for a while."""
    recent = RecentSteps()
    for length in (10, 20, 30):
        end_step(recent, (length, length), timed=True)
    work = recent.step()
    assert {action.stage for action in work.actions} == {0, 1}
    for number in range(STEPS):
        end_step(recent, (10 + number,), timed=False)
    assert recent.step() is None
    end_step(recent, (40,), timed=True)
    work = recent.step()
    assert {action.stage for action in work.actions} == {0}
