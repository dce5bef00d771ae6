"""One whole number for all bits of a tensor and for where they stand.

One invariant: equal bits at equal places have equal sums, whatever they mean, NaN included; other ones differ
but for patterns that cancel, which no recompute was seen to make. No lane waits, no mode sees it, and
autograd records nothing.

The bytes are read as words of 8, once, by the device's own reduction. The words of a long tensor are laid out
in rows of no round length, whose columns are added up; the halves of the sums, and bytes that make no word,
are then added up with a weight each. Words that change places, as rows of tokens do, fall into other columns.
No temporary is as large as the tensor, unless its elements have gaps between them. Four kernels a tensor: a
sampled call takes two checksums of each save, so launches are most of its price.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.checkpoint.kept import plain_parts

_LONGEST_ROW = 1 << 14  # in words: what it takes beside the tensor is under 1 MB
_MIX = 0x1E3779B97F4A7C15  # odd


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
            total = _sum_of(part) if total is None else total * _MIX + _sum_of(part)
    return total


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy on the host, there where an event recorded after this has passed."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


@contextmanager
def outside_modes() -> Iterator[None]:
    """Context whose calls are seen by no mode, no subclass, no autograd and no forward AD."""
    guards = torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction()
    with guards[0], guards[1], torch._C._AutoDispatchBelowAutograd():
        yield


def _sum_of(tensor: torch.Tensor) -> torch.Tensor:
    data = _bytes(tensor)
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    rows = words.numel() // _LONGEST_ROW | 1  # odd: signs that all change do not cancel
    step = words.numel() // rows
    # rows of one step and a rest that is less than a row of words, which two rows share
    columns = words.as_strided((rows, words.numel() - step * (rows - 1)), (step, 1)).sum(0)
    # of an upper bit a weight keeps only its own lower bits, and halves have none
    halves = columns.view(torch.int32)
    if whole < data.numel():
        halves = torch.cat([halves, data[whole:]])
    return (halves * torch.arange(1, 2 * halves.numel(), 2, device=data.device)).sum()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes in the order of memory, where an expanded dimension counts once, from a whole word on."""
    tensor = tensor.resolve_conj().resolve_neg()
    strides = tensor.stride()
    for dim, stride in enumerate(strides):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    flat = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim])).contiguous()
    data = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # one element has any stride
    return data.clone() if data.data_ptr() % 8 or data.storage_offset() % 8 else data
