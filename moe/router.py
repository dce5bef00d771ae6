"""Which experts each token goes to, and what keeps them equally used.

One invariant: a decision depends on the probabilities alone. Where they are equal, the expert of the lower
number is chosen, and rows of one expert are in the order of their tokens, on every device. Nothing here asks
the host to wait.

Legend: T tokens, D width, E experts (of all ranks), K experts a token, R = T * K rows, P ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .config import MixtureConfig


class Routing(NamedTuple):
    """What a router decided for T tokens."""

    experts_TK: Tensor
    """int64, of each token the numbers of its experts, the most probable first."""
    weights_TK: Tensor
    """Their probabilities, float32. Its backward adds the auxiliary loss's gradient."""
    order_R: Tensor
    """int32, of each row, sorted by expert, its place in experts_TK.flatten()."""
    ends_E: Tensor
    """int32, where the rows of each expert end."""
    counts_PE: Tensor
    """int32, of each rank of the group, its rows for each expert. Without a group there is one rank."""


class TopKRouter(nn.Module):
    """Softmax over all experts; each token goes to its top_k. (T, D) -> Routing.

    tokens_E: rows for each expert since the last `update_balance`, of training forwards on this rank, int64;
        None before the first. A recompute counts nothing, nor does a forward without gradients, or a replay
        of a CUDA graph.
    bias_E: with balance="bias", added to the probabilities to choose by, and to nothing else.
    auxiliary_loss: with balance="loss", of the last forward; its gradient is added by the backward.
    loss_scale: what that gradient is multiplied by. Set it to what the trainer multiplies its own loss by,
        such as GradScaler's scale, or 1 / the microbatches that a step adds up.
    """

    bias_E: Tensor | None

    def __init__(self, config: MixtureConfig, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.config, self.group = config, group
        self.gate = nn.Linear(config.dim, config.experts, bias=False)
        self.register_buffer(
            "bias_E",
            torch.zeros(config.experts, dtype=torch.float32) if config.balance == "bias" else None,
        )
        self.tokens_E: Tensor | None = None
        self.auxiliary_loss: Tensor | None = None
        self.loss_scale: float | Tensor = 1.0

    def forward(self, x_TD: Tensor) -> Routing:
        config = self.config
        logits_TE = self.gate(x_TD)
        probs_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32)).softmax(-1)
        scores_TE = probs_TE.detach() if self.bias_E is None else probs_TE.detach() + self.bias_E
        experts_TK = _top_k(scores_TE, config.top_k)
        weights_TK = probs_TE.gather(1, experts_TK)
        if config.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        order_R, ends_E = sorted_rows(experts_TK.flatten(), config.experts)
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        counts_PE = counts_E[None] if self.group is None else _gathered(counts_E, self.group)
        if self._is_counted(x_TD):
            self.tokens_E = counts_E.long() if self.tokens_E is None else self.tokens_E + counts_E
        if config.balance == "loss" and (self.training or torch.is_grad_enabled()):
            loss = config.rate * _imbalance(probs_TE, counts_PE)
            if torch._C._current_graph_task_id() == -1:  # else it is a recompute, of an earlier forward
                self.auxiliary_loss = loss.detach()
            weights_TK = _WithLoss.apply(weights_TK, loss, self.loss_scale)  # type: ignore[no-untyped-call]
        return Routing(experts_TK, weights_TK, order_R, ends_E, counts_PE)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """The bias stays float32, with its bits, where a model is cast: its steps would be rounded away."""
        kept = self.bias_E
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.bias_E is not None and kept is not None:
            kept = self.bias_E if kept.is_meta else kept
            self.bias_E = kept.to(self.bias_E.device, torch.float32)
        if self.tokens_E is not None:
            self.tokens_E = fn(self.tokens_E)
        return self

    def _is_counted(self, x_TD: Tensor) -> bool:
        """Whether a forward is one of training, and no recompute, which runs inside a backward. A graph's
        capture computes nothing."""
        trains = self.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        return trains and not (x_TD.is_cuda and torch.cuda.is_current_stream_capturing())

    @torch.no_grad()
    def reset_balance(self) -> None:
        """No bias, and nothing counted."""
        self.tokens_E = None
        if self.bias_E is not None:
            self.bias_E.zero_()

    @torch.no_grad()
    def update_balance(self, group: dist.ProcessGroup | None = None) -> None:
        """Move each expert's bias towards an equal share, by the rows since the last call, and count anew.

        Call it once a step, when its backward is done. group: every rank whose tokens this router sees, the
        data-parallel ones; None takes the experts' group. Raises RuntimeError if nothing was counted: such as
        where each forward was inside a reentrant checkpoint. Blocks the host: with gloo, until all call.
        Source: arXiv:2408.15664.
        """
        tokens_E, self.tokens_E = self.tokens_E, None
        if self.bias_E is None:
            return
        if tokens_E is None:
            raise RuntimeError(
                "update_balance() before any training forward was counted: it is called once a step, after "
                "the backward; a forward without gradients, such as of a reentrant checkpoint, counts nothing"
            )
        group = self.group if group is None else group
        if group is not None:
            dist.all_reduce(tokens_E, group=group)
        off_E = tokens_E.double().mean() - tokens_E
        self.bias_E += self.config.rate * off_E.sign().to(self.bias_E.dtype)


def sorted_rows(experts_R: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The order that sorts rows by expert, and where each expert's end; int32. Rows of one expert stay in
    their order."""
    sorted_R, order_R = experts_R.int().sort(stable=True)
    numbers_E = torch.arange(num_experts, dtype=torch.int32, device=experts_R.device)
    return order_R.int(), torch.searchsorted(sorted_R, numbers_E, right=True, out_int32=True)


def inverse_of(order_R: Tensor) -> Tensor:
    """The row that `order_R` brings to each place, int32."""
    places_R = torch.arange(order_R.numel(), dtype=torch.int32, device=order_R.device)
    return torch.empty_like(order_R).scatter_(0, order_R.long(), places_R)


def _top_k(scores_TE: Tensor, k: int) -> Tensor:
    """The k experts of the highest score, ties to the lower number, which torch.topk leaves open.

    Scores are compared as float32. Each becomes an integer of the same order with the expert's number in its
    last digit, so that no two are equal.
    """
    experts = scores_TE.shape[1]
    bits_TE = (scores_TE.float() + 0.0).view(torch.int32).long()  # + 0.0: there is one zero
    keys_TE = (
        bits_TE ^ ((bits_TE >> 31) & 0x7FFFFFFF)
    ) * experts  # negative ones, from the last to the first
    numbers_E = torch.arange(experts - 1, -1, -1, device=scores_TE.device)
    return experts - 1 - (keys_TE + numbers_E).topk(k, dim=-1).values % experts


def _gathered(counts_E: Tensor, group: dist.ProcessGroup) -> Tensor:
    # the operator itself: its wrapper in torch has one name up to 2.12 and another since
    exchange = torch.ops._c10d_functional
    counts = exchange.all_gather_into_tensor(counts_E, group.size(), group.group_name)
    counts_PE: Tensor = exchange.wait_tensor(counts).view(group.size(), -1)
    return counts_PE


def _imbalance(probs_TE: Tensor, counts_PE: Tensor) -> Tensor:
    """1 where experts are equally used, and at most E. Over the group's tokens, as far as they are counts.

    Source: the auxiliary loss of arXiv:2101.03961, equation 4.
    """
    share_E = counts_PE.sum(0) / counts_PE.sum().clamp_min(1)
    mean_E = probs_TE.sum(0) / max(probs_TE.shape[0], 1)
    return probs_TE.shape[1] * (share_E.to(mean_E.dtype) * mean_E).sum()


class _WithLoss(torch.autograd.Function):
    """Passes a tensor on; its backward begins that of a loss as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
        ctx.scale, ctx.like = scale, (loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        one = torch.ones(
            (), dtype=dtype, device=device
        )  # a number would come from the host, and be waited for
        return grad, one * ctx.scale, None
