"""Bytes of the simulated device: its host memory, plain memory in the shape of pinned memory; which
operations touched which bytes of a storage since they were last written; and the happens-before checker: is
there an event between two accesses of the same bytes?

One invariant: nothing here keeps bytes alive. A storage is its StorageImpl, held weakly: the weak reference
keeps that object's address from being used again, so a tensor that the CPU allocator places at an old address
is never taken for the old one. Each registration of host memory is a storage of its own, so no copy can cross
from one into the next, and each can go alone.

Byte ranges carry the last write and the reads since, one a lane (as in FastTrack, Flanagan and Freund 2009):
an access that is ordered after those is ordered after everything before them. Ranges split where accesses
differ, and a write joins all that it covers; once there are many, what the host has seen finish is forgotten,
since everything to come is ordered after it.

A hazard is raised before the second access is issued, and nothing has changed then. Storages that die between
two device calls are looked at first thing in the next one, with the clocks of their death.
"""

from __future__ import annotations

import mmap
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from offload.device._sim_clock import Operation, SimLane
from offload.errors import HazardError, HostBudgetError


class PlainMemory:
    """`nbytes` in pieces of at most `registration_bytes`; the system gives the pages when they are used."""

    def __init__(
        self, nbytes: int, registration_bytes: int, release: Callable[[Sequence[torch.Tensor]], None]
    ) -> None:
        """release: raises if a copy of one of the pieces may be in flight."""
        if nbytes < 0 or registration_bytes <= 0:
            raise ValueError(
                f"{nbytes:,} host bytes in pieces of {registration_bytes:,} were asked for; give 0 or more, "
                "pieces above 0"
            )
        try:
            pieces = [
                _on_pages(min(registration_bytes, nbytes - start))
                for start in range(0, nbytes, registration_bytes)
            ]
        except (RuntimeError, OSError) as error:
            raise HostBudgetError(
                f"the system refused {nbytes:,} bytes of host memory ({error}); lower host_limit_bytes"
            ) from error
        self.pieces = tuple(pieces)
        self._release = release

    def release_piece(self, index: int) -> None:
        piece = self.pieces[index]
        if piece.numel():
            self._release([piece])
            self.pieces = (*self.pieces[:index], piece.new_empty(0), *self.pieces[index + 1 :])

    def release(self) -> None:
        self._release([piece for piece in self.pieces if piece.numel()])
        self.pieces = ()


def _on_pages(nbytes: int) -> torch.Tensor:
    """Bytes that start on a page, as pinned ones do."""
    return torch.frombuffer(
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
    )


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
    """Bookkeeping of the bytes of one storage."""

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


class HazardChecker:
    """The storages that a device has met, by identity, and the verdict on each access of them."""

    def __init__(self, host: SimLane, *, strict: bool) -> None:
        """strict: raise hazards; without it accesses are only noted."""
        self.strict = strict
        self._host = host
        self._tracked: dict[int, TrackedBytes] = {}
        # appended to by finalisers, on any thread, possibly while that thread holds the lock
        self._dead: deque[int] = deque()  # keys

    # -- storages --------------------------------------------------------------------------------------------
    def track(self, storage: torch.UntypedStorage, home: SimLane, *, host: bool = False) -> TrackedBytes:
        found = TrackedBytes(storage, home, self._dead.append, host=host)
        self._tracked[found.key] = found
        return found

    def locate(self, tensor: torch.Tensor, home: SimLane) -> Span:
        """The tensor's bytes. home: the lane that a storage met for the first time belongs to."""
        storage = tensor.untyped_storage()
        found = Span.of(self._tracked.get(storage._cdata) or self.track(storage, home), tensor)
        if found.tracked.released:
            raise HazardError(f"{found} are host memory that was released; release it after its last use")
        if found.tracked.freed and found.end > found.start:
            raise HazardError(f"{found} were freed, and nothing has refilled them; refill the storage first")
        return found

    def free(self, storage: torch.UntypedStorage, home: SimLane) -> None:
        """The storage's bytes go back to the lane that they came from. home: of a storage met first now."""
        tracked = self._tracked.get(storage._cdata) or self.track(storage, home)
        self.check_free(tracked.home, tracked.whole, "they are given back")
        tracked.ranges, tracked.active, tracked.freed = [], False, True

    def refill(self, storage: torch.UntypedStorage, home: SimLane) -> TrackedBytes:
        """The storage has other bytes from now on, which belong to `home`."""
        tracked = self._tracked.get(storage._cdata) or self.track(storage, home)
        tracked.nbytes, tracked.home = storage.nbytes(), home
        tracked.ranges, tracked.active, tracked.freed = [], True, False
        return tracked

    def is_host(self, storage: torch.UntypedStorage) -> bool:
        found = self._tracked.get(storage._cdata)
        return found is not None and found.host

    @property
    def active_bytes(self) -> int:
        return sum(tracked.nbytes for tracked in self._tracked.values() if tracked.active)

    def bury(self) -> None:
        """Give the bytes of storages that died since the last call back to the lanes that they came from."""
        while self._dead:
            tracked = self._tracked.pop(self._dead.popleft())
            try:
                self.check_free(tracked.home, tracked.whole, "their storage died")
            finally:
                tracked.ranges = []  # their operations point back at storages

    def release(self, pieces: Sequence[torch.Tensor]) -> None:
        """The host gives these host pieces back: no lane may still touch them, or touch them again."""
        held = [self.locate(piece, self._host).tracked for piece in pieces]
        for tracked in held:
            self.check_free(self._host, tracked.whole, "the host releases them")
        for tracked in held:
            tracked.released = True

    # -- verdicts --------------------------------------------------------------------------------------------
    def check(self, operation: Operation, span: Span, *, writing: bool) -> None:
        """Raise unless the operation, about to be issued, is ordered after what it conflicts with."""
        if not self.strict:
            return
        clock = operation.lane.clock
        for earlier, wrote in span.tracked.conflicts(span.start, span.end, writing=writing):
            if clock[earlier.lane.index] < earlier.number:
                raise _missing_edge(operation, writing, earlier, wrote, span)

    def stamp(self, operation: Operation, span: Span, *, writing: bool) -> None:
        span.tracked.stamp(span.start, span.end, operation, writing=writing, floor=self._host.clock)

    def check_free(self, lane: SimLane, span: Span, freed: str) -> None:
        """Raise unless all accesses are ordered before what `lane` is given next. freed: how the bytes went
        back, for the error."""
        if not self.strict:
            return
        seen = self._host.clock  # what is issued after the free comes after what the host has seen
        for earlier, wrote in span.tracked.conflicts(span.start, span.end, writing=True):
            if max(lane.clock[earlier.lane.index], seen[earlier.lane.index]) < earlier.number:
                raise _freed_too_early(lane, freed, earlier, wrote, span)


def _missing_edge(
    later: Operation, writes: bool, earlier: Operation, wrote: bool, where: Span
) -> HazardError:
    """`later` touches bytes that `earlier` touched, and no event orders the two."""
    if earlier.verb == "empty":
        kind, did = "allocator reuse", "hands them out"
    else:
        kind = ("WAW" if wrote else "WAR") if writes else "RAW"
        did = "writes them" if wrote else "reads them"
    return HazardError(
        f"{kind} hazard on {where}: {later} {'writes' if writes else 'reads'} them while {earlier}, which "
        f"{did}, may not have finished. " + _edges(later.lane, earlier)
    )


def _freed_too_early(lane: SimLane, freed: str, earlier: Operation, wrote: bool, where: Span) -> HazardError:
    """Bytes go back to the allocator of `lane` while another lane may still touch them."""
    what = f"{earlier}, which {'writes' if wrote else 'reads'} them"
    if earlier.number > earlier.lane.ran:
        why = f"but they were freed before the copy ran: {what}"
    else:
        why = f"while {what}, may not have finished"
    return HazardError(
        f"allocator reuse hazard on {where}: {freed}, and work issued to {lane.name} may get them next, "
        f"{why}. " + _edges(lane, earlier)
    )


def _edges(lane: SimLane, earlier: Operation) -> str:
    other = earlier.lane
    known = lane.clock[other.index]
    if known == 0:
        has = f"nothing orders {lane.name} after {other.name}"
    else:
        last = f" (last edge: '{lane.edges[other.index]}')" if other.index in lane.edges else ""
        has = f"{lane.name} comes after operation {known} of {other.name}{last}, not after {earlier.number}"
    how = "synchronize or poll it" if lane.name == "host" else f"let {lane.name} wait for it"
    return (
        f"{has}{lane.say_left_out()}. Record an event on {other.name} after operation {earlier.number} "
        f"and {how} first"
    )
