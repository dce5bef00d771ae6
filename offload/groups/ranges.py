"""Profiler ranges around transfers, named by direction and group (S2-82)."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

__all__ = ["transfer_range"]


def transfer_range(direction: str, name: str) -> AbstractContextManager[object]:
    """A range `offload/spill/core_attn` for torch's profiler and, where `torch.autograd.profiler.emit_nvtx` is on, for NVTX."""
    return torch.profiler.record_function(f"offload/{direction}/{name}")
