"""Causal attention with rotary positions; key and value heads are shared by groups of query heads.

Legend: B sequences, S tokens of each, D width, H query heads, N key heads, C channels of a head.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from .config import Marks, MixtureConfig


class Attention(nn.Module):
    """(B, S, D) in and out. Its marks are qkv_linear, core_attn and attn_proj."""

    def __init__(self, config: MixtureConfig, marks: Marks) -> None:
        super().__init__()
        self.config, self.marks = config, marks
        width, key_width = config.heads * config.channels, config.key_heads * config.channels
        self.wq = nn.Linear(config.dim, width, bias=False)
        self.wk = nn.Linear(config.dim, key_width, bias=False)
        self.wv = nn.Linear(config.dim, key_width, bias=False)
        self.wo = nn.Linear(width, config.dim, bias=False)

    def forward(self, x_BSD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        config, marks = self.config, self.marks
        x_BSD = marks.start(x_BSD, "qkv_linear")
        with marks.hooks("qkv_linear"):
            q, k, v = self.wq(x_BSD), self.wk(x_BSD), self.wv(x_BSD)
        q = marks.commit(q, "qkv_linear")
        # outside every mark: all that a rotation saves are the model's own tables
        q_BHSC = _rotated(_by_head(q, config.heads), rotation)
        k_BNSC = _rotated(_by_head(k, config.key_heads), rotation)
        v_BNSC = _by_head(v, config.key_heads)
        q_BHSC = marks.start(q_BHSC, "core_attn")
        backend = sdpa_kernel(SDPBackend.MATH) if config.math_attention else nullcontext()
        with marks.hooks("core_attn"), backend:
            y_BHSC = functional.scaled_dot_product_attention(
                q_BHSC, k_BNSC, v_BNSC, is_causal=True, enable_gqa=config.heads != config.key_heads
            )
        y_BHSC = marks.commit(y_BHSC, "core_attn")
        y = marks.start(y_BHSC.transpose(1, 2).flatten(2), "attn_proj")
        with marks.hooks("attn_proj"):
            y_BSD = self.wo(y)
        return marks.commit(y_BSD, "attn_proj")


def rotation_tables(config: MixtureConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position's angles, float32: (sequence, C / 2) each."""
    pairs = torch.arange(0, config.channels, 2, dtype=torch.float64)
    frequencies = config.rope_base ** (-pairs / config.channels)
    angles = torch.outer(torch.arange(config.sequence, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)


def _rotated(x_BHSC: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of channels by its token's angle; the pair's halves lie C/2 apart."""
    cos, sin = rotation
    left, right = x_BHSC.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
