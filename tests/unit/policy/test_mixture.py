"""The plan of a mixture: what it says is what its simulation says, it fits, and it is near its bound."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy", reason="the bound is an extra: pip install pipeline-offload[bench]")

from offload.policy.actions import Rates, one_f_one_b
from offload.policy.keeps import tail_keeps
from offload.policy.menu import Block, Level
from offload.policy.mixed_bound import action_seconds
from offload.policy.mixed_search import groups_at, units_a_chunk
from offload.policy.mixture import cheapest_mixture, choose_mixture, scaled
from offload.policy.simulate import simulate

GB, MB = 10**9, 10**6
H200 = Rates(d2h_bytes_per_s=55.3 * GB, h2d_bytes_per_s=55.4 * GB, duplex_bytes_per_s=102.5 * GB)

W2 = one_f_one_b(0, 4, 8)
"""Rank 0 of 4 with 8 microbatches, and one layer of it: what is cheap to recompute goes first, then products
of matrices, then attention."""
W2_MENU = (
    Level("plain", 2754 * MB, 0.0),
    Level("keep products", 1544 * MB, 0.8e-3, 0.0, 1210 * MB),
    Level("keep attention", 268 * MB, 8.8e-3, 0.0, 2486 * MB),
    Level("checkpoint", 134 * MB, 13.3e-3, 0.0, 2620 * MB),
)
W2_BLOCK = Block(menu=W2_MENU, forward_s=122.1e-3 / 8, backward_s=271e-3 / 8)
W2_BLOCKS = {(0, m): [W2_BLOCK] * 8 for m in range(8)}


def test_a_plan_is_what_its_simulation_says_and_the_same_each_time() -> None:
    limit = 13 * GB
    plan = choose_mixture(W2, W2_BLOCKS, H200, limit, max_trials=25)
    sizes = {
        chunk: groups_at(W2_BLOCKS[chunk], levels, units_a_chunk(8)) for chunk, levels in plan.levels.items()
    }
    again = simulate(
        W2,
        sizes,
        action_seconds(W2, W2_BLOCKS, {}),
        H200,
        limit_bytes=plan.saved_limit_bytes,
        keeps=tail_keeps(sizes, plan.kept_bytes),
        restoring_room_bytes=plan.restoring_room_bytes,
    )
    assert plan.predicted == again
    assert plan.fits
    assert plan.predicted_peak_bytes <= limit
    assert plan == choose_mixture(W2, W2_BLOCKS, H200, limit, max_trials=25)


def test_room_for_everything_gives_up_nothing() -> None:
    plan = choose_mixture(W2, W2_BLOCKS, H200, 89 * GB)
    assert {level for levels in plan.levels.values() for level in levels} == {0}
    assert plan.predicted.moved_bytes == 0
    assert plan.predicted_step_s == pytest.approx(8 * (122.1e-3 + 271e-3))


def test_without_a_limit_the_plan_frees_what_costs_under_a_hundredth() -> None:
    plan = cheapest_mixture(W2, W2_BLOCKS, H200, max_trials=25)
    assert plan.bound.step_s <= 1.01 * plan.bound.compute_s * (1 + 1e-6)
    assert plan.predicted_peak_bytes < 40 * GB  # of 88 GB


def test_a_scaled_plan_fits_chunks_of_other_lengths() -> None:
    plan = choose_mixture(W2, W2_BLOCKS, H200, 20 * GB, max_trials=25)
    other = scaled(plan, {(0, m): 0.5 + m / 8 for m in range(8)})
    assert other.fits
    assert other.problem.blocks[0, 0][0].menu[0].saved_bytes == 2754 * MB // 2
