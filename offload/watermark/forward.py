"""One managed forward: how the device's memory rose in it, what it saved, and when its backward comes.

Its allocation curve is how many bytes the device would have had at each of its saves if nothing had left, and
how many more were still to come; a forecast is made from it. One invariant: a forecast is a hint. One that is
wrong changes how many bytes leave and when, never results, and the latch holds the mark without it. What a
forward looks like there does not depend on what left in it. Curves are numbers only, no tensors: positions
count the saves of a forward.

No block leaves while the operator that saved it may still write it. rrelu saves its noise and draws it
afterwards; such an operator saves a tensor that requires no gradient. autograd numbers the operators of each
thread by itself, so to another thread the last operator of a forward is never over.

Forwards of a step are ordered by when their backwards come, as the step before was seen to do. What is read
last leaves first. Of bytes that are to leave, as many are left for saves still to come that are read even
later: those of forwards that begin before this one is read, and are read after it. A forward that has nothing
more to send is not visited. So the host time of a step grows with what it saves and moves, however many
forwards wait for their backward.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from offload.ids import ForwardId, GroupId
from offload.saved.handles import SavedChunk, SavedGroup
from offload.telemetry.records import ClientStats
from offload.transfer.block import DeviceBlock

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
        """Curve of what was recorded so far."""
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
        """Bytes that the forward of that number has saved when it was seen last."""
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


CLIENT = "watermark"

_sequence_nr = torch._C._autograd._get_sequence_nr


class Forward:
    """number: of the forwards of its step that saved something; None until this one has. running: inside
    `managed_forward`. being_read: its backward has begun. spilled: blocks that left and were not read so far.
    place: among the forwards, by when they are read. next: position of the first block that may still have to
    leave, if nothing else holds it, and at all. ends: step ends that it has outlived.
    in_figures: blocks whose copies the figures of a step have."""

    def __init__(self, chunk_id: ForwardId, levels: list[int]) -> None:
        self.chunk = SavedChunk(chunk_id)
        self.group = SavedGroup(GroupId(chunk_id, 0, "saved", CLIENT), leaves=True, waits=True)
        self.number: int | None = None
        self.recorder = CurveRecorder(levels)
        self.forecast = Forecast(())
        self.running = True
        self.being_read = False
        self.spilled: set[DeviceBlock] = set()
        self.place = -1
        self.next = [0, 0]
        self.ends = 0
        self.in_figures: set[DeviceBlock] = set()
        self._over = False
        self._operator = -1  # autograd's number of the one that saves
        self._thread = 0  # where it runs
        self._unwritten = False
        self._complete = 0  # blocks of operators before it

    def note_save(self, tensor: torch.Tensor) -> None:
        """An operator is about to save `tensor`."""
        operator = _sequence_nr()
        if operator != self._operator:
            self._operator, self._unwritten = operator, False
            self._thread = threading.get_ident()
            self._complete = len(self.chunk.blocks)
        if not tensor.requires_grad:
            self._unwritten = True

    @property
    def written(self) -> int:
        """How many of its blocks, from the first on, have the bytes that they will be read with."""
        if not (self.running and self._unwritten):
            return len(self.chunk.blocks)
        is_over = _sequence_nr() != self._operator and threading.get_ident() == self._thread
        return len(self.chunk.blocks) if is_over else self._complete

    def figures(self) -> ClientStats:
        """Figures of where its bytes went, of those that the figures of no earlier step have."""
        kept = came_back = read_here = 0
        blocks = [block for block in self.chunk.blocks if block not in self.in_figures]
        self.in_figures.update(block for block in blocks if block.copies)
        for block in blocks:
            if block.copies == 0:
                kept += 0 if self.ends else block.nbytes
            elif block.copies > 1:
                came_back += block.nbytes
            elif block.unread < block.readers:
                read_here += block.nbytes
        return ClientStats(kept_bytes=kept, came_back_bytes=came_back, read_here_bytes=read_here)

    @property
    def is_over(self) -> bool:
        """Predicate: nothing of the forward can be read any more."""
        self._over = self._over or not (self.running or next(self.chunk.living(), None))
        return self._over


class ReadOrder:
    """Each forward has a place: 0 is read last. One that the step before did not have is read before all that
    it had, the latest first, and waits for no saves to come.

    seen: by a forward's number, where in the step before it began, and where its backward did. bytes_of: what
    the forward of a number saved in it. forwards: by place; None where it has not begun.
    """

    def __init__(self, seen: Mapping[int, tuple[int, int]], bytes_of: Callable[[int], int]) -> None:
        last_first = sorted(seen, key=lambda number: -seen[number][1])
        reads = [-seen[number][1] for number in last_first]
        self.forwards: list[Forward | None] = [None] * len(seen)
        self._places = {number: place for place, number in enumerate(last_first)}
        # what comes at a place waits for is at the places behind it, up to those read before it begins
        self._ends = [bisect_left(reads, -seen[number][0]) for number in last_first]
        self._to_come = [0] * len(seen)
        self._steps = [0] * (len(seen) + 1)  # of bytes to come that are read later, from place to place
        for number, place in self._places.items():
            self._comes(place, bytes_of(number))
        # places where something may leave that nothing else holds; and any
        self._leaving: tuple[list[int], list[int]] = [], []

    def _comes(self, place: int, nbytes: int) -> None:
        self._to_come[place] += nbytes
        self._steps[place + 1] += nbytes
        self._steps[self._ends[place]] -= nbytes

    def enter(self, forward: Forward, number: int | None = None) -> None:
        """A forward begins to save. number: its own in this step; None for one of an earlier step."""
        new = len(self.forwards)
        forward.place = place = new if number is None else self._places.get(number, new)
        if place == new:
            self.forwards.append(None)
        self.forwards[place] = forward
        insort(self._leaving[False], place)
        if number is None:
            self.is_held(forward)

    def saved(self, forward: Forward, nbytes: int) -> None:
        """A forward has saved so many bytes."""
        if forward.place < len(self._to_come):
            self._comes(forward.place, -min(nbytes, self._to_come[forward.place]))

    def leaving(self, held: bool, nbytes: int, *, must: bool) -> Iterator[tuple[Forward, int]]:
        """Forwards of which something may leave, and how much of `nbytes` is not to, for what is to come.
        held: of what something else holds. must: nothing is left for what is to come."""
        to_come = [0] if must else [*accumulate(self._steps)]
        for place in [*self._leaving[held]]:
            later = to_come[min(place, len(to_come) - 1)]
            if later < nbytes and (forward := self.forwards[place]) is not None:
                yield forward, later

    def is_held(self, forward: Forward) -> None:
        """Something else may hold a save of this forward."""
        if forward.place not in self._leaving[True]:
            insort(self._leaving[True], forward.place)

    def is_empty(self, forward: Forward, held: bool) -> None:
        """Nothing more of this forward can leave."""
        if forward.place in self._leaving[held]:  # else an allocation that failed has sent it meanwhile
            self._leaving[held].remove(forward.place)
