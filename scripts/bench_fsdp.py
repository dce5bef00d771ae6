#!/usr/bin/env python3
"""What a step costs with FSDP2's shards on the host: stepped on the GPU by FSDPGPUOptimizerWrapper, or on the
host as CPUOffloadPolicy alone has it.

    python scripts/bench_fsdp.py --ranks 2 --out fsdp.json
    python scripts/bench_fsdp.py --ranks 4 --layers 40 --threads 16,8,4
    python scripts/bench_fsdp.py --tiny         gloo and the simulated device, for the script's own sake

The model is that of bench_optimizer.py, float32 shards, bfloat16 blocks, torch's fused AdamW; a step is one
forward and backward of a sequence on each rank. The peer's row is made for each number of threads, and the
ratio is over its best. Figures are those of the slowest or fullest rank, and step() is a part of the step.
torchrun starts the ranks anew for each row. One invariant: a row's weights after three steps under
deterministic kernels are compared with the bits of the row nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn import functional

import bench  # noqa: F401
import offload
from bench import gradients
from bench.measure import Clock
from bench.optim_work import ADAMW, TINY, FusedStack, OptimShape
from bench.options import add_options
from bench.run import Run, hardware, main_of, parser_of
from bench.table import Columns, reason_line
from offload.optim import FSDPGPUOptimizerWrapper
from parallel.launch import Rank, Ranks, choose_device, launched

GB = 1e9
PEER, WRAPPER = "cpu_offload_policy", "wrapper"
ROWS = ("nothing", PEER, WRAPPER, "wrapper, hidden_states")
COMPARED_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the parent asks of all ranks. threads: of torch's, on each rank."""

    row: str
    threads: int
    shape: OptimShape
    samples: int
    warmup: int
    tiny: bool


class Trainer:
    """The row's model and optimizer on this rank."""

    def __init__(self, request: Request, rank: Rank) -> None:
        self.device, self.shape, self.rank = rank.device, request.shape, rank
        self.clock = Clock(rank.device)
        cuda = self.clock.cuda
        self.engine, self.handle = None, None
        if request.row.startswith(WRAPPER):
            device = str(rank.device) if cuda else "sim"
            self.engine = offload.configure(device=device, store=rank.store, print_summary=False).engine
        self.model = FusedStack(request.shape, rank.device, torch.float32)
        if request.row.endswith("hidden_states"):
            self.handle = offload.apply(self.model, "hidden_states", min_numel=1 if request.tiny else None)
        on_host = request.row != "nothing"
        policy = CPUOffloadPolicy(pin_memory=cuda) if on_host else OffloadPolicy()
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*self.model.blocks, self.model):
            fully_shard(
                part,
                mesh=rank.mesh,
                mp_policy=mixed if cuda else MixedPrecisionPolicy(),
                offload_policy=policy,
            )
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), fused=True, **ADAMW)
        if self.engine is not None:
            self.optimizer = FSDPGPUOptimizerWrapper(self.optimizer, rank.device, engine=self.engine)

    def step(self, number: int) -> tuple[Any, Any, Any]:
        """Points in time: of its begin, when gradients are there, and of its end."""
        ranks = self.rank.ranks
        generator = torch.Generator(self.device).manual_seed(number * ranks.world + ranks.rank)
        size = (1, self.shape.sequence, self.shape.hidden)
        x, y = (torch.randn(size, device=self.device, generator=generator) for _ in range(2))
        begin = self.clock.mark()
        functional.mse_loss(self.model(x).float(), y).backward()
        backward = self.clock.mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return begin, backward, self.clock.mark()

    def digest(self) -> str:
        """A digest of this rank's shards."""
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            shard = parameter.detach().to_local().cpu().contiguous()  # type: ignore[attr-defined]
            found.update(shard.view(torch.uint8).numpy())
        return found.hexdigest()

    def pinned_bytes(self) -> int:
        """Pinned bytes that torch and the engine hold."""
        of_torch = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if self.clock.cuda else 0
        return of_torch + (0 if self.engine is None else self.engine.arena.held_bytes)


def measure(request: Request, rank: Rank) -> dict[str, Any]:
    """This rank's figures."""
    trainer = Trainer(request, rank)
    clock = trainer.clock
    with gradients.deterministic():
        for number in range(COMPARED_STEPS):
            trainer.step(number)
        clock.drain()
    digest = trainer.digest()
    samples = []
    for number in range(request.warmup + request.samples):
        clock.drain()
        dist.barrier(rank.group)
        clock.reset_peaks()
        begin, backward, end = trainer.step(COMPARED_STEPS + number)
        clock.drain()
        samples.append(
            {"step_ms": clock.ms(begin, end), "update_ms": clock.ms(backward, end), **clock.memory()}
        )
    timed = samples[request.warmup :]
    return {
        "digest": digest,
        "pinned": trainer.pinned_bytes(),
        "moved_bytes": 0 if trainer.handle is None else trainer.handle.report().last_step["moved_bytes"],
        "active_peak": max(one["active_peak"] for one in timed),
        "reserved_peak": max(one["reserved_peak"] for one in timed),
        **{name: statistics.median(one[name] for one in timed) for name in ("step_ms", "update_ms")},
        "samples": samples,
    }


def answer(request: Request, ranks: Ranks) -> dict[str, Any] | None:
    """All ranks' figures, on rank 0."""
    torch.set_num_threads(request.threads)  # torchrun has set it to one
    device = choose_device("cpu" if request.tiny else "cuda", ranks)
    with launched(ranks, device) as rank:
        everyones: list[Any] = [None] * ranks.world
        dist.all_gather_object(everyones, measure(request, rank))
    return {"status": "ok", "hardware": hardware(), "ranks": everyones} if ranks.rank == 0 else None


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, row_timeout_s=240.0)
    options = """
    --ranks int  processes, one a GPU (all GPUs; 2 with --tiny)
    --layers int=20  243 M parameters each
    --threads text  of each rank, a row of the peer each (this host's cores / ranks)
    --samples int=5  timed steps a row
    --warmup int=3  steps before them
    """
    add_options(parser, options)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="(all)")
    parsed = parser.parse_args(arguments)
    parsed.ranks = parsed.ranks or (2 if parsed.tiny else max(1, torch.cuda.device_count()))
    share = max(1, len(os.sched_getaffinity(0)) // parsed.ranks)
    parsed.threads = [int(text) for text in parsed.threads.split(",")] if parsed.threads else [share]
    return parsed


COLUMNS = Columns(
    f"row = label | step ms = step_ms:.1f | step() ms = update_ms:.1f | / {PEER} = over:.3f "
    "| active GB = active_peak:GB | reserved = reserved_peak:GB | pinned = pinned:GB | bits = bits"
)


def line(result: dict[str, Any], nothing: dict[str, Any] | None, peer_ms: float | None) -> str:
    label = f"{result['row']}, {result['threads']} threads" if result["row"] == PEER else result["row"]
    if result["status"] != "ok":
        return reason_line([label], result)
    ranks = result["ranks"]
    worst = {
        name: max(rank[name] for rank in ranks)
        for name in ("step_ms", "update_ms", "active_peak", "reserved_peak", "pinned")
    }
    found = {"label": label, **worst}
    if peer_ms is not None and result["row"] != PEER:
        found["over"] = worst["step_ms"] / peer_ms
    if nothing not in (None, result):
        same = all(
            one["digest"] == other["digest"] for one, other in zip(ranks, nothing["ranks"], strict=True)
        )
        found["bits"] = "same" if same else "differ"
    return COLUMNS.line(found)


def run_rows(run: Run) -> None:
    args = run.args
    shape = TINY if args.tiny else OptimShape(layers=args.layers)
    base = Request(
        row="", threads=args.threads[0], shape=shape, samples=args.samples, warmup=args.warmup, tiny=args.tiny
    )
    print(*run.header_lines(hardware()), sep="\n")
    print(f"{args.ranks} ranks, {shape.parameters / GB:.2f} G parameters, {shape.sequence} tokens a rank")
    print(COLUMNS.header)
    nothing, peer_ms = None, None
    for row in (row for row in ROWS if row in args.rows):
        for threads in args.threads if row == PEER else args.threads[:1]:
            asked = replace(base, row=row, threads=threads)
            found = run.measure(asked, ranks=args.ranks)
            said = [text for text in found.get("stderr", "").splitlines() if text.startswith("rank ")]
            if found["status"] == "failed" and said:
                found["reason"] = said[0]
            result = run.keep({"row": row, "threads": threads, **found})
            if result["status"] == "ok" and row == "nothing":
                nothing = result
            if result["status"] == "ok" and row == PEER:
                slowest = max(rank["step_ms"] for rank in result["ranks"])
                peer_ms = slowest if peer_ms is None else min(peer_ms, slowest)
            print(line(result, nothing, peer_ms), flush=True)


def main(arguments: list[str] | None = None) -> int:
    return main_of(__file__, parse(arguments), arguments, run_rows, answer, ranks=True)


if __name__ == "__main__":
    sys.exit(main())
