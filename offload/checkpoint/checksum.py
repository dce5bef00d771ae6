"""One whole number for all bits of a tensor and for where they stand.

One invariant: equal bits at equal places have equal sums, whatever they mean, NaN included; other ones differ
but for one case in some 2^32. No lane waits, no mode sees it, and autograd records nothing.

The bytes are read as words. A long tensor's are laid out in rows of `_COLUMNS`; the sums of its columns and
of its rows, or the words of a short one, are added up with a weight each. So words that change places move
one of the two; and no temporary is as large as the tensor, unless its elements have gaps between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.checkpoint.kept import plain_parts

__all__ = ["checksum", "outside_modes", "to_host"]

_COLUMNS = 1 << 16
_MIX = 0x1E3779B97F4A7C15  # odd
_LOWER_HALF = (1 << 32) - 1
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor | None:
    """On the tensor's device; None where there are no bits. Of a wrapper the parts count. Blocks the host:
    never."""
    parts = [
        part
        for part in plain_parts(tensor)
        if part.numel() and not (part.is_meta or part.is_quantized) and part.untyped_storage().nbytes()
    ]
    total = None
    with outside_modes():
        for part in parts:
            total = _sum_of(_words(part)) if total is None else total * _MIX + _sum_of(_words(part))
    return total


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy on the host, there where an event recorded after this has passed."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


@contextmanager
def outside_modes() -> Iterator[None]:
    """What runs inside is seen by no mode, no subclass, no autograd and no forward AD."""
    guards = torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction()
    with guards[0], guards[1], torch._C._AutoDispatchBelowAutograd():
        yield


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """In the order of memory, where an expanded dimension counts once."""
    tensor = tensor.resolve_conj().resolve_neg()
    strides = tensor.stride()
    for dim, stride in enumerate(strides):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    flat = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim])).contiguous().view(-1)
    itemsize = flat.dtype.itemsize
    if flat.numel() * itemsize % 8 == 0:
        if flat.data_ptr() % 8 or flat.storage_offset() * itemsize % 8:
            flat = flat.clone()
        itemsize = 8
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(_WORDS[itemsize])


def _sum_of(words: torch.Tensor) -> torch.Tensor:
    rows = words.numel() // _COLUMNS
    total = _weighted(words[rows * _COLUMNS :])
    if rows:
        cells = words[: rows * _COLUMNS].view(rows, _COLUMNS)
        for dim in (0, 1):
            total = total * _MIX + _weighted(cells.sum(dim, dtype=torch.int64))
    return total


def _weighted(values: torch.Tensor) -> torch.Tensor:
    if values.dtype is torch.int64:  # of an upper bit a product would keep the weight's lower bits only
        values = (values & _LOWER_HALF) + (values >> 32) * _MIX
    weights = torch.arange(1, values.numel() + 1, dtype=torch.int64, device=values.device).mul_(_MIX)
    return (values * weights.bitwise_xor_(weights >> 32)).sum()
