"""The happens-before checker of the simulated device: is there an event between two accesses of the same
bytes?

One invariant: a hazard is raised before the second access is issued, and nothing has changed then. Storages
that die between two device calls are looked at first thing in the next one, with the clocks of their death.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from offload.device._sim_bytes import Span, TrackedBytes
from offload.device._sim_clock import Operation, SimLane
from offload.errors import HazardError


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
