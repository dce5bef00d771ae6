"""One whole number for all bits of a tensor and for where they stand.

One invariant: equal bits at equal places have equal sums, whatever they mean, NaN included; other ones differ
but for patterns that cancel, which no recompute was seen to make. No lane waits, no mode sees it, and
autograd records nothing.

The bytes are read as words of 8, once, by the device's own reduction. The words of a long tensor are laid out
in an odd number of rows and columns of no round length, and the sum of each column is a word of the next,
shorter tensor; those of a short one are added up with a weight each. Words that change places, as rows of
tokens do, fall into other columns. No temporary is as large as the tensor, unless its elements have gaps
between them. One H200, November 2026: a sum of 470 MB takes 0.11 ms; the version before this one, with two
sums and a weight for each row and column, took 0.38, most of it the host's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.checkpoint.kept import plain_parts

__all__ = ["checksum", "outside_modes", "to_host"]

_MOST_WORDS = 1 << 16
_ROWS = 61
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
    while words.numel() > _MOST_WORDS:
        step = words.numel() // _ROWS
        # rows of one step and a rest that is less than a row of words, which two rows share
        words = words.as_strided((_ROWS, words.numel() - step * (_ROWS - 1)), (step, 1)).sum(0)
        words = _halves_added(words)
    weights = torch.arange(1, 2 * words.numel(), 2, device=words.device)
    return (_halves_added(words) * weights).sum()


def _halves_added(words: torch.Tensor) -> torch.Tensor:
    """Words whose upper halves count in all bits: of an upper bit a weight keeps only its own lower bits."""
    if words.dtype is not torch.int64:
        return words.to(torch.int64)
    return torch.add(words & _LOWER_HALF, words >> 32, alpha=_MIX)
