"""Work `70b` of bench_weights.py: adapters on frozen blocks of Llama-3-70B's shape, in INT8 on the host. The
model is never whole in bf16: it is built on meta, and its weights are made one at a time.

Rows are `nothing`, 8 layers with expanded weights on the device, `host`, and `inputs`, whose blocks' inputs
are on the host as well. A step is compared with `nothing`'s, times the layers over 8.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import offload
from bench.table import Columns
from bench.weights import (
    TINY,
    Model,
    Shape,
    expand_frozen,
    link_gb_s,
    make_whole,
    run_steps,
    streamed,
    where_of,
)

ROWS = "nothing,host,inputs"
DEFAULTS = {"tokens": 8192, "layers": 80, "samples": 2, "warmup": 3}
SLICE = 8


class Made:
    """The tensors of a model on meta, each made when it is asked for, the same ones each time."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self._like = model.state_dict()
        self._generator = torch.Generator(device)

    def keys(self) -> Iterable[str]:
        return self._like.keys()

    def get_tensor(self, name: str, /) -> Tensor:
        like = self._like[name]
        generator = self._generator.manual_seed(zlib.crc32(name.encode()))
        made = torch.empty(like.shape, dtype=like.dtype, device=generator.device)
        if like.dim() == 1:
            return made.fill_(1)
        return made.normal_(std=like.shape[1] ** -0.5, generator=generator)


class Unchecked(Model):
    """Without checkpoints of its own: apply's mode moves the inputs of blocks, and recomputes them."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def run_row(options: argparse.Namespace) -> dict[str, Any]:
    """The row of this process."""
    device, dtype = where_of(options.tiny)
    layers = min(SLICE, options.layers) if options.row == "nothing" else options.layers
    shape = Shape(layers, hidden=8192, ffn=28672, heads=64, kv_heads=8)
    if options.tiny:
        shape, options.tokens = TINY, 8
    rate = link_gb_s(device)
    begun = time.perf_counter()
    with torch.device("meta"):
        model = (Unchecked if options.row == "inputs" else Model)(shape, dtype=dtype)
    made, handle = Made(model, device), None
    if options.row == "nothing":
        make_whole(model, made, device)
        expand_frozen(model)
    else:
        mode = "hidden_states" if options.row == "inputs" else None
        where = "sim" if options.tiny else device
        handle = offload.apply(model, mode, weights="host", quantize="int8", device=where)
        offload.load_weights(model, made)
    build_s = time.perf_counter() - begun
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    torch.manual_seed(0)
    x = torch.randn(1, options.tokens, shape.hidden, device=device, dtype=dtype, requires_grad=True)

    def backward() -> None:
        model(x).float().square().mean().backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    found = run_steps(model, backward, step, options, device)
    return found | {
        "layers": shape.layers,
        "build_s": build_s,
        "link_gb_s": rate,
        **streamed(handle),
    }


COLUMNS = Columns(
    "row = row | layers = layers | ms = step_ms:.1f | / nothing's = over:.3f | active GB = active_bytes:GB "
    "| INT8 GB on the host = int8_bytes:GB | in GB = in_bytes:GB | stall ms = stall_ms:.1f "
    "| build s = build_s:.1f | bits = compared"
)


def derived(row: dict[str, Any], nothing: dict[str, Any] | None) -> dict[str, Any]:
    """The ratio is by layers; rows of other layers have no bits to compare."""
    if nothing is None:
        return {}
    alike = row["layers"] == nothing["layers"]
    over = row["over"] * nothing["layers"] / row["layers"]
    return {"over": over, "compared": row["compared"] if alike else None}
