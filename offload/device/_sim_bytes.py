"""Which operations touched which bytes of a storage since they were last written.

One invariant: nothing here keeps bytes alive. A storage is its StorageImpl, held weakly: the weak reference
keeps that object's address from being used again, so a tensor that the CPU allocator places at an old address
is never taken for the old one.

Byte ranges carry the last write and the reads since, one a lane (as in FastTrack, Flanagan and Freund 2009):
an access that is ordered after those is ordered after everything before them. Ranges split where accesses
differ, and a write joins all that it covers; once there are many, what the host has seen finish is forgotten,
since everything to come is ordered after it.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from offload.device._sim_clock import Operation, SimLane

_PRUNE_ABOVE = 64  # ranges of one storage, before the first look for ranges that can be forgotten


@dataclass(slots=True, eq=False)
class _Range:
    """Bytes `start..end` that were accessed alike."""

    start: int
    end: int
    write: Operation | None = None
    reads: dict[SimLane, Operation] = field(default_factory=dict)  # since the write


_START, _END = attrgetter("start"), attrgetter("end")


class TrackedBytes:
    """What is known of the bytes of one storage."""

    def __init__(
        self, storage: torch.UntypedStorage, home: SimLane, on_death: Callable[[int], None], *, host: bool
    ) -> None:
        """on_death: called with `key` once the storage is dead."""
        key: int = storage._cdata
        self.key = key
        self._weak: Any = storage._weak_ref()  # an address as an int; torch's annotation says otherwise
        self._ref = weakref.ref(storage, lambda _: on_death(key))
        self.nbytes = storage.nbytes()
        self.home = home  # the lane that gets the bytes back when the storage dies
        self.host = host
        self.released = False
        self.freed = False  # its storage stays, without bytes
        self.active = False  # counts in active_bytes
        self.ranges: list[_Range] = []  # by place: what was accessed
        self._prune_above = _PRUNE_ABOVE

    # bound early: at exit torch may be gone
    def __del__(self, free: Callable[[Any], None] = torch.UntypedStorage._free_weak_ref) -> None:
        if hasattr(self, "_weak"):  # not after an interrupt in its constructor
            free(self._weak)

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, or None if it is dead."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._weak)
        return found

    @property
    def whole(self) -> Span:
        return Span(self, 0, self.nbytes)

    # -- accesses --------------------------------------------------------------------------------------------
    def conflicts(self, start: int, end: int, *, writing: bool) -> Iterator[tuple[Operation, bool]]:
        """(operation, whether it wrote) of what an access now must come after; once for each range that it
        touched."""
        if start >= end:
            return
        for found in self.ranges[bisect_right(self.ranges, start, key=_END) :]:
            if found.start >= end:
                return
            if found.write is not None:
                yield found.write, True
            if writing:
                for read in found.reads.values():
                    yield read, False

    def stamp(
        self, start: int, end: int, operation: Operation, *, writing: bool, floor: Sequence[int]
    ) -> None:
        """Note the access. floor: the host's clock; what it counts is ordered before everything to come."""
        if start >= end:
            return
        first, last = self._cut(start), self._cut(end)
        if writing:
            self.ranges[first:last] = [_Range(start, end, operation)]
        else:
            covered: list[_Range] = []
            for known in self.ranges[first:last]:
                if start < known.start:
                    covered.append(_Range(start, known.start))
                covered.append(known)
                start = known.end
            if start < end:
                covered.append(_Range(start, end))
            for known in covered:
                known.reads[operation.lane] = operation
            self.ranges[first:last] = covered
        if len(self.ranges) > self._prune_above:
            self._forget(floor)

    def _cut(self, at: int) -> int:
        """Split the range that crosses `at`, if one does; the index of the first range that starts at or
        after it."""
        index = bisect_left(self.ranges, at, key=_START)
        if index > 0 and (crossing := self.ranges[index - 1]).end > at:
            self.ranges.insert(index, _Range(at, crossing.end, crossing.write, dict(crossing.reads)))
            crossing.end = at
        return index

    def _forget(self, floor: Sequence[int]) -> None:
        for known in self.ranges:
            if known.write is not None and known.write.number <= floor[known.write.lane.index]:
                known.write = None
            reads = known.reads.items()
            known.reads = {lane: read for lane, read in reads if read.number > floor[lane.index]}
        self.ranges = [known for known in self.ranges if known.write is not None or known.reads]
        self._prune_above = max(_PRUNE_ABOVE, 2 * len(self.ranges))


class Span(NamedTuple):
    """Bytes `start..end` of a storage."""

    tracked: TrackedBytes
    start: int
    end: int

    def __str__(self) -> str:
        kind = "host piece" if self.tracked.host else "device storage"
        return f"bytes [{self.start:,}, {self.end:,}) of a {kind} of {self.tracked.nbytes:,}"

    @classmethod
    def of(cls, tracked: TrackedBytes, tensor: torch.Tensor) -> Span:
        """From the tensor's first element to its last; what lies between strides counts too."""
        size, last = tensor.element_size(), -1
        start = int(tensor.storage_offset()) * size
        if tensor.numel():
            last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(tracked, start, start + (last + 1) * size)
