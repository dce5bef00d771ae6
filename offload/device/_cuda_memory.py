"""Pinned memory of the CUDA device: it costs what it holds, and goes back to the system piece by piece.

One invariant: pages go back to the system only after CUDA has let go of them. If pages that are still
registered went back, CUDA would refuse whatever is mapped at their address next (error 712), or a copy of it.

Anonymous memory with huge pages, touched by several threads and registered in pieces as they are touched:
17.5 GB/s on an H200 host with all of it touched first, against 1.7 GB/s for `torch.empty(pin_memory=True)`
(November 2026). A registration blocks every kernel launch while it runs, hence pieces of at most 64 MiB; and
one copy must stay within one registration.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch

from offload.errors import HostBudgetError, OffloadError

_PAGE = 4096
_HUGE_PAGE = 2 << 20
_TOUCH_THREADS = 8
_TOUCH_BYTES = 64 << 20  # one task of a touching thread: a piece may be the whole mapping


class PinnedMemory:
    """One mapping, registered with CUDA in pieces.

    registration_bytes: whole pages, so that no page belongs to two pieces.
    """

    def __init__(self, nbytes: int, registration_bytes: int) -> None:
        try:
            mapping = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise HostBudgetError(
                f"the system refused {nbytes:,} bytes of host memory ({error}); lower host_limit_bytes"
            ) from error
        skip = -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
        # a kernel without huge pages: pinning takes longer, and is the same
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE, skip, nbytes)
        # a storage each: torch looks where the storage starts to see whether a tensor is pinned. No inference
        # tensors, since other threads touch them
        with torch.inference_mode(False):
            self.pieces: tuple[torch.Tensor, ...] = tuple(
                torch.frombuffer(
                    mapping,
                    dtype=torch.uint8,
                    offset=skip + start,
                    count=min(registration_bytes, nbytes - start),
                )
                for start in range(0, nbytes, registration_bytes)
            )
        self._mapping: mmap.mmap | None = mapping
        self._offset = skip
        self._registration_bytes = registration_bytes
        self._registered: set[int] = set()  # indices of pieces
        with ThreadPoolExecutor(_TOUCH_THREADS) as threads:
            try:
                self._register(threads)
            except BaseException:  # at once: who holds the error holds this memory too
                threads.shutdown(wait=False, cancel_futures=True)
                self.release()
                raise

    def _register(self, threads: ThreadPoolExecutor) -> None:
        """Register each piece while those after it are touched. Raises HostBudgetError."""
        runtime = torch.cuda.cudart()
        touched = [
            [threads.submit(_touch, part) for part in piece.split(_TOUCH_BYTES)] for piece in self.pieces
        ]
        for index, piece in enumerate(self.pieces):
            for part in touched[index]:
                part.result()
            code = int(runtime.cudaHostRegister(piece.data_ptr(), piece.numel(), 0))
            if code != 0:
                _forget_last_error()
                nbytes = sum(each.numel() for each in self.pieces)
                raise HostBudgetError(
                    f"cudaHostRegister refused {piece.numel():,} bytes after "
                    f"{index * self._registration_bytes:,} of {nbytes:,} (error "
                    f"{code}); raise the locked-memory limit of the system or lower host_limit_bytes"
                )
            self._registered.add(index)

    def release_piece(self, index: int) -> None:
        piece = self.pieces[index]
        if index not in self._registered or self._mapping is None:
            return
        code = int(torch.cuda.cudart().cudaHostUnregister(piece.data_ptr()))
        if code != 0:
            _forget_last_error()
            raise OffloadError(
                f"cudaHostUnregister refused a piece of {piece.numel():,} bytes, one of "
                f"{len(self._registered)} registered (error {code}); "
                "it stays pinned: look for an earlier CUDA error"
            )
        self._registered.remove(index)
        self.pieces = (*self.pieces[:index], torch.empty(0, dtype=torch.uint8), *self.pieces[index + 1 :])
        # the mapping stays for the other pieces, so these pages are given up by hand; unpinned first, or the
        # driver would keep them
        try:
            self._mapping.madvise(
                mmap.MADV_DONTNEED, self._offset + index * self._registration_bytes, piece.numel()
            )
        except OSError as error:  # a process that locks all its memory
            warnings.warn(
                f"offload: the system keeps the pages of a piece of {piece.numel():,} bytes that was "
                f"unpinned ({error}), until its whole slab of {len(self.pieces)} pieces goes; run without "
                "mlockall",
                RuntimeWarning,
                stacklevel=2,
            )
        if not self._registered:
            self._mapping = None

    def release(self) -> None:
        runtime = torch.cuda.cudart()
        for index in self._registered:
            runtime.cudaHostUnregister(self.pieces[index].data_ptr())
        self._registered.clear()
        self.pieces = ()
        self._mapping = None  # returned to the system with its last tensor

    def __del__(self) -> None:
        # dropped and not released, as its arena was. Blocks the host for the copies in flight
        if not getattr(self, "_registered", None) or sys.is_finalizing():
            return
        if _capturing():  # an unregistration would end the capture: this address is given up instead
            _GIVEN_UP.append(self.pieces)
            return
        with contextlib.suppress(Exception):
            torch.cuda.synchronize()
        self.release()


_GIVEN_UP: list[tuple[torch.Tensor, ...]] = []
"""Pieces of mappings that were dropped while a graph was captured."""


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _forget_last_error() -> None:
    """Clear the error that a refused call left with the calling thread: CUDA hands it to whoever asks next,
    and that is torch after its next kernel launch, which would raise it as its own. Asking is the only way to
    clear it, so an empty kernel is launched here."""
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.cuda._sleep(0)


def _touch(piece: torch.Tensor) -> None:
    piece[::_PAGE].zero_()  # one write a page: the kernel clears the page itself
