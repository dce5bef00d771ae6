"""What a block can save for its backward, and what each choice costs.

    level   one choice: how much of the block's forward the backward computes once more
    menu    all levels of one block, from the one that saves most to the one that saves least

One invariant: numbers and names only. Level 0 is the plain block, of which nothing is computed again. Every
further level saves less and computes more, and each step down costs more seconds for a byte than the one
before: a menu is convex, so a linear program may mix neighbouring levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Level", "Menu", "convex"]


class Level(NamedTuple):
    """One way to run a block.

    saved_bytes: what waits for the backward: kept on the device, or moved. recompute_s: device seconds that
        the backward computes once more. host_s: host seconds beyond those of the plain block, forward and
        backward together. made_again_bytes: what the recompute makes again, on the device from its begin to
        the end of the block's backward.
    """

    name: str
    saved_bytes: int
    recompute_s: float
    host_s: float = 0.0
    made_again_bytes: int = 0


Menu = tuple[Level, ...]


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
