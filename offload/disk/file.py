"""The file: opened in a directory, unlinked at once, written and read past the page cache, grown as it is
needed.

One invariant: no name of the file is left in the directory, so whatever ends the process, the system frees
the file's bytes. Offsets are multiples of `PAGE_BYTES`; what lies between the end of a tensor and the next
page is padding.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from offload.config import LEAST_DISK_BYTES
from offload.memory.free_ranges import FreeRanges, round_up
from offload.memory.growth import PAGE_BYTES
from offload.telemetry.speaker import speaker

logger = speaker(__name__)

GROWTH_BYTES = 256 << 20
"""What the file grows by: 40 ms of a disk that writes 7 GB/s, so asking the file system is no part of the
cost."""

KEPT_SHARE = 20
"""Without a limit of its own, the file leaves one part in so many of the file system to others."""

_BUFFER_BYTES = 8 << 20  # for memory that does not lie on pages; a copy through it costs a tenth of a write
_VIEWS_A_CALL = 512  # Linux takes 1,024


HostBytes = Sequence[torch.Tensor]
"""The bytes of one tensor in host memory: 1-D uint8 tensors, one behind the other."""


class Extent(NamedTuple):
    """Bytes of the file that hold one tensor. start: a multiple of PAGE_BYTES; nbytes: without padding."""

    start: int
    nbytes: int

    @property
    def end(self) -> int:
        """Where the next one may start."""
        return self.start + round_up(self.nbytes, PAGE_BYTES)


class SpillFile:
    """A file without a name.

    directory: on the file system to use. limit_bytes: the largest size of the file; None leaves a twentieth
        of the file system to others.
    Raises ValueError if the directory is not there, cannot be written, or has no space. Where the file system
    refuses O_DIRECT, the page cache is used, and said once at INFO. Every call but `close` may block for the
    disk.
    """

    def __init__(self, directory: str, limit_bytes: int | None = None) -> None:
        self.directory = directory
        self.file_system = _file_system_of(directory)
        self.nbytes = 0
        self.direct = True
        self._limit_bytes = limit_bytes
        if not os.path.isdir(directory):
            raise ValueError(
                f"disk_directory {directory!r} is no directory; make it, or give one that exists"
            )
        path = os.path.join(directory, f".offload-{os.getpid()}-{id(self):x}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            try:
                self._number = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._use_page_cache()
                self._number = os.open(path, flags & ~os.O_EXCL, 0o600)  # the failed open may have made it
            os.unlink(path)
        except OSError as error:
            raise ValueError(
                f"disk_directory {directory!r} ({self.file_system}) cannot be used: {error.strerror}; give "
                "one that this process may write to"
            ) from error
        self._close = weakref.finalize(self, os.close, self._number)
        try:
            self.grow(LEAST_DISK_BYTES)
            self._try()
        except OSError as error:
            self.close()
            raise ValueError(
                f"disk_directory {directory!r} ({self.file_system}) cannot hold {LEAST_DISK_BYTES:,} bytes: "
                f"{error.strerror}; free some space there, or give another directory"
            ) from error

    def grow(self, nbytes: int) -> None:
        """Allocate `nbytes` more at the end. Raises OSError (ENOSPC) where the limit or the file system has
        no room for them; the size is as before then."""
        limit, found = self._limit_bytes, os.fstatvfs(self._number)
        room, of = found.f_bavail * found.f_frsize, "of the file system"
        if limit is None:
            room -= found.f_blocks * found.f_frsize // KEPT_SHARE
        elif limit - self.nbytes < room:
            room, of = limit - self.nbytes, f"of disk_limit_bytes={limit:,}"
        if nbytes > room:
            raise OSError(errno.ENOSPC, f"No space left for {nbytes:,} bytes, {max(0, room):,} are free {of}")
        os.posix_fallocate(self._number, self.nbytes, nbytes)
        self.nbytes += nbytes

    def write(self, tensors: Sequence[HostBytes], start: int) -> None:
        """Write these from `start` on, each from a page of its own. Raises OSError if not all could be
        written."""
        if self.direct and not all(map(_on_pages, tensors)):
            self._write_by_buffer(tensors, start)
            return
        views: list[memoryview] = []
        for tensor in tensors:
            views += _views(tensor)
            tail = sum(map(len, _views(tensor))) % PAGE_BYTES
            if tail:
                page = _aligned(PAGE_BYTES)
                page[:tail] = views[-1][-tail:]
                views[-1:] = [views[-1][:-tail], page]
        self._move(os.pwritev, views, start)

    def read(self, tensors: Sequence[HostBytes], start: int) -> None:
        """Fill these from the file, as `write` wrote them. Raises OSError if not all could be read."""
        if self.direct and not all(map(_on_pages, tensors)):
            self._read_by_buffer(tensors, start)
            return
        views: list[memoryview] = []
        tails: list[tuple[memoryview, memoryview]] = []
        for tensor in tensors:
            views += _views(tensor)
            tail = sum(map(len, _views(tensor))) % PAGE_BYTES
            if tail:
                page, last = _aligned(PAGE_BYTES), views.pop()
                views += [last[:-tail], page]
                tails.append((last[-tail:], page[:tail]))
        self._move(os.preadv, views, start)
        for to, page in tails:
            to[:] = page

    def _write_by_buffer(self, tensors: Sequence[HostBytes], start: int) -> None:
        buffer = _aligned(_BUFFER_BYTES)
        for at, views in _windows(tensors):
            end = 0
            for view in views:
                buffer[end : end + len(view)] = view
                end += len(view)
            self._move(os.pwritev, [buffer[: round_up(end, PAGE_BYTES)]], start + at)

    def _read_by_buffer(self, tensors: Sequence[HostBytes], start: int) -> None:
        buffer = _aligned(_BUFFER_BYTES)
        for at, views in _windows(tensors):
            self._move(os.preadv, [buffer[: round_up(sum(map(len, views)), PAGE_BYTES)]], start + at)
            end = 0
            for view in views:
                view[:] = buffer[end : end + len(view)]
                end += len(view)

    def close(self) -> None:
        """Give the file's bytes back to the file system. Idempotent."""
        self._close()

    # -- inside ----------------------------------------------------------------------------------------------
    def _move(self, call: object, views: list[memoryview], start: int) -> None:
        """pwritev or preadv until every byte has moved: one call may move fewer."""
        assert callable(call)
        left = [view for view in views if len(view)]
        while left:
            moved = call(self._number, left[:_VIEWS_A_CALL], start)
            if moved <= 0:
                raise OSError(errno.EIO, f"the file ends at byte {start:,}")
            start += moved
            while left and moved >= len(left[0]):
                moved -= len(left.pop(0))
            if moved:
                left[0] = left[0][moved:]

    def _try(self) -> None:
        """Write a page and read it back. Some file systems open with O_DIRECT and refuse the first call."""
        page, back = _aligned(PAGE_BYTES), _aligned(PAGE_BYTES)
        page[:] = bytes(range(256)) * (PAGE_BYTES // 256)
        for _ in range(2):
            try:
                self._move(os.pwritev, [page], 0)
                self._move(os.preadv, [back], 0)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                self._use_page_cache()
                flags = fcntl.fcntl(self._number, fcntl.F_GETFL)
                fcntl.fcntl(self._number, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))
            else:
                break
        if page != back:
            raise OSError(errno.EIO, "a page that was written reads back as other bytes")

    def _use_page_cache(self) -> None:
        self.direct = False
        logger.info(
            f"disk_directory {self.directory} ({self.file_system}) refuses O_DIRECT; the file is written and "
            "read through the page cache"
        )


class Extents:
    """The free bytes of a file. Thread-safe: the writer takes, the engine's callers give back."""

    def __init__(self, file: SpillFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._free = FreeRanges()
        self._returned: deque[Extent] = deque()
        self._lent_bytes = self._peak_bytes = 0
        self._free.put(0, 0, file.nbytes)

    @property
    def lent_bytes(self) -> int:
        """Bytes that tensors have, in whole pages."""
        with self._lock:
            self._accept()
            return self._lent_bytes

    def take(self, sizes: Sequence[int]) -> list[Extent]:
        """Extents of these sizes, side by side, that nobody else has; the file grows where none are free.
        Raises OSError (ENOSPC) where it cannot. Blocks for the file system then."""
        pages = [round_up(nbytes, PAGE_BYTES) for nbytes in sizes]
        needed = sum(pages)
        with self._lock:
            self._accept()
            while (free := self._free.best_fit(needed)) is None:
                before = self._file.nbytes
                try:
                    self._file.grow(max(needed, GROWTH_BYTES))
                except OSError as error:
                    if error.errno != errno.ENOSPC or needed >= GROWTH_BYTES:
                        raise
                    self._file.grow(needed)
                self._free.put(0, before, self._file.nbytes)
            start = self._free.cut(free, needed).start
            self._lent_bytes += needed
            self._peak_bytes = max(self._peak_bytes, self._lent_bytes)
        starts = accumulate(pages, initial=start)  # and the end
        return [Extent(at, size) for at, size in zip(starts, sizes, strict=False)]

    def give_back(self, extent: Extent) -> None:
        """No job reads or writes the extent any more. Blocks the host: never, even while the file grows."""
        self._returned.append(extent)
        if self._lock.acquire(blocking=False):
            try:
                self._accept()
            finally:
                self._lock.release()

    def take_peak(self) -> int:
        """Most bytes that were lent at once since the last call. Blocks the host: never, so without the lock,
        which a growth holds."""
        peak, self._peak_bytes = self._peak_bytes, self._lent_bytes
        return peak

    def _accept(self) -> None:
        while self._returned:
            extent = self._returned.popleft()
            self._free.put(0, extent.start, extent.end)
            self._lent_bytes -= extent.end - extent.start


# -- host bytes as the system wants them ---------------------------------------------------------------------
def _views(tensor: HostBytes) -> list[memoryview]:
    return [part.numpy().data for part in tensor]


def _on_pages(tensor: HostBytes) -> bool:
    """Predicate: each part starts on a page of memory, and all but the last end on one, as O_DIRECT wants."""
    return all(part.data_ptr() % PAGE_BYTES == 0 for part in tensor) and all(
        part.numel() % PAGE_BYTES == 0 for part in tensor[:-1]
    )


def _aligned(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


def _windows(tensors: Sequence[HostBytes]) -> list[tuple[int, list[memoryview]]]:
    """Each tensor cut so that a list fits the buffer: (its first byte's place, views)."""
    found: list[tuple[int, list[memoryview]]] = []
    at = 0
    for tensor in tensors:
        room = 0
        for view in _views(tensor):
            while len(view):
                if room == 0:
                    found.append((at, []))
                    room = _BUFFER_BYTES
                part = view[:room]
                found[-1][1].append(part)
                view, at, room = view[len(part) :], at + len(part), room - len(part)
        at = round_up(at, PAGE_BYTES)
    return found


def _file_system_of(directory: str) -> str:
    """Its type and where it is mounted, for messages."""
    best = ("", "unknown file system")
    path = os.path.realpath(directory)
    try:
        with open("/proc/self/mounts") as mounts:
            for line in mounts:
                _, point, kind = line.split()[:3]
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best[0]):
                    best = (point, f"{kind} at {point}")
    except OSError:
        pass
    return best[1]
