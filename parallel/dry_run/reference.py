"""Reference modules of one rank: a layer, the embedding and the head of a described model, cut by tensor and
expert parallelism, with the kernels of a GPU.

They are built on the meta device and hold no bytes; a forward and a backward of one show every operator call
with its sizes. One invariant: a module calls what a GPU would run, so attention is the fused kernel and a
norm is one kernel. (Written as `nn.RMSNorm` and `scaled_dot_product_attention` they would be taken apart
here, because what they become depends on the device.)

    tokens   of one microbatch: sequence x batch
    tp       ranks that share a layer. Between layers each holds tokens / tp of the rows (sequence
             parallelism): they are gathered before a layer's products and summed back after
    ep       ranks that share the experts; tokens are sent to them, in equal parts
    T        rows of a rank, tokens / tp;  D hidden;  H heads of this rank;  C channels of a head
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives  # their sizes on the meta device
from torch import Tensor, nn
from torch.nn import functional

from .models import LayerKind, ModelShape

TP_GROUP, EP_GROUP = "tp", "ep"
"""Names of the process groups in the collectives' arguments."""

_META: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a layer is cut, and what one microbatch is."""

    sequence: int
    batch: int = 1
    """Sequences of a microbatch."""
    tp: int = 1
    ep: int = 1

    @property
    def tokens(self) -> int:
        return self.sequence * self.batch

    def check(self, model: ModelShape) -> None:
        """Raises ValueError for a cut that this model's layers do not take."""
        for name, count in (("heads", model.heads), ("ffn", model.ffn), ("tokens", self.tokens)):
            if count % self.tp:
                raise ValueError(
                    f"{model.name}: {name} {count} over --tp {self.tp} is no whole number; take a --tp that "
                    "divides it"
                )
        if self.tp > model.kv_heads and self.tp % model.kv_heads:
            raise ValueError(f"{model.name}: {model.kv_heads} key heads over --tp {self.tp} ranks")
        if self.ep > 1 and not model.experts:
            raise ValueError(f"{model.name} has no experts; leave --ep {self.ep} out")
        if self.ep > 1 and model.experts % self.ep:
            raise ValueError(
                f"{model.name}: {model.experts} experts over --ep {self.ep} ranks; take an --ep that divides "
                "them"
            )


def _gathered(rows: Tensor, cut: Cut) -> Tensor:
    """[T, D] of each rank as [tokens, D] on all."""
    if cut.tp == 1:
        return rows
    return _arrived(torch.ops._c10d_functional_autograd.all_gather_into_tensor(rows, cut.tp, TP_GROUP))


def _summed(whole: Tensor, cut: Cut) -> Tensor:
    """Partial sums [tokens, D] as the rows [T, D] of this rank."""
    if cut.tp == 1:
        return whole
    return _arrived(torch.ops._c10d_functional_autograd.reduce_scatter_tensor(whole, "sum", cut.tp, TP_GROUP))


def _exchanged(rows: Tensor, cut: Cut) -> Tensor:
    """Rows for the experts of other ranks, for those that the others have for this one's."""
    if cut.ep == 1:
        return rows
    parts = [len(rows) // cut.ep] * cut.ep
    parts[0] += len(rows) - sum(parts)
    return _arrived(torch.ops._c10d_functional_autograd.all_to_all_single(rows, parts, parts, EP_GROUP))


def _arrived(sent: Tensor) -> Tensor:
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(sent)
    return waited


class _Norm(nn.Module):
    """A norm as one kernel. LayerNorm's, for RMSNorm too: it saves 4 bytes a row more (the mean). upcast:
    RMSNorm in float32 by a kernel each, as transformers' layers have it."""

    def __init__(self, width: int, *, bias: bool = False, upcast: bool = False) -> None:
        super().__init__()
        self.upcast = upcast
        self.weight = nn.Parameter(torch.empty(width, **_META))
        self.bias = nn.Parameter(torch.empty(width, **_META)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if not self.upcast:
            return functional.layer_norm(x, self.weight.shape, self.weight, self.bias)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def _linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, **_META)


def _flash(q: Tensor, k: Tensor, v: Tensor, cut: Cut) -> Tensor:
    """Fused causal attention; [tokens, H, C] in and out."""
    q, k, v = (t.view(cut.batch, cut.sequence, -1, t.shape[-1]).transpose(1, 2) for t in (q, k, v))
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    return out.transpose(1, 2).reshape(cut.tokens, -1, q.shape[-1])


class _Rotation(nn.Module):
    """Rotary positions by four kernels, as transformers has them."""

    def __init__(self, channels: int, cut: Cut) -> None:
        super().__init__()
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(cut.tokens, 1, channels, **_META), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        turned: Tensor = torch.cat((-right, left), dim=-1) * self.get_buffer("sin")
        return x * self.get_buffer("cos") + turned


class _Attention(nn.Module):
    """Query heads over shared key and value heads."""

    def __init__(self, model: ModelShape, cut: Cut) -> None:
        super().__init__()
        self.cut, self.channels = cut, model.head_dim
        heads, kv_heads = model.heads // cut.tp, max(1, model.kv_heads // cut.tp)
        bias = model.bias or model.qkv_bias
        self.q = _linear(model.hidden, heads * model.head_dim, bias)
        self.k = _linear(model.hidden, kv_heads * model.head_dim, bias)
        self.v = _linear(model.hidden, kv_heads * model.head_dim, bias)
        self.out = _linear(heads * model.head_dim, model.hidden, model.bias)
        self.q_norm = _Norm(model.head_dim, upcast=model.upcast_norms) if model.qk_norm else None
        self.k_norm = _Norm(model.head_dim, upcast=model.upcast_norms) if model.qk_norm else None
        self.rotation = _Rotation(model.head_dim, cut) if model.rotary else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (product(x).view(len(x), -1, self.channels) for product in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotation is not None:
            q, k = self.rotation(q), self.rotation(k)
        made: Tensor = self.out(_flash(q, k, v, self.cut).flatten(1))
        return made


class _LatentAttention(nn.Module):
    """Queries, keys and values from narrow vectors. Values are padded to a key's channels, as the fused
    kernel wants them."""

    def __init__(self, model: ModelShape, cut: Cut) -> None:
        super().__init__()
        assert model.latent is not None
        self.cut, self.latent, self.channels = cut, model.latent, model.head_dim
        self.heads = model.heads // cut.tp
        latent = model.latent
        self.plain_dim = model.head_dim - latent.rotary_dim
        self.query_down = _linear(model.hidden, latent.query_rank, False) if latent.query_rank else None
        self.query_norm = _Norm(latent.query_rank, upcast=model.upcast_norms) if latent.query_rank else None
        self.query_up = _linear(latent.query_rank or model.hidden, self.heads * model.head_dim, False)
        self.down = _linear(model.hidden, latent.key_value_rank + latent.rotary_dim, False)
        self.norm = _Norm(latent.key_value_rank, upcast=model.upcast_norms)
        self.up = _linear(latent.key_value_rank, self.heads * (self.plain_dim + latent.value_dim), False)
        self.out = _linear(self.heads * latent.value_dim, model.hidden, False)
        self.rotation = _Rotation(latent.rotary_dim, cut)

    def forward(self, x: Tensor) -> Tensor:
        latent, rows = self.latent, len(x)
        narrow = x
        if self.query_down is not None and self.query_norm is not None:
            narrow = self.query_norm(self.query_down(x))
        q = self.query_up(narrow).view(rows, self.heads, self.channels)
        q_plain, q_turned = q.split([self.plain_dim, latent.rotary_dim], dim=-1)
        q = torch.cat((q_plain, self.rotation(q_turned)), dim=-1)
        made, k_turned = self.down(x).split([latent.key_value_rank, latent.rotary_dim], dim=-1)
        pair = self.up(self.norm(made)).view(rows, self.heads, -1)
        k_plain, v = pair.split([self.plain_dim, latent.value_dim], dim=-1)
        k_turned = self.rotation(k_turned.unsqueeze(1)).expand(rows, self.heads, latent.rotary_dim)
        k = torch.cat((k_plain, k_turned), dim=-1)
        v = functional.pad(v, (0, self.channels - latent.value_dim))
        attended = _flash(q, k, v, self.cut)[..., : latent.value_dim]
        projected: Tensor = self.out(attended.flatten(1))
        return projected


class _Mlp(nn.Module):
    def __init__(self, model: ModelShape, ffn: int) -> None:
        super().__init__()
        self.gate = _linear(model.hidden, ffn, model.bias) if model.gated else None
        self.up = _linear(model.hidden, ffn, model.bias)
        self.down = _linear(ffn, model.hidden, model.bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = (
            functional.gelu(self.up(x)) if self.gate is None else functional.silu(self.gate(x)) * self.up(x)
        )
        made: Tensor = self.down(inner)
        return made


class _Experts(nn.Module):
    """Routed experts as one batched product, each with an equal part of the rows, and shared ones.

    With ep above 1 the rows of this rank [T, D] are sent to the experts' ranks; without, all tokens are
    gathered and each expert is cut by tp.
    """

    def __init__(self, model: ModelShape, cut: Cut) -> None:
        super().__init__()
        self.cut, self.chosen = cut, model.experts_per_token
        local = model.experts // cut.ep
        width = model.expert_ffn // (cut.tp if cut.ep == 1 else 1)
        self.router = _linear(model.hidden, model.experts, False)
        self.gate = nn.Parameter(torch.empty(local, model.hidden, width, **_META))
        self.up = nn.Parameter(torch.empty(local, model.hidden, width, **_META))
        self.down = nn.Parameter(torch.empty(local, width, model.hidden, **_META))
        shared = model.shared_experts * model.expert_ffn // cut.tp
        self.shared = _Mlp(model, shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        sent = self.cut.ep > 1
        rows = x if sent else _gathered(x, self.cut)
        made = self._routed(rows)
        routed = made if sent else _summed(made, self.cut)
        if self.shared is None:
            return routed
        shared = _summed(self.shared(_gathered(x, self.cut) if sent else rows), self.cut)
        return routed + shared

    def _routed(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.router(x).float(), dim=-1)
        weights, experts = scores.topk(self.chosen, dim=-1)
        order = experts.flatten().argsort()
        came_from = order // self.chosen
        rows = _exchanged(x.index_select(0, came_from), self.cut)
        local = len(self.gate)
        # a batched product takes equal parts; what is left over is less than a row for each expert
        each = max(1, len(rows) // local)
        parts = rows[: each * local].view(-1, each, x.shape[1]) if len(rows) >= local else rows.unsqueeze(1)
        gate, up, down = (weight[: len(parts)] for weight in (self.gate, self.up, self.down))
        inner = functional.silu(torch.bmm(parts, gate)) * torch.bmm(parts, up)
        outs = torch.bmm(inner, down).flatten(0, 1)
        back = _exchanged(outs, self.cut)
        came_from, weights = came_from[: len(back)], weights.flatten()[: len(back)]
        scaled = back * weights.to(back.dtype).unsqueeze(1)
        return torch.zeros_like(x).index_add(0, came_from, scaled)


class Layer(nn.Module):
    """One decoder layer: [T, D] in and out."""

    def __init__(self, model: ModelShape, cut: Cut, kind: LayerKind = "dense") -> None:
        super().__init__()
        self.cut = cut
        norms = {"bias": model.bias, "upcast": model.upcast_norms}
        self.attention_norm = _Norm(model.hidden, **norms)
        self.attention = _Attention(model, cut) if model.latent is None else _LatentAttention(model, cut)
        self.mlp_norm = _Norm(model.hidden, **norms)
        self.mlp = _Mlp(model, model.ffn // cut.tp) if kind == "dense" else None
        self.experts = _Experts(model, cut) if kind == "moe" else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + _summed(self.attention(_gathered(self.attention_norm(x), self.cut)), self.cut)
        normed = self.mlp_norm(x)
        if self.mlp is not None:
            return x + _summed(self.mlp(_gathered(normed, self.cut)), self.cut)
        assert self.experts is not None
        routed: Tensor = self.experts(normed)
        return x + routed


class Embedding(nn.Module):
    """Tokens [tokens] to rows [T, D]; the table is cut by tp along the vocabulary."""

    def __init__(self, model: ModelShape, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        rows = -(-model.vocabulary // cut.tp)
        self.table = nn.Parameter(torch.empty(rows, model.hidden, **_META))
        self.positions = (
            nn.Parameter(torch.empty(model.positions, model.hidden, **_META)) if model.positions else None
        )

    def forward(self, tokens: Tensor) -> Tensor:
        made = functional.embedding(tokens, self.table)
        if self.positions is not None:
            made = made + functional.embedding(tokens, self.positions)
        return _summed(made, self.cut)


class Head(nn.Module):
    """Rows [T, D] to the loss: norm, logits of this rank's part of the vocabulary, and cross entropy over it
    in float32. The sums over tp inside the loss, a number a token, are left out."""

    def __init__(self, model: ModelShape, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        self.norm = _Norm(model.hidden, bias=model.bias, upcast=model.upcast_norms)
        self.logits = _linear(model.hidden, -(-model.vocabulary // cut.tp), False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.logits(_gathered(self.norm(x), self.cut))
        targets = torch.empty(self.cut.tokens, dtype=torch.long, device="meta")
        return functional.cross_entropy(logits.float(), targets)


class _Adapted(nn.Module):
    """A frozen linear layer with an adapter beside it, as peft has it without dropout."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.first = _linear(linear.in_features, rank, False)
        self.second = _linear(rank, linear.out_features, False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x) + self.second(self.first(x)) * 1.0
        return made


def adapt(module: nn.Module, rank: int) -> None:
    """Freeze the module, and give its linear layers adapters of this rank; 0: none."""
    module.requires_grad_(False)
    if rank:
        for parent in [*module.modules()]:
            for name, child in [*parent.named_children()]:
                if isinstance(child, nn.Linear):
                    setattr(parent, name, _Adapted(child, rank))
