"""Where the bytes of a tensor lie in its storage, and how to build the same view over other bytes.

One invariant: a view that is rebuilt here has the size, the strides and the dtype of the one that autograd
saved, and its place (`place_of`); others would choose other kernels and change bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from offload.device.cuda import sanitizing

ALIGNMENT = 16
"""Bytes; the largest item size of a torch dtype. Spans start on it, so that any view over a copied span stays
aligned."""

PLACES = 256
"""Bytes; kernels are chosen by addresses modulo at most this: cuBLASLt's heuristics look at 256, vector loads
at 16 to 64."""

ALLOCATED_AT = 64
"""Bytes; all allocators of torch align to them, so another address is one of memory that others allocated."""


class ViewLayout(NamedTuple):
    """How one tensor looks at its storage. offset: elements of dtype from the start of the storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(slots=True, init=False, eq=False, repr=False)
class WeakStorage:
    """A weak reference to a storage. While it lives, the address of the StorageImpl names no other
    storage."""

    key: int = field(init=False)
    _pointer: Any = field(init=False)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.key = storage._cdata
        self._pointer = storage._weak_ref()

    def refer_to(self, storage: torch.UntypedStorage) -> None:
        """From here on to another storage."""
        before, self._pointer = self._pointer, storage._weak_ref()
        self.key = int(storage._cdata)
        _free_weak_ref(before)

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, if something still holds it."""
        return torch.UntypedStorage._new_with_weak_ptr(self._pointer)

    def __del__(self) -> None:
        try:
            pointer = self._pointer
        except AttributeError:  # an interrupt in its constructor
            return
        _free_weak_ref(pointer)  # bound below: `torch` may be gone when the interpreter exits


_free_weak_ref: Callable[[Any], None] = torch.UntypedStorage._free_weak_ref


class Layouts(dict[tuple[Any, ...], ViewLayout]):
    """One object for all equal layouts, by the equal tuple: a model saves few distinct ones, many times each.

    Whatever else their number is, no more than `_MOST` are remembered; what is forgotten lives on with whom
    it was given to.
    """

    _MOST = 4096

    def __missing__(self, look: tuple[Any, ...]) -> ViewLayout:
        if len(self) >= self._MOST:
            self.clear()
        layout = ViewLayout(*look)
        self[layout] = layout
        return layout


def span_of(tensor: torch.Tensor, storage_bytes: int) -> tuple[int, int]:
    """Start and stop of the bytes from a tensor's first element to its last, widened to `ALIGNMENT` within
    its storage."""
    itemsize = tensor.element_size()
    start = int(tensor.storage_offset()) * itemsize
    if tensor.is_contiguous():
        stop = start + tensor.numel() * itemsize
    else:
        last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        stop = start + (last + 1) * itemsize
    return (start - start % ALIGNMENT, min(storage_bytes, stop + -stop % ALIGNMENT))


def bytes_of(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    """These bytes as a 1-D uint8 tensor that shares and holds the storage."""
    if sanitizing():
        return _unseen(storage, torch.uint8, start, (nbytes,), (1,))
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (nbytes,), (1,))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements, in any order, are a range of memory without gaps, each once."""
    like = torch.empty_like(tensor, device="meta") if tensor.layout is torch.strided else None
    return like is not None and like.stride() == tensor.stride()


def overlaps_itself(layout: ViewLayout) -> bool:
    """Whether two of its elements may be the same bytes (an expanded tensor): such a view cannot be written
    element by element."""
    reach = 0
    for stride, size in sorted(zip(layout.stride, layout.size, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def view_of(storage: torch.UntypedStorage, layout: ViewLayout, start: int) -> torch.Tensor:
    """The view that `layout` describes, over a storage whose first byte is byte `start` of the original
    one."""
    size, stride, offset, dtype = layout
    offset, odd = divmod(offset * dtype.itemsize - start, dtype.itemsize)
    if odd:  # an item that lies across its own size, as only memory of others can
        storage = bytes_of(storage, odd, storage.nbytes() - odd).clone().untyped_storage()
    if sanitizing():
        return _unseen(storage, dtype, offset, size, stride)
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


def place_of(storage: torch.UntypedStorage, start: int) -> int:
    """How far byte `start` of a storage lies behind where an allocation may begin, modulo `PLACES`."""
    return (storage.data_ptr() % ALLOCATED_AT + start) % PLACES


def empty_at(like: ViewLayout, device: torch.device) -> torch.Tensor:
    """A new tensor of that size, stride and dtype, `like.offset` elements behind the begin of its storage."""
    size, stride, offset, dtype = like
    last = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return torch.empty(offset + last + 1, dtype=dtype, device=device).as_strided(size, stride, offset)


def _unseen(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    """A tensor over bytes that are there already: the sanitizer would see a kernel that writes all of it,
    beside a copy that still reads it."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
