"""How many bytes of host memory may be pinned: one number for all ranks of a host.

Pinned pages cannot be swapped, so ranks that each take "most of the RAM" end with the kernel killing one of
them. One invariant: the sum of what was granted and not released never exceeds the limit. A refused request
leaves no trace.

The number may be of one process, or of all processes of one host: then it is in a file in memory, a line for
each process, and locks that the kernel returns when a process ends.

    lock of byte 0         whoever counts has it
    lock of byte 1 + i     line i has an owner, which lives; else its bytes are nobody's, and count no more

The bytes in lines with an owner never exceed the limit, whenever a process is killed. A line's
lock goes after its process's memory, so what comes back is free.

Each of N processes can get the least of limit / 2N and 40% of its demand, whatever the others hold: nobody
grows into what another may still take of that. Before its first step has ended a process's demand is unknown.
After Apache Spark's rule of 1/2N, which its memory manager states for tasks.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import secrets
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from offload.sizes import bytes_text
from offload.telemetry.speaker import speaker

logger = speaker(__name__)

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
        """Return True if both count in one place: what one of them granted is used in the other."""


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
    """Bytes that this process may pin where nobody says: 80% of the machine's memory, or of a cgroup's limit
    where that is lower, and no more than is available, beside the `held_bytes` that it holds already. root:
    where /proc and /sys are."""
    groups = cgroups(root / "proc/self/cgroup", root / "sys/fs/cgroup")
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [physical_bytes, *(group.limit_bytes for group in groups)]
    free = [available_bytes(root / "proc/meminfo"), *(group.available_bytes for group in groups)]
    return min(int(min(limits) * DEFAULT_SHARE), max(0, min(free)) + held_bytes)


def available_bytes(meminfo: Path) -> int:
    """Bytes that the machine can give without swapping."""
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


GUARANTEED_SHARE = 0.4
"""Of its demand: what a process gets, where that is less than limit / 2N."""

_LINE = struct.Struct("<4q")


class _Line(NamedTuple):
    """Line of one process. used, limit: bytes. most: its largest request; its demand once `settled`."""

    used: int
    most: int
    settled: int
    limit: int

    def guaranteed(self, limit_bytes: int, processes: int) -> int:
        half = limit_bytes // (2 * processes)
        return min(int(self.most * GUARANTEED_SHARE), half) if self.settled else half


class _Ledger:
    """The file of one path in this process, and this process's line in it. It stays open until the process
    ends, because closing any file of a path returns all locks of it."""

    def __init__(self, path: Path) -> None:
        self.path, self.pid = path, os.getpid()
        self._mutex = threading.Lock()
        self._open()
        atexit.register(self._leave)

    def _open(self) -> None:
        while True:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 0)
            if os.fstat(self._file).st_nlink:
                break
            os.close(self._file)  # the last process has just left, and took the file away
        self.mine = next(index for index in range(1 << 20) if self._is_free(index))
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 1 + self.mine)
        self.write(_Line(0, 0, 0, 1 << 62))
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0)

    def _is_free(self, index: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + index)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 1 + index)
        return True

    @contextmanager
    def lines(self) -> Iterator[dict[int, _Line]]:
        """The lines of living processes, while nobody else counts. Blocks the host for others' counting."""
        with self._mutex:
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 0)
            try:
                size = os.fstat(self._file).st_size
                found = _LINE.iter_unpack(os.pread(self._file, size - size % _LINE.size, 0))
                lines = {index: _Line(*line) for index, line in enumerate(found)}
                yield {at: line for at, line in lines.items() if at == self.mine or not self._is_free(at)}
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0)

    def write(self, line: _Line) -> None:
        os.pwrite(self._file, _LINE.pack(*line), self.mine * _LINE.size)

    def _leave(self) -> None:
        if self.pid == os.getpid():
            with suppress(OSError), self.lines() as lines:
                if len(lines) == 1:
                    self.path.unlink()


_ledgers: dict[Path, _Ledger] = {}
_ledgers_lock = threading.Lock()


def _ledger(path: Path) -> _Ledger:
    with _ledgers_lock:
        found = _ledgers.get(path)
        if found is None or found.pid != os.getpid():  # a forked process has no locks
            found = _ledgers[path] = _Ledger(path)
        return found


class SharedHostBudget:
    """The budget of all processes that name one file. Thread-safe.

    path: the file, which the first makes and the last removes. limit_bytes: what all of them may hold
        together; the least that a living process gives holds. Raises ValueError for a negative one, OSError
        where the file cannot be made.

    Each call takes a lock of the file for each process, so an arena asks when it grows and never per block.
    """

    is_named = True
    """A user gave it; else it is what ranks of one host have by default."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path, self._settled = path, False
        self.limit_bytes = limit_bytes

    @property
    def _here(self) -> _Ledger:
        return _ledger(self._path)

    @property
    def limit_bytes(self) -> int:
        return self._limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int) -> None:
        self._limit_bytes, here = checked_limit(limit_bytes), self._here
        with here.lines() as lines:
            here.write(lines[here.mine]._replace(limit=limit_bytes))

    @property
    def used_bytes(self) -> int:
        """Bytes that all living processes use."""
        with self._here.lines() as lines:
            return sum(line.used for line in lines.values())

    def reserve(self, nbytes: int) -> bool:
        """Count `nbytes` more as used, or return False."""
        assert nbytes >= 0, nbytes
        here = self._here
        with here.lines() as lines:
            mine = lines[here.mine]
            mine = mine._replace(most=max(mine.most, mine.used + nbytes))
            limit = min(line.limit for line in lines.values())
            others = [line for index, line in lines.items() if index != here.mine]
            kept = sum(max(line.used, line.guaranteed(limit, len(lines))) for line in others)
            fits = mine.used + nbytes + kept <= limit
            here.write(mine._replace(used=mine.used + nbytes * fits))
        return fits

    def release(self, nbytes: int) -> None:
        here = self._here
        with here.lines() as lines:
            mine = lines[here.mine]
            assert 0 <= nbytes <= mine.used, f"released {nbytes:,} bytes of {mine.used:,} reserved"
            here.write(mine._replace(used=mine.used - nbytes))

    def settle(self) -> None:
        if not self._settled:
            here, self._settled = self._here, True
            with here.lines() as lines:
                here.write(lines[here.mine]._replace(settled=1))

    def counts_with(self, other: HostBudget) -> bool:
        return isinstance(other, SharedHostBudget) and other._path == self._path


class Strings(Protocol):
    """Methods that are used of a torch.distributed.Store."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set `desired` where the key has no value, and return the value that it has then."""


def shared_by_store(store: Strings, host_key: str, limit_bytes: int) -> SharedHostBudget:
    """The budget of the ranks that give one store and one host_key.

    Raises ValueError where ranks of one host_key have no memory in common, such as containers that were not
    given one /dev/shm.
    """
    folder = _folder()
    here = f"{os.stat(folder).st_dev}"
    key, mine = f"offload/host_budget/{host_key}", f"{here} {secrets.token_hex(8)}"
    there, name = store.compare_set(key, "", mine).decode().split()
    if there != here:
        raise ValueError(
            f"ranks with the host_key {host_key!r} share {folder}, and that of this one is another: give "
            "containers one /dev/shm, or each a host_key of its own"
        )
    return SharedHostBudget(_path_of(name), limit_bytes)


def shared_by_torchrun(limit_bytes: int) -> SharedHostBudget | None:
    """The budget of the ranks that one `torchrun` started on this host; None in a process of its own, and
    where no such file can be made, which is said."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < 2:
        return None
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")
    job = "\n".join(os.environ.get(name, "") for name in names)
    path = _path_of(hashlib.sha256(job.encode()).hexdigest()[:16])  # of any length, and of one job alone
    try:
        found = SharedHostBudget(path, limit_bytes)
    except OSError as error:
        logger.warning(
            f"{path} cannot be made ({error}), so each rank of this host may pin {bytes_text(limit_bytes)} "
            "by itself, and all together more than there is; give each its share as host_limit"
        )
        return None
    found.is_named = False
    return found


def _folder() -> Path:
    memory = Path("/dev/shm")  # of all processes, and gone with the machine
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def _path_of(name: str) -> Path:
    return _folder() / f"offload-{os.getuid()}-{name}"
