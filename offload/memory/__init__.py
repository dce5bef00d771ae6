"""Host memory: who may have how much (budget), where it is (arena), and the pools that the source systems
name.

One invariant: every pinned byte belongs to a `HostArena`, and every arena asks a `HostBudget` first.
"""

from __future__ import annotations

from offload.memory.arena import ArenaStats, Block, HostArena
from offload.memory.budget import HostBudget, LocalHostBudget, StoreHostBudget, default_host_limit_bytes
from offload.memory.size_class_pool import CPUSpillBackend
from offload.memory.tensor_pool import GPUTensorPool, TensorPool

__all__ = [
    "ArenaStats",
    "Block",
    "CPUSpillBackend",
    "GPUTensorPool",
    "HostArena",
    "HostBudget",
    "LocalHostBudget",
    "StoreHostBudget",
    "TensorPool",
    "default_host_limit_bytes",
]
