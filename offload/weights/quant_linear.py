"""Linear layers whose frozen weight is INT8 wherever the module is: for models that are built of them.
`apply(weights=..., quantize="int8")` needs none: it leaves a model's own layers in place.

One invariant: the outputs and gradients are those of torch's linear on the expanded weight, bit for bit. The
expanded weight lives during a forward and during a backward, not in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offload.device.rows import expand_rows, quantize_rows
from offload.errors import OffloadError


class QuantLinear(nn.Module):
    """A frozen linear layer in INT8, of a floating-point one.

    values: (out_features, in_features), int8. scales: (out_features, 1), float32. bias: (out_features),
    float32, or None. All three are buffers; no conversion of the module changes their dtypes. The weight is
    expanded to the dtype of the input, or of autocast.
    """

    values: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        """linear: on any device. Raises ValueError for a weight that is not finite."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        values = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
        scales = torch.empty(self.out_features, 1, device=weight.device)
        quantize_rows(weight, values, scales)
        if not bool(scales.isfinite().all()):
            raise ValueError(f"QuantLinear of a {tuple(weight.shape)} weight with values that are inf or nan")
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone().float())

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """The weight's elements: (out_features, in_features)."""
        return _expanded(self.values, self.scales, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features). Returns (..., out_features). Its backward raises OffloadError where values
        or scales were written in between."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        values, scales, weight = self.values, self.scales, self.expanded(dtype)
        versions = _version(values), _version(scales)
        has_hooks = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        ours = weight.untyped_storage()._cdata if has_hooks else 0  # a transform's tensor has none

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage()._cdata != ours:
                return tensor
            return tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            if versions != (_version(values), _version(scales)):
                raise OffloadError(
                    f"values or scales of a QuantLinear of {tuple(values.shape)} were written between its "
                    "forward and its backward, such as by load_state_dict(): write them after the backward"
                )
            return _expanded(values, scales, dtype).as_strided(*kept)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack) if has_hooks else nullcontext():
            return F.linear(x, weight, None if self.bias is None else self.bias.to(dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        kept = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            now = self._buffers[name]
            if now is not None and before is not None and now.dtype != before.dtype:
                self._buffers[name] = before.to(now.device)
        return self

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"


def _expanded(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(values, dtype=dtype)
    expand_rows(values, scales, out)
    return out


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class QuantLinearLoRA(QuantLinear):
    """QuantLinear with a trained update beside it: base(x) + scaling * (x A^T) B^T.

    lora_A: (rank, in_features), and lora_B: (out_features, rank), zeros at first; float32 until the module is
    converted. scaling: alpha / rank.
    """

    def __init__(self, linear: nn.Linear, rank: int, alpha: float | None = None) -> None:
        """alpha: None for `rank`, which scales by 1. Raises ValueError for a rank below 1."""
        super().__init__(linear)
        if rank < 1:
            raise ValueError(f"QuantLinearLoRA with rank {rank}, must be at least 1")
        self.scaling = (rank if alpha is None else alpha) / rank
        where = self.values.device
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, device=where))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, device=where))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Return the base's output plus the scaled update (`QuantLinear.forward`)."""
        base = super().forward(x)
        update = F.linear(F.linear(x.to(self.lora_A.dtype), self.lora_A), self.lora_B)
        return base + (update * self.scaling).to(base.dtype)
