"""A step that was seen, as numbers for a plan; every expected figure is derived here."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from offload.planner.work import Ran, StepWork, read_parts_of, with_halves
from offload.policy.actions import Action
from offload.policy.menu import Level, Menu

F, B = Action("F", 0, 0), Action("B", 0, 0)
MENU = (Level("plain", 100, 0.0), Level("checkpoint", 10, 1.0, 90))


@dataclass(frozen=True)
class Profiled:
    forward_s: float = 1.0
    menu: Menu = MENU


def work_of(
    forward_s: float, backward_s: float, levels: tuple[int, ...], profile: Profiled = Profiled()
) -> StepWork:
    ran = {(0, 0): [Ran(profile, level) for level in levels]}
    work = StepWork.of((F, B), {F: forward_s, B: backward_s}, ran)
    assert work is not None
    return work


def test_what_blocks_do_not_explain_is_around_them_and_a_recompute_is_taken_off() -> None:
    # two blocks of 1 s and 0.5 s around them; a backward twice as long, and one recompute
    work = work_of(2.5, 5.0 + 1.0, (1, 0))
    blocks = work.blocks[0, 0]
    assert [block.forward_s for block in blocks] == [1.0, 1.0]
    assert [block.backward_s for block in blocks] == [pytest.approx(2.0)] * 2
    assert work.rest_s == {F: pytest.approx(0.5), B: pytest.approx(1.0)}


def test_a_profile_that_counts_gaps_is_scaled_to_the_forward_that_was_measured() -> None:
    work = work_of(1.0, 2.0, (0, 0))
    blocks = work.blocks[0, 0]
    assert [block.forward_s for block in blocks] == [0.5, 0.5]
    assert [block.menu[1].recompute_s for block in blocks] == [0.5, 0.5]
    assert work.rest_s == {F: 0.0, B: 0.0}


def test_a_backward_whose_input_half_does_nothing_is_whole_in_its_weight_half() -> None:
    """Of two chunks, one of them in the first stage: what it recomputes it does once."""
    actions = [Action(kind, stage, 0) for stage in (0, 1) for kind in "FIW"]
    seconds = dict(zip(actions, [2.0, 1e-6, 5.0, 2.0, 3.0, 3.0], strict=True))
    ran = {(stage, 0): [Ran(Profiled(), 1), Ran(Profiled(), 0)] for stage in (0, 1)}
    work = StepWork.of(actions, seconds, ran)
    assert [str(action) for action in work.actions] == [
        str(action) for action in (actions[0], Action("B", 0, 0), *(Action(kind, 1, 0) for kind in "FIW"))
    ]
    for stage in (0, 1):
        assert [block.backward_s for block in work.blocks[stage, 0]] == [pytest.approx(2.0)] * 2


def test_a_pause_in_one_of_several_alike_forwards_is_not_of_the_work() -> None:
    actions = [Action(kind, 0, number) for number in range(4) for kind in ("F", "B")]
    seconds = {action: {"F": 2.0, "B": 4.0}[action.kind] for action in actions}
    profile = Profiled()
    ran = {(0, number): [Ran(profile, int(number == 3))] * 2 for number in range(4)}
    seconds[Action("F", 0, 1)], seconds[Action("B", 0, 3)] = 9.0, 7.5
    work = StepWork.of(actions, seconds, ran)
    assert work is not None
    assert [work.rest_s[action] for action in actions[:6]] == [0.0] * 6
    # the last microbatch is recomputed, which no other is: what it took is its own
    assert work.rest_s[actions[-1]] == pytest.approx(0.0)
    assert [block.backward_s for block in work.blocks[0, 3]] == [pytest.approx(2.75)] * 2


def test_a_chunk_of_blocks_without_a_profile_cannot_be_planned_for() -> None:
    ran = {(0, 0): [Ran(None, -1)]}
    assert StepWork.of((F, B), {F: 1.0, B: 2.0}, ran) is None


def test_a_head_is_a_block_that_saves_nothing_and_wants_room() -> None:
    ran = {(0, 0): [Ran(Profiled(), 0)]}
    work = StepWork.of((F, B), {F: 1.5, B: 3.0}, ran, head_bytes=40)
    head = work.blocks[0, 0][-1]
    assert (head.forward_s, head.menu) == (0.0, (Level("head", 0, 0.0, 40),))


def test_a_split_backward_takes_off_what_each_half_computed_again_and_knows_what_the_weight_half_reads() -> (
    None
):
    """Two blocks of 1 s, one recomputed in 1 s: in the I, and in the W unless the I left what it reads."""
    halves = [Action(kind, 0, 0) for kind in ("F", "I", "W")]
    for left, weight_s in ((False, 1.0 + 1.0), (True, 1.0)):
        calls = with_halves([Ran(Profiled(), 0), Ran(Profiled(), 1)], [(40, 30, left)])
        ran = {(0, 0): calls}
        work = StepWork.of(halves, dict(zip(halves, (2.0, 3.0 + 1.0, weight_s), strict=True)), ran)
        blocks = work.blocks[0, 0]
        assert [block.backward_s for block in blocks] == [pytest.approx(2.0)] * 2
        assert [block.weight_part for block in blocks] == [pytest.approx(0.25)] * 2
        assert [(block.w_bytes, block.passed_bytes) for block in blocks] == [(40, 30)] * 2
    # of a step that recomputes nothing it is not seen, and remembered
    plain = {(0, 0): [Ran(Profiled(), 0)] * 2}
    work = StepWork.of(halves, dict.fromkeys(halves, 2.0), plain, read_parts=read_parts_of(ran))
    assert [(block.w_bytes, block.passed_bytes) for block in work.blocks[0, 0]] == [(40, 30)] * 2
    assert with_halves(calls, [(1, 0, False)] * 2) == calls, "of other calls than these"
