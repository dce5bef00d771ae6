"""Blocks of Qwen2.5-7B's shape with adapters, and the steps of one row: what the works of bench_weights.py
share.

One invariant: a row's gradients come from a step under deterministic kernels that is none of the timed ones.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bench import gradients
from bench.table import Columns
from offload import QuantLinear

GB = 1e9


@dataclass(frozen=True)
class Shape:
    """A decoder block. hidden, ffn: features. heads, kv_heads: of hidden / heads features each. rank: of the
    adapters beside frozen projections; 0 for trained projections alone."""

    layers: int = 28
    hidden: int = 3584
    ffn: int = 18944
    heads: int = 28
    kv_heads: int = 4
    rank: int = 16


TINY = Shape(layers=3, hidden=1024, ffn=1024, heads=8, kv_heads=8, rank=2)


class LoraLinear(nn.Module):
    """A frozen projection and a trained one of low rank beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int, **where: Any) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False, **where).requires_grad_(False)
        self.lora_A = nn.Linear(inputs, rank, bias=False, **where)
        self.lora_B = nn.Linear(rank, outputs, bias=False, **where)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


class Block(nn.Module):
    def __init__(self, shape: Shape, inside: bool, **where: Any) -> None:
        super().__init__()
        self.inside = inside
        size = shape.hidden // shape.heads
        sizes = {
            "q": (shape.hidden, shape.hidden),
            "k": (shape.hidden, shape.kv_heads * size),
            "v": (shape.hidden, shape.kv_heads * size),
            "o": (shape.hidden, shape.hidden),
            "gate": (shape.hidden, shape.ffn),
            "up": (shape.hidden, shape.ffn),
            "down": (shape.ffn, shape.hidden),
        }
        self.shape = shape
        self.project = nn.ModuleDict(
            {
                name: LoraLinear(*io, shape.rank, **where) if shape.rank else nn.Linear(*io, False, **where)
                for name, io in sizes.items()
            }
        )
        self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden, **where) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self._run, x, use_reentrant=False) if self.inside else self._run(x)
        return out

    def _run(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        y = self.norms[0](x)
        query, key, value = (
            self.project[name](y).view(batch, sequence, -1, hidden // self.shape.heads).transpose(1, 2)
            for name in ("q", "k", "v")
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.project["o"](y.transpose(1, 2).reshape(x.shape))
        y = self.norms[1](x)
        return x + self.project["down"](F.silu(self.project["gate"](y)) * self.project["up"](y))


class Model(nn.Module):
    """Each block is recomputed in the backward.

    inside: the checkpoint is within the block's call, so that a recompute runs no hooks of the block. Around
    it, an engine whose hooks of a forward fetch the next block's weights fetches each block three times a
    step instead of twice (TrainStream 0.4.1: 706 for 487 ms).
    """

    def __init__(self, shape: Shape, *, inside: bool = False, **where: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(shape, inside, **where) for _ in range(shape.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if layer.inside else checkpoint(layer, x, use_reentrant=False)  # type: ignore[union-attr]
        return x


def where_of(tiny: bool) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of a row's model."""
    return (torch.device("cpu"), torch.float32) if tiny else (torch.device("cuda:0"), torch.bfloat16)


def make_whole(model: nn.Module, made: Any, device: torch.device) -> None:
    """Give a model on meta its tensors. made: has get_tensor(name)."""
    model.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(made.get_tensor(name))


def streamed(handle: Any) -> dict[str, Any]:
    """Figures of the weights of a row, and what its handle explains; None without a handle."""
    figures = None if handle is None else handle.weights
    return {
        "weights": None if figures is None else figures.as_dict(),
        "text": "" if handle is None else str(handle.explain()),
    }


def expand_frozen(model: nn.Module) -> None:
    """Round each frozen projection as quantize="int8" does, in place."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.requires_grad:
            module.weight.data = QuantLinear(module).expanded(module.weight.dtype)


def bits_of(model: nn.Module) -> list[int]:
    """A fingerprint of each gradient, this rank's part of it; of none where another keeps them (a peer)."""
    grads = (getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters() if p.grad is not None)
    return [int(gradients.fingerprint(grad)) for grad in grads]


def link_gb_s(device: torch.device) -> float:
    """To the device, of 256 MiB at once."""
    if device.type == "cpu":
        return 0.0
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return (1 << 28) / min(times) / GB


def run_steps(
    model: nn.Module,
    backward: Callable[[], None],
    step: Callable[[], None],
    options: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    """Times in ms of `samples` steps after `warmup` ones, peaks in bytes of those, and the bits of the first
    step's gradients (before step(), which also zeroes them). On a CPU there are no peaks."""
    is_cuda, warmup, samples = device.type == "cuda", options.warmup, options.samples
    times: list[float] = []
    bits: list[int] = []
    for index in range(warmup + samples):
        if index == warmup and is_cuda:
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        with gradients.deterministic() if index == 0 else nullcontext():
            backward()
        if index == 0:
            bits = bits_of(model)
        step()
        if is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e3)
    stats = torch.cuda.memory_stats() if is_cuda else {}
    return {
        "row": options.row,
        "ms": times[warmup:],
        "active_bytes": stats.get("active_bytes.all.peak", 0),
        "reserved_bytes": stats.get("reserved_bytes.all.peak", 0),
        "bits": bits,
    }


COLUMNS = Columns(
    "row = row | ms = step_ms:.1f | / nothing = over:.3f | law ms = law_ms:.1f | active GB = active_bytes:GB "
    "| reserved GB = reserved_bytes:GB | stay = kept_blocks | in GB = in_bytes:GB | stall ms = stall_ms:.1f "
    "| hits = hits | misses = misses | bits = compared"
)


def compared(row: dict[str, Any], nothing: dict[str, Any] | None) -> str:
    """Whether a row has the bits of the row `nothing`; one that ran without it says so."""
    if nothing is None:
        return "not compared"
    if not row["bits"]:
        return "not seen"
    return "same" if row["bits"] == nothing["bits"] else "DIFFER"


def shown(row: dict[str, Any], nothing: dict[str, Any] | None) -> dict[str, Any]:
    """The row and what a work's columns name beside: figures of weights or gradients, and the ratio."""
    found = row | (row.get("weights") or row.get("gradients") or {})
    found |= {"step_ms": statistics.median(row["ms"]), "compared": compared(row, nothing)}
    if nothing is not None:
        found |= {"nothing_ms": statistics.median(nothing["ms"])}
        found |= {"over": found["step_ms"] / found["nothing_ms"]}
    return found


def derived(row: dict[str, Any], nothing: dict[str, Any] | None) -> dict[str, Any]:
    """The law."""
    if row["weights"] is None or nothing is None or not row["link_gb_s"]:
        return {}
    beside, moves = row["nothing_ms"], row["streamed_bytes"] * (1 - row["kept_blocks"] / row["blocks"])
    copies = moves / row["link_gb_s"] / GB * 1e3
    return {"law_ms": max(beside / 3, copies) + max(2 * beside / 3, copies)}
