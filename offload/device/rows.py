"""Rows of INT8 values and a float32 scale each, from and to floating-point tensors, on any device.

    scale = max |row| / 127, at least 1e-8
    value = round(weight / scale), ties to even, in [-127, 127]
    weight' = value * scale, in float32, rounded to the weight's dtype

One invariant: all devices and both paths of `expand_rows` give the same bits. So all divisions are by
tensors: torch's kernels for CUDA multiply by the reciprocal of a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from offload.telemetry.speaker import speaker

logger = speaker(__name__)

LEAST_SCALE = 1e-8
_CHUNK_NUMEL = 1 << 24
"""Elements that are quantised at once: two float32 copies of them are 128 MiB."""


@contextmanager
def _unseen() -> Iterator[None]:
    """No mode, no subclass and no autograd sees what runs inside."""
    guards = torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction()
    with guards[0], guards[1], torch._C._AutoDispatchBelowAutograd():
        yield


def quantize_rows(weight: Tensor, values: Tensor, scales: Tensor) -> None:
    """Quantise along the last dimension, on the current lane.

    weight: (..., k), of any floating dtype. values: as weight, int8, and scales: (..., 1), float32; both are
        written. A scale is not finite where its row has an inf or a nan. Blocks the host: never.
    Source: the symmetric scheme of SquareQ's INT8 slabs.
    """
    if weight.dim() > 2:
        for parts in zip(weight, values, scales, strict=True):
            quantize_rows(*parts)
        return
    rows = max(1, _CHUNK_NUMEL // weight.shape[-1])
    with _unseen():
        for part, value, scale in zip(*(each.split(rows) for each in (weight, values, scales)), strict=True):
            largest = part.abs().amax(-1, keepdim=True).float()
            scale.copy_(torch.div(largest, torch.full_like(largest, 127)).clamp_(min=LEAST_SCALE))
            value.copy_(torch.div(part.float(), scale).round_().clamp_(-127, 127))


def expand_rows(values: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write values * scales to `out`, on the current lane.

    values: (..., k), int8. scales: (..., 1), float32. out: as values, of a floating dtype. Blocks the host:
    the first time on a GPU, to compile a kernel for it: torch's own multiplication casts each element by a
    branch and divides for each index.
    """
    with _unseen():
        dense = all(each.is_contiguous() for each in (values, scales, out))
        if out.is_cuda and dense and (kernel := _kernel()) is not None:
            kernel(values, scales, out)
        else:
            torch.mul(values, scales, out=out)


@cache
def _kernel() -> Callable[[Tensor, Tensor, Tensor], None] | None:
    """The compiled expansion; None where it cannot be compiled, which is said."""
    try:
        from offload.device._rows_kernel import expand

        values = torch.zeros(1, 16, dtype=torch.int8, device="cuda")
        expand(values, torch.ones(1, 1, device="cuda"), torch.empty_like(values, dtype=torch.bfloat16))
    except Exception as error:  # no triton, or no compiler for what launches its kernels
        logger.warning(
            "INT8 weights are expanded by torch's own multiplication, to the same bits but several times "
            "slower, because triton compiles no kernel here "
            f"({(str(error) or type(error).__name__).splitlines()[0]}); install triton and a C compiler"
        )
        return None
    return expand
