#!/usr/bin/env python3
"""What a step costs with the optimizer's state on the GPU, or on the host: one table, one run, one GPU.

    python scripts/bench_optimizer.py                           alone, training and together
    python scripts/bench_optimizer.py --parts alone --rows ours_step,torchao
    python scripts/bench_optimizer.py --tiny                    the whole script on a CPU and the simulated
                                                                device, for its own sake

alone: from step() until the last new weight, gradients there, nothing else running. training: accumulated
microbatches, consecutive steps, then the same clipped by the global norm. together: the attention of every
block leaves beside the optimizer, on its pair of lanes and on a pair of their own.

The bound is computed from rates measured in the same run. Peers run if they are installed, and a row that
cannot run is printed with the reason. One invariant: a figure is printed beside the figures of the same run
that it is judged by.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from bench import optim_child, report
from bench.optim_child import OptimRequest
from bench.optim_work import OPTIMIZERS
from bench.options import add_options
from bench.run import Run, check_names, hardware, main_of, parser_of
from bench.table import reason_of

GB = 1e9
PARTS = ("alone", "training", "together")
ALONE = ("gpu_fused", "ours_step", "ours_half", "torchao", "megatron")
TRAINING = ("gpu_fused", "ours_step", "ours_forward", "ours_backward", "megatron")
CLIPPED = ("gpu_fused", "ours_step", "ours_forward")
TOGETHER = (
    ("gpu_fused", ""),
    ("gpu_fused", "two"),
    ("ours_forward", ""),
    ("ours_forward", "one"),
    ("ours_forward", "two"),
)
"""(optimizer, whose lanes the groups take)."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, row_timeout_s=240.0)
    options = f"""
    --parts text={",".join(PARTS)}  of them
    --rows text  only these: {", ".join(OPTIMIZERS)}
    --dtype float32|bfloat16=float32  bfloat16 takes float32 masters
    --layers int  243 M parameters each (6)
    --sequence int=8192  of the training steps
    --microbatches int=8  of the same
    --steps int=5  timed steps
    --warmup int=3  steps before them
    """
    add_options(parser, options)
    parsed = parser.parse_args(arguments)
    check_names(parser, parsed.parts.split(","), PARTS)
    check_names(parser, (parsed.rows or "").split(","), OPTIMIZERS)
    return parsed


def row(run: Run, **what: Any) -> dict[str, Any]:
    """One row's result, kept."""
    args = run.args
    given = {name: getattr(args, name) for name in ("dtype", "layers", "tiny", "steps", "warmup")}
    request = OptimRequest(**given, **what)
    return run.keep({"request": what} | run.measure(request, optim_child.run, here=args.tiny))


def print_row(label: str, result: dict[str, Any], baseline: dict[str, Any] | None, rest: str = "") -> None:
    if result["status"] != "ok":
        print(f"  {label:<30} {reason_of(result)}", flush=True)
        return
    active, reserved, pinned = (
        result[name] / GB for name in ("active_peak", "reserved_peak", "pinned_bytes")
    )
    over = "     -" if baseline is None else f"{result['step_ms'] / baseline['step_ms']:6.3f}"
    host = (
        f"  host {result['host_bytes'] / result['parameters']:.2f} B a parameter"
        if "host_bytes" in result
        else ""
    )
    print(
        f"  {label:<30} {result['step_ms']:>8.1f} ms {over}  active {active:6.2f}  reserved {reserved:6.2f}"
        f"  pinned {pinned:6.2f} GB{host}{rest}",
        flush=True,
    )


def run_rows(
    run: Run, title: str, names: tuple[str, ...], bound_ms: float | None = None, **what: Any
) -> None:
    """A line a row; ratios are to torch's fused optimizer on the GPU, the first row."""
    chosen = [name for name in names if run.args.rows is None or name in run.args.rows.split(",")]
    if not chosen:
        return
    print(title)
    baseline: dict[str, Any] | None = None
    for name in chosen:
        result = row(run, optimizer=name, **what)
        rest = ""
        if result["status"] == "ok":
            baseline = result if name == "gpu_fused" else baseline
            if bound_ms is not None and name.startswith("ours") and name != "ours_half":
                rest = f"  {result['step_ms'] / bound_ms:.3f} of the bound"
            if "issue_ms" in result:
                rest += f"  step() {result['issue_ms']:.1f} ms, built in {result['construct_s']:.1f} s"
        print_row(name, result, baseline, rest)


def run_alone(run: Run) -> None:
    rates = row(run, kind="rates")
    bound_ms = None
    if rates["status"] == "ok":
        bound_ms = rates["bound_ms"]
        print(f"{report.link_line(rates['links'])}; bound {bound_ms:.1f} ms, all state streamed")
    else:
        print(f"no rates: {rates['reason']}")
    title = "alone: from step() to the last new weight, gradients there, nothing else running"
    run_rows(run, title, ALONE, bound_ms, kind="alone")


def run_training(run: Run) -> None:
    args = run.args
    for clip in (False, True):
        title = (
            f"training{', clipped by the global norm' if clip else ''}: {args.microbatches} microbatches of "
            f"{args.sequence}, consecutive steps; the ratio is over gpu_fused"
        )
        what: dict[str, Any] = {"sequence": args.sequence, "microbatches": args.microbatches, "clip": clip}
        run_rows(run, title, CLIPPED if clip else TRAINING, kind="training", **what)


def run_together(run: Run) -> None:
    args = run.args
    print(
        "together: groups of activations and the optimizer in one step; the ratio is over gpu_fused without"
    )
    baseline: dict[str, Any] | None = None
    for name, groups in TOGETHER:
        result = row(
            run,
            kind="training",
            optimizer=name,
            groups=groups,
            sequence=args.sequence,
            microbatches=args.microbatches,
        )
        rest = ""
        if result["status"] == "ok":
            baseline = baseline or result
            if groups:
                moved = result["groups"]
                rest = f"  groups moved {moved['spill_bytes'] / GB:.1f} GB, stall {moved['stall_ms']:.0f} ms"
        lanes = {"": "", "one": " + groups, 1 pair", "two": " + groups, 2 pairs"}[groups]
        if name == "gpu_fused" and groups:
            lanes = " + groups"
        print_row(name + lanes, result, baseline, rest)


def run_parts(run: Run) -> None:
    print(*run.header_lines(hardware()), f"weights in {run.args.dtype}", sep="\n")
    for part in run.args.parts.split(","):
        {"alone": run_alone, "training": run_training, "together": run_together}[part](run)


def main(arguments: list[str] | None = None) -> int:
    return main_of(__file__, parse(arguments), arguments, run_parts, optim_child.run)


if __name__ == "__main__":
    sys.exit(main())
