"""Which operators a selective checkpoint keeps where nobody says which: those that take long for the bytes
that they make. And which may never be kept.

One invariant: only operators that this torch has, and that may be kept.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from offload.checkpoint.kept import Operator, check_keepable, writes_inputs

IN_PLACE = "c10d"
"""Namespace of the collectives that write to what they are given."""

_MAKERS = ("empty", "zeros", "ones", "full", "new_", "arange", "eye", "scalar_tensor", "linspace")

_MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
_KERNELS = ("flash", "efficient", "cudnn")
_ATTENTION = (
    *(f"_scaled_dot_product_{kernel}_attention" for kernel in _KERNELS),
    *(f"_{kernel}_attention_forward" for kernel in _KERNELS),
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
_OVERLOADS = ("default", "dtype")  # mm.dtype: with a dtype of its own for the result


@cache
def default_operators() -> frozenset[Operator]:
    """Matrix products, and every form of attention that scaled_dot_product_attention and flex_attention call.

    Convolutions are not among them.
    """
    found: set[Operator] = set()
    for name in (*_MATRIX_PRODUCTS, *_ATTENTION):
        packet = getattr(torch.ops.aten, name, None)
        overloads = () if packet is None else packet.overloads()
        found.update(getattr(packet, overload) for overload in _OVERLOADS if overload in overloads)
    flex = getattr(torch.ops.higher_order, "flex_attention", None)
    if flex is not None:
        found.add(flex)
    return frozenset(check_keepable(operator) for operator in found)


def never_kept(operator: Any) -> str:
    """Why no output of the operator is ever kept; empty if one may be."""
    if not isinstance(operator, OpOverload):
        return "" if operator in default_operators() else "it is an operator of higher order"
    try:
        check_keepable(operator)
    except ValueError:
        return "it writes to its inputs" if writes_inputs(operator) else "it returns a view of its input"
    if operator.namespace == IN_PLACE:
        return "it communicates in place"
    name = operator._schema.name.partition("::")[2]
    if name in {"_to_copy", "to", "copy"}:
        return "it is a cast: autocast and FSDP2 make others in a recompute"
    if operator.namespace == "aten" and (name.startswith(_MAKERS) or name.endswith("_like")):
        return "it only makes a tensor, which others fill"
    return ""
