"""Uses of a weight of experts, (experts, out, in), that need no more than the experts that they name.

One invariant: what is not known here needs the whole weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offload.params.watched import accessors, methods

_SWAPS = methods("transpose swapaxes swapdims")
_MATRIX_T = accessors("mT", "__get__")


def form_of(func: Any, args: Any, kwargs: Any) -> str | None:
    """The kind of a use: "transpose" of its matrices, "same" for a conversion that changes nothing, "product"
    of rows, "expert" and "rows" for an index of one and of some; None for any other. args[0], or args[1] of a
    product, is the weight or its transpose."""
    if func in _MATRIX_T:
        return "transpose"
    if func in _SWAPS and len(args) == 3:
        return "transpose" if {dim % 3 for dim in args[1:]} == {1, 2} else None
    if func is Tensor.to:
        return "same" if args[1:] == (args[0].dtype,) and not kwargs else None
    if func is torch._grouped_mm:
        plain = len(args) == 2 and kwargs.get("bias") is None and kwargs.get("out_dtype") is None
        rows = args[0]
        fits = plain and kwargs.get("offs") is not None and rows.dim() == 2 and rows.is_contiguous()
        return "product" if fits and rows.numel() else None
    if func is Tensor.__getitem__:
        index = args[1]
        if type(index) is Tensor and index.dtype in (torch.int64, torch.int32):
            return {0: "expert", 1: "rows"}.get(index.dim())
        return "expert" if type(index) is int else None
    return None
