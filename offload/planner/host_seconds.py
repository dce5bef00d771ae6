"""What the host takes for a block, by the way in which the block runs: from what its calls have measured.

    plain        its forward
    checkpoint   its forward and its recompute, of which nothing is kept
    selective    the same with dispatch modes, which keep some calls

One invariant: a way that was not seen takes what it usually does, scaled by those that were.
"""

from __future__ import annotations

from enum import IntEnum
from math import inf, isfinite

__all__ = ["USUAL", "HostSeconds", "Way"]


class Way(IntEnum):
    PLAIN = 0
    CHECKPOINT = 1
    SELECTIVE = 2


USUAL = (1.0, 2.9, 5.9)
"""By way, in those of a plain forward. W5, small operators whose launches set the pace, one H200: 461 ms a
step plain and 881 with every block checkpointed. With a forward and a backward of equal host time a
checkpoint adds 1.9 forwards."""


class HostSeconds:
    """Of one kind of block. The least of all calls counts: what runs for the first time, and what else the
    host does, hold some up."""

    def __init__(self) -> None:
        self._forward = [inf, inf, inf]
        self._again = [0.0, inf, inf]

    def note_forward(self, way: Way, seconds: float) -> None:
        self._forward[way] = min(self._forward[way], seconds)

    def note_again(self, way: Way, seconds: float) -> None:
        self._again[way] = min(self._again[way], seconds)

    def by_way(self) -> tuple[float, ...] | None:
        """None before any way was seen whole."""
        seen = [forward + again for forward, again in zip(self._forward, self._again, strict=True)]
        scales = [seconds / usual for seconds, usual in zip(seen, USUAL, strict=True) if isfinite(seconds)]
        if not scales:
            return None
        scale = sum(scales) / len(scales)
        return tuple(
            seconds if isfinite(seconds) else scale * usual
            for seconds, usual in zip(seen, USUAL, strict=True)
        )
