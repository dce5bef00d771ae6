"""Work `auto` of bench_weights.py: one total for all kinds beside splits by hand.

A row is WORK@GB:SPLIT, such as full@24:auto. Works: `full`, all of 7 B trains; `lora`, adapters; `14b`,
48 blocks of 5120. SPLIT: `auto`; `plain` without offload; or ACTIVATIONS-REST, where ACTIVATIONS are plain,
moved or again, and REST (weights and state) is resident, half or host.

One invariant: a row that runs out of memory, or passes its total, says so.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

import offload
from bench.weights import GB, Model, Shape, link_gb_s, run_steps
from bench.weights_70b import Unchecked

SPLITS = [f"{kept}-{rest}" for kept in ("plain", "moved", "again") for rest in ("resident", "half", "host")]
SHAPES = {"full": Shape(rank=0), "lora": Shape(), "14b": Shape(48, 5120, 13824, 40, 8, 0)}
ROWS = ",".join(f"full@24:{split}" for split in ("auto", *SPLITS))
DEFAULTS = {"tokens": 16384, "warmup": 24, "samples": 5}
_MODES = {"plain": "off", "moved": "groups", "again": "checkpoint"}


def _apply(model: Model, optimizer: Any, split: str, total_bytes: float) -> Any:
    where: dict[str, Any] = {}
    if split == "plain":
        return None
    if split == "auto":
        return offload.apply(model, "auto", optimizer=optimizer, device_total=total_bytes, **where)
    kept, rest = split.split("-")
    limits = {"device_limit": 0.25 * total_bytes} if kept == "moved" else {}
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if rest != "resident":
        where |= {"weights": "host" if rest == "host" else weights / 2, "optimizer": optimizer}
    return offload.apply(model, _MODES[kept], **limits, **where)


def run_row(options: argparse.Namespace) -> dict[str, Any]:
    """The row of this process."""
    work, _, rest = options.row.partition("@")
    gb, _, split = rest.partition(":")
    device = torch.device("cpu" if options.tiny else "cuda:0")
    dtype = torch.float32 if options.tiny else torch.bfloat16
    shape, tokens, total_bytes = SHAPES[work], options.tokens, float(gb) * GB
    if options.tiny:
        shape, tokens = Shape(6, 1024, 1024, 8, 8, min(shape.rank, 2)), 8
    torch.manual_seed(0)
    # on the host where it may not fit; apply brings what is to be on the device
    is_away = split != "plain" and not split.endswith("resident") and not options.tiny
    model = Unchecked(shape, device="cpu" if is_away else device, dtype=dtype)
    trained = [each for each in model.parameters() if each.requires_grad or not shape.rank]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    handle = _apply(model, optimizer, split, total_bytes)
    x = torch.randn(1, tokens, shape.hidden, device=device, dtype=dtype)

    def backward() -> None:
        model(x).float().square().mean().backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    found = run_steps(model, backward, step, warmup=options.warmup, samples=options.samples, device=device)
    parameters = sum(p.numel() for p in model.parameters())
    flop = (4 if shape.rank else 6) * parameters * tokens + 6 * tokens**2 * shape.hidden * shape.layers
    return found | {
        "row": options.row,
        "total_bytes": total_bytes,
        "flop": flop,
        "link_gb_s": link_gb_s(device),
        "text": "" if handle is None else str(handle.explain()),
    }


HEADER = "| row | ms | model-TFLOP/s | total GB | active GB | within |"


def line(row: dict[str, Any], nothing: dict[str, Any] | None) -> str:
    ms, active = statistics.median(row["ms"]), row["active_bytes"]
    cells = [row["row"], f"{ms:.1f}", f"{row['flop'] / ms / 1e9:.0f}", f"{row['total_bytes'] / GB:.1f}"]
    cells += [f"{active / GB:.2f}", "yes" if active <= row["total_bytes"] else "PASSED"]
    return "| " + " | ".join(cells) + " |"
