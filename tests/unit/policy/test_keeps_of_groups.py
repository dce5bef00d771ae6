"""The plan after warm-up: near the bound where the cap bites, nothing moved where it does not, and always a
function of its numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from offload.policy.actions import Action, ChunkKey, GroupKey, GroupSize, Rates, one_f_one_b
from offload.policy.keeps import kept_peak_bytes, limit_keeps
from offload.policy.mixture import choose_keeps
from offload.policy.simulate import simulate

GB = 10**9
H200 = Rates(d2h_bytes_per_s=55.2 * GB, h2d_bytes_per_s=55.1 * GB, duplex_bytes_per_s=101.5 * GB)
NAMES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_act", "mlp_fc2")
W2 = one_f_one_b(0, 4, 8)
W2_COMPUTE_S = [3.194 / 8 * (1 / 3 if action.kind == "F" else 2 / 3) for action in W2]
W2_SIZES: dict[ChunkKey, list[GroupSize]] = {
    (0, m): [GroupSize(name, 22 * GB // 56) for _ in range(8) for name in NAMES] for m in range(8)
}


@pytest.mark.parametrize("device_gb", [50, 40, 32, 22])
def test_the_plan_of_a_pipeline_stage_comes_within_five_percent_of_the_bound(device_gb: int) -> None:
    pytest.importorskip("scipy", reason="the bound needs scipy, an extra")
    from bench.bound import least_step

    limit_bytes = device_gb * GB - 9 * GB
    plan = choose_keeps(W2, W2_SIZES, W2_COMPUTE_S, H200, limit_bytes, max_trials=100)
    bound = least_step(W2, W2_SIZES, W2_COMPUTE_S, H200, limit_bytes)
    assert bound.step_s <= plan.predicted_step_s <= 1.05 * bound.step_s
    assert plan.fits


def test_a_plan_that_is_known_is_tried_first_and_not_lost() -> None:
    limit_bytes = 13 * GB
    known = choose_keeps(W2, W2_SIZES, W2_COMPUTE_S, H200, limit_bytes, max_trials=50)
    again = choose_keeps(W2, W2_SIZES, W2_COMPUTE_S, H200, limit_bytes, max_trials=1, start=known)
    assert (again.keeps, again.predicted) == (known.keeps, known.predicted)
    assert not choose_keeps(W2, W2_SIZES, W2_COMPUTE_S, H200, limit_bytes, max_trials=1).fits


def test_a_start_from_another_step_is_no_more_than_a_start() -> None:
    """Chunks that follow others, of a stage that is not there, more than fits."""
    few = partial(choose_keeps, W2, W2_SIZES, W2_COMPUTE_S, H200, 13 * GB, max_trials=30)
    plan = few()
    for kept in ({(7, 7): 1e9}, {(0, 2): 5e9}, dict.fromkeys(W2_SIZES, 1e12)):
        other = few(start=replace(plan, kept_bytes=kept, restoring_room_bytes=10**12))
        assert other.fits
        assert other.predicted_step_s <= 1.02 * plan.predicted_step_s


def test_different_amounts_by_chunk_beat_the_best_equal_ones() -> None:
    """Chunk 0 is read right after the last warm-up forward, the last chunks meet an emptying device: both
    keep more than the middle."""
    limit_bytes = 31 * GB
    plan = choose_keeps(W2, W2_SIZES, W2_COMPUTE_S, H200, limit_bytes, max_trials=100)
    equal_s = []
    for part in range(9):
        for window in range(9):
            kept = limit_keeps(W2, W2_SIZES, limit_bytes * part // 8, 0, 0)
            result = simulate(
                W2,
                W2_SIZES,
                W2_COMPUTE_S,
                H200,
                limit_bytes=limit_bytes,
                keeps=kept,
                restoring_room_bytes=limit_bytes * window // 16,
            )
            if result.peak_bytes <= limit_bytes:
                equal_s.append(result.step_s)
    assert plan.predicted_step_s < min(equal_s)
    kept_of = [sum(key.chunk == (0, m) for key in plan.keeps) for m in range(8)]
    assert min(kept_of[0], kept_of[7]) > max(kept_of[3:5])


def test_a_limit_that_holds_everything_keeps_everything() -> None:
    plan = choose_keeps(W2, W2_SIZES, W2_COMPUTE_S, H200, 88 * GB)
    assert len(plan.keeps) == 8 * 56
    assert plan.predicted.moved_bytes == 0
    assert plan.predicted_step_s == pytest.approx(3.194)
    assert plan.num_trials <= 6  # nothing is better, so nothing more is tried


def test_a_plan_is_what_its_simulation_says_and_the_same_each_time() -> None:
    plan = choose_keeps(W2, W2_SIZES, W2_COMPUTE_S, H200, 23 * GB, max_trials=20)
    again = simulate(
        W2,
        W2_SIZES,
        W2_COMPUTE_S,
        H200,
        limit_bytes=23 * GB,
        keeps=plan.keeps,
        restoring_room_bytes=plan.restoring_room_bytes,
    )
    assert plan.predicted == again
    assert plan == choose_keeps(W2, W2_SIZES, W2_COMPUTE_S, H200, 23 * GB, max_trials=20)


def test_what_stays_is_the_end_of_each_chunk() -> None:
    plan = choose_keeps(W2, W2_SIZES, W2_COMPUTE_S, H200, 31 * GB, max_trials=30)
    for m in range(8):
        indices = {key.position for key in plan.keeps if key.chunk == (0, m)}
        assert indices == set(range(56 - len(indices), 56))
    assert kept_peak_bytes(W2, W2_SIZES, plan.keeps) <= 31 * GB


def test_a_limit_of_one_group_has_a_plan_and_a_smaller_one_says_that_it_does_not_fit() -> None:
    actions = one_f_one_b(0, 2, 3)
    sizes: dict[ChunkKey, list[GroupSize]] = {
        (0, m): [GroupSize("a", 10), GroupSize("b", 10)] for m in range(3)
    }
    rates = Rates(d2h_bytes_per_s=10, h2d_bytes_per_s=10)
    fitting = choose_keeps(actions, sizes, [1.0] * 6, rates, 10)
    assert (fitting.fits, fitting.predicted_peak_bytes) == (True, 10)
    too_small = choose_keeps(actions, sizes, [1.0] * 6, rates, 9)
    assert (too_small.fits, too_small.predicted_peak_bytes) == (False, 10)


def test_chunks_of_different_shapes_and_split_backwards_have_a_plan() -> None:
    actions = [Action("F", 1, 0), Action("F", 1, 1), Action("I", 1, 0), Action("F", 1, 2), Action("W", 1, 0)]
    actions += [Action("B", 1, 1), Action("W", 1, 2)]
    sizes: dict[ChunkKey, list[GroupSize]] = {
        (1, 0): [GroupSize("a", 7)] * 5,
        (1, 1): [],
        (1, 2): [GroupSize("b", 0), GroupSize("a", 30)],
    }
    plan = choose_keeps(actions, sizes, [1.0] * 7, Rates(d2h_bytes_per_s=20, h2d_bytes_per_s=20), 40)
    assert plan.fits
    assert all(isinstance(key, GroupKey) for key in plan.keeps)


def test_a_plan_leaves_room_between_the_halves_where_that_saves_a_fetch() -> None:
    # each W reads two fifths of its chunk right after its I; two of four chunks fit
    order = [Action("F", 1, m) for m in range(4)]
    order += [Action(kind, 1, m) for m in range(4) for kind in ("I", "W")]  # type: ignore[arg-type]
    layer = [GroupSize("x", 4, half_bytes=4), GroupSize("y", 6, half_bytes=0)]
    sizes: dict[ChunkKey, list[GroupSize]] = {(1, m): layer * 4 for m in range(4)}
    seconds = [4.0 if action.kind == "F" else 2.4 if action.kind == "I" else 1.6 for action in order]
    rates = Rates(d2h_bytes_per_s=12, h2d_bytes_per_s=12)
    plan = choose_keeps(order, sizes, seconds, rates, 80)
    assert plan.fits
    assert plan.half_room_bytes > 0
    without = simulate(
        order,
        sizes,
        seconds,
        rates,
        limit_bytes=80,
        keeps=plan.keeps,
        restoring_room_bytes=plan.restoring_room_bytes,
    )
    assert plan.predicted_step_s < without.step_s
    assert choose_keeps(W2, W2_SIZES, W2_COMPUTE_S, H200, 40 * GB, max_trials=6).half_room_bytes == 0


def test_an_empty_step_has_an_empty_plan() -> None:
    plan = choose_keeps([], {}, [], H200, 0)
    assert (plan.keeps, plan.predicted_step_s) == (frozenset(), 0.0)


def test_limits_and_trials_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="limit_bytes is -1, less than 0"):
        choose_keeps([], {}, [], H200, -1)
    with pytest.raises(ValueError, match="max_trials is 0; give 1 or more"):
        choose_keeps([], {}, [], H200, 0, max_trials=0)
    with pytest.raises(ValueError, match="0F0 has no blocks"):
        choose_keeps([Action("F", 0, 0), Action("B", 0, 0)], {}, [1.0, 1.0], H200, 0)


def test_where_what_an_input_half_leaves_does_not_fit_the_plan_says_so() -> None:
    order = [Action("F", 0, 0), Action("I", 0, 0), Action("W", 0, 0)]
    group = GroupSize("block", 10, region=1, again_s=0.1, again_bytes=30, half_bytes=0, left_bytes=30)
    rates = Rates(d2h_bytes_per_s=100, h2d_bytes_per_s=100)
    plan = choose_keeps(order, {(0, 0): [group]}, [1.0] * 3, rates, 29)
    assert not plan.fits
    assert plan.predicted_peak_bytes > 29
    assert not limit_keeps(order, {(0, 0): [group]}, 29, 0, 0)
    assert choose_keeps(order, {(0, 0): [group]}, [1.0] * 3, rates, 60).fits
