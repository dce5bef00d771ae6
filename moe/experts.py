"""The experts: gated MLPs (SwiGLU), each on the rows that were routed to it.

    h_RG = rows @ w1[expert].T          # G = 2 F: gate and up
    a_RF = silu(gate) * up [* probability]
    y_RD = a_RF @ w2[expert].T

One invariant: what is saved for the backward is the least that it can be made of in elementwise time: the
input of each product's chain, x and h. The activation is computed again from h by the same operators, so it
has the same bits; h itself is computed again from x where `recomputes`.

A gradient is that of the mean over the group's ranks of their losses, as DistributedDataParallel has it for
the rest of a model: the experts see the rows of all ranks, and so their gradients are divided by the ranks.

Legend: R rows, D width, E experts of this rank, F width inside one, G = 2 F, T tokens, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .config import Marks
from .dispatch import summed_rows
from .products import grouped_outer, grouped_product


class Rows(NamedTuple):
    """Which rows the experts work on.

    ends_E: int32, where the rows of each expert end. index_R, rows_TK: int32; where given, row r is
        x[index_R[r]], and rows_TK has the rows of each of x: x is kept, and gathered again in the backward.
    """

    ends_E: Tensor
    index_R: Tensor | None = None
    rows_TK: Tensor | None = None


class GroupedExperts(nn.Module):
    """`experts` gated MLPs on sorted rows: (R, D) -> (R, D).

    recomputes: neither h is kept, which takes the first product once more. gradient_share: what a weight's
        gradient is multiplied by: 1 / the ranks whose rows arrive here.
    Products are in the dtype of x: weights of another one are cast for each product, and no copy of them is
    saved.
    """

    def __init__(
        self,
        experts: int,
        dim: int,
        hidden: int,
        *,
        marks: Marks | None = None,
        recomputes: bool = False,
        gradient_share: float = 1.0,
    ) -> None:
        super().__init__()
        self.marks = Marks() if marks is None else marks
        self.recomputes, self.gradient_share = recomputes, gradient_share
        self.w1_EGD = nn.Parameter(torch.empty(experts, 2 * hidden, dim))
        self.w2_EDF = nn.Parameter(torch.empty(experts, dim, hidden))
        for weight in (self.w1_EGD, self.w2_EDF):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor, rows: Rows, weights_R: Tensor | None = None) -> Tensor:
        """x: (R, D), or (T, D) where `rows` has an index. weights_R: the probability of each row, in the
        dtype of x, applied to its activation; None: they are applied elsewhere."""
        marks, w1_EGD, w2_EDF = self.marks, self.w1_EGD, self.w2_EDF
        share = self.gradient_share
        if self.recomputes:
            y = _Recomputed.apply(x, weights_R, w1_EGD, w2_EDF, rows, share)  # type: ignore[no-untyped-call]
            return cast(Tensor, y)
        x = marks.start(x, "expert_fc1")
        with marks.hooks("expert_fc1"):
            h_RG: Tensor = _First.apply(x, w1_EGD, rows, share)  # type: ignore[no-untyped-call]
        h_RG = marks.commit(h_RG, "expert_fc1")
        h_RG = marks.start(h_RG, "moe_act")
        with marks.hooks("moe_act"):
            y_RD: Tensor = _Second.apply(h_RG, weights_R, w2_EDF, rows, share)  # type: ignore[no-untyped-call]
        return marks.commit(y_RD, "moe_act")


def _rows_of(x: Tensor, rows: Rows) -> Tensor:
    return x if rows.index_R is None else x.index_select(0, rows.index_R)


def _first(x: Tensor, w1_EGD: Tensor, rows: Rows) -> Tensor:
    return grouped_product(_rows_of(x, rows), w1_EGD.to(x.dtype).transpose(1, 2), rows.ends_E)


def _first_backward(
    grad_RG: Tensor, x: Tensor, w1_EGD: Tensor, rows: Rows, needed: Sequence[bool], share: float
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and w1, as far as they are needed."""
    of_x = of_w1 = None
    if needed[1]:
        of_w1 = _shared(grouped_outer(grad_RG, _rows_of(x, rows), rows.ends_E), share, w1_EGD)
    if needed[0]:
        of_x = grouped_product(grad_RG, w1_EGD.to(x.dtype), rows.ends_E)
        of_x = of_x if rows.rows_TK is None else summed_rows(of_x, rows.rows_TK)
    return of_x, of_w1


def _activated(h_RG: Tensor, weights_R: Tensor | None) -> Tensor:
    """silu(gate) * up, times the rows' weights."""
    gate_RF, up_RF = h_RG.chunk(2, dim=1)
    act_RF = nn.functional.silu(gate_RF).mul_(up_RF)
    return act_RF if weights_R is None else act_RF.mul_(weights_R[:, None])


def _second(h_RG: Tensor, weights_R: Tensor | None, w2_EDF: Tensor, rows: Rows) -> Tensor:
    act_RF = _activated(h_RG, weights_R)
    return grouped_product(act_RF, w2_EDF.to(h_RG.dtype).transpose(1, 2), rows.ends_E)


def _second_backward(
    grad_RD: Tensor,
    h_RG: Tensor,
    weights_R: Tensor | None,
    w2_EDF: Tensor,
    rows: Rows,
    needed: Sequence[bool],
    share: float,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of h, of the rows' weights and of w2, as far as they are needed. What is (R, F) is freed or
    written over as soon as it can be: there are four of it at most, two of them the gradient of h."""
    grad_RD = grad_RD.contiguous()  # an expanded one crashes grouped_mm
    of_h = of_weights = of_w2 = None
    act_RF = _activated(h_RG, None)
    if needed[2]:
        weighted_RF = act_RF if weights_R is None else act_RF * weights_R[:, None]
        of_w2 = _shared(grouped_outer(grad_RD, weighted_RF, rows.ends_E), share, w2_EDF)
        del weighted_RF
    if needed[0] or needed[1]:
        grad_RF = grouped_product(grad_RD, w2_EDF.to(h_RG.dtype), rows.ends_E)
        if needed[1]:
            of_weights = act_RF.mul_(grad_RF).sum(1)
        del act_RF
        if weights_R is not None:
            grad_RF.mul_(weights_R[:, None])
        gate_RF, up_RF = h_RG.chunk(2, dim=1)
        of_h = torch.empty_like(h_RG)
        of_gate, of_up = of_h.chunk(2, dim=1)
        of_up.copy_(nn.functional.silu(gate_RF)).mul_(grad_RF)  # not by out=, which torch.compile refuses
        of_gate.copy_(torch.ops.aten.silu_backward(grad_RF.mul_(up_RF), gate_RF))
    return of_h, of_weights, of_w2


def _shared(grad: Tensor, share: float, weight: Tensor) -> Tensor:
    return (grad if share == 1.0 else grad.mul_(share)).to(weight.dtype)


# The layouts are kept on ctx, not saved: see dispatch.py.


class _First(torch.autograd.Function):
    """The first product. Saves x, as it was given, and the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1_EGD: Tensor, rows: Rows, share: float) -> Tensor:
        ctx.save_for_backward(x, w1_EGD)
        ctx.rows, ctx.share = rows, share
        return _first(x, w1_EGD, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RG: Tensor) -> tuple[Tensor | None, ...]:
        x, w1_EGD = ctx.saved_tensors
        grad_RG = grad_RG.contiguous()
        of_x, of_w1 = _first_backward(grad_RG, x, w1_EGD, ctx.rows, ctx.needs_input_grad, ctx.share)
        return of_x, of_w1, None, None


class _Second(torch.autograd.Function):
    """The activation and the second product. Saves h and the rows' weights."""

    @staticmethod
    def forward(
        ctx: Any, h_RG: Tensor, weights_R: Tensor | None, w2_EDF: Tensor, rows: Rows, share: float
    ) -> Tensor:
        ctx.save_for_backward(h_RG, weights_R, w2_EDF)
        ctx.rows, ctx.share = rows, share
        return _second(h_RG, weights_R, w2_EDF, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        h_RG, weights_R, w2_EDF = ctx.saved_tensors
        needed = ctx.needs_input_grad
        grads = _second_backward(grad_RD, h_RG, weights_R, w2_EDF, ctx.rows, needed, ctx.share)
        return *grads, None, None


class _Recomputed(torch.autograd.Function):
    """Both products. Saves x, as it was given, and the rows' weights; h is computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights_R: Tensor | None,
        w1_EGD: Tensor,
        w2_EDF: Tensor,
        rows: Rows,
        share: float,
    ) -> Tensor:
        ctx.save_for_backward(x, weights_R, w1_EGD, w2_EDF)
        ctx.rows, ctx.share = rows, share
        return _second(_first(x, w1_EGD, rows), weights_R, w2_EDF, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        x, weights_R, w1_EGD, w2_EDF = ctx.saved_tensors
        of_x, of_weights, of_w1, of_w2 = ctx.needs_input_grad[:4]
        of_h = of_x or of_w1
        grad_h, grad_weights, grad_w2 = _second_backward(
            grad_RD,
            _first(x, w1_EGD, ctx.rows),
            weights_R,
            w2_EDF,
            ctx.rows,
            (of_h, of_weights, of_w2),
            ctx.share,
        )
        grad_x = grad_w1 = None
        if of_h:
            assert grad_h is not None
            grad_x, grad_w1 = _first_backward(grad_h, x, w1_EGD, ctx.rows, (of_x, of_w1), ctx.share)
        return grad_x, grad_weights, grad_w1, grad_w2, None, None
