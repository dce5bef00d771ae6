"""What a block can save for its backward, and what each choice costs.

    level   one choice: how much of the block's forward the backward computes once more
    menu    all levels of one block, from the one that saves most to the one that saves least
    block   one block of one chunk: its menu, and what it takes at level 0

One invariant: numbers and names only. Level 0 is the plain block, of which nothing is computed again. Every
further level saves less and computes more, and each step down costs more seconds for a byte than the one
before: a menu is convex, so a linear program may mix neighbouring levels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from offload.policy.actions import Action, ChunkKey, ChunkSizes, GroupSize, Life, lives_of


class Level(NamedTuple):
    """One way to run a block.

    saved_bytes: what waits for the backward: kept on the device, or moved. recompute_s: device seconds that
        the backward computes once more. made_again_bytes: what the recompute makes again, on the device from
        its begin to the end of the block's backward.
    """

    name: str
    saved_bytes: int
    recompute_s: float
    made_again_bytes: int = 0

    def scaled(self, factor: float) -> Level:
        """For `factor` times as many tokens."""
        return self._replace(
            saved_bytes=round(self.saved_bytes * factor),
            recompute_s=self.recompute_s * factor,
            made_again_bytes=round(self.made_again_bytes * factor),
        )


Menu = tuple[Level, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block of one chunk, for a plan. Equal blocks are told apart by their places only."""

    menu: Menu
    """The levels to choose from, the plain one first."""
    forward_s: float
    """Device seconds of the plain block's forward."""
    backward_s: float
    """Device seconds of its whole backward, of a plain block."""
    weight_part: float = 0.5
    """Of `backward_s`, what the W of a split backward takes; its I takes the rest."""
    w_reads: float = 1.0
    """Of what the plain block saves, what that W reads again."""
    i_passes: float = 0.0
    """Of it, what that W alone reads."""
    group: GroupSize | None = None
    """Of a block that is one group with one level: the group as it is simulated."""

    def __post_init__(self) -> None:
        if not self.menu:
            raise ValueError("the menu of a block has no level; give it the plain one at least")
        least = min(self.forward_s, self.backward_s, *(min(level[1:]) for level in self.menu))
        parts = (self.weight_part, self.w_reads, self.i_passes)
        if least < 0 or not all(0.0 <= part <= 1.0 for part in parts):
            raise ValueError(
                f"a block has {least} seconds or bytes, and {parts} as weight_part, w_reads and i_passes; "
                "give 0 or more, and parts in 0..1"
            )

    @property
    def w_bytes(self) -> int:
        """What the W of a split backward reads of the plain block."""
        return round(self.menu[0].saved_bytes * self.w_reads)

    @property
    def passed_bytes(self) -> int:
        """Of these, what the I does not read."""
        return min(self.w_bytes, round(self.menu[0].saved_bytes * self.i_passes))

    def scaled(self, factor: float) -> Block:
        """The block of a chunk with `factor` times as many tokens, whose bytes and seconds grow with
        them."""
        menu = tuple(level.scaled(factor) for level in self.menu)
        return replace(
            self, menu=menu, forward_s=self.forward_s * factor, backward_s=self.backward_s * factor
        )


ChunkBlocks = Mapping[ChunkKey, Sequence[Block]]
"""Each chunk's blocks in forward order."""


def group_blocks(sizes: ChunkSizes) -> dict[ChunkKey, list[Block]]:
    """Each group as a block with one level, whose seconds are those of its actions."""
    return {
        chunk: [
            Block(
                menu=(Level(group.name, group.nbytes, 0.0, group.again_bytes),),
                forward_s=0.0,
                backward_s=0.0,
                w_reads=min(1.0, group.w_bytes / max(1, group.nbytes)),
                group=group,
            )
            for group in groups
        ]
        for chunk, groups in sizes.items()
    }


def block_seconds(block: Block, action: Action, life: Life) -> float:
    """What the plain block computes in this action."""
    if action.kind == "F":
        return block.forward_s
    if life.half_read is None:
        return block.backward_s
    part = block.weight_part if action.kind == "W" else 1 - block.weight_part
    return block.backward_s * part


def action_seconds(
    actions: Sequence[Action], blocks: ChunkBlocks, rest_s: Mapping[Action, float]
) -> list[float]:
    """What each action computes with every block plain. rest_s: seconds of an action outside the blocks."""
    lives = lives_of(actions)
    for action in actions:
        if action.chunk not in blocks:
            raise ValueError(
                f"{action} has no blocks; blocks has {len(blocks)} chunks, add {action.chunk}, with an empty "
                "list if it has none"
            )
    return [
        sum(block_seconds(block, action, lives[action.chunk]) for block in blocks[action.chunk])
        + rest_s.get(action, 0.0)
        for action in actions
    ]


def convex(levels: Sequence[Level]) -> Menu:
    """The levels that a mixture could want, from most bytes to fewest. A level goes if another one saves no
    more and costs no more, or if two others mixed do."""
    chosen: list[Level] = []
    for level in sorted(levels, key=lambda level: (-level.saved_bytes, level.recompute_s)):
        if chosen and level.saved_bytes == chosen[-1].saved_bytes:
            continue
        while chosen and level.recompute_s <= chosen[-1].recompute_s:
            chosen.pop()
        while len(chosen) > 1 and _rate(chosen[-2], chosen[-1]) >= _rate(chosen[-2], level):
            chosen.pop()
        chosen.append(level)
    return tuple(chosen)


def _rate(more: Level, less: Level) -> float:
    """Seconds for each byte that the step from one level to the next saves."""
    return (less.recompute_s - more.recompute_s) / (more.saved_bytes - less.saved_bytes)
