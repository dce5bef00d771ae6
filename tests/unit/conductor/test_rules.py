"""The three rules, at their edges, and how the two bridges differ."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.client import Phase
from offload.conductor.config import MIB
from offload.conductor.phases import HeuristicPolicyBridgeV0, RuntimeLimitHints, TurnsPolicyBridge

HARD_BYTES = 23500 * MIB
FULL_BYTES = HARD_BYTES
IDLE = RuntimeLimitHints(max_inflight_h2d=2, max_inflight_d2h=2)


def bridge(kind: type[HeuristicPolicyBridgeV0] = HeuristicPolicyBridgeV0) -> HeuristicPolicyBridgeV0:
    found = kind(h2d_slots=2, d2h_slots=2)
    found.begin_step(None)
    found.enter(Phase.STEP_BEGIN, 0, HARD_BYTES)
    return found


@pytest.mark.req("S1-30", "S1-38")
def test_rule_1_one_byte_above_80_percent_of_the_hard_cap_in_backward() -> None:
    found = bridge()
    found.enter(Phase.BACKWARD, HARD_BYTES * 80 // 100 + 1, HARD_BYTES)
    hints = found.hints()
    assert (hints.suppress_speculative, hints.prefetch_window_cap) == (True, 1)
    assert (hints.max_inflight_h2d, hints.max_inflight_d2h) == (2, 2)


@pytest.mark.req("S1-31")
def test_rule_1_does_not_fire_at_exactly_80_percent_nor_in_another_phase() -> None:
    assert HARD_BYTES * 80 % 100 == 0
    found = bridge()
    found.enter(Phase.BACKWARD, HARD_BYTES * 80 // 100, HARD_BYTES)
    assert found.hints() == IDLE
    for phase in (Phase.STEP_BEGIN, Phase.FORWARD, Phase.STEP_END):
        found = bridge()
        found.enter(phase, FULL_BYTES, HARD_BYTES)
        assert found.hints() == IDLE


@pytest.mark.req("S1-32")
def test_rule_2_in_the_optimizer_whatever_the_pressure() -> None:
    found = bridge()
    found.enter(Phase.OPTIMIZER, 0, HARD_BYTES)
    expected = RuntimeLimitHints(max_inflight_h2d=1, max_inflight_d2h=2, suppress_speculative=True)
    assert found.hints() == expected


@pytest.mark.req("S1-33")
def test_rule_3_shrinks_from_the_fourth_full_check_on_by_one_each_down_to_one() -> None:
    found = bridge()
    found.begin_step(5)
    caps = [(found.check(all_full=True), found.hints().prefetch_window_cap) for _ in range(9)]
    assert caps == [(False, None)] * 3 + [(True, 4), (True, 3), (True, 2), (True, 1)] + [(False, 1)] * 2


@pytest.mark.req("S1-34")
def test_rule_3_begins_to_count_anew_when_any_slot_is_free() -> None:
    found = bridge()
    for full in [True] * 3 + [False] + [True] * 3:
        assert not found.check(all_full=full)
    assert found.check(all_full=True)
    assert not found.check(all_full=False)
    assert found.hints().prefetch_window_cap == 3  # what it has shrunk to stays within the step


STEPS = st.lists(
    st.one_of(st.tuples(st.sampled_from(Phase), st.integers(0, HARD_BYTES)), st.booleans()), max_size=60
)


@pytest.mark.req("S1-35", "S1-36", "S1-37")
@given(STEPS)
def test_within_a_step_the_letter_only_tightens_and_a_step_begins_without_any(events: list[object]) -> None:
    found = bridge()
    before = found.hints()
    for event in events:
        if isinstance(event, bool):
            found.check(all_full=event)
        else:
            phase, allocated = event  # type: ignore[misc]
            if phase is Phase.STEP_BEGIN:
                continue
            found.enter(phase, allocated, HARD_BYTES)
        hints = found.hints()
        caps = before.prefetch_window_cap, hints.prefetch_window_cap
        assert (caps[1] or 10**9) <= (caps[0] or 10**9)  # None is no cap
        assert hints.suppress_speculative >= before.suppress_speculative
        before = hints
    found.begin_step(None)
    found.enter(Phase.STEP_BEGIN, FULL_BYTES, HARD_BYTES)
    assert found.hints() == IDLE


def test_under_1f1b_the_letter_throttles_every_forward_after_the_first_backward_and_turns_none() -> None:
    """docs/design.md, the conductor's decision: why the default bridge starts anew at each turn."""
    suppressed = {}
    for kind in (HeuristicPolicyBridgeV0, TurnsPolicyBridge):
        found = bridge(kind)
        seen = []
        for phase in [Phase.FORWARD, *itertools.chain(*[(Phase.BACKWARD, Phase.FORWARD)] * 3)]:
            found.enter(phase, FULL_BYTES, HARD_BYTES)
            seen.append((found.hints().suppress_speculative, found.hints().prefetch_window_cap))
        suppressed[kind] = seen
    free, tight = (False, None), (True, 1)
    assert suppressed[HeuristicPolicyBridgeV0] == [free] + [tight] * 6
    assert suppressed[TurnsPolicyBridge] == [free] + [tight, free] * 3


def test_within_one_turn_the_default_bridge_only_tightens_too() -> None:
    found = bridge(TurnsPolicyBridge)
    found.enter(Phase.BACKWARD, FULL_BYTES, HARD_BYTES)
    found.enter(Phase.BACKWARD, 0, HARD_BYTES)  # the same turn, with less allocated
    assert found.hints().suppress_speculative
    found.enter(Phase.OPTIMIZER, 0, HARD_BYTES)
    found.enter(Phase.STEP_END, 0, HARD_BYTES)
    assert found.hints() == IDLE  # an evaluation between two steps is not throttled
