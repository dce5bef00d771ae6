"""The bound reproduces the figures that were published for one H200, its closed form, and the laws of a lower
bound."""

from __future__ import annotations

import itertools
import sys
from typing import NamedTuple

import pytest

pytest.importorskip("scipy", reason="the bound needs scipy, an extra")
pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.bound import least_step, single_pass_limit_s
from bench.mixed_program import MixedBound
from offload.policy.actions import Action, ChunkKey, GroupSize, Rates, one_f_one_b

GB = 10**9
H200 = Rates(d2h_bytes_per_s=55.2 * GB, h2d_bytes_per_s=55.1 * GB, duplex_bytes_per_s=101.5 * GB)
W1_COMPUTE_S, W1_BYTES = 0.590, 33.0 * GB
W2_STEP_S = 3.194
"""The step of W2 with nothing offloaded."""
WEIGHTS_AND_WORKING_SET = 9 * GB
"""7 GB of weights and gradients, 2 GB of working set."""


class Work(NamedTuple):
    """An action, its seconds, and the bytes that it makes (F) or reads for the last time (B, I, W)."""

    action: Action
    compute_s: float
    nbytes: int


def least(work: list[Work], rates: Rates, cap_bytes: int, *, slices: int = 4) -> MixedBound:
    sizes: dict[ChunkKey, list[GroupSize]] = {}
    for action, _, nbytes in work:
        if action.kind == "F":
            sizes[action.chunk] = [GroupSize("chunk", nbytes)]
        elif action.kind == "W":
            sizes[action.chunk] = [sizes[action.chunk][0]._replace(half_bytes=nbytes)]
    actions, seconds = [item.action for item in work], [item.compute_s for item in work]
    return least_step(actions, sizes, seconds, rates, cap_bytes, slices=slices)


def stage_work(forward_bytes: int, step_compute_s: float) -> list[Work]:
    """Rank 0 of 4, 8 microbatches; a forward is a third of the compute of forward and backward."""
    return [
        Work(action, step_compute_s / 8 * (1 / 3 if action.kind == "F" else 2 / 3), forward_bytes)
        for action in one_f_one_b(0, 4, 8)
    ]


def test_one_pass_of_w1_cannot_take_less_than_its_copies() -> None:
    limit_s = single_pass_limit_s(
        W1_COMPUTE_S / 3, W1_COMPUTE_S * 2 / 3, W1_BYTES, H200.d2h_bytes_per_s, H200.h2d_bytes_per_s
    )
    assert limit_s == pytest.approx(1.20, abs=0.005)  # 33.0 / 55.2 + 33.0 / 55.1


def test_what_a_split_backward_reads_is_no_more_than_what_there_is() -> None:
    """Halves of three bytes were read as two each, which four have room for."""
    work = [Work(Action("F", 0, 0), 0.0, 3), Work(Action("I", 0, 0), 0.0, 3), Work(Action("W", 0, 0), 0.0, 3)]
    found = least(work, Rates(d2h_bytes_per_s=1.0, h2d_bytes_per_s=1.0), 3, slices=2)
    assert (found.step_s, found.moved_bytes) == (0.0, 0)


def test_one_pass_that_moves_nothing_takes_its_compute() -> None:
    assert single_pass_limit_s(0.2, 0.39, 0, 55.2 * GB, 55.1 * GB) == pytest.approx(W1_COMPUTE_S)


@pytest.mark.parametrize(("device_gb", "published_ratio"), [(50, 1.10), (40, 1.19), (32, 1.29), (22, 1.55)])
@pytest.mark.parametrize("slices", [1, 4])
def test_a_pipeline_stage_has_its_published_ratios(
    device_gb: int, published_ratio: float, slices: int
) -> None:
    bound = least(
        stage_work(22 * GB, W2_STEP_S), H200, device_gb * GB - WEIGHTS_AND_WORKING_SET, slices=slices
    )
    # published with two decimals
    assert bound.step_s / bound.compute_s == pytest.approx(published_ratio, abs=0.006)


def test_a_stage_with_selective_checkpointing_has_its_published_ratio_to_nothing_offloaded() -> None:
    bound = least(stage_work(round(14.1 * GB), 3.243), H200, 22 * GB - WEIGHTS_AND_WORKING_SET)
    assert bound.step_s / W2_STEP_S == pytest.approx(1.10, abs=0.01)


def test_the_cap_of_50_gb_costs_what_the_four_first_forwards_must_move_out() -> None:
    bound = least(stage_work(22 * GB, W2_STEP_S), H200, 41 * GB)
    first_forwards_s = W2_STEP_S / 8 * 4 / 3
    assert bound.step_s - W2_STEP_S == pytest.approx((4 * 22 - 41) / 55.2 - first_forwards_s, rel=1e-3)


def test_the_moved_bytes_are_the_fewest_of_a_best_step() -> None:
    bound = least(stage_work(22 * GB, W2_STEP_S), H200, 41 * GB)
    # F0..F3 are alive together at the end of 0F3, and 0F4..0F7 at the end of 0F7: at either point all but 41
    # GB have left, each byte once
    assert bound.moved_bytes == pytest.approx(2 * (4 * 22 - 41) * GB, rel=1e-3)
    room_for_all = least(stage_work(22 * GB, W2_STEP_S), H200, 88 * GB)
    assert room_for_all.moved_bytes == 0
    assert room_for_all.step_s == pytest.approx(room_for_all.compute_s)


@settings(max_examples=30)
@given(
    forward_s=st.floats(0.01, 2.0),
    backward_s=st.floats(0.01, 2.0),
    moved=st.integers(0, 1000),
    cap=st.integers(0, 1000),
    d2h=st.floats(50, 2000),
    h2d=st.floats(50, 2000),
)
def test_one_pass_of_the_linear_program_is_the_closed_form(
    forward_s: float, backward_s: float, moved: int, cap: int, d2h: float, h2d: float
) -> None:
    total = moved + cap
    work = [Work(Action("F", 0, 0), forward_s, total), Work(Action("B", 0, 0), backward_s, total)]
    bound = least(work, Rates(d2h_bytes_per_s=d2h, h2d_bytes_per_s=h2d), cap, slices=3)
    assert bound.step_s == pytest.approx(
        single_pass_limit_s(forward_s, backward_s, moved, d2h, h2d), rel=1e-5
    )
    assert bound.moved_bytes == pytest.approx(moved, abs=1.0)


@settings(max_examples=20)
@given(
    caps=st.lists(st.integers(0, 60), min_size=2, max_size=4),
    sizes=st.lists(st.integers(0, 12), min_size=5, max_size=5),
)
def test_a_larger_cap_never_costs_time(caps: list[int], sizes: list[int]) -> None:
    work = [Work(action, 1.0, sizes[action.microbatch]) for action in one_f_one_b(0, 3, 5)]
    rates = Rates(d2h_bytes_per_s=6, h2d_bytes_per_s=5, duplex_bytes_per_s=8)
    steps_s = [least(work, rates, cap, slices=2).step_s for cap in sorted(caps)]
    assert all(earlier >= later - 1e-6 for earlier, later in itertools.pairwise(steps_s))
    assert steps_s[-1] >= 10.0 - 1e-6  # never under the compute


def test_more_slices_come_nearer_from_below() -> None:
    work = [Work(action, 1.0, 10) for action in one_f_one_b(0, 3, 4)]
    rates = Rates(d2h_bytes_per_s=6, h2d_bytes_per_s=5, duplex_bytes_per_s=8)
    steps_s = [least(work, rates, 7, slices=slices).step_s for slices in (1, 2, 4)]
    assert steps_s[0] <= steps_s[1] + 1e-6 <= steps_s[2] + 2e-6


def test_a_split_backward_keeps_its_bytes_until_the_weight_half() -> None:
    split = [
        Work(Action("F", 0, 0), 1.0, 10),
        Work(Action("I", 0, 0), 1.0, 0),
        Work(Action("F", 0, 1), 1.0, 10),
        Work(Action("W", 0, 0), 1.0, 10),
        Work(Action("B", 0, 1), 1.0, 10),
    ]
    rates = Rates(d2h_bytes_per_s=5, h2d_bytes_per_s=5)
    assert least(split, rates, 20).moved_bytes == 0
    assert least(split, rates, 10, slices=2).moved_bytes == pytest.approx(10, abs=1)


def test_after_the_input_half_only_what_the_weight_half_reads_takes_room() -> None:
    # 4 of 10 bytes are left when the second forward makes its 10
    split = [
        Work(Action("F", 0, 0), 1.0, 10),
        Work(Action("I", 0, 0), 1.0, 6),
        Work(Action("F", 0, 1), 1.0, 10),
        Work(Action("W", 0, 0), 1.0, 4),
        Work(Action("B", 0, 1), 1.0, 10),
    ]
    rates = Rates(d2h_bytes_per_s=5, h2d_bytes_per_s=5)
    assert least(split, rates, 14).moved_bytes == 0
    assert least(split, rates, 13).moved_bytes == pytest.approx(1, abs=1e-3)
    assert least(split, rates, 10).moved_bytes == pytest.approx(4, abs=1e-3)


@pytest.mark.parametrize("slices", [1, 2])
def test_what_left_before_the_input_half_goes_again_without_a_copy(slices: int) -> None:
    # chunk 0 is away while chunk 1 lives, back for its I, away while chunk 2 lives, back for its W
    kinds = "F0 F1 B1 I0 F2 B2 W0"
    nbytes = dict.fromkeys(kinds.split(), 10) | {"I0": 0}
    work = [Work(Action(text[0], 0, int(text[1])), 1.0, nbytes[text]) for text in kinds.split()]  # type: ignore[arg-type]
    bound = least(work, Rates(d2h_bytes_per_s=100, h2d_bytes_per_s=100), 10, slices=slices)
    assert (bound.step_s, bound.moved_bytes) == (pytest.approx(7.0), 10)


def test_a_step_without_bytes_is_its_compute() -> None:
    bound = least([Work(Action("F", 0, 0), 1.0, 0), Work(Action("B", 0, 0), 2.0, 0)], H200, 0)
    assert bound == MixedBound(step_s=3.0, compute_s=3.0, moved_bytes=0, recomputed_bytes=0)
    assert least([], H200, 0).step_s == 0.0


def test_an_order_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="before its forward"):
        least_step([Action("B", 0, 0)], {(0, 0): [GroupSize("chunk", 10)]}, [1.0], H200, 100)
    with pytest.raises(ValueError, match="2 actions and 1 compute times"):
        least_step([Action("F", 0, 0), Action("B", 0, 0)], {(0, 0): []}, [1.0], H200, 100)


def test_a_cap_below_zero_says_that_the_weights_alone_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"cap_bytes is -1.*raise the device limit"):
        least([], H200, -1)
    with pytest.raises(ValueError, match="slices is 0"):
        least([], H200, 1, slices=0)


def test_without_scipy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    work = [Work(Action("F", 0, 0), 1.0, 10), Work(Action("B", 0, 0), 1.0, 10)]
    with pytest.raises(ImportError, match=r"pip install scipy, or in a checkout pip install '\.\[plan\]'"):
        least(work, H200, 5)
