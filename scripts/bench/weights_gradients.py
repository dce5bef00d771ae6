"""Work `gradients` of bench_weights.py: weights resident and trained, four microbatches a step, gradients on
the host against without. Rows are `nothing`, `host`, and `clipped`, which is `host` with clip_grad_norm_: two
more passes over the gradients.

One invariant: all rows make the same backwards, and no optimizer's step is in their times.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch import nn

import offload
from bench.table import cells_line
from bench.weights import GB, TINY, Model, Shape, compared, link_gb_s, run_steps, where_of

ROWS = "nothing,host,clipped"
MICROBATCHES = 4

HEADER = (
    "| row | ms | / nothing | active GB | reserved GB | gradients GB | in GB | out GB | stall ms | bits |"
)


def run_row(options: argparse.Namespace) -> dict[str, Any]:
    """The row of this process."""
    device, dtype = where_of(options.tiny)
    shape, tokens = (TINY, 8) if options.tiny else (Shape(layers=options.layers), options.tokens)
    torch.manual_seed(0)
    rate = link_gb_s(device)
    model = Model(shape, device=device, dtype=dtype).requires_grad_(True)
    handle = None if options.row == "nothing" else offload.apply(model, gradients="host")
    xs = [torch.randn(1, tokens, shape.hidden, device=device, dtype=dtype) for _ in range(MICROBATCHES)]

    def backward() -> None:
        for x in xs:
            model(x).float().square().mean().backward()

    def step() -> None:
        if options.row == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model.zero_grad()
        offload.step_end()

    found = run_steps(model, backward, step, warmup=options.warmup, samples=options.samples, device=device)
    figures = None if handle is None else handle.gradients
    return found | {
        "row": options.row,
        "link_gb_s": rate,
        "gradient_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "moved": None if figures is None else (figures.in_bytes, figures.out_bytes, figures.stall_ms),
        "text": "" if handle is None else str(handle.explain()),
    }


def line(row: dict[str, Any], nothing: dict[str, Any] | None) -> str:
    ms = statistics.median(row["ms"])
    ratio = "" if nothing is None else f"{ms / statistics.median(nothing['ms']):.3f}"
    cells = [row["row"], f"{ms:.1f}", ratio, f"{row['active_bytes'] / GB:.2f}"]
    cells += [f"{row['reserved_bytes'] / GB:.2f}", f"{row['gradient_bytes'] / GB:.2f}"]
    if row["moved"] is None:
        cells += [""] * 3
    else:
        in_bytes, out_bytes, stall_ms = row["moved"]
        cells += [f"{in_bytes / GB:.2f}", f"{out_bytes / GB:.2f}", f"{stall_ms:.1f}"]
    return cells_line([*cells, compared(row, nothing)])
