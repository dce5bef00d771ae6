"""The free bytes of an arena as ranges that split and join, and the events that the next writer of each must
wait for.

One invariant: ranges that touch are one, and none crosses from one piece of host memory into the next; the
events of joined ranges are kept. Not thread-safe: the arena holds its lock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from offload.device.base import Device, Event

POLLS_PER_EVENT = 2
"""Events asked about for each new one and for each block that is cut, whatever the number pending: the host
cost of a call stays flat."""

EQUALS_LOOKED_AT = 4
"""Among blocks or ranges of one size, how many are looked at for one that nobody reads any more: longest free
first, so the likeliest first."""


@dataclass(slots=True, eq=False)
class PendingEvent:
    """An event that free bytes wait for, shared by all of them: a thousand may wait for one transfer.

    `event` is None from the moment it is known to have passed, and never before.
    """

    event: Event | None


class PendingEvents:
    """One PendingEvent an event, in the order in which the device is asked about them: longest unasked
    first."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # by id of the event, which the PendingEvent keeps alive
        self._unpassed: OrderedDict[int, PendingEvent] = OrderedDict()

    def of(self, event: Event) -> PendingEvent:
        """For each new event some of the older ones are asked about: they do not pile up."""
        pending = self._unpassed.get(id(event))
        if pending is None:
            self.poll_oldest()
            pending = self._unpassed[id(event)] = PendingEvent(event)
        return pending

    def poll(self, pending: PendingEvent) -> bool:
        """Return True if the event has passed. Blocks the host: never, as the next two."""
        if (event := pending.event) is not None and self._device.poll(event):
            self.passed(event, pending)
        return pending.event is None

    def poll_oldest(self) -> None:
        """`poll` POLLS_PER_EVENT of those that were asked about longest ago, but none behind one that has not
        passed: lanes are in order, those behind it will hardly have."""
        for _ in range(min(POLLS_PER_EVENT, len(self._unpassed))):
            key, pending = next(iter(self._unpassed.items()))
            if not self._device.poll(pending.event):
                self._unpassed.move_to_end(key)
                return
            self.passed(pending.event, pending)

    def poll_all(self) -> bool:
        """Ask about every event; whether all have passed."""
        for pending in tuple(self._unpassed.values()):
            self.poll(pending)
        return not self._unpassed

    def synchronize(self, these: Iterable[PendingEvent]) -> None:
        """Block the host until these events have passed."""
        for pending in these:
            if (event := pending.event) is not None:
                self._device.synchronize(event)
                self.passed(event, pending)

    def synchronize_all(self) -> None:
        """Block the host until every event has passed."""
        self.synchronize(tuple(self._unpassed.values()))

    def passed(self, event: Event, pending: PendingEvent) -> None:
        """The event of `pending` is known to have passed."""
        del self._unpassed[id(event)]
        pending.event = None


def join_pending(these: Iterable[PendingEvent]) -> tuple[PendingEvent, ...]:
    """Pending events that may still be ahead, each once, in the order given."""
    return tuple(dict.fromkeys(pending for pending in these if pending.event is not None))


class Range(NamedTuple):
    """Bytes `start..end` of one piece. pending: what the next writer must wait for."""

    piece: int
    start: int
    end: int
    pending: tuple[PendingEvent, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def idle(self) -> bool:
        """Predicate: every event is known to have passed. Asks no device."""
        return all(pending.event is None for pending in self.pending)


class FreeRanges:
    """By place, to join neighbours, and by size. Finding a fit is a bisection, joining is two dictionary
    look-ups; nothing walks all ranges."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._by_start: dict[tuple[int, int], _Entry] = {}
        self._by_end: dict[tuple[int, int], _Entry] = {}
        self._by_size: list[_Entry] = []  # ascending, of one size the longest free first
        self._num_inserted = 0

    def clear(self) -> None:
        """Forget all of them: their memory goes."""
        self.nbytes = 0
        for index in (self._by_start, self._by_end, self._by_size):
            index.clear()

    def __len__(self) -> int:
        return len(self._by_size)

    def __iter__(self) -> Iterator[Range]:
        return (entry.range for entry in self._by_size)

    def put(self, piece: int, start: int, end: int, pending: tuple[PendingEvent, ...] = ()) -> None:
        """Free these bytes and join them with the free neighbours in the same piece."""
        if before := self._by_end.get((piece, start)):
            self._remove(before)
            start, pending = before.range.start, join_pending((*before.range.pending, *pending))
        if behind := self._by_start.get((piece, end)):
            self._remove(behind)
            end, pending = behind.range.end, join_pending((*pending, *behind.range.pending))
        self._insert(Range(piece, start, end, pending))

    def best_fit(self, nbytes: int) -> Range | None:
        """The smallest free range of at least `nbytes`; of equals one that nobody reads any more."""
        at = bisect_left(self._by_size, (nbytes,))
        near = self._by_size[at : at + EQUALS_LOOKED_AT]
        equals = [entry.range for entry in near if entry.nbytes == near[0].nbytes]
        return next((free for free in equals if free.idle), equals[0] if equals else None)

    def cut(self, free: Range, nbytes: int) -> Range:
        """Take the first `nbytes` out of a free range; the rest stays free. Both keep its events."""
        assert 0 < nbytes <= free.nbytes, (nbytes, free)
        self._remove(self._by_start[free.piece, free.start])
        middle = free.start + nbytes
        if middle < free.end:
            self._insert(Range(free.piece, middle, free.end, free.pending))
        return Range(free.piece, free.start, middle, free.pending)

    def gather(self, nbytes: int) -> list[Range]:
        """Take exactly `nbytes`, in as few ranges as a greedy choice finds: one that fits, else the largest
        and go on."""
        assert nbytes <= self.nbytes, (nbytes, self.nbytes)
        taken = []
        while nbytes:
            free = self.best_fit(nbytes) or self.best_fit(self._by_size[-1].nbytes)
            assert free is not None
            taken.append(self.cut(free, min(nbytes, free.nbytes)))
            nbytes -= taken[-1].nbytes
        return taken

    def _insert(self, new: Range) -> None:
        entry = _Entry(new.nbytes, self._num_inserted, new)
        self._num_inserted += 1
        self._by_start[new.piece, new.start] = self._by_end[new.piece, new.end] = entry
        insort(self._by_size, entry)
        self.nbytes += entry.nbytes

    def _remove(self, entry: _Entry) -> None:
        old = entry.range
        del self._by_start[old.piece, old.start], self._by_end[old.piece, old.end]
        del self._by_size[bisect_left(self._by_size, entry)]
        self.nbytes -= entry.nbytes


class _Entry(NamedTuple):
    """A range as it is sorted; no two have one `order`, so ranges are never compared."""

    nbytes: int
    order: int
    range: Range


def round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
