"""A small GPT in stages, whose layers carry the offload marks.

One invariant: the marks change nothing but where saved activations live; a model without them, and the same
model cut into any number of stages, holds the same parameters and computes the same bits (each layer draws
its parameters from a seed of its own).

A mark is three lines, `x = group_start(x, name)`, `with offload_hooks(): y = f(x)`, `y = group_commit(y,
name)`; here a layer asks for each name whether it was chosen.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from offload import group_commit, group_start, offload_hooks

END_OF_TEXT = 256
"""The one token that is not a byte; the vocabulary is padded to 272, a multiple of 16, for the matrix
units."""

GROUP_NAMES = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "mlp_fc1",
    "mlp_act",
    "mlp_fc2",
)
"""Every mark of a layer, in the order in which the forward meets it."""


def group_names(text: str) -> frozenset[str]:
    """Read `all`, `none` or a comma-separated choice of marks, as a command line gives it."""
    if text == "all":
        return frozenset(GROUP_NAMES)
    names = frozenset(name.strip() for name in text.split(",") if name.strip()) - (
        {"none"} if text.strip() == "none" else frozenset()
    )
    check_group_names(names)
    return names


def check_group_names(names: frozenset[str]) -> None:
    """Refuse names that no layer has, and attn_proj without the attention whose output it shares."""
    unknown = sorted(names - frozenset(GROUP_NAMES))
    if unknown:
        raise ValueError(
            f"no layer has the mark {', '.join(map(repr, unknown))}; the marks are {', '.join(GROUP_NAMES)} "
            "(or all, or none)"
        )
    if "attn_proj" in names and "core_attn" not in names:
        raise ValueError(
            "attn_proj saves core_attn's output, which stays where that is; choose core_attn too, or leave "
            "attn_proj out"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig:
    """The shape of the model, and which of its activations may leave the device."""

    dim: int
    """Width of the residual stream; also H * C."""
    layers: int
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads, each shared by heads / kv_heads query heads."""
    ffn: int
    """Width inside the gated MLP."""
    sequence: int
    """The longest sequence, in tokens."""
    vocabulary: int = 272
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    seed: int = 0
    """Parameters are drawn from it, layer by layer."""
    offload_modules: frozenset[str] = field(default_factory=frozenset)
    """Marks that are set, out of GROUP_NAMES."""
    math_attention: bool = False
    """Attention by plain matrix products: slower and larger, but the same bits every time, also on a GPU."""

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "kv_heads", "ffn", "sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.vocabulary <= END_OF_TEXT:
            raise ValueError(
                f"vocabulary is {self.vocabulary}, but 256 bytes and the end of a text need {END_OF_TEXT + 1}"
            )
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            channels = self.dim / self.heads
            raise ValueError(
                f"dim {self.dim} over {self.heads} heads is {channels:g} channels each; rotary pairs need an "
                "even whole number"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads cannot share {self.kv_heads} key heads equally; kv_heads must "
                "divide heads"
            )
        check_group_names(self.offload_modules)

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.dim // self.heads

    def with_(self, **changes: Any) -> TransformerConfig:
        """Copy with some fields changed, checked again."""
        return replace(self, **changes)


PRESETS: dict[str, TransformerConfig] = {
    "tiny": TransformerConfig(dim=128, layers=4, heads=4, kv_heads=2, ffn=352, sequence=256),
    "small": TransformerConfig(dim=512, layers=8, heads=8, kv_heads=4, ffn=1408, sequence=1024),
    "medium": TransformerConfig(dim=2048, layers=16, heads=16, kv_heads=4, ffn=5632, sequence=4096),
    "large": TransformerConfig(dim=4096, layers=12, heads=32, kv_heads=8, ffn=14336, sequence=16384),
}


class _Marks:
    """The three lines of a mark, each for a chosen name only."""

    def __init__(self, chosen: frozenset[str]) -> None:
        self.chosen = chosen

    def start(self, x: Tensor, name: str) -> Tensor:
        return group_start(x, name) if name in self.chosen else x

    def hooks(self, name: str) -> AbstractContextManager[Any]:
        return offload_hooks() if name in self.chosen else nullcontext()

    def commit(self, y: Tensor, name: str) -> Tensor:
        return group_commit(y, name) if name in self.chosen else y


class Attention(nn.Module):
    """Causal attention with rotary positions; key and value heads are shared by groups of query heads.

    [B, S, D] in and out (sequences, tokens, width); [B, heads, S, channels] in between.
    """

    def __init__(self, config: TransformerConfig, marks: _Marks) -> None:
        super().__init__()
        self.config, self.marks = config, marks
        kv_width = config.kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_width, bias=False)
        self.wv = nn.Linear(config.dim, kv_width, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        config, marks = self.config, self.marks
        batch, tokens, _ = x.shape
        x = marks.start(x, "qkv_linear")
        with marks.hooks("qkv_linear"):
            q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q = marks.commit(q, "qkv_linear")
        # The rotation is outside every mark: all it saves are the model's own tables, the same for every
        # chunk.
        q = _rotated(q.view(batch, tokens, config.heads, -1).transpose(1, 2), rotation)
        k = _rotated(k.view(batch, tokens, config.kv_heads, -1).transpose(1, 2), rotation)
        v = v.view(batch, tokens, config.kv_heads, -1).transpose(1, 2)
        q = marks.start(q, "core_attn")
        with (
            marks.hooks("core_attn"),
            sdpa_kernel(SDPBackend.MATH) if config.math_attention else nullcontext(),
        ):
            y = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=config.heads != config.kv_heads
            )
        y = marks.commit(y, "core_attn")
        y = marks.start(y.transpose(1, 2).reshape(batch, tokens, -1), "attn_proj")
        with marks.hooks("attn_proj"):
            y = self.wo(y)
        return marks.commit(y, "attn_proj")


class GatedMLP(nn.Module):
    """silu(gate) * up, and down again."""

    def __init__(self, config: TransformerConfig, marks: _Marks) -> None:
        super().__init__()
        self.marks = marks
        self.gate = nn.Linear(config.dim, config.ffn, bias=False)
        self.up = nn.Linear(config.dim, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        marks = self.marks
        x = marks.start(x, "mlp_fc1")
        with marks.hooks("mlp_fc1"):
            gate, up = self.gate(x), self.up(x)
        gate = marks.commit(gate, "mlp_fc1")
        gate = marks.start(gate, "mlp_act")
        with marks.hooks("mlp_act"):
            y = functional.silu(gate) * up
        y = marks.commit(y, "mlp_act")
        y = marks.start(y, "mlp_fc2")
        with marks.hooks("mlp_fc2"):
            y = self.down(y)
        return marks.commit(y, "mlp_fc2")


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm and beside a residual.

    A norm's group commits after the residual's addition: what the norm saved is the residual itself, which is
    alive until there anyway.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.marks = _Marks(config.offload_modules)
        self.attn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config, self.marks)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = GatedMLP(config, self.marks)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        marks = self.marks
        x = marks.start(x, "attn_norm")
        with marks.hooks("attn_norm"):
            normed = self.attn_norm(x)
        x = marks.commit(x + self.attn(normed, rotation), "attn_norm")
        x = marks.start(x, "mlp_norm")
        with marks.hooks("mlp_norm"):
            normed = self.mlp_norm(x)
        return marks.commit(x + self.mlp(normed), "mlp_norm")


class TransformerStage(nn.Module):
    """Some consecutive layers: with the embedding on the first stage, and the final norm and the head on the
    last."""

    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(self, config: TransformerConfig, stage: int, num_stages: int) -> None:
        super().__init__()
        layers = layers_of_stage(config, stage, num_stages)
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim) if stage == 0 else None
        self.blocks = nn.ModuleDict({str(layer): Block(config) for layer in layers})
        last = stage == num_stages - 1
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps) if last else None
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False) if last else None
        angles = torch.outer(torch.arange(config.sequence, dtype=torch.float64), _frequencies(config))
        self.register_buffer("rotary_cos", angles.cos().float(), persistent=False)
        self.register_buffer("rotary_sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, S] on the first stage, hidden states [B, S, D] after it; logits [B, S, vocabulary] from
        the last."""
        if x.shape[1] > self.config.sequence:
            raise ValueError(
                f"a sequence of {x.shape[1]} tokens; the model's longest is {self.config.sequence}: raise "
                "`sequence` in its config"
            )
        if self.embedding is not None:
            x = self.embedding(x)
        rotation = (self.rotary_cos[: x.shape[1]].to(x.dtype), self.rotary_sin[: x.shape[1]].to(x.dtype))
        for block in self.blocks.values():
            x = block(x, rotation)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters, each layer from its own seed, whatever stage it is on."""
        # into the residual, which adds up 2 * layers of them
        narrow = 0.02 / math.sqrt(2 * self.config.layers)
        for layer, block in self.blocks.items():
            _draw(
                block,
                self.config.seed * 1_000_003 + int(layer),
                {"attn.wo.weight": narrow, "mlp.down.weight": narrow},
            )
        for offset, ends in ((500_000, self.embedding), (500_001, self.head)):
            if ends is not None:
                _draw(ends, self.config.seed * 1_000_003 + offset, {})


def build_stage_module(
    config: TransformerConfig,
    stage: int,
    num_stages: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> TransformerStage:
    """One virtual stage; its parameters are drawn on `device` in float32 and then cast, so that every dtype
    starts from the same values."""
    with torch.device(device):
        module = TransformerStage(config, stage, num_stages)
    module.reset_parameters()
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


def layers_of_stage(config: TransformerConfig, stage: int, num_stages: int) -> range:
    """The layers of one stage: as equal as they can be, the earlier stages taking one more where they
    cannot."""
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage {stage} of {num_stages}: stages are numbered 0 to {num_stages - 1}")
    if config.layers < num_stages:
        raise ValueError(
            f"{config.layers} layers cannot be cut into {num_stages} stages; take more layers, or fewer "
            "ranks or virtual stages"
        )
    each, more = divmod(config.layers, num_stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def stage_examples(
    config: TransformerConfig, stage: int, num_stages: int, *, batch: int, sequence: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What goes into a stage and what comes out, as meta tensors: the shapes that OffloadPipelineStage is
    told."""

    def hidden(width: int) -> Tensor:
        return torch.empty(batch, sequence, width, dtype=dtype, device="meta", requires_grad=True)

    tokens = torch.empty(batch, sequence, dtype=torch.int64, device="meta")
    return tokens if stage == 0 else hidden(config.dim), hidden(
        config.vocabulary if stage == num_stages - 1 else config.dim
    )


def saved_bytes_of_layer(config: TransformerConfig, *, batch: int, sequence: int, dtype: torch.dtype) -> int:
    """About the bytes that the chosen marks of one layer save for one microbatch; to reserve host memory by,
    not to account with."""
    width, kv_width = config.dim, config.kv_heads * config.head_dim
    channels = {
        "attn_norm": 2 * width,
        "qkv_linear": width,
        "core_attn": 2 * width + 2 * kv_width + config.heads,
        "attn_proj": width,
        "mlp_norm": 2 * width,
        "mlp_fc1": width,
        "mlp_act": 3 * config.ffn,
        "mlp_fc2": config.ffn,
    }
    return batch * sequence * dtype.itemsize * sum(channels[name] for name in config.offload_modules)


def _frequencies(config: TransformerConfig) -> Tensor:
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    return torch.pow(torch.tensor(config.rope_base, dtype=torch.float64), -pairs / config.head_dim)


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of channels by its token's angle; the pair's halves lie C/2 apart."""
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def _draw(module: nn.Module, seed: int, narrower: dict[str, float]) -> None:
    """Matrices from a normal distribution, norms to one."""
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        generator = torch.Generator(parameter.device).manual_seed(seed)
        parameter.normal_(0.0, narrower.get(name, 0.02), generator=generator)
        seed += 7_919
