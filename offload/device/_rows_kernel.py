"""The expansion of INT8 rows as a kernel of triton, which is imported with this file only.

One invariant: it is bound by memory: an element is read once and written once, 16 bytes a thread.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

_COLUMNS = 1024
"""A program's: 4 warps of 8 elements a thread."""


@triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
def _expand_row(values, scales, out, width, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < width
    value = tl.load(values + row * width + column, mask=inside)
    product = value.to(tl.float32) * tl.load(scales + row)
    tl.store(out + row * width + column, product.to(out.dtype.element_ty), mask=inside)


def expand(values: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write values * scales to `out` (`expand_rows`), for contiguous tensors of one GPU."""
    width = values.shape[-1]
    with torch.cuda.device(out.device):
        _expand_row[(scales.numel(), triton.cdiv(width, _COLUMNS))](
            values, scales, out, width, columns=_COLUMNS, num_warps=4
        )
