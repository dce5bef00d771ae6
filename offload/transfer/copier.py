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
        """Whether `owner` may copy a piece of `nbytes` now. Never blocks the host."""


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
        """What was counted since the last call, by client."""
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
