"""The models of scripts/bench_model.py (those of transformers: families.toml): each as its library builds it,
with random weights and nothing downloaded, one batch size, one loss, and the totals that it is tried within.

`SIX` are models on which mode "auto" was first compared with torch's checkpoint, `OWN` others that differ
from them in kind: encoder with decoder, convolutions in stages, sliding windows, dropout, audio, and one so
small that launching its kernels takes longer than they do. No plan is tuned to any of them. One invariant:
`make` uses nothing of `offload`, so what is trained is the same in each row.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.run import imported

Loss = Callable[[int], torch.Tensor]
"""The scalar that step `number` calls backward on. Steps take turns with a few batches."""
Made = tuple[nn.Module, Loss]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a model is built for. config, sequence, batch: of the models "llama" and "config" alone: as a
    config.json of transformers, tokens a sequence, and sequences a step."""

    device: torch.device
    tiny: bool
    config: Mapping[str, Any] | None = None
    sequence: int | None = None
    batch: int | None = None

    def size(self, usual: int, tiny: int) -> int:
        return tiny if self.tiny else usual

    @contextmanager
    def building(self, dtype: torch.dtype) -> Iterator[None]:
        """Parameters are made on the device and in `dtype`; in tiny sizes, in float32."""
        torch.set_default_dtype(torch.float32 if self.tiny else dtype)
        try:
            with self.device:
                yield
        finally:
            torch.set_default_dtype(torch.float32)

    def drawn(self, *shape: int) -> torch.Tensor:
        """Normal values of the model's dtype, where it is bfloat16."""
        dtype = torch.float32 if self.tiny else torch.bfloat16
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def tokens(self, vocabulary: int, batch: int, sequence: int) -> torch.Tensor:
        return torch.randint(0, vocabulary, (batch, sequence), device=self.device)


def _adamw(parameters: list[nn.Parameter], device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-5, fused=device.type == "cuda")


def _unchanging(parameters: list[nn.Parameter], device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model. totals: of all active bytes of a step, in GB of 1e9, or, with `shares`, as shares of what a
    plain step takes."""

    make: Callable[[Setting], Made]
    totals: tuple[float, ...]
    shares: bool = False
    optimizer: Callable[[list[nn.Parameter], torch.device], torch.optim.Optimizer] = _adamw


_TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "moe_intermediate_size"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "vocab_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_attention_heads", "n_head", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_experts_per_tok", "num_conv_pos_embedding_groups"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "num_conv_pos_embeddings"), 16),
    "num_experts": 4,
    "max_source_positions": 20,
    "conv_dim": (32,) * 7,
}
"""Instead of what a config says of these, with --tiny."""


def shrunk(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _TINY.get(name, value) for name, value in config.items()}


def _transformer(
    config_class: str,
    model_class: str,
    make_loss: Callable[[Any, Setting], Loss],
    config: Mapping[str, Any],
    attention: str | None,
) -> Callable[[Setting], Made]:
    """A model of transformers in bfloat16. attention: its implementation; None for the library's choice."""

    def make(setting: Setting) -> Made:
        transformers, sizes = imported("transformers"), shrunk(config) if setting.tiny else dict(config)
        built = getattr(transformers, config_class)(**sizes)
        if attention is not None:
            built._attn_implementation = attention
        with setting.building(torch.bfloat16):
            model = getattr(transformers, model_class)(built)
        return model, make_loss(model, setting)

    return make


def _text(
    loss: Callable[[Any, torch.Tensor], torch.Tensor], batch: int, sequence: int
) -> Callable[[Any, Setting], Loss]:
    """Four batches of random tokens. loss: of the model and one batch, int64 of (batch, sequence)."""

    def make_loss(model: Any, setting: Setting) -> Loss:
        shape = (setting.size(batch, 2), setting.size(sequence, 16))
        batches = [setting.tokens(model.config.vocab_size, *shape) for _ in range(4)]
        return lambda number: loss(model, batches[number % 4])

    return make_loss


def _of_labels(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def _of_half_the_labels(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens[:, ::2].contiguous()).loss


def _of_states(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of all hidden states, and of the logits of the last 512 tokens, so that the head is a small part."""
    hidden = model.base_model(input_ids=tokens).last_hidden_state
    logits = model.lm_head(hidden[:, -512:]).float()
    return logits.logsumexp(-1).mean() + hidden.float().pow(2).mean()


def _of_last_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens).logits[:, -128:].float()
    return logits.logsumexp(-1).mean()


def _whisper_loss(model: Any, setting: Setting) -> Loss:
    config, batch = model.config, setting.size(8, 2)
    features = setting.drawn(batch, config.num_mel_bins, 2 * config.max_source_positions)
    labels = setting.tokens(config.vocab_size, batch, setting.size(256, 16))
    return lambda number: model(input_features=features, labels=labels).loss


def _wav2vec2_loss(model: Any, setting: Setting) -> Loss:
    """CTC over 15 seconds of sound at 16 kHz."""
    sound = setting.drawn(setting.size(32, 2), setting.size(240_000, 8_000))
    labels = 1 + setting.tokens(model.config.vocab_size - 1, len(sound), setting.size(100, 4))
    return lambda number: model(input_values=sound, labels=labels).loss


def _images(
    build: Callable[[bool], tuple[nn.Module, int]], *, batch: int, side: int
) -> Callable[[Setting], Made]:
    """A model in float32 under autocast, on two batches of images. build: gets whether sizes are tiny, and
    returns the model and, of a tiny one, the side of its images in pixels."""

    def make(setting: Setting) -> Made:
        with setting.building(torch.float32):
            model, tiny_side = build(setting.tiny)
        pixels = setting.size(side, tiny_side)
        shape, kind = (setting.size(batch, 2), 3, pixels, pixels), setting.device.type
        batches = [torch.randn(shape, device=setting.device) for _ in range(2)]

        def loss(number: int) -> torch.Tensor:
            with torch.autocast(kind, torch.bfloat16):
                output = model(batches[number % 2])
            return output.float().pow(2).mean()

        return model, loss

    return make


def _vit(tiny: bool) -> tuple[nn.Module, int]:
    models = imported("torchvision").models
    if not tiny:
        return models.vit_l_16(), 224
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
    return models.VisionTransformer(image_size=32, patch_size=16, **sizes), 32


def _convnext(tiny: bool) -> tuple[nn.Module, int]:
    models = imported("torchvision").models
    if not tiny:
        return models.convnext_base(), 224
    stage = models.convnext.CNBlockConfig
    return models.ConvNeXt([stage(16, 32, 2), stage(32, None, 2)], stochastic_depth_prob=0.5), 32


def _eva02(tiny: bool) -> tuple[nn.Module, int]:
    create = imported("timm").create_model
    if not tiny:
        return create("eva02_large_patch14_224", drop_path_rate=0.1), 224
    return create("eva02_tiny_patch14_224", drop_path_rate=0.1, img_size=28, depth=2), 28


def _readme(setting: Setting) -> Made:
    """README's first example, as printed."""
    width, rows = setting.size(2048, 32), setting.size(16384, 8)
    parts = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    blocks = [nn.Sequential(*map(copy.deepcopy, parts)) for _ in range(8)]
    model = nn.Sequential(*blocks).to(setting.device)

    def loss(number: int) -> torch.Tensor:
        x = torch.randn(rows, width, device=setting.device)
        return (model(x) - x).square().mean()

    return model, loss


def _readme_optimizer(parameters: list[nn.Parameter], device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
}


def _causal(setting: Setting) -> Made:
    """Any causal language model of transformers, by its config.json; without one, `LLAMA`. One batch."""
    transformers, config = imported("transformers"), setting.config or LLAMA
    built = transformers.AutoConfig.for_model(**(shrunk(config) if setting.tiny else config))
    built.use_cache = False
    dtype = torch.float32 if setting.tiny else torch.bfloat16
    with setting.device:
        model = transformers.AutoModelForCausalLM.from_config(built, dtype=dtype)
    batch, sequence = setting.batch or 1, setting.size(setting.sequence or 16384, 16)
    tokens = setting.tokens(built.vocab_size, batch, sequence)
    return model, lambda number: _of_labels(model, tokens)


_LOSSES: dict[str, Callable[..., Any]] = {
    "states": _of_states,
    "labels": _of_labels,
    "half_the_labels": _of_half_the_labels,
    "last_logits": _of_last_logits,
}


def _of_file(name: str) -> Family:
    """A model of families.toml."""
    found = tomllib.loads((Path(__file__).parent / "families.toml").read_text())[name]
    losses = {"whisper": _whisper_loss, "wav2vec2": _wav2vec2_loss}
    kind, shares = found["loss"], found.get("shares", False)
    make_loss = losses.get(kind) or _text(_LOSSES[kind], found["batch"], found["sequence"])
    make = _transformer(*found["classes"], make_loss, found["config"], found.get("attention"))
    return Family(totals=tuple(found["totals"]), shares=shares, make=make)


SIX = {name: _of_file(name) for name in ("gpt2", "whisper", "gemma3", "modernbert")}
SIX["vit"] = Family(totals=(14, 22), make=_images(_vit, batch=192, side=224))
SIX["qwen3_moe"] = _of_file("qwen3_moe")
OWN = {name: _of_file(name) for name in ("mistral", "t5", "bert", "neox", "wav2vec2")}
OWN |= {
    # convolutions in four stages of blocks of different sizes, stochastic depth
    "convnext": Family(totals=(0.4, 0.6), shares=True, make=_images(_convnext, batch=160, side=224)),
    # attention with rotary tables, gated feed-forward, stochastic depth
    "eva02": Family(totals=(0.4, 0.6), shares=True, make=_images(_eva02, batch=96, side=224)),
    "readme": Family(totals=(9, 16), make=_readme, optimizer=_readme_optimizer),
}

LLAMA_8B = LLAMA | {"num_hidden_layers": 32, "vocab_size": 128256, "rope_theta": 500000.0}
"""Llama 3 8B."""


def _llama_8b(setting: Setting) -> Made:
    return _causal(replace(setting, config=LLAMA_8B, sequence=8192))


FAMILIES = {
    "llama8b": Family(totals=(32, 100), make=_llama_8b),
    "llama": Family(totals=(14, 20), make=_causal, optimizer=_unchanging),
    "config": Family(totals=(14, 20), make=_causal, optimizer=_unchanging),
    **SIX,
    **OWN,
}
GROUPS = {"six": tuple(SIX), "own": tuple(OWN)}
"""Names for several models."""
