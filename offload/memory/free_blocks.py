"""The free bytes of an arena: whole blocks by size, ranges that split and join, and the events that the next
writer of each must wait for.

A steady step asks for the sizes of the step before, so a block that comes back is kept whole and lent again
as it was: cutting each out of the ranges and joining it again was a large part of what a moved tensor costs
the host (`scripts/bench_stage.py --micro`). Where no block of a size is left, one is cut from ranges. One
invariant: a free byte lies in one whole block or in one range; ranges that touch are one, and none crosses
from one piece into the next; the events of joined ranges are kept.

    piece    one registration of host memory, the longest thing that one copy may touch
    extent   a byte range inside one piece
    block    a list of extents; a list, so that free bytes are never too scattered to be lent

Not thread-safe: the arena holds its lock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch

from offload.device.base import Device, Event

__all__ = ["Block", "FreeBlocks", "PendingEvent", "PendingEvents", "Range", "join_pending", "round_up"]

POLLS_PER_EVENT = 2
"""Events asked about for each new one and by each taker, whatever the number pending: the host cost of a call
stays flat."""

EQUALS_LOOKED_AT = 4
"""Among blocks or ranges of one size, how many are looked at for one that nobody reads any more: longest free
first, so the likeliest first."""


class PendingEvent:
    """An event that free bytes wait for, shared by all of them: a thousand may wait for one transfer.

    `event` is None from the moment it is known to have passed, and never before.
    """

    __slots__ = ("event",)

    def __init__(self, event: Event) -> None:
        self.event: Event | None = event


class PendingEvents:
    """One PendingEvent an event, and the order in which the device is asked about them: longest unasked
    first."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._of_event: dict[int, PendingEvent] = {}  # by id of the event, which the PendingEvent keeps alive
        self._unpassed: deque[PendingEvent] = deque()  # and some that passed since they were asked about last

    def of(self, event: Event) -> PendingEvent:
        """For each new event some of the older ones are asked about: they do not pile up."""
        pending = self._of_event.get(id(event))
        if pending is None:
            self.poll_oldest()
            pending = self._of_event[id(event)] = PendingEvent(event)
            self._unpassed.append(pending)
        return pending

    def poll(self, pending: PendingEvent) -> bool:
        """Whether the event has passed. Blocks the host: never, as the next two."""
        if pending.event is not None and self._device.poll(pending.event):
            self._pass(pending.event, pending)
        return pending.event is None

    def poll_oldest(self) -> None:
        """`poll` POLLS_PER_EVENT of those that were asked about longest ago, but none behind one that has not
        passed: lanes are in order, those behind it will hardly have."""
        for _ in range(min(POLLS_PER_EVENT, len(self._unpassed))):
            pending = self._unpassed.popleft()
            if pending.event is not None and not self.poll(pending):
                self._unpassed.append(pending)
                return

    def poll_all(self) -> bool:
        """Ask about every event; whether all have passed."""
        self._unpassed = deque(pending for pending in self._unpassed if not self.poll(pending))
        return not self._unpassed

    def synchronize(self, these: Iterable[PendingEvent]) -> None:
        """Block the host until these events have passed."""
        for pending in these:
            if (event := pending.event) is not None:
                self._device.synchronize(event)
                self._pass(event, pending)

    def synchronize_all(self) -> None:
        """Block the host until every event has passed."""
        self.synchronize(self._unpassed)
        self._unpassed.clear()

    def _pass(self, event: Event, pending: PendingEvent) -> None:
        del self._of_event[id(event)]
        pending.event = None


def join_pending(these: Iterable[PendingEvent]) -> tuple[PendingEvent, ...]:
    """Those whose event may still be ahead, each once, in the order given."""
    return tuple(dict.fromkeys(pending for pending in these if pending.event is not None))


def _passed(these: tuple[PendingEvent, ...]) -> bool:
    """Whether every event is known to have passed. Asks no device."""
    for pending in these:  # noqa: SIM110  # no generator: asked for every block that is lent again
        if pending.event is not None:
            return False
    return True


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
        return _passed(self.pending)


# not frozen, which would set each field by a call: one is made for every tensor that moves
@dataclass(slots=True, eq=False)
class Block:
    """Host bytes on loan, until `give_back`. Its borrower changes nothing of it."""

    nbytes: int
    extents: tuple[torch.Tensor, ...]
    """1-D uint8 views, each inside one registration; their lengths sum to `nbytes`."""
    after: tuple[Event, ...]
    """What the lane that writes next must wait for: the last users of these bytes."""
    ranges: tuple[Range, ...] = field(repr=False)
    """The arena's own bookkeeping, as is the next."""
    pending: tuple[PendingEvent, ...] = field(repr=False)


class FreeBlocks:
    """Whole blocks by the bytes that they were asked for; ranges by place, to join neighbours, and by size.

    Finding a fit is a bisection, joining is two dictionary look-ups; nothing walks all ranges.
    """

    def __init__(self) -> None:
        self.range_bytes = 0
        self._whole: dict[int, deque[Block]] = {}
        self._by_start: dict[tuple[int, int], _Entry] = {}
        self._by_end: dict[tuple[int, int], _Entry] = {}
        self._by_size: list[_Entry] = []  # ascending, of one size the longest free first
        self._num_inserted = 0

    def clear(self) -> None:
        """Forget all of them: their memory goes."""
        self.range_bytes = 0
        for index in (self._whole, self._by_start, self._by_end, self._by_size):
            index.clear()

    # -- whole blocks ----------------------------------------------------------------------------------------
    def put_whole(self, block: Block) -> None:
        """`block.pending` is what its next writer must wait for."""
        same = self._whole.get(block.nbytes)
        if same is None:
            same = self._whole[block.nbytes] = deque()
        same.append(block)

    def take_whole(self, nbytes: int) -> Block | None:
        """One of exactly that size: of the oldest ones the first that nobody reads any more, else the
        oldest."""
        same = self._whole.get(nbytes)
        if not same:
            return None
        for at, block in enumerate(islice(same, EQUALS_LOOKED_AT)):
            for pending in block.pending:  # `_passed`, without a call
                if pending.event is not None:
                    break
            else:
                del same[at]
                return block
        return same.popleft()

    def split_whole(self) -> None:
        """Every whole block goes back to the ranges, to be joined and cut anew."""
        for same in self._whole.values():
            for block in same:
                for part in block.ranges:
                    self.put(part.piece, part.start, part.end, block.pending)
        self._whole.clear()

    def count(self) -> tuple[int, int]:
        """Bytes that are free, and the ranges that they lie in, those of whole blocks as they were lent.

        Walks the whole blocks."""
        parts = [part for same in self._whole.values() for block in same for part in block.ranges]
        whole_bytes = sum(part.end - part.start for part in parts)
        return self.range_bytes + whole_bytes, len(self._by_size) + len(parts)

    # -- ranges ----------------------------------------------------------------------------------------------
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
        if at == len(self._by_size):
            return None
        found = self._by_size[at]
        for entry in self._by_size[at : at + EQUALS_LOOKED_AT]:
            if entry.nbytes == found.nbytes and entry.range.idle:
                return entry.range
        return found.range

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
        assert nbytes <= self.range_bytes, (nbytes, self.range_bytes)
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
        self.range_bytes += entry.nbytes

    def _remove(self, entry: _Entry) -> None:
        old = entry.range
        del self._by_start[old.piece, old.start], self._by_end[old.piece, old.end]
        del self._by_size[bisect_left(self._by_size, entry)]
        self.range_bytes -= entry.nbytes


class _Entry(NamedTuple):
    """A range as it is sorted; no two have one `order`, so ranges are never compared."""

    nbytes: int
    order: int
    range: Range


def round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
