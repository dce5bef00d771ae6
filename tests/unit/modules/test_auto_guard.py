"""Mode "auto" gives a plan up whose steps are slower than those before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from offload.modules.auto_guard import AutoGuard
from offload.policy.actions import Action
from tests.unit.modules.linked import FORWARD_S, LAYERS, MICROBATCHES, RATE, SETTLED, Run, new_run

__all__ = ["new_run"]

F = Action("F", 0, 0)


class Step(NamedTuple):
    took_s: float | None
    is_planned: bool = True
    is_final: bool = True
    shape: int = 1


def verdicts(*steps: Step) -> list[bool]:
    """Of each step, given when the next one has ended. Half of a step's time it waited for copies."""
    guard, found, before_s = AutoGuard(), list[bool](), None
    for step in (*steps, steps[-1]):
        seconds = None if before_s is None else {F: before_s / 2}
        found.append(
            guard.step_ended(
                step.shape,
                is_planned=step.is_planned,
                is_final=step.is_final,
                seconds_before=seconds,
                stall_before_s=0.0 if before_s is None else before_s / 2,
            )
        )
        before_s = step.took_s
    return found[1:]


RECOMPUTED = [Step(took_s, is_planned=False) for took_s in (12.0, 10.0)]


@pytest.mark.parametrize(("fastest_s", "is_slower"), [(10.4, False), (10.6, True)])
def test_the_fastest_of_the_first_steps_under_the_last_plan_is_compared_once(
    fastest_s: float, is_slower: bool
) -> None:
    under = [Step(took_s) for took_s in (20.0, 30.0, fastest_s, 20.0, 20.0, 20.0)]
    assert verdicts(*RECOMPUTED, *under) == [False] * 5 + [is_slower, False, False]


@pytest.mark.parametrize(
    "other", [Step(1.0, is_final=False), Step(None), Step(1.0, shape=2)], ids=["tried", "untimed", "shape"]
)
def test_a_step_under_an_earlier_plan_or_of_no_known_time_is_not_looked_at(other: Step) -> None:
    if other.shape == 1:
        assert verdicts(*RECOMPUTED, other, *[Step(20.0)] * 4)[-1]
    else:  # what is known of one shape is not of the other
        assert not any(verdicts(*RECOMPUTED, *[other] * 4, *[Step(20.0)] * 4))


def test_a_plan_whose_steps_are_slower_than_those_before_it_is_given_up_until_other_steps_come(
    new_run: Callable[[float], Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(RATE / 2)
    run.planned_factor = 3.0
    run.steps(SETTLED + 6)
    explained = run.handle.explain()
    assert explained.plan is None
    assert explained.is_final
    assert "a step under the plan took longer than one that recomputes every block" in str(explained)
    (said,) = [record.getMessage() for record in caplog.records if "under the plan" in record.message]
    took_ms, recomputed_ms = (float(word) for word in said.split() if word.replace(".", "").isdigit())
    assert took_ms > 1.05 * recomputed_ms
    assert len(run.plans) == 3
    assert run.handle._auto is not None
    assert not run.handle._auto.memory.is_measured
    run.microbatches += 1
    run.planned_factor = 1.0
    run.steps(SETTLED + 6)
    assert run.handle.explain().plan is not None


def test_later_plans_are_made_from_times_that_were_measured_under_the_plan_before(
    new_run: Callable[[float], Run],
) -> None:
    """Blocks take 3% longer under a plan than without: less than what gives a plan up."""
    run = new_run(RATE)
    run.planned_factor = 1.03
    run.steps(SETTLED)
    _, *later = run.plans
    plain_s = MICROBATCHES * LAYERS * 3 * FORWARD_S * 1.03
    assert [plan.plain_s for plan in later] == [pytest.approx(plain_s)] * 2
    assert run.handle.explain().is_final
