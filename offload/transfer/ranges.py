"""Profiler ranges around copies, named by direction and group (S2-82). One invariant: without a profiler they cost nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["transfer_range"]


def transfer_range(direction: str, name: str) -> AbstractContextManager[object]:
    """A range `offload/spill/core_attn` for torch's profiler and, where `torch.autograd.profiler.emit_nvtx` is on, for NVTX."""
    if not torch.autograd.profiler._is_profiler_enabled:  # a range that nobody listens to still costs 8 microseconds
        return nullcontext()
    return torch.profiler.record_function(f"offload/{direction}/{name}")
