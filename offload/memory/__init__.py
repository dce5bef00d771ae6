"""Host memory: who may have how much (budget), where it is (arena), and who has it on loan (loans).

One invariant: every pinned byte belongs to a `HostArena`, and every arena asks a `HostBudget` first.
"""

from __future__ import annotations

from offload.memory.arena import ArenaStats, Block, HostArena
from offload.memory.budget import HostBudget, LocalHostBudget, StoreHostBudget, default_host_limit_bytes

__all__ = [
    "ArenaStats",
    "Block",
    "HostArena",
    "HostBudget",
    "LocalHostBudget",
    "StoreHostBudget",
    "default_host_limit_bytes",
]
