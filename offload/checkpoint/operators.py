"""What a selective checkpoint keeps where nobody says what: the operators that take long for the bytes that
they make.

One invariant: only operators that this torch has, and that may be kept.
"""

from __future__ import annotations

import torch

from offload.checkpoint.kept import Operator, check_keepable

__all__ = ["default_operators"]

_MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)
_OVERLOADS = ("default", "dtype")  # mm.dtype: with a dtype of its own for the result


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
