"""Stages to plan mixtures for, and what each way of doing all blocks alike would take on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offload.policy.actions import Action, ChunkKey, Rates, one_f_one_b
from offload.policy.keeps import tail_keeps
from offload.policy.menu import (
    Block,
    Level,
    Menu,
    action_seconds,
    convex,
    groups_at,
    num_leaving,
    units_a_chunk,
)
from offload.policy.mixture import MixedPlan, choose_keeps
from offload.policy.simulate import Simulation, simulate

GB, MB = 10**9, 10**6
H200 = Rates(d2h_bytes_per_s=55.3 * GB, h2d_bytes_per_s=55.4 * GB, duplex_bytes_per_s=102.5 * GB)


def menu_of(plain_bytes: int, input_bytes: int, cheap_s: float, calls: Sequence[tuple[int, float]]) -> Menu:
    """Plain; all of `calls`, (bytes, seconds), kept; then without the cheapest for its bytes, one after the
    other; the input alone."""
    by_price = sorted(calls, key=lambda call: call[1] / call[0])
    levels = [Level("plain", plain_bytes, 0.0)]
    for dropped in range(len(by_price) + 1):
        saved = input_bytes + sum(nbytes for nbytes, _ in by_price[dropped:])
        seconds = cheap_s + sum(seconds for _, seconds in by_price[:dropped])
        levels.append(Level(f"{len(calls) - dropped} kept", saved, seconds, plain_bytes - saved))
    return convex(levels)


def interleaved(rank: int, ranks: int, virtual: int, microbatches: int) -> tuple[Action, ...]:
    """One rank's order under interleaved 1F1B; microbatches is a multiple of ranks."""
    total = virtual * microbatches
    warmup = min(total, 2 * (ranks - rank - 1) + (virtual - 1) * ranks)

    def action(kind: str, number: int) -> Action:
        place = number // ranks % virtual
        stage = (place if kind == "F" else virtual - 1 - place) * ranks + rank
        microbatch = number // (ranks * virtual) * ranks + number % ranks
        return Action("F" if kind == "F" else "B", stage, microbatch)

    order = [action("F", number) for number in range(warmup)]
    for number in range(total - warmup):
        order += [action("F", warmup + number), action("B", number)]
    return (*order, *(action("B", number) for number in range(total - warmup, total)))


class Stage(NamedTuple):
    """One rank's step."""

    actions: tuple[Action, ...]
    blocks: dict[ChunkKey, list[Block]]

    @classmethod
    def of(cls, actions: Sequence[Action], block: Block, num_blocks: int) -> Stage:
        """Every chunk with so many equal blocks."""
        chunks = [action.chunk for action in actions if action.kind == "F"]
        return cls(tuple(actions), {chunk: [block] * num_blocks for chunk in chunks})

    @property
    def plain_s(self) -> float:
        return sum(action_seconds(self.actions, self.blocks, {}))


W2_BLOCK = Block(
    menu=menu_of(
        2754 * MB,
        134 * MB,
        0.8e-3,
        [(134 * MB, 4.5e-3), *((size * MB, size * 6.3e-6) for size in (134, 34, 34, 134, 470, 470))],
    ),
    forward_s=122.1e-3 / 8,
    backward_s=271e-3 / 8,
)
"""A layer of W2: attention's output, then q, k, v, o, gate and up, whose seconds go by their bytes."""
W2 = Stage.of(one_f_one_b(0, 4, 8), W2_BLOCK, 8)
W2_INTERLEAVED = Stage.of(interleaved(0, 4, 2, 8), W2_BLOCK, 4)

LARGE_BLOCK = Block(
    menu=menu_of(
        1680 * MB,
        84 * MB,
        0.6e-3,
        [(84 * MB, 2.0e-3), *((size * MB, size * 7e-6) for size in (84, 21, 21, 84, 285, 285))],
    ),
    forward_s=10.5e-3,
    backward_s=21.6e-3,
)
"""A layer of hidden 5120, ffn 17408, sequence 8192."""
LARGE = Stage.of(one_f_one_b(1, 4, 12), LARGE_BLOCK, 6)
LARGE_INTERLEAVED = Stage.of(interleaved(1, 4, 2, 12), LARGE_BLOCK, 3)

SMALL_BLOCK = Block(
    menu=menu_of(
        147 * MB,
        8 * MB,
        0.06e-3,
        [(8 * MB, 0.06e-3), *((size * MB, size * 5e-6) for size in (8, 2, 2, 8, 23, 23))],
    ),
    forward_s=0.55e-3,
    backward_s=1.1e-3,
)
"""A layer of W5, whose operators are short."""
SMALL = Stage.of(one_f_one_b(0, 4, 16), SMALL_BLOCK, 16)
SMALL_INTERLEAVED = Stage.of(interleaved(0, 4, 2, 16), SMALL_BLOCK, 8)


def alike_s(stage: Stage, limit_bytes: int, max_trials: int) -> dict[str, float]:
    """Seconds of the plans that fit which run every block at one level, and keep or move what it saves."""
    found: dict[str, float] = {}
    num_levels = max(len(block.menu) for own in stage.blocks.values() for block in own)
    compute_s = action_seconds(stage.actions, stage.blocks, {})
    units = units_a_chunk(len(stage.blocks))
    for level in range(num_levels):
        at = {
            chunk: tuple(min(level, len(block.menu) - 1) for block in own)
            for chunk, own in stage.blocks.items()
        }
        sizes = {chunk: groups_at(own, at[chunk], units) for chunk, own in stage.blocks.items()}
        plan = choose_keeps(stage.actions, sizes, compute_s, H200, limit_bytes, max_trials=max_trials)
        if plan.predicted_peak_bytes <= limit_bytes:
            block = stage.blocks[stage.actions[0].chunk][0]
            found[block.menu[level].name] = plan.predicted_step_s
    return found


def played(stage: Stage, plan: MixedPlan, rates: Rates = H200) -> Simulation:
    """The plan's step, from its numbers alone."""
    units = units_a_chunk(len(stage.blocks))
    split = {action.chunk for action in stage.actions if action.kind == "I"}
    sizes = {
        chunk: groups_at(
            own,
            plan.levels[chunk],
            units,
            num_leaving(own, plan.levels[chunk], plan.again_room_bytes) if chunk in split else 0,
        )
        for chunk, own in stage.blocks.items()
    }
    return simulate(
        stage.actions,
        sizes,
        action_seconds(stage.actions, stage.blocks, {}),
        rates,
        limit_bytes=plan.saved_limit_bytes,
        keeps=tail_keeps(sizes, plan.kept_bytes),
        restoring_room_bytes=plan.restoring_room_bytes,
        half_room_bytes=plan.half_room_bytes,
    )
