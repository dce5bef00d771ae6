"""Phases: their order, who is told, and their seconds."""

from __future__ import annotations

import itertools

import pytest

from offload.client import Phase
from offload.conductor.phases import LEGAL_MOVES, PhaseCoordinator, PhaseOrderError

WHOLE = [Phase.STEP_BEGIN, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.STEP_END]


@pytest.mark.req("S1-1")
def test_a_step_goes_through_five_phases_and_the_next_one_again() -> None:
    coordinator = PhaseCoordinator()
    seen: list[Phase] = []
    coordinator.listen(seen.append)
    assert coordinator.phase is None
    for phase in WHOLE * 2:
        coordinator.enter(phase)
        assert coordinator.phase is phase
    assert seen == WHOLE * 2


@pytest.mark.req("S1-5")
def test_forward_and_backward_take_turns_and_a_microbatch_more_is_no_transition() -> None:
    coordinator = PhaseCoordinator()
    seen: list[Phase] = []
    coordinator.listen(seen.append)
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    for phase in [Phase.STEP_BEGIN, forward, forward, backward, forward, backward, backward, Phase.OPTIMIZER]:
        coordinator.enter(phase)
    assert seen == [Phase.STEP_BEGIN, forward, backward, forward, backward, Phase.OPTIMIZER]


@pytest.mark.req("S1-6")
@pytest.mark.parametrize(("before", "after"), list(itertools.product([None, *Phase], Phase)))
def test_every_move_that_the_table_lacks_is_a_typed_error_that_changes_nothing(
    before: Phase | None, after: Phase
) -> None:
    coordinator = PhaseCoordinator()
    if before is not None:
        for phase in WHOLE[: WHOLE.index(before) + 1]:
            coordinator.enter(phase)
    seen: list[Phase] = []
    coordinator.listen(seen.append)
    goes_on = before is after and after in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    if after in LEGAL_MOVES[before] or goes_on:
        coordinator.enter(after)
        assert seen == ([] if goes_on else [after])
    else:
        with pytest.raises(PhaseOrderError, match="legal from here: "):
            coordinator.enter(after)
        assert coordinator.phase is before
        assert seen == []


def test_the_message_names_the_call_where_it_stands_and_the_next_step() -> None:
    with pytest.raises(PhaseOrderError) as raised:
        PhaseCoordinator().enter(Phase.OPTIMIZER)
    assert "enter_optimizer() before the first begin_step()" in str(raised.value)
    assert str(raised.value).endswith("legal from here: begin_step()")


@pytest.mark.req("S1-2")
def test_a_transition_is_told_once_in_order_also_behind_a_listener_that_raises() -> None:
    coordinator = PhaseCoordinator()
    told: list[tuple[str, Phase]] = []

    def failing(phase: Phase) -> None:
        told.append(("second", phase))
        raise ValueError("second listener")

    coordinator.listen(lambda phase: told.append(("first", phase)))
    coordinator.listen(failing)
    coordinator.listen(lambda phase: told.append(("third", phase)))
    with pytest.raises(ValueError, match="second listener"):
        coordinator.enter(Phase.STEP_BEGIN)
    assert told == [(name, Phase.STEP_BEGIN) for name in ("first", "second", "third")]
    assert coordinator.phase is Phase.STEP_BEGIN  # and the step goes on
    coordinator.unlisten(failing)
    coordinator.unlisten(failing)
    coordinator.enter(Phase.FORWARD)
    assert told[3:] == [("first", Phase.FORWARD), ("third", Phase.FORWARD)]


@pytest.mark.req("S1-4")
def test_seconds_add_up_by_phase_and_begin_anew_with_the_step() -> None:
    now = iter([0.0, 1.0, 4.0, 5.5, 5.75, 8.0, 9.0, 9.5])
    coordinator = PhaseCoordinator(lambda: next(now))
    turns = [Phase.STEP_BEGIN, Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD, Phase.BACKWARD]
    for phase in [*turns, Phase.OPTIMIZER, Phase.STEP_END]:
        coordinator.enter(phase)
    assert coordinator.durations == {
        Phase.STEP_BEGIN: 1.0,
        Phase.FORWARD: 3.0 + 0.25,
        Phase.BACKWARD: 1.5 + 2.25,
        Phase.OPTIMIZER: 1.0,
    }
    coordinator.enter(Phase.STEP_BEGIN)
    assert coordinator.durations == {}


@pytest.mark.parametrize(
    ("before", "target", "by_way_of"),
    [
        ([], Phase.BACKWARD, [Phase.STEP_BEGIN, Phase.FORWARD, Phase.BACKWARD]),
        (WHOLE[:2], Phase.OPTIMIZER, [Phase.BACKWARD, Phase.OPTIMIZER]),
        (WHOLE[:3], Phase.FORWARD, [Phase.FORWARD]),
        (WHOLE[:3], Phase.STEP_END, [Phase.STEP_END]),
        (WHOLE[:3], Phase.STEP_BEGIN, [Phase.STEP_END, Phase.STEP_BEGIN]),
        (WHOLE[:4], Phase.FORWARD, [Phase.STEP_END, Phase.STEP_BEGIN, Phase.FORWARD]),
        (WHOLE[:4], Phase.OPTIMIZER, []),
        (WHOLE, Phase.BACKWARD, [Phase.STEP_BEGIN, Phase.FORWARD, Phase.BACKWARD]),
    ],
)
def test_a_phase_that_was_seen_is_reached_by_legal_moves(
    before: list[Phase], target: Phase, by_way_of: list[Phase]
) -> None:
    coordinator = PhaseCoordinator()
    for phase in before:
        coordinator.enter(phase)
    seen: list[Phase] = []
    coordinator.listen(seen.append)
    coordinator.reach(target)
    assert seen == by_way_of


def test_every_phase_is_reached_from_every_other() -> None:
    for length, target in itertools.product(range(6), Phase):
        coordinator = PhaseCoordinator()
        for phase in WHOLE[:length]:
            coordinator.enter(phase)
        coordinator.reach(target)
        assert coordinator.phase is target
