"""Steps whose lengths vary: what they are planned for, and what a plan that is followed by position costs."""

from __future__ import annotations

import random

import pytest

from offload.policy.actions import ChunkKey, one_f_one_b
from offload.policy.keeps import tail_keeps
from offload.policy.lengths import Lengths, nearest
from offload.policy.menu import Block, action_seconds, groups_at
from offload.policy.mixture import MixedPlan, choose_mixture
from offload.policy.simulate import Simulation, simulate
from tests.unit.policy.mixtures import GB, H200, W2_BLOCK

LAYERS, UNITS = 8, 32


def lengths_of(*steps: list[float]) -> Lengths:
    """A step for each list, with the amount of each of its chunks."""
    lengths = Lengths()
    for amounts in steps:
        lengths.note({(0, at): amount for at, amount in enumerate(amounts)})
    return lengths


@pytest.mark.parametrize(
    ("steps", "vary"),
    [
        ([[8.0], [8.0]], False),
        ([[8.0], [9.0]], True),  # nothing else is known yet
        ([[8.0], [9.0], [9.0]], False),  # it has changed
        ([[8.0]] * 4 + [[9.0]] * 2, False),
        ([[8.0], [9.0], [9.0], [8.0]], True),  # it changes again
        ([[8.0], [9.0], [7.0]], True),
        ([[8.0, 8.0], [8.0], [8.0, 8.0]], True),  # numbers of chunks vary
        ([[8.0], [9.0], [8.0]] + [[8.0]] * 7, False),  # it has changed often, long ago
    ],
)
def test_steps_vary_where_they_change_more_than_once(steps: list[list[float]], vary: bool) -> None:
    assert lengths_of(*steps).vary is vary


def test_the_typical_chunk_is_the_mean_and_one_deviation_of_its_stage() -> None:
    lengths = lengths_of([6.0, 10.0], [10.0, 6.0])  # a mean of 8, off by 2 each
    assert lengths.typical() == {0: 10.0}
    assert lengths.factors({(0, 0): 5.0, (0, 1): 20.0}) == {(0, 0): 2.0, (0, 1): 0.5}
    assert lengths.window_factor() == 1.0
    assert lengths_of([4.0], [4.0], [4.0], [16.0]).window_factor() == 16.0 / (7.0 + 27.0**0.5)


def test_a_step_that_comes_again_is_its_own_typical_step() -> None:
    lengths = lengths_of([6.0, 10.0], [6.0, 10.0])
    assert lengths.factors({(0, 0): 6.0, (0, 1): 10.0}) == {(0, 0): 1.0, (0, 1): 1.0}


def test_a_plan_is_too_old_where_the_typical_length_is_another_by_a_tenth() -> None:
    lengths = lengths_of([10.0], [10.0])
    assert not lengths.drifted({0: 9.2})
    assert lengths.drifted({0: 9.0})
    assert lengths.drifted({0: 10.0, 1: 10.0})


def test_a_chunk_beyond_the_plan_follows_the_one_before_it() -> None:
    planned = [(0, 0), (0, 1), (1, 1)]
    assert nearest((0, 1), planned) == (0, 1)
    assert nearest((0, 7), planned) == (0, 1)
    assert nearest((1, 0), planned) == (1, 1)
    assert nearest((2, 0), planned) is None


class _Step:
    """Six to eight microbatches of W2's stage, each of 8192 to 16384 tokens by 256. limit_bytes: of the
    engine."""

    def __init__(self, draws: random.Random) -> None:
        tokens = [draws.randrange(8192, 16385, 256) for _ in range(draws.randint(6, 8))]
        self.actions = one_f_one_b(0, 4, len(tokens))
        self.amounts = {(0, at): number / 16384 for at, number in enumerate(tokens)}
        self.blocks: dict[ChunkKey, list[Block]] = {
            chunk: [W2_BLOCK.scaled(amount)] * LAYERS for chunk, amount in self.amounts.items()
        }
        self.compute_s = action_seconds(self.actions, self.blocks, {})

    def checkpointed_s(self) -> float:
        return sum(self.compute_s) + sum(
            block.menu[-1].recompute_s for own in self.blocks.values() for block in own
        )

    def simulated(self, plan: MixedPlan, window_factor: float, limit_bytes: int) -> Simulation:
        """The step under a plan for another one, followed by position: of each chunk the part that the plan
        keeps stays, by the chunk's own length."""
        follows = {chunk: nearest(chunk, plan.levels) for chunk in self.blocks}
        sizes, kept = {}, {}
        for chunk, place in follows.items():
            assert place is not None
            sizes[chunk] = groups_at(self.blocks[chunk], plan.levels[place], UNITS)
            planned = groups_at(plan.problem.blocks[place], plan.levels[place], UNITS)
            longer = sum(one.nbytes for one in sizes[chunk]) / sum(one.nbytes for one in planned)
            kept[chunk] = plan.kept_bytes[place] * longer
        return simulate(
            self.actions,
            sizes,
            self.compute_s,
            H200,
            limit_bytes=limit_bytes,
            keeps=tail_keeps(sizes, kept),
            restoring_room_bytes=round(plan.restoring_room_bytes * window_factor),
        )


@pytest.mark.parametrize("limit_gb", [6, 11])
def test_a_plan_for_the_typical_step_is_near_hindsight_in_each_and_never_over_the_limit(
    limit_gb: int,
) -> None:
    """Moving only and recomputing only take far longer."""
    draws, lengths, limit_bytes = random.Random(17), Lengths(), limit_gb * GB
    for _ in range(8):
        lengths.note(_Step(draws).amounts)
    known = [_Step(draws) for _ in range(4)]
    typical = lengths.typical()[0]
    actions = one_f_one_b(0, 4, 8)
    blocks = {action.chunk: [W2_BLOCK.scaled(typical)] * LAYERS for action in actions}
    plan = choose_mixture(actions, blocks, H200, limit_bytes)
    ours_s = hindsight_s = checkpoint_s = 0.0
    for step in known:
        seen = step.simulated(plan, lengths.window_factor(), limit_bytes)
        assert seen.peak_bytes <= limit_bytes
        ours_s += seen.step_s
        checkpoint_s += step.checkpointed_s()
        hindsight_s += choose_mixture(
            step.actions, step.blocks, H200, limit_bytes, max_trials=60
        ).predicted_step_s
    assert ours_s <= 1.03 * hindsight_s
    assert ours_s <= 0.9 * checkpoint_s
