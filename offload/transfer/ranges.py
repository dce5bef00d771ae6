"""Profiler ranges around copies, named by direction and group (S2-82). One invariant: without a profiler they
cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from offload.device import CopyPair, Device, Lane

__all__ = ["copy_in_range", "transfer_range"]


def transfer_range(direction: str, name: str) -> AbstractContextManager[object]:
    """A range `offload/spill/core_attn` for torch's profiler and, where `torch.autograd.profiler.emit_nvtx`
    is on, for NVTX."""
    # a range that nobody listens to still costs 8 microseconds
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.profiler.record_function(f"offload/{direction}/{name}")


def copy_in_range(device: Device, lane: Lane, pairs: Sequence[CopyPair], direction: str, name: str) -> None:
    """`device.copy` inside a `transfer_range`: to enter a context that does nothing is three calls a copy, so
    nobody does."""
    if torch.autograd.profiler._is_profiler_enabled:
        with transfer_range(direction, name):
            device.copy(lane, pairs)
    else:
        device.copy(lane, pairs)
