"""Small results that the host waits for, read past the copies that are queued.

A GPU has one copy engine a direction, first in, first out. So the 32 bytes of a `tolist()` wait behind all
copies to the host that were queued before, whatever their stream: 5 to 28 ms each time where activations
leave (two H100s, a timeline of a mixture whose ranks exchange row counts, 2026-11-27). Here a kernel writes
them to pinned memory by itself, and no copy engine takes part.

One invariant: a page has one reader at a time, and is read only once the kernel that fills it has ended.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offload.device._cuda_memory import PinnedMemory

_PAGE_BYTES = 1 << 16


def read_numbers(tensor: Tensor) -> Any:
    """As `tensor.tolist()`, without waiting for the copies to the host that are queued.

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
