"""What a block can save for its backward, what each choice costs, and the groups that a chunk's blocks make
at their levels.

    level   one choice: how much of the block's forward the backward computes once more
    menu    all levels of one block, from the one that saves most to the one that saves least
    block   one block of one chunk: its menu, and what it takes at level 0
    levels  for each block of a chunk, in forward order, the place of its level in its menu
    path    the levels of one block that a mixture could want, from plain to the last

One invariant: numbers and names only, and pure functions of one chunk's blocks; what a step costs is asked
elsewhere. Level 0 is the plain block, of which nothing is computed again. Every further level saves less and
computes more, and each step down costs more seconds for a byte than the one before: a menu is convex, so a
linear program may mix neighbouring levels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
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
    grown_bytes: int = 0
    """That are on the device from its backward to the end of the step, beside all blocks: gradients of what
    was read before it."""
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
        """Bytes of the plain block that the W of a split backward reads."""
        return round(self.menu[0].saved_bytes * self.w_reads)

    @property
    def passed_bytes(self) -> int:
        """Bytes of these that the I does not read."""
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
    """Seconds that the plain block computes in this action."""
    if action.kind == "F":
        return block.forward_s
    if life.half_read is None:
        return block.backward_s
    part = block.weight_part if action.kind == "W" else 1 - block.weight_part
    return block.backward_s * part


def action_seconds(
    actions: Sequence[Action], blocks: ChunkBlocks, rest_s: Mapping[Action, float]
) -> list[float]:
    """Seconds of each action with every block plain. rest_s: seconds of an action outside the blocks."""
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


Levels = tuple[int, ...]
"""Of one chunk: for each block the place of its level in its menu."""

_MOST_UNITS_A_CHUNK, _UNITS = 32, 256
"""What a block saves can stay in part: in units of about so many to a chunk, and to all chunks, of plain
blocks."""
_BETWEEN = 4
"""Mixtures of two neighbouring levels, of which the same blocks of all chunks have the further one."""


def groups_at(
    blocks: Sequence[Block], levels: Levels, num_units: int, num_leaving: int = 0
) -> list[GroupSize]:
    """One chunk's groups with each block at its level, in units: those of a recomputed block are one
    region. num_units: about so many, were all blocks plain. num_leaving: so many recomputed blocks, the first
    ones, leave for the W of a split backward what it reads."""
    unit_bytes = max(1, sum(block.menu[0].saved_bytes for block in blocks) // num_units)
    groups: list[GroupSize] = []
    for place, (block, at) in enumerate(zip(blocks, levels, strict=True)):
        if block.group is not None:
            groups.append(block.group)
            continue
        level = block.menu[at]
        num = max(1, round(level.saved_bytes / unit_bytes))
        ends = [part / num for part in range(num + 1)]
        leaves = at > 0 and num_leaving > 0
        num_leaving -= leaves
        # a recomputed block's W recomputes again, from all that it saved, if nothing was left for it
        w_bytes = (0 if leaves else level.saved_bytes) if at else block.w_bytes
        left_bytes, passed_bytes = block.w_bytes if leaves else 0, 0 if at else block.passed_bytes
        groups += [
            GroupSize(
                level.name,
                _between(level.saved_bytes, start, end),
                region=place + 1 if at or level.made_again_bytes else 0,
                weight=(block.forward_s + block.backward_s) / num,
                again_s=level.recompute_s / num,
                again_bytes=_between(level.made_again_bytes, start, end),
                half_bytes=min(_between(w_bytes, start, end), _between(level.saved_bytes, start, end)),
                left_bytes=_between(left_bytes, start, end),
                passed_bytes=min(_between(passed_bytes, start, end), _between(w_bytes, start, end)),
                grown_bytes=block.grown_bytes if end == 1 else 0,
            )
            for start, end in pairwise(ends)
        ]
    return groups


def num_leaving(blocks: Sequence[Block], levels: Levels, room_bytes: float) -> int:
    """How many recomputed blocks of a chunk leave something between the halves of its backward, the first
    ones, as far as there is room."""
    left = accumulate(block.w_bytes for block, at in zip(blocks, levels, strict=True) if at)
    return sum(nbytes <= room_bytes for nbytes in left)


def _between(nbytes: int, start: float, end: float) -> int:
    return round(nbytes * end) - round(nbytes * start)


def units_a_chunk(num_chunks: int) -> int:
    """About how many units a plan cuts a chunk into."""
    return max(1, min(_MOST_UNITS_A_CHUNK, _UNITS // max(1, num_chunks)))


def path_of(block: Block) -> Levels:
    """The places of the levels that a mixture could want."""
    return tuple(block.menu.index(level) for level in convex(block.menu))


def alike(paths: Sequence[Levels], step: int) -> Levels:
    """Levels of a chunk's blocks along their paths: `_BETWEEN` steps are one level for all blocks, and each
    step between is one level for a part of them. A block whose path is shorter is at its end."""
    return tuple(
        path[min((place + 1) * step // _BETWEEN - place * step // _BETWEEN, len(path) - 1)]
        for place, path in enumerate(paths)
    )


def most_steps(paths: Iterable[Levels]) -> int:
    """The step at which every block is at the end of its path."""
    return _BETWEEN * (max(map(len, paths), default=1) - 1)


def moved(paths: Sequence[Levels], levels: Levels, change: float) -> Levels:
    """`abs(change)` of the blocks, one at least, at the next level of their paths away from plain, or nearer
    to it."""
    further = change > 0
    reached: dict[int, int] = {}
    for at, (path, level) in enumerate(zip(paths, levels, strict=True)):
        ahead = [other for other in path if (other > level if further else other < level)]
        if ahead:
            reached[at] = min(ahead) if further else max(ahead)
    # those that have given up least, and among them the first: their bytes wait longest
    order = sorted(reached, key=lambda at: (levels[at], at), reverse=not further)
    changed = list(levels)
    for at in order[: max(1, round(abs(change) * len(levels)))]:
        changed[at] = reached[at]
    return tuple(changed)
