"""The copier: every copy between device and host passes it, in both directions, whoever asks for it.

It asks admission, names the copies in a profile, issues them to their lane, records one event after them,
ends the lease with that event, and counts by client what was copied and what was denied. One invariant:
nothing else in the project calls `Device.copy`. The caller makes the lane wait for what the copy needs,
before the call.

Admission says who may copy how many bytes, in which direction, now. `ask` answers at once. A REQUIRED copy
that is denied goes ahead and is counted, because compute must not deadlock on an arbiter; any other copy that
is denied moves nothing.

    lease     permission to copy one piece; it ends with the event of that copy, so that an arbiter can count
              what is in flight

How long compute waited for copies is measured by timed events around each such wait (`Stall`), which are read
one step late. Reading them never blocks the host, and asks about one event a lane: where the last one has
passed, so have those before it. What the link carries is measured on the engine's own lanes and in its own
memory.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple, Protocol

import torch

from offload.device import CopyPair, Device, Event, Lane
from offload.ids import Owner
from offload.memory.arena import HostArena
from offload.policy.actions import Rates
from offload.telemetry.records import ClientStats
from offload.transfer.limits import Limits


class Direction(Enum):
    __hash__ = object.__hash__  # members are compared by identity; Enum's own hash is a Python call
    D2H = "d2h"
    H2D = "h2d"


class Priority(IntEnum):
    """Under scarcity a lower one is denied first."""

    BACKGROUND = 0
    SPECULATIVE = 1  # a prefetch: nobody waits for it yet
    REQUIRED = 2  # its reader waits
    CRITICAL = 3


class DenialReason(Enum):
    CEILING_REACHED = "its owner has a ceiling, which is reached"
    CONDUCTOR_DISABLED = "the conductor is switched off, or was shut down"
    D2H_CAP_ZERO = "max_spilling_bytes is 0"
    D2H_SLOTS_EXHAUSTED = "no slot is free from device to host"
    H2D_SLOTS_EXHAUSTED = "no slot is free from host to device"
    PHASE_RULE_SUPPRESSED_SPECULATIVE = "a rule of this phase suppresses prefetches"
    PINNED_EXHAUSTED = "pinned host memory is promised to others"
    VRAM_HARD_CAP = "device memory is at its hard cap"
    VRAM_SOFT_CAP = "device memory is at its soft cap"


class Lease(Protocol):
    """Permission to copy one piece."""

    def done(self, event: Event | None) -> None:
        """The copy is issued, and over when `event` has passed; None: nothing is in flight that has an event.
        Only the first call counts. Never blocks the host."""


class Admission(Protocol):
    """Grants or denies copies. Called from several threads, as the optimizer's workers copy too."""

    def ask(self, nbytes: int, direction: Direction, owner: Owner, priority: Priority) -> Lease | Denied:
        """Decide whether `owner` may copy a piece of `nbytes` now. Never blocks the host."""


class _Uncounted:
    """A lease whose end is not counted."""

    def done(self, event: Event | None) -> None:
        """Nothing is counted."""


UNCOUNTED: Lease = _Uncounted()


class Denied(NamedTuple):
    """No permission. lease: of a REQUIRED copy, which goes ahead all the same."""

    reason: DenialReason
    lease: Lease = UNCOUNTED


class CapsAdmission:
    """Grants within the caps: for an engine that shares its link with nobody. What is in flight is bounded by
    the transfer engine itself, which knows the order of the reads."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def ask(self, nbytes: int, direction: Direction, owner: Owner, priority: Priority) -> Lease | Denied:
        may_stay = direction is Direction.D2H and priority < Priority.REQUIRED
        if may_stay and self._limits.max_spilling_bytes == 0:
            return Denied(DenialReason.D2H_CAP_ZERO)
        return UNCOUNTED


CopyWatcher = Callable[[Direction, Owner, int, Event, Event], None]
"""Called with the direction, the owner, the bytes, and timed events before and after the copies."""


class Copier:
    """Copies on the lanes of `device`. Any thread may call it."""

    def __init__(self, device: Device, admission: Admission) -> None:
        self.device = device
        self.admission = admission
        self._watchers: tuple[CopyWatcher, ...] = ()
        self._on_h2d: deque[tuple[Sequence[Event], Event]] = deque(maxlen=64)
        self._lock = threading.Lock()
        self._counts: defaultdict[str, ClientStats] = defaultdict(ClientStats)

    def ask(self, nbytes: int, direction: Direction, owner: Owner, priority: Priority) -> Lease | None:
        """Permission to copy a piece; None if it is denied, which is counted. A REQUIRED one that is denied
        is counted and gets a lease all the same. `copy` ends the lease; where it is not reached, or raises,
        the caller does. Blocks the host: never."""
        answer = self.admission.ask(nbytes, direction, owner, priority)
        if not isinstance(answer, Denied):
            return answer
        with self._lock:
            counts = self._counts[owner.client]
            counts.denied += 1
            counts.denied_bytes += nbytes
        return answer.lease if priority >= Priority.REQUIRED else None

    def copy(
        self,
        lease: Lease,
        direction: Direction,
        owner: Owner,
        pairs: Sequence[CopyPair],
        nbytes: int,
        lane: Lane | None = None,
        behind: Sequence[Event] = (),
    ) -> Event:
        """Issue the copies of one piece; the event after them, with which the lease ends.

        nbytes: their sum. lane: None for the device's own lane of that direction; any other lets pass, to the
            device, what could run on that one (`_let_pass`). behind: of a copy that others are to let pass,
            what its lane was made to wait for; none in a capture. The caller keeps both sides alive until the
            event has passed.
        After an exception some of the copies may have been issued: the caller orders what comes after them,
        and ends the lease. Blocks the host only where its side is not pinned.
        """
        device, out = self.device, direction is Direction.D2H
        if lane is None:
            lane = device.d2h if out else device.h2d
        elif not out:
            self._let_pass(lane)
        watchers = self._watchers if self._watchers and not device.is_capturing() else ()
        start = device.record(lane, timed=True) if watchers else None
        # a range that nobody listens to would still cost 8 microseconds
        if torch.autograd.profiler._is_profiler_enabled:
            name = owner.label.rpartition("/")[2]  # of all microbatches alike
            with torch.profiler.record_function(f"offload/{'spill' if out else 'restore'}/{name}"):
                device.copy(lane, pairs)
        else:
            device.copy(lane, pairs)
        event = device.record(lane)
        if start is not None:
            end = device.record(lane, timed=True)
            for watcher in watchers:
                watcher(direction, owner, nbytes, start, end)
        if lease is not UNCOUNTED:
            lease.done(event)
        with self._lock:
            if behind:
                self._on_h2d.append((behind, event))
            counts = self._counts[owner.client]
            if out:
                counts.out_bytes += nbytes
            else:
                counts.in_bytes += nbytes
        return event

    def _let_pass(self, lane: Lane) -> None:
        """`lane` goes on behind the copies of h2d that nothing holds up. No hazard is behind this edge, it is
        for time alone: a GPU's copy engine stays with a stream that has copies queued. One H100, torch 2.11:
        weights waited 118 ms beside state of optimizers that was queued 20 ms deep (docs/log.md, 2026-11-26).
        """
        if self.device.is_capturing():
            return
        coming, poll = self._on_h2d, self.device.poll
        with self._lock:
            while coming and poll(coming[0][1]):
                coming.popleft()
            last = None
            for behind, event in coming:
                if not all(map(poll, behind)):
                    break
                last = event
        if last is not None:
            self.device.wait(lane, last, "let pass")

    def watch(self, watcher: CopyWatcher) -> None:
        """Tell `watcher` of every copy outside of a capture, until `unwatch`. Takes no lock, so a finaliser
        may undo it on any thread."""
        self._watchers = (*self._watchers, watcher)

    def unwatch(self, watcher: CopyWatcher) -> None:
        """Undo `watch`, once or again."""
        self._watchers = tuple(other for other in self._watchers if other != watcher)

    def of(self, owner: Owner) -> OwnedCopies:
        """Copies of one owner, each REQUIRED."""
        return OwnedCopies(self, self.device, owner)

    def take_counts(self) -> dict[str, ClientStats]:
        """Return what was counted since the last call, by client."""
        with self._lock:
            counts, self._counts = self._counts, defaultdict(ClientStats)
        return dict(counts)


@dataclass(slots=True, frozen=True)
class OwnedCopies:
    """Copies that one owner cannot do without: a denial is counted, and they go ahead."""

    _copier: Copier
    device: Device
    owner: Owner

    def send(self, pairs: Sequence[CopyPair], lane: Lane | None = None) -> Event:
        """To the host, on d2h or `lane`, as one piece; the event after it."""
        return self._move(Direction.D2H, pairs, lane)

    def fetch(self, pairs: Sequence[CopyPair], lane: Lane | None = None) -> Event:
        """To the device, on h2d or `lane`, as one piece; the event after it."""
        return self._move(Direction.H2D, pairs, lane)

    def _move(self, direction: Direction, pairs: Sequence[CopyPair], lane: Lane | None) -> Event:
        nbytes = sum(source.numel() for _, source in pairs)
        lease = self._copier.ask(nbytes, direction, self.owner, Priority.REQUIRED)
        assert lease is not None  # REQUIRED
        try:
            return self._copier.copy(lease, direction, self.owner, pairs, nbytes, lane)
        except BaseException:
            lease.done(None)
            raise


@dataclass(slots=True, eq=False)
class Stall:
    """A wait of `lane` between two timed events."""

    lane: Lane
    before: Event
    after: Event
    _ms: float | None = None

    def ms(self, device: Device) -> float:
        """Device time between the two, which have passed. The device is asked once: a step's clock and its
        figures both want it."""
        if self._ms is None:
            self._ms = device.elapsed_ms(self.before, self.after)
        return self._ms


class Stalls(list[Stall]):
    """Waits of one client's lanes for copies and steps in one step, in their order. before: those of the step
    before it."""

    def __init__(self, device: Device, before: Sequence[Stall] = ()) -> None:
        super().__init__()
        self._device, self._before = device, before

    def wait(self, lane: Lane, event: Event, order: str) -> None:
        """The lane waits for the event, which is a stall where it has not passed yet. order: as
        `Device.wait`."""
        before = None if self._device.poll(event) else self._device.record(lane, timed=True)
        self._device.wait(lane, event, order)
        if before is not None:
            self.append(Stall(lane, before, self._device.record(lane, timed=True)))

    def end_step(self) -> tuple[Stalls, int, float]:
        """Three things: the list for the next step, empty yet; the number of waits in this one; and the ms
        that the waits of the step BEFORE took, read one step late so that it never blocks the host."""
        before, self._before = self._before, ()
        return Stalls(self._device, self), len(self), total_ms(self._device, before)


def all_passed(device: Device, stalls: Sequence[Stall]) -> bool:
    """Whether the device got to the end of each. stalls: in the order of their waits, as everywhere here."""
    return not _lanes_under_way(device, stalls)


def total_ms(device: Device, stalls: Sequence[Stall]) -> float:
    """The device time of those that have ended."""
    under_way = _lanes_under_way(device, stalls)
    ended = [stall for stall in stalls if stall.lane not in under_way or device.poll(stall.after)]
    return sum((stall.ms(device) for stall in ended), 0.0)


def _lanes_under_way(device: Device, stalls: Sequence[Stall]) -> set[Lane]:
    """Lanes that have not got to the end of their last one."""
    last = {stall.lane: stall.after for stall in stalls}
    return {lane for lane, after in last.items() if not device.poll(after)}


_COPIES = 6  # after one to warm up; 64 MiB each: 7 ms a direction at 55 GB/s
_COPY_BYTES = 64 << 20
_MEASUREMENTS = 3

LINK_TEST_BYTES = 2 * _COPY_BYTES
"""Free host bytes that the measurement needs."""


def measure_rates(
    copier: Copier, arena: HostArena, line_up: Callable[[], None] | None = None
) -> Rates | None:
    """Bytes per second out, in, and both at once; None where the arena cannot lend two blocks of 64 MiB.

    line_up: called before each of the three, whatever comes of it: a barrier, so that devices which share the
        host's memory or a switch are measured while they share it.
    Blocks the host for about 30 ms: for before step 1. Nothing else may use the lanes meanwhile.
    """
    line_up = line_up or (lambda: None)  # nobody to line up with
    device, link = copier.device, copier.of(Owner("engine", "link"))
    blocks = [arena.take(_COPY_BYTES), arena.take(_COPY_BYTES)]
    out, back = blocks
    try:
        if out is None or back is None:
            for _ in range(_MEASUREMENTS):
                line_up()
            return None
        source, target = device.empty(_COPY_BYTES), device.empty(_COPY_BYTES)
        device.note_write(device.compute, source)
        outward = list(zip(out.extents, source.split([part.numel() for part in out.extents]), strict=True))
        inward = list(zip(target.split([part.numel() for part in back.extents]), back.extents, strict=True))
        for lane in (device.d2h, device.h2d):
            device.wait(lane, device.record(device.compute), "allocate")
        out_work, in_work = (device.d2h, link.send, outward), (device.h2d, link.fetch, inward)
        d2h_s = _seconds(device, [out_work], line_up)
        h2d_s = _seconds(device, [in_work], line_up)
        both_s = _seconds(device, [out_work, in_work], line_up)
        moved = _COPIES * _COPY_BYTES
        if min(d2h_s, h2d_s, both_s) <= 0:
            return None
        return Rates(
            d2h_bytes_per_s=moved / d2h_s,
            h2d_bytes_per_s=moved / h2d_s,
            duplex_bytes_per_s=2 * moved / both_s,
        )
    finally:
        for block in blocks:
            if block is not None:
                arena.give_back(block, None)


_Work = tuple[Lane, Callable[[list[CopyPair]], Event], list[CopyPair]]


def _seconds(device: Device, work: list[_Work], line_up: Callable[[], None]) -> float:
    """Device time of `_COPIES` rounds on each lane, side by side: the longest lane's."""
    spans = []
    for _, copy, pairs in work:
        copy(pairs)
    line_up()
    starts = [device.record(lane, timed=True) for lane, _, _ in work]
    for _ in range(_COPIES):
        for _, copy, pairs in work:
            copy(pairs)
    for (lane, _, _), start in zip(work, starts, strict=True):
        end = device.record(lane, timed=True)
        device.synchronize(end)
        spans.append(device.elapsed_ms(start, end) / 1000)
    return max(spans)
