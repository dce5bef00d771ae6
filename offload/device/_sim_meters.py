"""What a program on the simulated device has cost so far: copies, waits and bytes, and virtual time.

One invariant: virtual time passes where compute is announced and where a copy is issued; no reading makes it
pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

from offload.device._sim_clock import SimLane, SimLanes
from offload.device._sim_hazards import HazardChecker
from offload.device.base import Lane

__all__ = ["SimMeters"]


class SimMeters(ABC):
    """The simulated device's meters."""

    _lock: AbstractContextManager[Any]
    _lanes: SimLanes
    _checker: HazardChecker
    _waits: Counter[str]
    _stall_s: float = 0.0
    _blocked_s: float = 0.0

    @property
    @abstractmethod
    def compute(self) -> SimLane: ...
    @abstractmethod
    def _enter(self, lane: Lane) -> SimLane: ...

    # -- counts ----------------------------------------------------------------------------------------------
    def active_bytes(self) -> int:
        """Bytes of living storages that came from `empty` or were declared by `note_write`, and not freed
        whole by `note_free`."""
        with self._lock:
            self._enter(self._lanes.host)
            return self._checker.active_bytes

    def release_cached(self, worth: int) -> int:
        """Nothing: what is let go of here is gone."""
        return 0

    def copies(self, lane: Lane) -> int:
        """Copies issued to `lane` so far, one a pair."""
        return self._lanes.own(lane).copies

    def copied_bytes(self, lane: Lane) -> int:
        """Bytes of the copies issued to `lane` so far."""
        return self._lanes.own(lane).copied_bytes

    @property
    def waits(self) -> Mapping[str, int]:
        """How often each ordering edge was asked for, by its title, those of `without` included."""
        return MappingProxyType(self._waits)

    # -- virtual time ----------------------------------------------------------------------------------------
    def compute_for(self, seconds: float) -> None:
        """The calling thread's compute lane is busy for `seconds` of virtual time."""
        if not seconds >= 0:
            raise ValueError(f"compute of {seconds} seconds was announced; announce 0 or more")
        with self._lock:
            lane = self.compute
            lane.time_s += seconds
            lane.busy_s += seconds
            self._enter(lane)

    @property
    def now_s(self) -> float:
        """Virtual time of the calling thread's compute lane, and so of the host, which is not ahead of it."""
        return self.compute.time_s

    @property
    def stall_s(self) -> float:
        """Virtual time that compute lanes waited for copy lanes."""
        return self._stall_s

    @property
    def blocked_s(self) -> float:
        """Virtual time that the host was blocked in `synchronize`, and compute idle with it; not part of the
        stall."""
        return self._blocked_s

    def busy_s(self, lane: Lane) -> float:
        """Virtual time that `lane` worked."""
        return self._lanes.own(lane).busy_s
