"""How many bytes of host memory may be pinned: one number for all ranks of a host.

Pinned pages cannot be swapped, so ranks that each take "most of the RAM" end with the kernel killing one of
them. One invariant: the sum of what was granted and not released never exceeds the limit. A refused request
leaves no trace.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol

__all__ = ["HostBudget", "LocalHostBudget", "StoreHostBudget", "default_host_limit_bytes"]

DEFAULT_SHARE = 0.8
"""Share of the host's memory that may be pinned by default: the rest is for data loaders, the page cache and
pageable tensors."""

RACES = 3
"""How often a reservation is tried again that was only refused because two ranks asked at the same moment."""


class HostBudget(Protocol):
    """Who says how much host memory may be held. Thread-safe."""

    @property
    def limit_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int:
        """Bytes granted and not released, by every rank that shares this budget."""

    def reserve(self, nbytes: int) -> bool:
        """Count `nbytes` more as used, or return False and count nothing."""

    def release(self, nbytes: int) -> None:
        """Give back bytes that `reserve` granted."""

    def counts_with(self, other: HostBudget) -> bool:
        """Whether both count in one place: what one of them granted is used in the other."""


class LocalHostBudget:
    """The budget of one process. `limit_bytes` may be changed between steps; 0 refuses everything."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = _checked(limit_bytes)
        self.used_bytes = 0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> bool:
        assert nbytes >= 0, nbytes
        with self._lock:
            if self.used_bytes + nbytes > self.limit_bytes:
                return False
            self.used_bytes += nbytes
            return True

    def release(self, nbytes: int) -> None:
        with self._lock:
            assert 0 <= nbytes <= self.used_bytes, (
                f"released {nbytes:,} bytes of {self.used_bytes:,} reserved"
            )
            self.used_bytes -= nbytes

    def counts_with(self, other: HostBudget) -> bool:
        return other is self


class Counters(Protocol):
    """What is used of a torch.distributed.Store."""

    def add(self, key: str, amount: int, /) -> int:
        """Add atomically, from zero for a new key, and return the sum."""


class StoreHostBudget:
    """The budget of all ranks of one host: a counter in the job's store.

    store: any torch.distributed store.
    host_key: the same for all ranks of a host and different between hosts.
    limit_bytes: what the whole host may pin. Every rank passes the same number.

    Each call is one or more round trips to the store, so an arena asks when it grows and never per block. A
    rank that dies leaves its bytes counted for as long as the store lives; a restarted job has a new store.
    """

    def __init__(self, store: Counters, host_key: str, limit_bytes: int) -> None:
        self.limit_bytes = _checked(limit_bytes)
        self._store = store
        self._key = f"offload/host_bytes/{host_key}"

    @property
    def used_bytes(self) -> int:
        return self._store.add(self._key, 0)

    def reserve(self, nbytes: int) -> bool:
        """Count `nbytes` more as used, or return False. Two ranks that overshoot at the same moment may both
        be refused although one would fit; each rolls back and asks again, so a refusal that stays is a true
        one but for a race lost three times."""
        assert nbytes >= 0, nbytes
        for _ in range(RACES):
            # read first: a request that cannot fit must not disturb the counter that others compare with
            if self.used_bytes + nbytes > self.limit_bytes:
                return False
            if self._store.add(self._key, nbytes) <= self.limit_bytes:
                return True
            self._store.add(self._key, -nbytes)
        return False

    def release(self, nbytes: int) -> None:
        left = self._store.add(self._key, -nbytes)
        assert left >= 0, f"host budget {self._key!r} was released {-left:,} bytes below zero"

    def counts_with(self, other: HostBudget) -> bool:
        return isinstance(other, StoreHostBudget) and (other._store, other._key) == (self._store, self._key)


def default_host_limit_bytes() -> int:
    """80% of what this process may use: the machine's memory, or its cgroup's limit where that is lower."""
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [physical_bytes, *cgroup_limits_bytes(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]
    return int(min(limits) * DEFAULT_SHARE)


def cgroup_limits_bytes(membership: Path, root: Path) -> list[int]:
    """The memory limits of the cgroup named in `membership` and of all its ancestors under `root`; empty if
    there is none.

    Reads both layouts: v2 (`0::/path`, memory.max) and v1 (`n:memory:/path`,
    memory/.../memory.limit_in_bytes).
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = top / path.lstrip("/")
        # inside a container the path may name a cgroup of the host that is not visible here: then only the
        # root is read
        for candidate in (folder, *folder.parents):
            # v2 says "max" for no limit; v1 says a number beyond any machine
            if candidate.is_relative_to(top):
                with suppress(OSError, ValueError):
                    limits.append(int((candidate / name).read_text()))
    return limits


def _checked(limit_bytes: int) -> int:
    if limit_bytes < 0:
        raise ValueError(
            f"a host limit of {limit_bytes:,} bytes is negative; give bytes, 0 refuses everything"
        )
    return limit_bytes
