"""The models of scripts/bench_model.py: each as its library builds it, with random weights and nothing
downloaded, one batch size, one loss, and the totals that it is tried within.

`SIX` are models on which mode "auto" was first compared with torch's checkpoint, `OWN` others that differ
from them in kind: encoder with decoder, convolutions in stages, sliding windows, dropout, audio, and one so
small that launching its kernels takes longer than they do. No plan is tuned to any of them. One invariant:
`make` uses nothing of `offload`, so what is trained is the same in each row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
    config_class: str, model_class: str, make_loss: Callable[[Any, Setting], Loss], **config: Any
) -> Callable[[Setting], Made]:
    """A model of transformers in bfloat16. attention, in `config`: its implementation; without it, the
    library's choice."""

    def make(setting: Setting) -> Made:
        transformers, sizes = imported("transformers"), shrunk(config) if setting.tiny else dict(config)
        attention = sizes.pop("attention", None)
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


SIX = {
    "gpt2": Family(
        totals=(14, 24),
        make=_transformer(
            "GPT2Config",
            "GPT2LMHeadModel",
            _text(_of_states, 16, 1024),
            attention="sdpa",
            n_embd=1600,
            n_layer=24,
            n_head=25,
            n_positions=2048,
            use_cache=False,
            resid_pdrop=0.1,
            attn_pdrop=0.0,
            embd_pdrop=0.1,
        ),
    ),
    "whisper": Family(
        totals=(9.8, 13),
        make=_transformer(
            "WhisperConfig",
            "WhisperForConditionalGeneration",
            _whisper_loss,
            attention="sdpa",
            d_model=1280,
            encoder_layers=24,
            decoder_layers=8,
            encoder_attention_heads=20,
            decoder_attention_heads=20,
            encoder_ffn_dim=5120,
            decoder_ffn_dim=5120,
            max_source_positions=1500,
            use_cache=False,
        ),
    ),
    "gemma3": Family(
        totals=(19.8, 26),
        make=_transformer(
            "Gemma3TextConfig",
            "Gemma3ForCausalLM",
            _text(_of_last_logits, 2, 4096),
            attention="sdpa",
            hidden_size=2560,
            intermediate_size=10240,
            num_hidden_layers=16,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            vocab_size=32000,
            sliding_window=1024,
            max_position_embeddings=32768,
            use_cache=False,
        ),
    ),
    "modernbert": Family(
        totals=(9.8, 14),
        make=_transformer(
            "ModernBertConfig",
            "ModernBertForMaskedLM",
            _text(_of_last_logits, 16, 1024),
            attention="sdpa",
            hidden_size=1024,
            intermediate_size=2624,
            num_hidden_layers=28,
            num_attention_heads=16,
            reference_compile=False,
        ),
    ),
    "vit": Family(totals=(14, 22), make=_images(_vit, batch=192, side=224)),
    "qwen3_moe": Family(
        totals=(20, 25),
        make=_transformer(
            "Qwen3MoeConfig",
            "Qwen3MoeForCausalLM",
            _text(_of_states, 1, 16384),
            attention="sdpa",
            num_experts=16,
            num_experts_per_tok=4,
            moe_intermediate_size=1536,
            head_dim=128,
            norm_topk_prob=True,
            hidden_size=2048,
            intermediate_size=14336,
            num_hidden_layers=8,
            num_attention_heads=32,
            num_key_value_heads=4,
            vocab_size=32000,
            max_position_embeddings=65536,
            use_cache=False,
        ),
    ),
}

OWN = {
    "mistral": Family(  # sliding windows and grouped queries, head and cross entropy over all tokens
        totals=(0.5, 0.7),
        shares=True,
        make=_transformer(
            "MistralConfig",
            "MistralForCausalLM",
            _text(_of_labels, 3, 4096),
            hidden_size=2048,
            intermediate_size=7168,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=8,
            vocab_size=32000,
            sliding_window=1024,
            use_cache=False,
        ),
    ),
    "t5": Family(  # encoder and decoder; later blocks use the first one's position bias; dropout
        totals=(0.4, 0.6),
        shares=True,
        make=_transformer(
            "T5Config",
            "T5ForConditionalGeneration",
            _text(_of_half_the_labels, 16, 512),
            d_model=1024,
            d_kv=64,
            d_ff=2816,
            num_layers=24,
            num_decoder_layers=24,
            num_heads=16,
            vocab_size=32128,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
            use_cache=False,
        ),
    ),
    "bert": Family(  # post-norm, dropout, a head over all tokens
        totals=(0.45, 0.65),
        shares=True,
        make=_transformer(
            "BertConfig",
            "BertForMaskedLM",
            _text(_of_labels, 64, 512),
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
            vocab_size=30522,
            use_cache=False,
        ),
    ),
    "neox": Family(  # attention and feed-forward side by side; weights and state are a third of a step
        totals=(0.6, 0.75),
        shares=True,
        make=_transformer(
            "GPTNeoXConfig",
            "GPTNeoXForCausalLM",
            _text(_of_labels, 12, 1024),
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=24,
            num_attention_heads=16,
            vocab_size=50304,
            use_cache=False,
        ),
    ),
    "wav2vec2": Family(  # seven convolutions over sound, of falling size, then 24 layers; CTC
        totals=(0.45, 0.65),
        shares=True,
        make=_transformer(
            "Wav2Vec2Config",
            "Wav2Vec2ForCTC",
            _wav2vec2_loss,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
            conv_dim=(512,) * 7,
            num_conv_pos_embeddings=128,
            num_conv_pos_embedding_groups=16,
            feat_extract_norm="layer",
            conv_bias=True,
            do_stable_layer_norm=True,
            apply_spec_augment=False,
            layerdrop=0.0,
            ctc_loss_reduction="mean",
        ),
    ),
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
