"""Runtimes with the attributes that the source system's adapters write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def weights_runtime(max_inflight: int = 4, prefetch_window: int = 3) -> Any:
    policy = SimpleNamespace(prefetch_window=prefetch_window)
    return SimpleNamespace(
        engine=SimpleNamespace(_max_inflight=max_inflight), scheduler=SimpleNamespace(policy=policy)
    )


def activations_runtime(max_d2h: int | None = 3, max_h2d: int | None = 3) -> Any:
    return SimpleNamespace(transfer=SimpleNamespace(_max_d2h=max_d2h, _max_h2d=max_h2d))


def knobs(*runtimes: Any) -> list[Any]:
    """What the attributes are, those of weights first."""
    found: list[Any] = []
    for runtime in runtimes:
        if hasattr(runtime, "scheduler") and hasattr(runtime.scheduler, "policy"):
            found += [runtime.engine._max_inflight, runtime.scheduler.policy.prefetch_window]
        else:
            found += [runtime.transfer._max_d2h, runtime.transfer._max_h2d]
    return found
