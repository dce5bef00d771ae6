"""Pinned memory of the CUDA device: it costs what it holds, and goes back to the system piece by piece.

One invariant: pages go back to the system only after CUDA has let go of them. If pages that are still
registered went back, CUDA would refuse whatever is mapped at their address next (error 712), or a copy of it.

Anonymous memory with huge pages, touched by several threads and registered in pieces as they are touched:
17.5 GB/s on an H200 host with all of it touched first, against 1.7 GB/s for `torch.empty(pin_memory=True)`
(November 2026). A registration blocks every kernel launch while it runs, hence pieces of at most 64 MiB; and
one copy must stay within one registration.

Small results that the host waits for are read through such memory, past the copies that are queued.
A GPU has one copy engine a direction, first in, first out. So the 32 bytes of a `tolist()` wait behind all
copies to the host that were queued before, whatever their stream: 5 to 28 ms each time where activations
leave (two H100s, a timeline of a mixture whose ranks exchange row counts, 2026-11-27). Here a kernel writes
them to pinned memory by itself, and no copy engine takes part.
A page has one reader at a time, and is read only once the kernel that fills it has ended.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

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


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_GIVEN_UP: list[tuple[torch.Tensor, ...]] = []
"""Pieces of mappings that were dropped while a graph was captured."""


def _forget_last_error() -> None:
    """Clear the error that a refused call left with the calling thread: CUDA hands it to whoever asks next,
    and that is torch after its next kernel launch, which would raise it as its own. Asking is the only way to
    clear it, so an empty kernel is launched here."""
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.cuda._sleep(0)


def _touch(piece: torch.Tensor) -> None:
    piece[::_PAGE].zero_()  # one write a page: the kernel clears the page itself


_PAGE_BYTES = 1 << 16


def read_numbers(tensor: Tensor) -> Any:
    """Read numbers as `tensor.tolist()` does, without waiting for the copies to the host that are queued.

    tensor: of any shape and dtype. On a GPU it comes past the copies if it is a plain tensor of at most
        64 KiB; else, on other devices, and inside a transform of torch.func, as `tolist()` brings it.
    Blocks the host: until the current stream has computed it, as `tolist()` does.
    Raises in the capture of a CUDA graph, as `tolist()` does.
    """
    if torch.compiler.is_compiling() or not tensor.is_cuda or torch.cuda.is_current_stream_capturing():
        return tensor.tolist()
    nbytes = tensor.numel() * tensor.itemsize
    is_plain = type(tensor) is Tensor and not (tensor.is_conj() or tensor.is_neg())
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if not is_plain or is_transformed or not 0 < nbytes <= _PAGE_BYTES:
        return tensor.tolist()
    free = _free_pages.setdefault(tensor.get_device(), [])
    page = free.pop() if free else _Page(tensor.device)
    # no mode and no autograd sees it
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        # on the current stream, for which the host waits before it reads; until then this call holds what is
        # read (`flat`) and what is written (`page`), and no other reader is given the page
        torch.bitwise_or(flat, 0, out=page.on_device[:nbytes])  # copy_ would take a copy engine
        torch.cuda.current_stream(tensor.device).synchronize()
        numbers = page.host[:nbytes].view(tensor.dtype).view(tensor.shape).tolist()
    free.append(page)
    return numbers


class _Page:
    """Pinned host memory, and the same bytes as a tensor of the GPU."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._memory = PinnedMemory(_PAGE_BYTES, _PAGE_BYTES)
        (self.host,) = self._memory.pieces
        self.__cuda_array_interface__ = {
            "shape": (_PAGE_BYTES,),
            "typestr": "|u1",
            "data": (self.host.data_ptr(), False),
            "version": 2,
        }
        with torch.inference_mode(False):  # it outlives the mode that its first reader is in
            self.on_device = torch.as_tensor(self, device=device)


_free_pages: dict[int, list[_Page]] = {}
"""By the device's index: as many as threads have read at once."""
