"""Admission: who may copy how many bytes, in which direction, now.

One invariant: `ask` answers at once. A REQUIRED copy that is denied goes ahead and is counted, because
compute must not deadlock on an arbiter; any other copy that is denied moves nothing.

    lease     permission to copy one piece; it ends with the event of that copy, so that an arbiter can count
              what is in flight
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple, Protocol

from offload.config import OffloadConfig
from offload.device import Event
from offload.ids import Owner

__all__ = [
    "DEFAULT_IN_FLIGHT_BYTES",
    "UNCOUNTED",
    "Admission",
    "CapsAdmission",
    "DenialReason",
    "Denied",
    "Direction",
    "Lease",
    "Limits",
    "Priority",
]


# bytes: 20 ms of a 55 GB/s link, so one burst of a transformer layer leaves without compute waiting
DEFAULT_IN_FLIGHT_BYTES = 1 << 30


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
    D2H_CAP_ZERO = "max_spilling_bytes is 0"
    D2H_SLOTS_EXHAUSTED = "no slot is free from device to host"
    H2D_SLOTS_EXHAUSTED = "no slot is free from host to device"


class Denied(NamedTuple):
    reason: DenialReason


class Lease(Protocol):
    """Permission to copy one piece."""

    def done(self, event: Event | None) -> None:
        """The copy is issued, and over when `event` has passed; None: nothing is in flight that has an event.
        Only the first call counts. Never blocks the host."""


class Admission(Protocol):
    """Grants or denies copies. Called from several threads, as the optimizer's workers copy too."""

    def ask(self, nbytes: int, direction: Direction, owner: Owner, priority: Priority) -> Lease | Denied:
        """Whether `owner` may copy a piece of `nbytes` now. Never blocks the host."""


@dataclass(slots=True, init=False)
class Limits:
    """Caps of one engine, in bytes; they may change between steps. None: no cap of that kind.

    names_window: the config names max_restoring_bytes. bounded_elsewhere: what is in flight is bounded by a
    client that measures the device's memory, so no cap is derived for spills. half_room_bytes: what stays of
    a chunk between the I and the W of a split backward, of what the I brought back; None: as much as
    max_restoring_bytes where the W is the next read, else nothing. again_room_bytes: the same of what the I
    computed again; None: as much as of what it brought back; a
    plan's, which another config does not change. kept_limit_bytes: the most that stays at
    once whatever the plan keeps, as a step may be longer than the planned one.
    """

    device_limit_bytes: int | None
    max_spilling_bytes: int | None
    max_restoring_bytes: int
    names_window: bool
    bounded_elsewhere: bool
    half_room_bytes: int | None
    again_room_bytes: int | None
    kept_limit_bytes: int | None

    def __init__(self, config: OffloadConfig) -> None:
        self.bounded_elsewhere = False
        self.again_room_bytes = None
        self.follow(config)

    def follow(self, config: OffloadConfig) -> None:
        """Take the caps that `config` has, or leaves to be derived."""
        limit = config.device_limit_bytes
        spilling, restoring = config.max_spilling_bytes, config.max_restoring_bytes
        if spilling is None and limit is None and not self.bounded_elsewhere:
            spilling = DEFAULT_IN_FLIGHT_BYTES
        self.names_window = restoring is not None
        if restoring is None:
            restoring = DEFAULT_IN_FLIGHT_BYTES if limit is None else limit // 4
        self.device_limit_bytes = limit
        self.max_spilling_bytes = spilling
        self.max_restoring_bytes = restoring
        self.half_room_bytes = None
        self.kept_limit_bytes = None if limit is None else limit - limit // 4  # until a plan says more


class _Uncounted:
    """A lease whose end is not counted."""

    def done(self, event: Event | None) -> None:
        """Nothing is counted."""


UNCOUNTED: Lease = _Uncounted()


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
