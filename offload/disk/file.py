"""The file: opened in a directory, unlinked at once, written and read past the page cache, grown as it is
needed.

One invariant: no name of the file is left in the directory, so whatever ends the process, the system frees
the file's bytes. Offsets are multiples of `PAGE_BYTES`; what lies between the end of a tensor and the next
page is padding.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from offload.memory.free_ranges import FreeRanges, round_up
from offload.memory.growth import PAGE_BYTES

__all__ = ["GROWTH_BYTES", "Extent", "Extents", "SpillFile"]

logger = logging.getLogger(__name__)

GROWTH_BYTES = 256 << 20
"""What the file grows by: 40 ms of a disk that writes 7 GB/s, so asking the file system is no part of the
cost."""

FIRST_BYTES = 16 << 20
"""What the file has from the start: a directory that has no room for so much is refused."""

KEPT_SHARE = 20
"""Without a limit of its own, the file leaves one part in so many of the file system to others."""

_BUFFER_BYTES = 8 << 20  # for memory that does not lie on pages; a copy through it costs a tenth of a write
_VIEWS_A_CALL = 512  # Linux takes 1,024


class Extent(NamedTuple):
    """Bytes of the file that hold one tensor. start: a multiple of PAGE_BYTES; nbytes: without padding."""

    start: int
    nbytes: int


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
            self.grow(FIRST_BYTES)
            self._try()
        except OSError as error:
            self.close()
            raise ValueError(
                f"disk_directory {directory!r} ({self.file_system}) cannot hold {FIRST_BYTES:,} bytes: "
                f"{error.strerror}; free some space there, or give another directory"
            ) from error

    def grow(self, nbytes: int) -> None:
        """Allocate `nbytes` more at the end. Raises OSError (ENOSPC) where the limit or the file system has
        no room for them; the size is as before then."""
        limit, found = self._limit_bytes, os.fstatvfs(self._number)
        room = found.f_bavail * found.f_frsize
        if limit is None:
            room -= found.f_blocks * found.f_frsize // KEPT_SHARE
        else:
            room = min(room, limit - self.nbytes)
        if nbytes > room:
            raise OSError(errno.ENOSPC, f"No space left for {nbytes:,} bytes, {max(0, room):,} are free")
        os.posix_fallocate(self._number, self.nbytes, nbytes)
        self.nbytes += nbytes

    def write(self, parts: Sequence[torch.Tensor], start: int) -> None:
        """Write these host bytes, one behind the other, from `start` on. Raises OSError if not all could be
        written."""
        if self.direct and not _on_pages(parts):
            buffer = _aligned(_BUFFER_BYTES)
            for at, views in _windows(parts):
                _gather(buffer, views)
                nbytes = sum(len(view) for view in views)
                self._move(os.pwritev, [buffer[: round_up(nbytes, PAGE_BYTES)]], start + at)
            return
        views = _views(parts)
        tail = self._tail_of(views)
        if tail:
            page = _aligned(PAGE_BYTES)
            page[:tail] = views[-1][-tail:]
            views[-1:] = [views[-1][:-tail], page]
        self._move(os.pwritev, views, start)

    def read(self, parts: Sequence[torch.Tensor], start: int) -> None:
        """Fill these host bytes from the file, from `start` on. Raises OSError if not all could be read."""
        if self.direct and not _on_pages(parts):
            buffer = _aligned(_BUFFER_BYTES)
            for at, views in _windows(parts):
                nbytes = sum(len(view) for view in views)
                self._move(os.preadv, [buffer[: round_up(nbytes, PAGE_BYTES)]], start + at)
                _scatter(views, buffer)
            return
        views = _views(parts)
        tail = self._tail_of(views)
        if tail:
            page, last = _aligned(PAGE_BYTES), views[-1]
            self._move(os.preadv, [*views[:-1], last[:-tail], page], start)
            last[-tail:] = page[:tail]
        else:
            self._move(os.preadv, views, start)

    def close(self) -> None:
        """Give the file's bytes back to the file system. Idempotent."""
        self._close()

    # -- inside ----------------------------------------------------------------------------------------------
    def _tail_of(self, views: list[memoryview]) -> int:
        return len(views[-1]) % PAGE_BYTES if self.direct else 0

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
            "disk_directory %s (%s) refuses O_DIRECT; the file is written and read through the page cache",
            self.directory,
            self.file_system,
        )


class Extents:
    """The free bytes of a file. Thread-safe: the writer takes, the engine's callers give back."""

    def __init__(self, file: SpillFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._free = FreeRanges()
        self.lent_bytes = self.lent_peak_bytes = 0
        self._free.put(0, 0, file.nbytes)

    def take(self, nbytes: int) -> Extent:
        """Bytes that nobody else has; the file grows where none are free. Raises OSError (ENOSPC) where it
        cannot. Blocks for the file system then."""
        needed = round_up(nbytes, PAGE_BYTES)
        with self._lock:
            while (free := self._free.best_fit(needed)) is None:
                before = self._file.nbytes
                try:
                    self._file.grow(max(needed, GROWTH_BYTES))
                except OSError as error:
                    if error.errno != errno.ENOSPC or needed >= GROWTH_BYTES:
                        raise
                    self._file.grow(needed)
                self._free.put(0, before, self._file.nbytes)
            part = self._free.cut(free, needed)
            self.lent_bytes += needed
            self.lent_peak_bytes = max(self.lent_peak_bytes, self.lent_bytes)
            return Extent(part.start, nbytes)

    def give_back(self, extent: Extent) -> None:
        """No job reads or writes the extent any more. Waits for a growth of the file under way."""
        needed = round_up(extent.nbytes, PAGE_BYTES)
        with self._lock:
            self._free.put(0, extent.start, extent.start + needed)
            self.lent_bytes -= needed

    def reset_peak(self) -> None:
        with self._lock:
            self.lent_peak_bytes = self.lent_bytes


# -- host bytes as the system wants them ---------------------------------------------------------------------
def _views(parts: Sequence[torch.Tensor]) -> list[memoryview]:
    return [part.numpy().data for part in parts]


def _on_pages(parts: Sequence[torch.Tensor]) -> bool:
    """Whether every part starts on a page of memory, and all but the last end on one, as O_DIRECT wants."""
    return all(part.data_ptr() % PAGE_BYTES == 0 for part in parts) and all(
        part.numel() % PAGE_BYTES == 0 for part in parts[:-1]
    )


def _aligned(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


def _windows(parts: Sequence[torch.Tensor]) -> list[tuple[int, list[memoryview]]]:
    """The parts cut so that each list fits the buffer: (its first byte's place, views). All but the last fill
    it."""
    found: list[tuple[int, list[memoryview]]] = []
    at = room = 0
    for view in _views(parts):
        while len(view):
            if room == 0:
                found.append((at, []))
                room = _BUFFER_BYTES
            found[-1][1].append(view[:room])
            taken = len(found[-1][1][-1])
            view, at, room = view[taken:], at + taken, room - taken
    return found


def _gather(buffer: memoryview, views: list[memoryview]) -> None:
    at = 0
    for view in views:
        buffer[at : at + len(view)] = view
        at += len(view)


def _scatter(views: list[memoryview], buffer: memoryview) -> None:
    at = 0
    for view in views:
        view[:] = buffer[at : at + len(view)]
        at += len(view)


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
