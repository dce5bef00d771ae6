"""Admission: who may copy how many bytes, in which direction, now.

One invariant: `ask` answers at once. A REQUIRED copy that is denied goes ahead and is counted, because
compute must not deadlock on an arbiter; any other copy that is denied moves nothing.

    lease     permission to copy one piece; it ends with the event of that copy, so that an arbiter can count
              what is in flight
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple, Protocol

from offload.device import Event
from offload.ids import Owner
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
