"""The mixture as a module, and the decoder layer around it.

One invariant: marks and modes change where saved activations live, and no bit of what is computed. With a
group, every rank runs the same collectives in the same order, whatever it routes: counts, rows, probabilities
there; rows back; their gradients in reverse.

Legend: T tokens, D width, K experts a token, R rows sorted by expert: here those of this rank's tokens, or
those that arrived for its experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offload import selective_contexts

from .attention import Attention
from .config import EXPERTS, Marks, MixtureConfig, Placement
from .dispatch import arrived, combined, gathered_rows, layout_of, returned, sent
from .experts import GroupedExperts, Rows
from .router import TopKRouter


def replaying_contexts(group: str = "moe_dispatch") -> Callable[[], Any]:
    """A context_fn for torch.utils.checkpoint (use_reentrant=False) around one layer with a mixture: its
    recompute routes nothing again.

    What it keeps: the chosen experts and the order of the rows; with a group of ranks also the row counts and
    the rows that arrived, so the recompute sends nothing. They leave for the host as `group`, by the rules of
    `offload.selective_contexts`.
    """
    aten, exchange = torch.ops.aten, torch.ops._c10d_functional
    kept: set[tuple[Any, int]] = {
        (aten.topk.default, 0),
        (aten.sort.stable, 0),
        (exchange.all_gather_into_tensor.default, 0),
        (aten.sort.stable, 1),  # of the rows that arrived
        (exchange.all_to_all_single.default, 0),  # rows
        (exchange.all_to_all_single.default, 1),  # their probabilities
    }
    return selective_contexts(kept, group=group)


class Mixture(nn.Module):
    """Router, dispatch, experts, combine: (..., D) -> (..., D), in the dtype of the input or of autocast.

    group: ranks that share the experts, each with experts / ranks of them and with tokens of its own; None
        is one rank with all. An expert's gradient is of the mean of the ranks' losses (experts.py).
    Blocks the host: with a group, once a forward, for the row counts of all ranks; without, only where the
    products are a loop (products.py).
    Raises ValueError for experts that the ranks cannot share, and for input_kept="unpermuted" with a group;
    RuntimeError in the capture of a CUDA graph with a group or with balance="bias".
    """

    def __init__(
        self,
        config: MixtureConfig,
        group: dist.ProcessGroup | None = None,
        placement: Placement | None = None,
        marks: Marks | None = None,
    ) -> None:
        super().__init__()
        placement = Placement() if placement is None else placement
        ranks = 1 if group is None else group.size()
        self.config, self.placement = config, placement
        self.marks = placement.marks() if marks is None else marks
        self.group = group if ranks > 1 else None
        if config.experts % ranks:
            raise ValueError(
                f"{config.experts} experts cannot be shared equally by {ranks} ranks; take a number of ranks "
                "that divides them"
            )
        self.input_kept = placement.input_on(ranks)
        self.router = TopKRouter(config, self.group)
        build = partial(GroupedExperts, marks=self.marks, recomputes=placement.recomputes)
        own = config.experts // ranks
        self.experts = build(own, config.dim, config.expert_hidden, gradient_share=1 / ranks)
        self.first_expert = 0 if self.group is None else self.group.rank() * own
        self.shared = build(1, config.dim, config.shared_hidden) if config.shared_hidden else None

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1:] != (self.config.dim,):
            raise ValueError(
                f"a mixture of width {self.config.dim} got {tuple(x.shape)}; the last size must be its dim"
            )
        self._refuse_capture(x)
        group = self.group
        x_TD = x.reshape(-1, self.config.dim)
        if torch.is_autocast_enabled(x.device.type):  # before rows are copied, sent and saved
            x_TD = x_TD.to(torch.get_autocast_dtype(x.device.type))
        # the router saves x_TD as well: it leaves only if it leaves here
        routing = self._grouped("expert_fc1", x_TD, self.router, output=lambda routing: routing.weights_TK)
        layout = layout_of(routing, group)
        weights_R = gathered_rows(
            routing.weights_TK.reshape(-1), routing.order_R, layout.rows_TK.reshape(-1, 1)
        ).to(x_TD.dtype)
        inside = self.config.probabilities == "activation"
        rows = Rows(layout.ends_E)
        if self.input_kept == "unpermuted":
            rows, x_RD = Rows(layout.ends_E, layout.token_R, layout.rows_TK), x_TD
        else:
            x_RD = gathered_rows(x_TD, layout.token_R, layout.rows_TK)
        weights_inside = weights_R if inside else None
        if group is not None:
            x_RD = sent(x_RD, layout, group)
            weights_inside = None if weights_inside is None else sent(weights_inside, layout, group)
        shared_TD = None if self.shared is None else self._shared(x_TD)  # beside the exchange
        if group is not None:
            x_RD = arrived(x_RD, layout)
            weights_inside = None if weights_inside is None else arrived(weights_inside, layout)
        y_RD = self._grouped(None, x_RD, self.experts, rows, weights_inside)
        if group is not None:
            y_RD = returned(y_RD, layout, group)
        if not inside:
            y_RD = self._grouped("moe_act", y_RD, torch.mul, weights_R[:, None])
        y_TD = combined(y_RD, layout)
        return (y_TD if shared_TD is None else y_TD + shared_TD).view_as(x)

    def _shared(self, x_TD: Tensor) -> Tensor:
        assert self.shared is not None
        all_rows = torch.full((1,), x_TD.shape[0], dtype=torch.int32, device=x_TD.device)
        y_TD: Tensor = self._grouped(None, x_TD, self.shared, Rows(all_rows))
        return y_TD

    def _grouped(
        self,
        name: str | None,
        x: Tensor,
        function: Callable[..., Any],
        *arguments: Any,
        output: Callable[[Any], Tensor] = lambda y: y,
    ) -> Any:
        """function(x, *arguments) as a group: that of a mode of the experts, else `name`."""
        marks = self.marks
        name = EXPERTS if EXPERTS in marks.chosen else name
        if name is None:
            return function(x, *arguments)
        x = marks.start(x, name)
        with marks.hooks(name):
            y = function(x, *arguments)
        marks.commit(output(y), name)
        return y

    def _refuse_capture(self, x: Tensor) -> None:
        why = (
            "its ranks exchange row counts, for which the host waits"
            if self.group is not None
            else "a replay would count no tokens for balance='bias'"
            if self.config.balance == "bias" and self.training
            else None
        )
        if why is not None and x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"a mixture in the capture of a CUDA graph: {why}; leave the layer out of it")


class DecoderLayer(nn.Module):
    """One layer: attention and mixture, each behind a norm and beside a residual. (B, S, D) -> (B, S, D).

    A norm's group commits after the residual's addition: what the norm saved is the residual itself, which is
    alive until there anyway.
    """

    def __init__(
        self,
        config: MixtureConfig,
        group: dist.ProcessGroup | None = None,
        placement: Placement | None = None,
    ) -> None:
        super().__init__()
        placement = Placement() if placement is None else placement
        self.marks = placement.marks()
        self.attn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config, self.marks)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mixture = Mixture(config, group, placement, self.marks)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """rotation: `rotation_tables` of the tokens' positions, in the dtype of x."""
        marks = self.marks
        x = marks.start(x, "attn_norm")
        with marks.hooks("attn_norm"):
            normed = self.attn_norm(x)
        x = marks.commit(x + self.attn(normed, rotation), "attn_norm")
        x = marks.start(x, "mlp_norm")
        with marks.hooks("mlp_norm"):
            normed = self.mlp_norm(x)
        return marks.commit(x + self.mixture(normed), "mlp_norm")
