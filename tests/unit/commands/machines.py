"""A host and GPUs in figures, for the tests of their verdicts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from offload.commands.machine import Gpu, Host, Pcie
from offload.policy.actions import Rates

PCIE_5 = Pcie(5, 16, 5, 16)


def rates(out: float, back: float, both: float) -> Rates:
    """In GB/s."""
    return Rates(d2h_bytes_per_s=out * 1e9, h2d_bytes_per_s=back * 1e9, duplex_bytes_per_s=both * 1e9)


def gpu(name: str = "cuda:0", **figures: Any) -> Gpu:
    """An H200 of a good machine, with nobody beside it, but for `figures`."""
    found = Gpu(name, lambda _: None, 0, threading.Lock(), threading.Barrier(1))  # type: ignore[arg-type, return-value]
    good = {
        "model": "NVIDIA H200",
        "memory_bytes": 150 << 30,
        "node": 0,
        "pcie": PCIE_5,
        "alone": rates(55.3, 55.4, 102.5),
        "pinned_bytes": 1 << 30,
        "pinning_s": 0.06,
        "pinned_maps": 2,
    }
    for figure, value in (good | figures).items():
        setattr(found, figure, value)
    return found


def host(**figures: Any) -> Host:
    """A good machine of two nodes, with the threads bound to the first."""
    good: dict[str, Any] = {
        "memory_bytes": 1 << 40,
        "free_bytes": 900 << 30,
        "pinnable_bytes": 800 << 30,
        "huge_pages": "madvise",
        "maps": 400,
        "most_maps": 65530,
        "nodes": {0: frozenset(range(8)), 1: frozenset(range(8, 16))},
        "cores": frozenset(range(8)),
        "memory_nodes": frozenset({0, 1}),
        "driver": "580.1",
    }
    return Host(**good | figures)


def tree(root: Path, files: dict[str, str]) -> Path:
    """Files of a /proc and a /sys under `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
