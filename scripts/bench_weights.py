#!/usr/bin/env python3
"""What weights on the host cost: LoRA on blocks of Qwen2.5-7B's shape, each row in a process of its own.

    python scripts/bench_weights.py                 4,096 tokens: nothing, all streamed, 5 GB, 6.8 GB
    python scripts/bench_weights.py --tokens 16384 --rows nothing,host
    python scripts/bench_weights.py --tiny          the whole script on a CPU and the simulated device

Every block is checkpointed, and has adapters of rank 16 on its seven projections. A row is judged by the row
`nothing` and by the law: of each pass what is longer, its compute (a third of `nothing` in the forward, two
thirds in the backward with its recompute) or the copies of the blocks that do not stay.

One invariant: a row's gradients of a step under deterministic kernels have the bits of `nothing`'s, or the
row says that they differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
for _folder in (str(_ROOT), str(_ROOT / "scripts")):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import offload  # noqa: E402
from bench import gradients  # noqa: E402
from bench.run import NEEDS_GPU, hardware  # noqa: E402

GB = 1e9
ROWS = "nothing,host,5GB,6.8GB"


@dataclass(frozen=True)
class Shape:
    """A decoder block. hidden, ffn: features. heads, kv_heads: of hidden / heads features each."""

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
    def __init__(self, shape: Shape, **where: Any) -> None:
        super().__init__()
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
            {name: LoraLinear(*io, shape.rank, **where) for name, io in sizes.items()}
        )
        self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden, **where) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
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
    def __init__(self, shape: Shape, **where: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(shape, **where) for _ in range(shape.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def bits_of(model: nn.Module) -> list[int]:
    """A sum of the bits of each gradient."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [int(grad.contiguous().view(torch.int16).to(torch.int64).abs().sum()) for grad in grads]


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


def run_row(options: argparse.Namespace) -> dict[str, Any]:
    """The row of this process."""
    device = torch.device("cpu" if options.tiny else "cuda")
    dtype = torch.float32 if options.tiny else torch.bfloat16
    shape, tokens = (TINY, 8) if options.tiny else (Shape(layers=options.layers), options.tokens)
    torch.manual_seed(0)
    model = Model(shape, device=device, dtype=dtype)
    rate = link_gb_s(device)
    handle = None if options.row == "nothing" else offload.apply(model, weights=options.row)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    x = torch.randn(1, tokens, shape.hidden, device=device, dtype=dtype)
    times: list[float] = []
    bits: list[int] = []
    for step in range(options.warmup + options.samples):
        if step == options.warmup and not options.tiny:
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        with gradients.deterministic() if step == 0 else nullcontext():
            model(x).float().square().mean().backward()
        if step == 0:
            bits = bits_of(model)
        optimizer.step()
        optimizer.zero_grad()
        if not options.tiny:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e3)
    figures = None if handle is None else handle.weights
    return {
        "row": options.row,
        "ms": times[options.warmup :],
        "active_bytes": 0 if options.tiny else torch.cuda.max_memory_allocated(),
        "reserved_bytes": 0 if options.tiny else torch.cuda.max_memory_reserved(),
        "link_gb_s": rate,
        "bits": bits,
        "blocks": shape.layers,
        "weights": None if figures is None else figures.as_dict(),
        "text": "" if handle is None else str(handle.explain()),
    }


HEADER = (
    "| row | ms | / nothing | law ms | active GB | reserved GB | stay | in GB | stall ms | hits | misses "
    "| bits |"
)


def line(row: dict[str, Any], nothing: dict[str, Any] | None) -> str:
    ms, weights = statistics.median(row["ms"]), row["weights"]
    beside = None if nothing is None else statistics.median(nothing["ms"])
    cells = [row["row"], f"{ms:.1f}", "" if beside is None else f"{ms / beside:.3f}"]
    law = ""
    if weights is not None and beside is not None and row["link_gb_s"]:
        moves = weights["streamed_bytes"] * (1 - weights["kept_blocks"] / row["blocks"])
        copies = moves / row["link_gb_s"] / GB * 1e3
        law = f"{max(beside / 3, copies) + max(2 * beside / 3, copies):.1f}"
    cells += [law, f"{row['active_bytes'] / GB:.2f}", f"{row['reserved_bytes'] / GB:.2f}"]
    if weights is None:
        cells += [""] * 5
    else:
        cells += [str(weights["kept_blocks"]), f"{weights['in_bytes'] / GB:.2f}"]
        cells += [f"{weights['stall_ms']:.1f}", str(weights["hits"]), str(weights["misses"])]
    same = nothing is None or row["bits"] == nothing["bits"]
    return "| " + " | ".join([*cells, "same" if same else "DIFFER"]) + " |"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=ROWS, help='"nothing", and what weights= is given (%(default)s)')
    parser.add_argument("--tokens", type=int, default=4096, help="of one sequence (%(default)s)")
    parser.add_argument("--layers", type=int, default=Shape.layers, help="(%(default)s)")
    parser.add_argument("--samples", type=int, default=10, help="timed steps a row (%(default)s)")
    parser.add_argument("--warmup", type=int, default=6, help="steps before them (%(default)s)")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write every figure as JSON")
    parser.add_argument("--tiny", action="store_true", help="tiny blocks on the simulated device")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.tiny:
        parsed.samples, parsed.warmup = 1, 3
    elif not torch.cuda.is_available():
        parser.error(NEEDS_GPU)
    return parsed


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.row:
        print(json.dumps(run_row(options)))
        return
    print("simulated" if options.tiny else hardware(), f"torch {torch.__version__}", HEADER, sep="\n")
    print("|---" * HEADER.count(" | ") + "|---|", flush=True)
    given = sys.argv[1:] if arguments is None else arguments
    found: list[dict[str, Any]] = []
    for row in options.rows.split(","):
        command = [sys.executable, __file__, *given, "--row", row]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"| {row} | failed: {(done.stderr.strip().splitlines() or [''])[-1]} |", flush=True)
            continue
        found.append(json.loads(done.stdout.splitlines()[-1]))
        nothing = next((each for each in found if each["row"] == "nothing"), None)
        print(line(found[-1], nothing), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
