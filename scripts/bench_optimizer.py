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
from bench.table import Columns, reason_line

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


COLUMNS = Columns(
    "row = label | ms = step_ms:.1f | / GPU = over:.3f | / bound = over_bound:.3f "
    "| active GB = active_peak:GB | reserved = reserved_peak:GB | pinned = pinned_bytes:GB "
    "| host bytes a parameter = host_each:.2f "
    "| step() ms = issue_ms:.1f | built in s = construct_s:.1f | groups moved GB = spill_bytes:GB "
    "| their stall ms = stall_ms:.0f"
)


def print_row(label: str, result: dict[str, Any], baseline: dict[str, Any] | None, **more: float) -> None:
    if result["status"] != "ok":
        print(reason_line([label], result), flush=True)
        return
    found = result | result.get("groups", {}) | more | {"label": label}
    if baseline is not None:
        found["over"] = result["step_ms"] / baseline["step_ms"]
    if "host_bytes" in result:
        found["host_each"] = result["host_bytes"] / result["parameters"]
    print(COLUMNS.line(found), flush=True)


def run_rows(
    run: Run, title: str, names: tuple[str, ...], bound_ms: float | None = None, **what: Any
) -> None:
    """A line a row; ratios are to torch's fused optimizer on the GPU, the first row."""
    chosen = [name for name in names if run.args.rows is None or name in run.args.rows.split(",")]
    if not chosen:
        return
    print(title, COLUMNS.header, sep="\n")
    baseline: dict[str, Any] | None = None
    for name in chosen:
        result, more = row(run, optimizer=name, **what), {}
        if result["status"] == "ok":
            baseline = result if name == "gpu_fused" else baseline
            if bound_ms is not None and name.startswith("ours") and name != "ours_half":
                more = {"over_bound": result["step_ms"] / bound_ms}
        print_row(name, result, baseline, **more)


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
    title = (
        "together: groups of activations and the optimizer in one step; the ratio is over gpu_fused without"
    )
    print(title, COLUMNS.header, sep="\n")
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
        if result["status"] == "ok":
            baseline = baseline or result
        lanes = {"": "", "one": " + groups, 1 pair", "two": " + groups, 2 pairs"}[groups]
        if name == "gpu_fused" and groups:
            lanes = " + groups"
        print_row(name + lanes, result, baseline)


def run_parts(run: Run) -> None:
    print(*run.header_lines(hardware()), f"weights in {run.args.dtype}", sep="\n")
    for part in run.args.parts.split(","):
        {"alone": run_alone, "training": run_training, "together": run_together}[part](run)


def main(arguments: list[str] | None = None) -> int:
    return main_of(__file__, parse(arguments), arguments, run_parts, optim_child.run)


if __name__ == "__main__":
    sys.exit(main())
