"""The free bytes of an arena: ranges that split, join again, and remember who still reads them.

One invariant: free ranges never overlap, two that touch are one, and none crosses from one piece into the
next. A range knows every event after which its bytes may be written; joining keeps the events of both.

Costs: finding a fit is a bisection over the distinct sizes, joining is two dictionary look-ups; nothing walks
    all ranges.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from offload.memory.marks import Mark, join_marks

__all__ = ["EQUALS_LOOKED_AT", "FreeRanges", "Range", "round_up"]

EQUALS_LOOKED_AT = 4
"""Among ranges of one size, how many are looked at for one that nobody reads any more: longest free first, so
the likeliest first."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes `start..end` of one piece. marks: what the next writer must wait for."""

    piece: int
    start: int
    end: int
    marks: tuple[Mark, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def idle(self) -> bool:
        """Whether every event is known to have passed. Asks no device."""
        return all(mark.event is None for mark in self.marks)


class FreeRanges:
    """Free ranges by place (to join neighbours) and by size (to find a fit). Not thread-safe: the arena holds
    its lock."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._by_start: dict[tuple[int, int], Range] = {}
        self._by_end: dict[tuple[int, int], Range] = {}
        self._sizes: list[int] = []  # distinct sizes, ascending
        self._by_size: dict[int, dict[int, Range]] = {}  # size -> ranges by id, oldest first

    def __len__(self) -> int:
        return len(self._by_start)

    def __iter__(self) -> Iterator[Range]:
        return iter(self._by_start.values())

    def clear(self) -> None:
        self.total_bytes = 0
        for index in (self._by_start, self._by_end, self._sizes, self._by_size):
            index.clear()

    def put(self, piece: int, start: int, end: int, marks: tuple[Mark, ...] = ()) -> None:
        """Free these bytes and join them with the free neighbours in the same piece."""
        if before := self._by_end.get((piece, start)):
            self._remove(before)
            start, marks = before.start, join_marks((*before.marks, *marks))
        if behind := self._by_start.get((piece, end)):
            self._remove(behind)
            end, marks = behind.end, join_marks((*marks, *behind.marks))
        self._insert(Range(piece, start, end, marks))

    def best_fit(self, nbytes: int) -> Range | None:
        """The smallest free range of at least `nbytes`; among equals one that nobody reads any more."""
        at = bisect_left(self._sizes, nbytes)
        return None if at == len(self._sizes) else self._pick(self._sizes[at])

    def cut(self, free: Range, nbytes: int) -> Range:
        """Take the first `nbytes` out of a free range; the rest stays free. Both keep its marks."""
        assert 0 < nbytes <= free.nbytes, (nbytes, free)
        self._remove(free)
        middle = free.start + nbytes
        if middle < free.end:
            self._insert(Range(free.piece, middle, free.end, free.marks))
        return Range(free.piece, free.start, middle, free.marks)

    def gather(self, nbytes: int) -> list[Range]:
        """Take exactly `nbytes`, in as few ranges as a greedy choice finds: one that fits, else the largest
        and go on."""
        assert nbytes <= self.total_bytes, (nbytes, self.total_bytes)
        taken = []
        while nbytes:
            free = self.best_fit(nbytes) or self._pick(self._sizes[-1])
            part = self.cut(free, min(nbytes, free.nbytes))
            taken.append(part)
            nbytes -= part.nbytes
        return taken

    def _pick(self, size: int) -> Range:
        same = self._by_size[size]
        for candidate in islice(same.values(), EQUALS_LOOKED_AT):
            if candidate.idle:
                return candidate
        return next(iter(same.values()))

    def _insert(self, new: Range) -> None:
        self._by_start[new.piece, new.start] = new
        self._by_end[new.piece, new.end] = new
        same = self._by_size.get(new.nbytes)
        if same is None:
            same = self._by_size[new.nbytes] = {}
            insort(self._sizes, new.nbytes)
        same[id(new)] = new
        self.total_bytes += new.nbytes

    def _remove(self, old: Range) -> None:
        del self._by_start[old.piece, old.start]
        del self._by_end[old.piece, old.end]
        same = self._by_size[old.nbytes]
        del same[id(old)]
        if not same:
            del self._by_size[old.nbytes]
            del self._sizes[bisect_left(self._sizes, old.nbytes)]
        self.total_bytes -= old.nbytes


def round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
