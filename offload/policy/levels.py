"""The levels of one chunk's blocks: the groups that they make, and the next levels to try.

    levels  for each block of a chunk, in forward order, the place of its level in its menu
    path    the levels of one block that a mixture could want, from plain to the last

One invariant: pure functions of one chunk's blocks; what a step costs is asked elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from offload.policy.actions import GroupSize
from offload.policy.menu import Block, convex

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
