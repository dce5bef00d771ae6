"""Models described by numbers: a family of known ones, and any `config.json` in transformers' format.

One invariant: numbers and names only. A feature of a configuration that is not described here is named in
`left_out`, or refused where bytes would be wrong without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

LayerKind = Literal["dense", "moe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Attention whose queries, keys and values are made from narrow vectors (DeepSeek-V2 and V3)."""

    query_rank: int
    """Width of the vector that queries are made from; 0: they are made from the hidden states."""
    key_value_rank: int
    rotary_dim: int
    """Channels of a head that carry the position; a key's are shared by all heads."""
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder of equal layers, but for dense ones before experts begin."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Channels of a query and of a key."""
    ffn: int
    """Width inside the dense MLP."""
    vocabulary: int
    gated: bool = True
    """silu(gate) * up; else one product and gelu."""
    bias: bool = False
    """In every linear layer."""
    qkv_bias: bool = False
    rotary: bool = True
    positions: int = 0
    """Rows of a learned table of positions; 0: none."""
    qk_norm: bool = False
    tied: bool = False
    """Head and embedding are one weight; ranks that have one each hold a copy."""
    latent: Latent | None = None
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    """Layers before the first with experts. All, where there are no experts."""
    upcast_norms: bool = False
    """RMSNorm in float32, by several kernels, as transformers' layers have it."""
    left_out: tuple[str, ...] = ()
    """What of the model is not described."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{self.name}: {name} is {getattr(self, name)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.name}: {self.heads} query heads cannot share {self.kv_heads} key heads equally"
            )
        if self.experts and not (0 < self.experts_per_token <= self.experts and self.expert_ffn > 0):
            raise ValueError(
                f"{self.name}: {self.experts} experts, {self.experts_per_token} a token, of width "
                f"{self.expert_ffn}; give a token 1..{self.experts} experts, and them a width"
            )

    def layer_kind(self, layer: int) -> LayerKind:
        return "moe" if self.experts and layer >= self.dense_layers else "dense"


KNOWN: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="llama3-8b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336,
            vocabulary=128256,
        ),
        ModelShape(
            name="llama3-70b", layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672,
            vocabulary=128256,
        ),
        ModelShape(
            name="llama3-405b", layers=126, hidden=16384, heads=128, kv_heads=8, head_dim=128, ffn=53248,
            vocabulary=128256,
        ),
        ModelShape(
            name="qwen3-8b", layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=12288,
            vocabulary=151936, qk_norm=True,
        ),
        ModelShape(
            name="qwen3-32b", layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, ffn=25600,
            vocabulary=151936, qk_norm=True,
        ),
        ModelShape(
            name="mixtral-8x7b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336,
            vocabulary=32000, experts=8, experts_per_token=2, expert_ffn=14336,
        ),
        ModelShape(
            name="deepseek-v3", layers=61, hidden=7168, heads=128, kv_heads=128, head_dim=192, ffn=18432,
            vocabulary=129280, experts=256, experts_per_token=8, expert_ffn=2048, shared_experts=1,
            dense_layers=3,
            latent=Latent(query_rank=1536, key_value_rank=512, rotary_dim=64, value_dim=128),
            left_out=("the layer that predicts a second token",),
        ),
        ModelShape(
            name="gpt3-175b", layers=96, hidden=12288, heads=96, kv_heads=96, head_dim=128, ffn=49152,
            vocabulary=50257, gated=False, bias=True, rotary=False, positions=2048, tied=True,
        ),
    )
}  # fmt: skip
"""From each model's published configuration."""


def known_model(name: str) -> ModelShape:
    found = KNOWN.get(name.lower())
    if found is None:
        raise ValueError(
            f"no model is called {name!r}; there are {', '.join(KNOWN)}, and any config.json by its path"
        )
    return found


_LIKE_LLAMA = {
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3",
    "olmo2", "smollm3",
}  # fmt: skip
_QK_NORM = {"qwen3", "qwen3_moe", "olmo2"}
_QKV_BIAS = {"qwen2", "qwen2_moe"}


def model_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """A `config.json` in transformers' format. Raises ValueError for a model type that is not described here,
    and for a number that is missing."""
    kind = str(config.get("model_type"))
    if kind == "gpt2":
        return _gpt2(config, name)
    if kind not in _LIKE_LLAMA:
        raise ValueError(
            f"{name}: model_type is {kind!r}; described are {', '.join(sorted({'gpt2', *_LIKE_LLAMA}))}. For "
            "a model of the same layers write its numbers under one of these"
        )
    found = _Fields(config, name)
    heads = found.number("num_attention_heads")
    hidden = found.number("hidden_size")
    shape = ModelShape(
        name=name,
        layers=found.number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        ffn=found.number("intermediate_size"),
        vocabulary=found.number("vocab_size"),
        bias=bool(config.get("mlp_bias")),
        qkv_bias=bool(config.get("attention_bias", kind in _QKV_BIAS)),
        qk_norm=kind in _QK_NORM,
        tied=bool(config.get("tie_word_embeddings", kind == "smollm3")),  # a file leaves a class's own out
        upcast_norms=True,
        left_out=_left_out(config),
    )
    experts = next(
        (config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)),
        0,
    )
    if experts:
        shape = replace(
            shape,
            experts=experts,
            experts_per_token=found.number("num_experts_per_tok"),
            expert_ffn=config.get("moe_intermediate_size") or shape.ffn,
            shared_experts=_shared_experts(config),
            dense_layers=config.get("first_k_dense_replace") or 0,
        )
    if kind in ("deepseek_v2", "deepseek_v3"):
        latent = Latent(
            query_rank=config.get("q_lora_rank") or 0,
            key_value_rank=found.number("kv_lora_rank"),
            rotary_dim=found.number("qk_rope_head_dim"),
            value_dim=found.number("v_head_dim"),
        )
        head_dim = found.number("qk_nope_head_dim") + latent.rotary_dim
        shape = replace(shape, latent=latent, head_dim=head_dim, kv_heads=heads)
    return shape


class _Fields:
    """A configuration whose missing numbers are errors."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self._name = config, name

    def number(self, key: str) -> int:
        value = self._config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self._name}: {key} is {value!r}; it must be a whole number, 1 or more")
        return value


def _gpt2(config: Mapping[str, Any], name: str) -> ModelShape:
    found = _Fields(config, name)
    hidden, heads = found.number("n_embd"), found.number("n_head")
    return ModelShape(
        name=name,
        layers=found.number("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=config.get("n_inner") or 4 * hidden,
        vocabulary=found.number("vocab_size"),
        gated=False,
        bias=True,
        rotary=False,
        positions=found.number("n_positions"),
        tied=bool(config.get("tie_word_embeddings", True)),
        left_out=tuple(
            f"{key} {config[key]}" for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop") if config.get(key)
        ),
    )


def _shared_experts(config: Mapping[str, Any]) -> int:
    """Shared experts, in widths of one routed expert."""
    width = config.get("shared_expert_intermediate_size")
    if width:
        return int(width) // int(config["moe_intermediate_size"])
    return int(config.get("n_shared_experts") or 0)


def _left_out(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the configuration has and the description has not."""
    found = []
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        found.append(f"the attention window of {config['sliding_window']} tokens: attention is over all")
    if config.get("attention_dropout"):
        found.append(f"attention_dropout {config['attention_dropout']}")
    if config.get("num_nextn_predict_layers"):
        found.append("layers that predict further tokens")
    return tuple(found)
