"""Work `full` of bench_weights.py: all of 7 B trains, in bf16 with float32 masters, and waits on the host:
weights, masters and moments, and in `clipped` the gradients. Every block is checkpointed.

Rows are `nothing`, the forward and backward of a few layers on the device, without a step; `backward`, whose
steps go on beside the backward; and `clipped`, by the norm of all gradients.

One invariant: the law is made of bytes that have to cross the link, counted here, and of `nothing`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from bench.table import Columns
from bench.weights import GB, Model, Shape, link_gb_s, make_whole, run_steps, streamed, where_of
from bench.weights_70b import Made
from offload.memory.budget import cgroups

ROWS = "nothing,backward,clipped"
DEFAULTS = {"tokens": 16384, "samples": 3, "warmup": 3}
SLICE = 4
LINK_GB_S, BOTH_GB_S = 55.0, 100.0
"""Each way alone, and both ways together."""


def host_bytes() -> int:
    """By the container's own count: what is used, but for file pages that the system may drop. 0 where it
    has no limit."""
    groups = cgroups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return min(
        ((each.limit_bytes, each.limit_bytes - each.available_bytes) for each in groups), default=(0, 0)
    )[1]


def run_row(options: argparse.Namespace) -> dict[str, Any]:
    """The row of this process."""
    device, dtype = where_of(options.tiny)
    is_slice = options.row == "nothing"
    layers = min(SLICE, options.layers) if is_slice else options.layers
    shape, tokens = Shape(layers, rank=0), options.tokens
    if options.tiny:
        shape, tokens = Shape(3, hidden=1024, ffn=1024, heads=8, kv_heads=8, rank=0), 8
    before, begun = host_bytes(), time.perf_counter()
    with torch.device("meta"):
        model = Model(shape, dtype=dtype)
    made, optimizer, handle = Made(model, device), None, None
    if is_slice:
        make_whole(model, made, device)
    else:
        steps_early = options.row == "backward"
        where = "sim" if options.tiny else device
        gradients = "device" if steps_early else "host"
        handle = offload.apply(model, weights="host", gradients=gradients, device=where)
        offload.load_weights(model, made)
        optimizer = offload.HybridDeviceOptimizer(
            model.parameters(),
            1.0,
            lr=1e-5,
            param_update_in_fp32=True,
            overlap="backward" if steps_early else "step",
            model=model,
            max_grad_norm=None if steps_early else 1.0,
        )
    build_s = time.perf_counter() - begun
    torch.manual_seed(0)
    x = torch.randn(1, tokens, shape.hidden, device=device, dtype=dtype)

    def backward() -> None:
        model(x).float().square().mean().backward()

    def step() -> None:
        if optimizer is None:
            model.zero_grad()
        else:
            optimizer.step()
            optimizer.zero_grad()

    no_bits = nn.Module()  # gradients are stepped by then
    found = run_steps(no_bits, backward, step, options, device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    attention = 6 * tokens**2 * shape.hidden * shape.layers  # causal: half of all pairs, forward and backward
    return found | {
        "layers": shape.layers,
        "parameters": parameters,
        "flop": 6 * parameters * tokens + attention,
        "build_s": build_s,
        "link_gb_s": link_gb_s(device),
        "host_bytes": host_bytes(),
        "host_bytes_before": before,
        "pinned_bytes": 0 if optimizer is None else optimizer.engine.arena.held_bytes,
        **streamed(handle),
    }


def law_ms(row: dict[str, Any], compute_ms: float) -> float:
    """What is longest of the compute and the bytes: each way alone, and both. Clipped, the gradients are all
    there before a step begins, so its 24 bytes a parameter come after the compute."""
    parameters = row["parameters"]
    if row["row"] == "clipped":
        return compute_ms + 24 * parameters / BOTH_GB_S / GB * 1e3
    inward, outward = 16 * parameters, 14 * parameters  # weights twice in and once out, and the state
    seconds = max(max(inward, outward) / LINK_GB_S / GB, (inward + outward) / BOTH_GB_S / GB)
    return max(compute_ms, seconds * 1e3)


COLUMNS = Columns(
    "row = row | layers = layers | ms = step_ms:.1f | compute ms = compute_ms:.1f | law ms = law_ms:.1f "
    "| / law = over_law:.3f | model-TFLOP/s = tflop_s:.0f | active GB = active_bytes:GB "
    "| reserved GB = reserved_bytes:GB | pinned GB = pinned_bytes:GB | host GB = host_bytes:GB "
    "| in GB = in_bytes:GB | stall ms = stall_ms:.1f | build s = build_s:.1f"
)


def derived(row: dict[str, Any], nothing: dict[str, Any] | None) -> dict[str, Any]:
    """Compute is that of `nothing`, by layers."""
    found = {"tflop_s": row["flop"] / row["step_ms"] / 1e9}
    if nothing is None or row["row"] == "nothing":
        return found
    compute_ms = row["nothing_ms"] * row["layers"] / nothing["layers"]
    law = law_ms(row, compute_ms)
    return found | {"compute_ms": compute_ms, "law_ms": law, "over_law": row["step_ms"] / law}
