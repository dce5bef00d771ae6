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
from typing import Any

import torch

from offload.device._sim_clock import SimEvent, SimLane

__all__ = ["Operation", "StorageRef", "TrackedBytes", "byte_range"]

_PRUNE_ABOVE = 64  # ranges of one storage, before the first look for ranges that can be forgotten


class Operation:
    """One numbered operation of a lane, as errors name it. Never holds a tensor."""

    __slots__ = ("end_s", "lane", "nbytes", "number", "verb")

    def __init__(self, lane: SimLane, verb: str, nbytes: int) -> None:
        self.lane = lane
        self.number = lane.issued + 1  # its number if it is issued: a hazard is raised before it is
        self.verb = verb
        self.nbytes = nbytes
        self.end_s = 0.0

    def __str__(self) -> str:
        return f"{self.verb} of {self.nbytes:,} bytes (operation {self.number} of {self.lane.name})"

    @property
    def after(self) -> SimEvent | None:
        return None

    def run(self) -> None:
        """A declaration moves nothing."""


class _Range:
    """Bytes up to `end` that were accessed alike."""

    __slots__ = ("end", "reads", "write")

    def __init__(self, end: int, write: Operation | None, reads: list[Operation]) -> None:
        self.end = end
        self.write = write
        self.reads = reads  # since the write, at most one a lane

    def add_read(self, operation: Operation) -> None:
        self.reads = [read for read in self.reads if read.lane is not operation.lane]
        self.reads.append(operation)


class StorageRef(weakref.ref[torch.UntypedStorage]):
    """Tells, once the storage is dead, which one it was."""

    __slots__ = ("key",)
    key: int


class TrackedBytes:
    """What is known of the bytes of one storage."""

    __slots__ = (
        "_labels",
        "_prune_above",
        "_ranges",
        "_ref",
        "_starts",
        "_weak",
        "counted",
        "home",
        "host",
        "key",
        "nbytes",
        "released",
    )

    def __init__(
        self,
        storage: torch.UntypedStorage,
        home: SimLane,
        on_death: Callable[[StorageRef], None],
        *,
        host: bool,
    ) -> None:
        self.key: int = storage._cdata
        self._weak: Any = storage._weak_ref()  # an address as an int; torch's annotation says otherwise
        self._ref = StorageRef(storage, on_death)
        self._ref.key = self.key
        self.nbytes = storage.nbytes()
        self.home = home  # the lane that gets the bytes back when the storage dies
        self.host = host
        self.released = False
        self.counted = 0  # of active_bytes
        self._starts: list[int] = []
        self._ranges: list[_Range] = []
        self._labels: dict[tuple[int, int], str] = {}
        self._prune_above = _PRUNE_ABOVE

    # bound early: at exit torch may be gone
    def __del__(self, free: Callable[[Any], None] = torch.UntypedStorage._free_weak_ref) -> None:
        free(self._weak)

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, or None if it is dead."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._weak)
        return found

    # -- names -----------------------------------------------------------------------------------------------
    def name(self, start: int, end: int, label: str) -> None:
        self._labels.pop((start, end), None)
        self._labels[start, end] = label

    def describe(self, start: int, end: int) -> str:
        labels = [label for (first, last), label in self._labels.items() if first < end and start < last]
        owner = (
            f"'{labels[-1]}'"
            if labels
            else f"a host piece of {self.nbytes:,}"
            if self.host
            else f"a device storage of {self.nbytes:,}"
        )
        return f"bytes [{start:,}, {end:,}) of {owner}"

    # -- accesses --------------------------------------------------------------------------------------------
    def conflicts(self, start: int, end: int, *, writing: bool) -> Iterator[tuple[Operation, bool]]:
        """(operation, whether it wrote) of what an access now must come after; once for each range that it
        touched."""
        if start >= end:
            return
        starts, ranges = self._starts, self._ranges
        index = bisect_right(starts, start) - 1
        if index < 0 or ranges[index].end <= start:
            index += 1
        while index < len(starts) and starts[index] < end:
            found = ranges[index]
            if found.write is not None:
                yield found.write, True
            if writing:
                for read in found.reads:
                    yield read, False
            index += 1

    def stamp(
        self, start: int, end: int, operation: Operation, *, writing: bool, floor: Sequence[int]
    ) -> None:
        """Note the access. floor: the host's clock; what it counts is ordered before everything to come."""
        if start >= end:
            return
        starts, ranges = self._starts, self._ranges
        index = bisect_left(starts, start)
        # the same block again: the usual case
        if index < len(starts) and starts[index] == start and ranges[index].end == end:
            if writing:
                ranges[index].write = operation
                ranges[index].reads = []
            else:
                ranges[index].add_read(operation)
            return
        first, last = self._cut(start), self._cut(end)
        if writing:
            starts[first:last] = [start]
            ranges[first:last] = [_Range(end, operation, [])]
        else:
            self._stamp_read(first, last, start, end, operation)
        if len(ranges) > self._prune_above:
            self._forget(floor)

    def drop_accesses(self) -> None:
        """Let go of the operations: the storage is dead, and operations point back at storages."""
        self._starts, self._ranges = [], []

    def _cut(self, at: int) -> int:
        """Split the range that crosses `at`, if one does; the index of the first range that starts at or
        after it."""
        index = bisect_left(self._starts, at)
        if index > 0 and self._ranges[index - 1].end > at:
            crossing = self._ranges[index - 1]
            self._starts.insert(index, at)
            self._ranges.insert(index, _Range(crossing.end, crossing.write, list(crossing.reads)))
            crossing.end = at
        return index

    def _stamp_read(self, first: int, last: int, start: int, end: int, operation: Operation) -> None:
        starts: list[int] = []
        ranges: list[_Range] = []
        at = start
        for begin, known in zip(self._starts[first:last], self._ranges[first:last], strict=True):
            if at < begin:
                starts.append(at)
                ranges.append(_Range(begin, None, [operation]))
            known.add_read(operation)
            starts.append(begin)
            ranges.append(known)
            at = known.end
        if at < end:
            starts.append(at)
            ranges.append(_Range(end, None, [operation]))
        self._starts[first:last] = starts
        self._ranges[first:last] = ranges

    def _forget(self, floor: Sequence[int]) -> None:
        starts: list[int] = []
        ranges: list[_Range] = []
        for begin, known in zip(self._starts, self._ranges, strict=True):
            if known.write is not None and known.write.number <= floor[known.write.lane.index]:
                known.write = None
            known.reads = [read for read in known.reads if read.number > floor[read.lane.index]]
            if known.write is not None or known.reads:
                starts.append(begin)
                ranges.append(known)
        self._starts, self._ranges = starts, ranges
        self._prune_above = max(_PRUNE_ABOVE, 2 * len(ranges))


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage from the tensor's first element to its last; what lies between strides counts
    too."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return start, start + tensor.numel() * size
    if tensor.numel() == 0:
        return start, start
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (int(last) + 1) * size
