"""Rows to their experts and back, on one rank or over a group of them.

One invariant: a backward moves rows along the layout that its forward had. The layout is made once, of a
Routing, and lives with autograd's nodes; a recompute of the layer finds it there.

Over P ranks: each rank sorts its rows by expert, so those for one rank lie together; they are exchanged,
arrive by sender, and are sorted by expert once more. The host waits once, for the row counts of all ranks. A
rank without rows, or that nobody sends any, takes part like every other.

Legend: T tokens, D width, E experts of this rank, K experts a token, P ranks, R rows sent, S rows received.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from offload import read_numbers

from .router import Routing, inverse_of, sorted_rows


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each row of one forward goes.

    token_R: int32, the token of each row that this rank sends. rows_TK: int32, of each token its K rows among
        those. ends_E: int32, where the rows of each of this rank's experts end.
    order_S, inverse_S: int32, of each row sorted by expert, its place among those that arrived, and back;
        None without a group, where rows are sorted already. sent, received: rows for, and from, each rank.
    """

    token_R: Tensor
    rows_TK: Tensor
    ends_E: Tensor
    order_S: Tensor | None = None
    inverse_S: Tensor | None = None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


def layout_of(routing: Routing, group: dist.ProcessGroup | None) -> Layout:
    """The layout of a routing. Blocks the host: with a group, until all ranks' counts are there."""
    tokens, k = routing.experts_TK.shape
    order_R = routing.order_R
    rows_TK = inverse_of(order_R).view(tokens, k)
    token_R = order_R // k
    if group is None:
        return Layout(token_R, rows_TK, routing.ends_E)
    ranks, rank = group.size(), group.rank()
    counts_PPE = routing.counts_PE.view(ranks, ranks, -1)  # by sender, receiver and expert there
    table = read_numbers(counts_PPE.sum(2))
    arrived_PE = counts_PPE[:, rank]
    experts = arrived_PE.shape[1]
    received = tuple(row[rank] for row in table)
    numbers_PE = torch.arange(experts, device=order_R.device).repeat(ranks)
    experts_S = numbers_PE.repeat_interleave(arrived_PE.reshape(-1), output_size=sum(received))
    order_S, ends_E = sorted_rows(experts_S, experts)
    return Layout(token_R, rows_TK, ends_E, order_S, inverse_of(order_S), tuple(table[rank]), received)


def sent(rows: Tensor, layout: Layout, group: dist.ProcessGroup) -> Tensor:
    """Rows sorted by expert, to the ranks that have their experts; under way until `arrived` reads them.
    Differentiable."""
    return collectives.all_to_all_single_autograd(rows, [*layout.received], [*layout.sent], group)


def arrived(rows: Tensor, layout: Layout) -> Tensor:
    """What `sent` returned, sorted by expert."""
    assert layout.order_S is not None
    assert layout.inverse_S is not None
    return gathered_rows(rows, layout.order_S, layout.inverse_S[:, None])


def returned(rows: Tensor, layout: Layout, group: dist.ProcessGroup) -> Tensor:
    """The way back of `sent` and `arrived`: there when it returns, so that autograd may save it."""
    assert layout.order_S is not None
    assert layout.inverse_S is not None
    by_sender = gathered_rows(rows, layout.inverse_S, layout.order_S[:, None])
    back = collectives.all_to_all_single_autograd(by_sender, [*layout.sent], [*layout.received], group)
    waited: Tensor = _Waited.apply(back)  # type: ignore[no-untyped-call]
    return waited


def gathered_rows(x: Tensor, index_R: Tensor, rows_TK: Tensor) -> Tensor:
    """Row index_R[r] of x, for each r. rows_TK: the rows r that have index t, of each t."""
    rows: Tensor = _Gathered.apply(x, index_R, rows_TK)  # type: ignore[no-untyped-call]
    return rows


def combined(y_RD: Tensor, layout: Layout) -> Tensor:
    """The sum of each token's K rows: (T, D)."""
    rows: Tensor = _Summed.apply(y_RD, layout.token_R, layout.rows_TK)  # type: ignore[no-untyped-call]
    return rows


def summed_rows(y: Tensor, rows_TK: Tensor) -> Tensor:
    """Sums of the rows rows_TK[t] for each t, always in this order."""
    tokens, k = rows_TK.shape
    by_token = y.index_select(0, rows_TK.reshape(-1))
    return by_token if k == 1 else by_token.view(tokens, k, *y.shape[1:]).sum(1)


# The index tensors are kept on ctx, not saved: they are no variables, so hooks on saved tensors have nothing
# to do with them, and a recompute need not come past the last of these nodes.


class _Gathered(torch.autograd.Function):
    """Rows by index; the gradient of a row that was taken K times is their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index_R: Tensor, rows_TK: Tensor) -> Tensor:
        ctx.rows_TK = rows_TK
        ctx.index_R = index_R
        return x.index_select(0, index_R)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = _Summed.apply(grad, ctx.index_R, ctx.rows_TK)  # type: ignore[no-untyped-call]
        return grad, None, None


class _Summed(torch.autograd.Function):
    """The adjoint of `_Gathered`, and the other way round."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, index_R: Tensor, rows_TK: Tensor) -> Tensor:
        ctx.rows_TK = rows_TK
        ctx.index_R = index_R
        return summed_rows(y, rows_TK)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = _Gathered.apply(grad, ctx.index_R, ctx.rows_TK)  # type: ignore[no-untyped-call]
        return grad, None, None


class _Waited(torch.autograd.Function):
    """What a collective brings, itself: until its first use it is inside a subclass, which would be saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.wait() if isinstance(x, collectives.AsyncCollectiveTensor) else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
