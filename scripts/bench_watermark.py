#!/usr/bin/env python3
"""What the watermark runtime costs, beside nothing, the source system's order and checkpoints: one run, one
GPU.

    python scripts/bench_watermark.py                       all workloads, under 200 s on an H200
    python scripts/bench_watermark.py --workloads lengths --steps 500
    python scripts/bench_watermark.py --tiny                the whole script on a CPU and the simulated
                                                            device, for its own sake

enough: the stack of W1 with a mark that is never reached, and without again: what a ratio is worth. By turns.
short: the same with a mark of 36 GB, and what each part of the forecast adds. fifth: with a mark
below which a fifth of the activations has to go.
recomputed: every layer is checkpointed, and half of what the checkpoints keep has to go.
lengths: a stack of half the layers and half the sequence, with sequences that vary by two, the mark at the
median's peak, in a device with 15% more than that. 500 steps a row take 200 s by themselves.
diffusion: convolutions, attention and skip connections in a device of 24 GB, in which the batch of 128, which
saves 30 GB, does not fit.

One invariant: a row is printed beside the row of the same run that it is judged by. moved, stall and latched
are of a timed step, on average.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

if __name__ == "__main__" and "PYTORCH_ALLOC_CONF" not in os.environ:
    # read when torch starts to use a GPU; segments of fixed size cannot serve steps of many shapes
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch

from bench.options import add_options
from bench.run import Run, check_names, hardware, main_of, parser_of
from bench.table import Columns
from bench.watermark_work import (
    GB,
    RowResult,
    RowSpec,
    Work,
    clear_device,
    denoiser_work,
    num_lengths,
    run_row,
    stack_work,
)
from bench.workload import StackShape

WORKLOADS = ("enough", "short", "fifth", "recomputed", "lengths", "diffusion")
NOTHING = RowSpec(name="nothing")
HIGH_GB, DEVICE_GB = 36.0, 24.0
"""The mark of `short`, and the device of `diffusion`."""
_TURNS = 4
"""Of the rows of `enough`, one after the other: the GPU's clock changes by more than they differ."""
RECOMPUTED = RowSpec(name="every layer recomputed", checkpoints=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    options = f"""
    --workloads text={",".join(WORKLOADS)}  of them
    --samples int=5  timed steps a row
    --steps int=40  timed steps of `lengths`
    """
    add_options(parser, options)
    parsed = parser.parse_args(arguments)
    check_names(parser, parsed.workloads.split(","), WORKLOADS)
    return parsed


class Bench:
    """The workloads of one run, and what their rows have shown."""

    def __init__(self, run: Run) -> None:
        self.options = run.args
        self.record, self.write = run.record, run.write
        self.sim = run.args.tiny
        self.device = torch.device("cpu" if self.sim else "cuda")
        self.dtype = torch.float32 if self.sim else torch.bfloat16
        self.results: dict[str, list[RowResult]] = {}
        if self.sim:
            self.shape = StackShape(
                layers=2, sequence=256, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16
            )
        else:
            self.shape = StackShape(layers=12, sequence=16384)

    def run(self) -> None:
        for name in self.options.workloads.split(","):
            self.results[name] = []
            getattr(self, name)(name)
            clear_device()  # of the workload's model
            self.record["rows"] = {key: [asdict(row) for row in rows] for key, rows in self.results.items()}
            self.write()

    def enough(self, name: str) -> None:
        work = self._stack()
        specs = [
            NOTHING,
            self._spec("watermark, never reached", 1 << 46),
            replace(NOTHING, name="nothing, again"),
        ]
        warmups = [None] if self.sim else [None, *[1] * (_TURNS - 1)]
        turns = [[self._run(spec, work, warmup=warmup) for spec in specs] for warmup in warmups]
        rows = [_together(found) for found in zip(*turns, strict=True)]
        for spec, result in zip(specs, rows, strict=True):
            self._show(name, spec, result, beside=None if result is rows[0] else rows[0])

    def short(self, name: str) -> None:
        work = self._stack()
        nothing = self._row(name, NOTHING, work)
        high = int(HIGH_GB * GB) if not self.sim else self._high(nothing, 0.2)
        self._ablation(name, work, nothing, high)

    def fifth(self, name: str) -> None:
        work = self._stack()
        nothing = self._row(name, NOTHING, work)
        self._ablation(name, work, nothing, self._high(nothing, 0.2))

    def recomputed(self, name: str) -> None:
        work = self._stack()
        nothing = self._row(name, RECOMPUTED, work)
        kept = self.shape.layers * self.shape.sequence * self.shape.hidden * self.dtype.itemsize
        # of the forward: what is higher are the temporaries of a recompute, which are read at once
        high = 200_000 if self.sim else nothing.saved_bytes - kept // 2
        for order in ("reactive", "forecast"):
            spec = RowSpec(name=f"watermark, {order}", order=order, checkpoints=True, high_bytes=high)
            self._row(name, spec, work, beside=nothing)

    def lengths(self, name: str) -> None:
        steps = 4 if self.sim else self.options.steps
        shape = (
            self.shape
            if self.sim
            else replace(self.shape, layers=self.shape.layers // 2, sequence=self.shape.sequence // 2)
        )
        work = stack_work(shape, self.device, self.dtype, vary=True, seed=7)
        # each length once: a length that comes for the first time takes 50 ms more on an H200
        run_row(NOTHING, work, steps=1, warmup=1 if self.sim else num_lengths(shape), sim=self.sim)
        nothing = self._row(name, NOTHING, work, steps=steps)
        # about the median's: what is saved grows with the length, half of which always is
        high = self._high(nothing, 0.25)
        self._device_of(1.15 * high)
        self._row(name, replace(NOTHING, name="nothing, in that device"), work, steps=steps)
        self._row(name, RECOMPUTED, work, steps=steps, beside=nothing)
        for order in ("reactive", "forecast"):
            spec = RowSpec(name=f"watermark, {order}", order=order, high_bytes=high)
            self._row(name, spec, work, steps=steps, beside=nothing)
        self._device_of(None)

    def diffusion(self, name: str) -> None:
        self._device_of(DEVICE_GB * GB)
        work = denoiser_work(self.device, self.dtype, tiny=self.sim, batch=2 if self.sim else 128)
        self._row(name, NOTHING, work)
        recomputed = self._row(name, RowSpec(name="every stage recomputed", checkpoints=True), work)
        high = 100_000 if self.sim else int(0.85 * DEVICE_GB * GB)
        for order in ("reactive", "forecast"):
            slabs = ((256, 16), (512, 24), (1536, 4))
            spec = RowSpec(name=f"watermark, {order}", order=order, high_bytes=high, slabs=slabs)
            self._row(name, spec, work, beside=recomputed)
        self._device_of(None)

    def _device_of(self, nbytes: float | None) -> None:
        """As if the device had no more than this; None for all that it has."""
        if not self.sim:
            total = torch.cuda.get_device_properties(0).total_memory
            share = 1.0 if nbytes is None else min(1.0, nbytes / total)
            torch.cuda.set_per_process_memory_fraction(share)

    def _ablation(self, name: str, work: Work, nothing: RowResult, high: int) -> None:
        self._row(name, RECOMPUTED, work, beside=nothing)
        self._row(name, RowSpec(name="reactive", order="reactive", high_bytes=high), work, beside=nothing)
        alone = RowSpec(name="+ forecast", order="forecast", restore_ahead=False, high_bytes=high)
        self._row(name, alone, work, beside=nothing)
        self._row(name, self._spec("+ restore ahead", high), work, beside=nothing)

    @staticmethod
    def _spec(name: str, high: int) -> RowSpec:
        return RowSpec(name=name, order="forecast", high_bytes=high)

    def _high(self, nothing: RowResult, share: float) -> int:
        """A mark below which this share of what the stack saves has to go."""
        if self.sim:
            return 300_000
        weights = torch.cuda.memory_allocated()
        return int(nothing.active_bytes - share * (nothing.active_bytes - weights))

    def _stack(self) -> Work:
        return stack_work(self.shape, self.device, self.dtype, vary=False, seed=7)

    def _row(
        self,
        name: str,
        spec: RowSpec,
        work: Work,
        *,
        steps: int | None = None,
        beside: RowResult | None = None,
    ) -> RowResult:
        result = self._run(spec, work, steps=steps)
        self._show(name, spec, result, beside=beside)
        return result

    def _run(
        self, spec: RowSpec, work: Work, *, steps: int | None = None, warmup: int | None = None
    ) -> RowResult:
        samples = 2 if self.sim else self.options.samples
        if warmup is None:
            warmup = 1 if self.sim else 3
        return run_row(spec, work, steps=steps or samples, warmup=warmup, sim=self.sim)

    def _show(self, name: str, spec: RowSpec, result: RowResult, *, beside: RowResult | None) -> None:
        rows = self.results[name]
        if not rows:
            print("", name, COLUMNS.header, sep="\n", flush=True)
        rows.append(result)
        print(line(result, beside, spec), flush=True)


def _together(turns: Sequence[RowResult]) -> RowResult:
    """One row of them all: every step's time, the most bytes of any turn, and the last turn's counts."""
    return replace(
        turns[-1],
        ms=[ms for result in turns for ms in result.ms],
        active_bytes=max(result.active_bytes for result in turns),
        reserved_bytes=max(result.reserved_bytes for result in turns),
        pinned_bytes=max(result.pinned_bytes for result in turns),
    )


COLUMNS = Columns(
    "row = name | ms = median_ms:.1f | / beside = over:.3f | active GB = active_bytes:GB "
    "| reserved GB = reserved_bytes:GB | mark GB = mark_bytes:GB | moved GB = moved_bytes:GB "
    "| stall ms = stall_ms:.1f | latched GB = latched_bytes:GB | times over = times_over "
    "| pinned GB = pinned_bytes:GB"
)


def line(result: RowResult, beside: RowResult | None, spec: RowSpec) -> str:
    if result.status != "ok":
        return f"| {result.name} | {result.status} |" + " |" * 9
    found = asdict(result) | {"median_ms": result.median_ms}
    if beside is not None and beside.status == "ok":
        found["over"] = sum(result.ms) / sum(beside.ms)
    if 0 < spec.high_bytes < 1 << 45:
        found["mark_bytes"] = spec.high_bytes
    found["latched_bytes"] = result.details.get("latched_bytes", 0) / len(result.ms)
    return COLUMNS.line(found | {"times_over": result.details.get("times_over", 0)})


def run_workloads(run: Run) -> None:
    print(*run.header_lines(hardware()), sep="\n", flush=True)
    Bench(run).run()


def main(arguments: list[str] | None = None) -> int:
    return main_of(__file__, parse(arguments), arguments, run_workloads)


if __name__ == "__main__":
    sys.exit(main())
