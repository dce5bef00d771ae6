"""The one door that every transfer passes: who may move how many bytes, in which direction, now.

One invariant: a denial moves nothing and is never waited on. A REQUIRED transfer that is denied goes ahead
all the same, because compute must not deadlock on an arbiter. A tensor whose spill is denied stays on the
device and is counted as refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple, Protocol

from offload.ids import GroupId

__all__ = ["CapsDoor", "Denied", "Direction", "Door", "Grant", "Limits", "Priority"]


class Direction(Enum):
    D2H = "d2h"
    H2D = "h2d"


class Priority(IntEnum):
    """Under scarcity a lower one is denied first."""

    BACKGROUND = 0
    SPECULATIVE = 1  # a prefetch: nobody waits for it yet
    REQUIRED = 2  # its reader waits
    CRITICAL = 3


class Grant(NamedTuple):
    nbytes: int


class Denied(NamedTuple):
    reason: str


class Door(Protocol):
    def admit(self, nbytes: int, direction: Direction, owner: GroupId, priority: Priority) -> Grant | Denied:
        """Whether `owner` may move `nbytes` now. Never blocks the host."""


@dataclass(slots=True, kw_only=True)
class Limits:
    """Caps of one engine, in bytes; they may change between steps. None: no cap of that kind."""

    device_limit_bytes: int | None
    max_spilling_bytes: int | None
    max_restoring_bytes: int


class CapsDoor:
    """Grants within the caps: the door of an engine that shares its link with nobody."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def admit(self, nbytes: int, direction: Direction, owner: GroupId, priority: Priority) -> Grant | Denied:
        if direction is Direction.D2H and self._limits.max_spilling_bytes == 0:
            return Denied("D2H_CAP_ZERO")
        return Grant(nbytes)
