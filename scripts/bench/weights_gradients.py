"""Work `gradients` of bench_weights.py: weights resident and trained, four microbatches a step, gradients on
the host against without. Rows are `nothing`, `host`, and `clipped`, which is `host` with clip_grad_norm_: two
more passes over the gradients.

One invariant: all rows make the same backwards, and no optimizer's step is in their times.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import offload
from bench.table import Columns
from bench.weights import TINY, Model, Shape, link_gb_s, run_steps, where_of

ROWS = "nothing,host,clipped"
MICROBATCHES = 4

COLUMNS = Columns(
    "row = row | ms = step_ms:.1f | / nothing = over:.3f | active GB = active_bytes:GB "
    "| reserved GB = reserved_bytes:GB | gradients GB = gradient_bytes:GB | in GB = in_bytes:GB "
    "| out GB = out_bytes:GB | stall ms = stall_ms:.1f | bits = compared"
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

    found = run_steps(model, backward, step, options, device)
    figures = None if handle is None else handle.gradients
    return found | {
        "link_gb_s": rate,
        "gradient_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "gradients": figures
        and {name: getattr(figures, name) for name in ("in_bytes", "out_bytes", "stall_ms")},
        "text": "" if handle is None else str(handle.explain()),
    }
