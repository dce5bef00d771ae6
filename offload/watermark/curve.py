"""The allocation curve of a forward: how many bytes the device would have had at each of its saves if nothing
had left, and how many more were still to come. And the forecast that is made from it.

One invariant: a forecast is a hint. One that is wrong changes how many bytes leave and when, never results,
and the latch holds the mark without it. What a forward looks like here does not depend on what left in it.

Numbers only, no tensors: positions count the saves of a forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_SHAPES = 16
"""Curves that are remembered of one forward of a step, the most recent first: batches of several sizes take
turns."""

_ALIKE = 8 / 7
"""How far the scale of one save may be from the scale of the first, for a forward of another size to be taken
for the same one, larger or smaller."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One forward, as a step has seen it.

    sizes: bytes of each save. levels: bytes on the device at each save, what had left counted in. ahead: the
    highest level from that save until the last of them was read. reads: positions in the order in which they
    were read. held: positions whose bytes something else kept on the device, so that their copies freed
    nothing.
    """

    sizes: tuple[int, ...]
    levels: tuple[int, ...]
    ahead: tuple[int, ...]
    reads: tuple[int, ...] = ()
    held: frozenset[int] = frozenset()


@dataclass(slots=True)
class CurveRecorder:
    """Takes down one forward. levels: of the whole step, which all of its forwards share."""

    levels: list[int]
    sizes: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # of each save, in `levels`
    reads: list[int] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    last: int = 0  # place after its last reading

    def saved(self, nbytes: int, level: int) -> None:
        self.sizes.append(nbytes)
        self.places.append(len(self.levels))
        self.levels.append(level)
        self.last = len(self.levels)

    def read(self, level: int) -> None:
        self.levels.append(level)
        self.last = len(self.levels)

    def curve(self) -> Curve:
        """What was taken down so far."""
        ahead: list[int] = []
        highest, end = 0, self.last
        for place in reversed(self.places):
            highest = max(highest, *self.levels[place:end])
            end = place
            ahead.append(highest)
        return Curve(
            tuple(self.sizes),
            tuple(self.levels[place] for place in self.places),
            tuple(reversed(ahead)),
            tuple(self.reads),
            frozenset(self.held),
        )


class Forecast:
    """Follows a forward, save by save, along a curve of the same shape; else along the nearest one, larger or
    smaller by one factor.

    curve: the one that it follows, of exactly this shape; None for another. lost: there were curves, and none
    fits any more.
    """

    def __init__(self, curves: Sequence[Curve]) -> None:
        self._same = [curve for curve in curves if curve.sizes]
        self._known = bool(self._same)
        self._like: Curve | None = None
        self._scale = 1.0
        self._at = 0

    @property
    def curve(self) -> Curve | None:
        return self._same[0] if self._same else None

    @property
    def lost(self) -> bool:
        return self._known and not self._same and self._like is None

    def saved(self, nbytes: int, level: int) -> int | None:
        """The highest level to come, after this save; None where nothing like it was seen. level: bytes on
        the device now, with what has left."""
        at, known = self._at, self._same
        self._at = at + 1
        if at == 0 and known:
            self._like = min(known, key=lambda curve: _ratio(nbytes, curve.sizes[0]))
            self._scale = nbytes / self._like.sizes[0]
        self._same = [curve for curve in known if at < len(curve.sizes) and curve.sizes[at] == nbytes]
        if self._same:
            curve, scale = self._same[0], 1.0
        elif self._like is not None and self._fits(self._like, at, nbytes):
            curve, scale = self._like, self._scale
        else:
            self._like = None
            return None
        return level + int((curve.ahead[at] - curve.levels[at]) * scale)

    def _fits(self, curve: Curve, at: int, nbytes: int) -> bool:
        return at < len(curve.sizes) and _ratio(nbytes, self._scale * curve.sizes[at]) <= _ALIKE


class Curves:
    """The curves of earlier steps, by a forward's number in its step."""

    def __init__(self) -> None:
        self._known: dict[int, list[Curve]] = {}

    def saved_bytes(self, number: int) -> int:
        """What the forward of that number has saved when it was seen last."""
        return sum(self._known[number][0].sizes) if number in self._known else 0

    def forecast(self, number: int) -> Forecast:
        """For the forward of that number. One that no step has had is taken for the last that they had."""
        if number not in self._known and self._known:
            number = max(self._known)
        return Forecast(self._known.get(number, ()))

    def learn(self, recorders: Iterable[tuple[int, CurveRecorder]]) -> None:
        """A step has ended. recorders: of its forwards that were read, with their numbers."""
        for number, recorder in recorders:
            curve = recorder.curve()
            others = [known for known in self._known.get(number, ()) if known.sizes != curve.sizes]
            self._known[number] = [curve, *others][:_SHAPES]


def _ratio(one: float, other: float) -> float:
    """How many times the larger is the smaller; 1 for equals."""
    low, high = sorted((one, other))
    return high / low if low > 0 else float("inf")
