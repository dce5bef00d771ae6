#!/usr/bin/env python3
"""What offload costs and saves in a real pipeline: torch's schedules over NCCL, a GPU for each rank, and the
link they share.

    python scripts/bench_pipeline.py --verify --out pipeline.json
    python scripts/bench_pipeline.py --ranks 4 --schedules 1f1b,zbv --saved-limit-gb 30,15 --budget-s 300
    python scripts/bench_pipeline.py --ranks 2 --schedules zbv --rows auto --layers 22 --device-total-gb 125
    python scripts/bench_pipeline.py --ranks 2 --schedules 1f1b --rows nothing,weights --microbatches 8
    python scripts/bench_pipeline.py --ranks 2 --tiny --verify    gloo and the simulated device, for the
                                                                  script's own sake

The model is derived from the GPU's memory so that 1F1B only just fits with nothing offloaded; the calculation
is printed. torchrun starts the ranks anew for every row, so that one that runs out of memory is a row of the
table and not the end of it. One invariant: rows come in the order of their value, and what a run that is cut
short has measured is printed and written.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from bench.options import RaisingParser, add_options
from bench.run import Run, check_positive, main_of, parser_of
from parallel.schedules import check_counts, schedule_named
from pipelines import child, report
from pipelines.memory import BlockFacts
from pipelines.requests import (
    KINDS,
    LEAST_STREAMED_LAYERS,
    SCHEDULE_NAMES,
    STREAMED,
    JobShape,
    Request,
    RowRequest,
    complete,
    rows_of,
)

GB = 1e9
HOST_GB_A_GPU = 110.0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check. Raises ValueError that says what to give instead."""
    parser = parser_of(__doc__, row_timeout_s=300.0, kind=RaisingParser)
    options = f"""
    --ranks int  processes, one a GPU (all GPUs; 2 with --tiny)
    --schedules text={",".join(SCHEDULE_NAMES)}  comma-separated, the most important first
    --rows text=nothing,ours  of {", ".join(KINDS[1:-1])}
    --verify  compare every gradient with those without offload, on a smaller model
    --layers int  of one rank; derived from the GPU's memory if not given
    --sequence int  tokens of a sequence, one a microbatch (8192)
    --microbatches int  a step (twice the ranks)
    --optimizer-bytes int=12  held for each parameter, allocated and not stepped
    --saved-limit-gb text  comma-separated GB of 1e9 of saved tensors on each device, a row each (a half and
        a quarter of 1f1b's)
    --device-total-gb text  comma-separated GB of 1e9 of all active bytes of each device, a row of mode auto
        each
    --samples int=3  timed steps a row
    --warmup int=6  steps after the first, before the timed ones; the plan needs 4
    --host-limit-gb float  pinned by all ranks of this host together ({HOST_GB_A_GPU:g} a rank)
    --timeout-s float=120  what a message between ranks may take
    --isolate  a launch for each row with --tiny, too
    --one-launch  one launch for all rows but the links, and another behind a row that fails; --budget-s is
        looked at before a launch only
    """
    add_options(parser, options)
    args = parser.parse_args(arguments)
    if args.child is not None:
        return args
    if args.ranks is None:
        args.ranks = 2 if args.tiny else max(1, torch.cuda.device_count())
    args.schedule_list = [schedule_named(name).name for name in args.schedules.split(",") if name]
    args.row_list = [name for name in args.rows.split(",") if name]
    unknown = [name for name in args.row_list if name not in KINDS[1:-1]]
    if unknown or not args.schedule_list:
        raise ValueError(
            f"--rows {', '.join(unknown)}: known are {', '.join(KINDS[1:-1])}"
            if unknown
            else "--schedules is empty"
        )
    if ("auto" in args.row_list) != bool(args.device_total_gb):
        raise ValueError("a row of mode auto needs both: --rows auto and --device-total-gb 120, say")
    if args.one_launch and args.isolate:
        raise ValueError("--one-launch and --isolate exclude each other")
    args.microbatches = args.microbatches if args.microbatches is not None else max(2, 2 * args.ranks)
    args.sequence = args.sequence if args.sequence is not None else (32 if args.tiny else 8192)
    check_positive(parser, args, "ranks", "layers", "sequence", "samples")
    streamed = [kind for kind in args.row_list if kind in STREAMED]
    for name in args.schedule_list:
        spec = schedule_named(name)
        virtual = spec.default_virtual_stages
        check_counts(spec, ranks=args.ranks, virtual_stages=virtual, microbatches=args.microbatches)
        if args.layers is not None and args.layers % virtual:
            raise ValueError(
                f"--layers {args.layers} cannot be cut into the {virtual} virtual stages of {name}; give a "
                "multiple"
            )
        if streamed and args.layers is not None and args.layers // virtual < LEAST_STREAMED_LAYERS:
            raise ValueError(
                f"--rows {streamed[0]} needs {LEAST_STREAMED_LAYERS} layers a virtual stage: under {name} "
                f"--layers {LEAST_STREAMED_LAYERS * virtual} at least, not {args.layers}"
            )
    return args


def request_of(args: argparse.Namespace) -> Request:
    limits = (
        [round(float(text) * GB) for text in args.saved_limit_gb.split(",")] if args.saved_limit_gb else []
    )
    shape = JobShape(
        layers=args.layers,
        sequence=args.sequence,
        microbatches=args.microbatches,
        optimizer_bytes=args.optimizer_bytes,
        samples=args.samples,
        warmup=args.warmup,
        tiny=args.tiny,
        verify_layers=1 if args.tiny else 2,
    )
    host_gb = args.host_limit_gb or (1.0 if args.tiny else HOST_GB_A_GPU * args.ranks)
    return Request(
        rows=rows_of(
            args.schedule_list,
            args.row_list,
            limits,
            verify=args.verify,
            totals_bytes=[
                round(float(text) * GB) for text in (args.device_total_gb or "").split(",") if text
            ],
        ),
        shape=shape,
        device="cpu" if args.tiny else "cuda",
        host_limit_bytes=round(host_gb * GB),
        timeout_s=args.timeout_s,
    )


def measure(run: Run, request: Request, rows: Sequence[RowRequest]) -> list[dict[str, Any]]:
    """The rows' results from one launch of all ranks, up to the first that failed."""
    for path in [*run.folder.glob("failure-*.json"), *run.folder.glob("row-*.json")]:
        path.unlink()
    asked = replace(request, rows=tuple(rows))
    results: list[dict[str, Any]] = []
    ended: dict[str, Any] = {"status": "failed", "reason": "the run was ended"}
    try:
        ended = child.with_failures(run.measure(asked, ranks=run.args.ranks, rows=len(rows)), run.folder)
    finally:
        results += [json.loads(path.read_text()) for path in sorted(run.folder.glob("row-*.json"))]
        if ended["status"] != "ok":
            failed = rows[min(len(results), len(rows) - 1)]
            results[len(rows) - 1 :] = []
            results.append({"row": asdict(failed), "label": failed.label, **ended})
        for found in results:
            print(report.progress_line(found, run.elapsed_s), flush=True)
            run.keep(found)
    return results


def run_rows(run: Run, request: Request) -> None:
    """The machine first, from whose figures comes what was left open; then a launch a row."""
    links = measure(run, request, request.rows[:1])[0]
    if links["status"] != "ok":
        print("without the link's rates and the block's figures no other row can run")
        return
    facts, world = links["ranks"][0], run.args.ranks
    rows, shape = complete(request.rows[1:], request.shape, BlockFacts(**facts["block"]), world)
    request = replace(request, shape=shape, facts=facts)
    print(*run.header_lines(facts["hardware"]), *report.calculation_lines(facts, shape, world), sep="\n")
    # what is tiny holds too little to be in its own way, and a launch takes longer than a row
    together = run.args.one_launch or (run.args.tiny and not run.args.isolate)
    while rows:
        rows = rows[len(measure(run, request, rows if together else rows[:1])) :]
    print(*report.report_lines(run.results, shape), sep="\n")


def run_all(run: Run) -> int:
    run_rows(run, request_of(run.args))
    code = run.end()
    compared = [result for result in run.results if result["row"]["kind"] == "verify"]
    wrong = [result for result in compared if result["status"] == "ok" and not report.equal_gradients(result)]
    return 1 if wrong else code


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.child is not None and not torch.cuda.is_available():
        torch.set_num_threads(1)  # operations this small only lose by threads
    answer = functools.partial(child.run, folder=args.child)
    return main_of(__file__, args, arguments, run_all, answer, ranks=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(str(error))
