"""What the host takes for a block, by the way in which the block runs: from what its calls have measured.

    plain        its forward
    checkpoint   its forward and its recompute, of which nothing is kept
    selective    the same with dispatch modes, which keep some calls

One invariant: a way that was not seen takes what it usually does, scaled by those that were, and never more
than any call of it did.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import inf, isfinite

__all__ = ["USUAL", "HostSeconds", "Way"]

_FIRST = 256
"""Calls of a way that are all measured. To measure all that follow takes a host that sets the pace 3% of a
step: W5's stack at a width of 64 on a CPU, every block kept, forwards of 47.3 ms; 44.0 so (November 2026)."""

_ONE_IN = 7
"""Of later calls; few models have a number of layers that it divides."""


class Way(IntEnum):
    PLAIN = 0
    CHECKPOINT = 1
    SELECTIVE = 2


USUAL = (1.0, 2.9, 5.9)
"""By way, in those of a plain forward. W5, small operators whose launches set the pace, one H200: 461 ms a
step plain and 881 with every block checkpointed. With a forward and a backward of equal host time a
checkpoint adds 1.9 forwards."""


@dataclass(slots=True)
class _Passes:
    """Forwards or recomputes of one way. least_s: of all, `paced` or not, so never less than what the host
    needs."""

    least_s: float = inf
    calls: int = 0
    paced: int = 0

    def note(self, seconds: float, *, paced: bool) -> None:
        self.least_s = min(self.least_s, seconds)
        self.calls += 1
        self.paced += paced

    @property
    def is_told(self) -> bool:
        """Of a host that is ahead only those calls are paced that something held up."""
        return self.paced > 0 and 2 * self.paced >= self.calls


class HostSeconds:
    """Of one kind of block. The least of all calls counts: what runs for the first time, and what else the
    host does, hold some up. paced: by the end the device had passed the begin, so the queue of launches was
    not full; where it is full, a call takes the device's time. A way counts as seen if half of its calls or
    more were paced. was_paced: by way, of the last forward that was measured, for who measures."""

    def __init__(self) -> None:
        self._forward = [_Passes() for _ in Way]
        self._again = [_Passes() for _ in Way]
        self._calls = [0 for _ in Way]
        self.was_paced = [False for _ in Way]

    def is_due(self, way: Way) -> bool:
        """Whether the call of this way that begins now is to be measured."""
        self._calls[way] += 1
        return self._calls[way] <= _FIRST or self._calls[way] % _ONE_IN == 0

    def note_forward(self, way: Way, seconds: float, *, paced: bool) -> None:
        self._forward[way].note(seconds, paced=paced)

    def note_again(self, way: Way, seconds: float, *, paced: bool) -> None:
        self._again[way].note(seconds, paced=paced)

    def by_way(self) -> tuple[float, ...] | None:
        """None before any way was seen whole."""
        most_s, told_s = [inf] * len(Way), [inf] * len(Way)
        for way, forward, again in zip(Way, self._forward, self._again, strict=True):
            parts = [forward] if way is Way.PLAIN else [forward, again]
            most_s[way] = sum(part.least_s for part in parts)
            if all(part.is_told for part in parts):
                told_s[way] = most_s[way]
        scales = [seconds / usual for seconds, usual in zip(told_s, USUAL, strict=True) if isfinite(seconds)]
        if not scales:
            return None
        scale = sum(scales) / len(scales)
        return tuple(
            told if isfinite(told) else min(scale * usual, most)
            for told, most, usual in zip(told_s, most_s, USUAL, strict=True)
        )
