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
from typing import NamedTuple, Protocol

DEFAULT_SHARE = 0.8
"""Share of the host's memory that may be pinned by default: the rest is for data loaders, the page cache and
pageable tensors."""


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

    def settle(self) -> None:
        """A step has ended: the most that was asked for is what this process needs."""

    def counts_with(self, other: HostBudget) -> bool:
        """Whether both count in one place: what one of them granted is used in the other."""


class LocalHostBudget:
    """The budget of one process. `limit_bytes` may be changed between steps; 0 refuses everything."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = checked_limit(limit_bytes)
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

    def settle(self) -> None:
        """It is nobody else's."""

    def counts_with(self, other: HostBudget) -> bool:
        return other is self


def default_host_limit_bytes(held_bytes: int = 0, root: Path = Path("/")) -> int:
    """What this process may pin where nobody says: 80% of the machine's memory, or of a cgroup's limit where
    that is lower, and no more than is available, beside the `held_bytes` that it holds already. root: where
    /proc and /sys are."""
    groups = cgroups(root / "proc/self/cgroup", root / "sys/fs/cgroup")
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [physical_bytes, *(group.limit_bytes for group in groups)]
    free = [available_bytes(root / "proc/meminfo"), *(group.available_bytes for group in groups)]
    return min(int(min(limits) * DEFAULT_SHARE), max(0, min(free)) + held_bytes)


def available_bytes(meminfo: Path) -> int:
    """What the machine can give without swapping."""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


class Cgroup(NamedTuple):
    """A control group's limit, and the bytes below it that are free, or files that can be dropped."""

    limit_bytes: int
    available_bytes: int


def cgroups(membership: Path, root: Path) -> list[Cgroup]:
    """The cgroup named in `membership` and all its ancestors under `root` that have a limit of memory.

    Reads both layouts: v2 (`0::/path`, memory.max) and v1 (`n:memory:/path`,
    memory/.../memory.limit_in_bytes). Pinned memory is charged to the group of the process that pins it.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = root / "memory"
        else:
            continue
        folder = top / path.lstrip("/")
        # inside a container the path may name a cgroup of the host that is not visible here: then only the
        # root is read
        for candidate in (folder, *folder.parents):
            # v2 says "max" for no limit; v1 says a number beyond any machine
            if candidate.is_relative_to(top):
                with suppress(OSError, ValueError):
                    limit = int((candidate / names[0]).read_text())
                    found.append(Cgroup(limit, limit))
                    used = int((candidate / names[1]).read_text())
                    stat = (candidate / "memory.stat").read_text().split()
                    droppable = int(dict(zip(stat[::2], stat[1::2], strict=False)).get(names[2], 0))
                    found[-1] = Cgroup(limit, limit - (used - droppable))
    return found


def checked_limit(limit_bytes: int) -> int:
    if limit_bytes < 0:
        raise ValueError(
            f"a host limit of {limit_bytes:,} bytes is negative; give bytes, 0 refuses everything"
        )
    return limit_bytes
