#!/usr/bin/env python3
"""What a training step costs with its activations on the device, recomputed, or on the host: one table, one
run, one GPU.

    python scripts/bench_stage.py --workload W1                 every default row of W1
    python scripts/bench_stage.py --workload W3 --sequence 16384,32768,65536 --without-nothing
    python scripts/bench_stage.py --workload WV --rows ours_auto    lengths that vary: means of the same steps
    python scripts/bench_stage.py --workload W2 --out w2.json   and then, for time over memory as a picture:
    python scripts/headline.py w2.json --picture w2.png
    python scripts/bench_stage.py --micro                       host cost a saved tensor
    python scripts/bench_stage.py --tiny                        the whole script on a CPU and the simulated
                                                                device, for its own sake

The limits of the machine, the baseline and every row are measured in the same run. Each row runs in a process
of its own. A row that cannot run is printed with the reason. One invariant: the timed steps are never
deterministic, and never share a process with another row's pinned memory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from bench import child, micro, report
from bench.child import DEFAULT_ROWS, LIMITED_ROWS, ROWS, RowRequest
from bench.options import add_options
from bench.rows import RowOptions
from bench.run import Run, check_names, hardware, main_of, parser_of

GB = 1e9
LIVE = "100,1000,10000"
_DEFAULT_LIMITS_GB = {
    "W1": (3.0,),
    "W2": (50.0, 40.0, 32.0, 22.0),
    "W3": (3.0,),
    "W5": (0.0,),
    "WV": (24.0,),
}
_LIMIT_MEANS = {"W1": "saved", "W2": "total", "W3": "saved", "W5": "saved", "WV": "total"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, row_timeout_s=300.0)
    options = f"""
    --workload {"|".join((*DEFAULT_ROWS, "all"))}=all  "all" is W1 and W2
    --rows text  comma-separated, of {", ".join(ROWS)}; nothing is always run first, for the ratios
    --device-limit-gb text  comma-separated GB of 1e9 for {" and ".join(LIMITED_ROWS)}, a row each; 0 is no
        limit (W1: 3; W2: 50,40,32,22; W5: 0; WV: 24)
    --limit-means auto|saved|total=auto  saved: saved tensors on the device. total: all active bytes; the
        engine is given the total less what is measured as resident (weights, gradients, inputs) less 2 GB
        for a backward's own tensors. auto: total on W2 and WV, saved elsewhere
    --host-limit-gb float=110  pinned bytes that a row may need at most
    --layers int  of the stack
    --sequence text  tokens; comma-separated: the rows again at each length
    --without-nothing  leave out the row nothing, and ratios to it
    --samples int  timed steps a row (W1 10, the others 5)
    --warmup int  steps between the first and the timed ones
    --no-gradients  leave out the comparison of gradients
    --micro  host cost a saved tensor instead of the workloads
    --live text={LIVE}  live tensors for --micro
    """
    add_options(parser, options)
    parsed = parser.parse_args(arguments)
    check_names(parser, (parsed.rows or "").split(","), ROWS, "rows")
    return parsed


def requests_for(
    args: argparse.Namespace, workload: str, folder: Path, sequence: int | None = None
) -> list[tuple[str, RowRequest]]:
    """(label, request) of every row of one workload, nothing first. sequence: None for the workload's own."""
    names = [name for name in (args.rows or DEFAULT_ROWS[workload]).split(",") if name]
    first = [] if args.without_nothing else ["nothing"]
    names = [*first, *(name for name in names if name != "nothing")]
    limits = (
        [float(text) for text in args.device_limit_gb.split(",")]
        if args.device_limit_gb
        else list(_DEFAULT_LIMITS_GB[workload])
    )
    means = _LIMIT_MEANS[workload] if args.limit_means == "auto" else args.limit_means
    if args.tiny and not args.device_limit_gb:
        limits, means = [0.0002], "saved"
    shared: dict[str, Any] = {"host_limit_bytes": round(args.host_limit_gb * GB)}
    shared |= {"engine": {"min_offloaded_tensor_size": 1}} if args.tiny else {}
    rows: list[tuple[str, RowRequest]] = []
    for name in names:
        for limit in limits if name in LIMITED_ROWS else [0.0]:
            label = f"{name}@{limit:g}{means[0]}" if limit else name
            options = RowOptions(**shared | ({f"{means}_limit_bytes": round(limit * GB)} if limit else {}))
            request = RowRequest(
                row=name,
                workload=workload,
                options=options,
                tiny=args.tiny,
                layers=args.layers,
                sequence=sequence,
                samples=args.samples,
                warmup=args.warmup,
                gradients=not args.no_gradients,
                reference=str(folder / f"reference-{workload}-{sequence}.pt"),
                label=label,
            )
            rows.append((label, request))
    return rows


def run_workload(run: Run, workload: str, link: dict[str, Any], sequence: int | None = None) -> None:
    """Run and print one workload's rows, then what does not fit the table."""
    requests = requests_for(run.args, workload, run.folder, sequence)
    left_out = [name for name in ROWS if name not in {request.row for _, request in requests}]
    notes: list[str] = []
    try:
        _run_rows(run, workload, link, requests, notes)
    finally:  # a run that is cut short says what it has
        print(*notes, f"  not among this run's rows: {', '.join(left_out)}", sep="\n", flush=True)


def _run_rows(
    run: Run, workload: str, link: dict[str, Any], requests: list[tuple[str, RowRequest]], notes: list[str]
) -> None:
    done: dict[str, dict[str, Any]] = {}
    for label, request in requests:
        result = {"row": request.row, "workload": workload, "label": label}
        result |= run.measure(request, child.run, here=run.args.tiny)
        if result["status"] == "ok":
            done[request.row] = result
        baseline = done.get("nothing")
        if request is requests[0][1]:
            facts = [f"{workload}, sequence {request.sequence or 'its own'}: no baseline"]
            if baseline is not None:
                facts = report.facts_lines(baseline, request.options.working_set_bytes)
            print(*facts, report.header_line(), sep="\n")
        report.add_bound(result, baseline, link, done.get("selective"))
        print(report.row_line(result), flush=True)
        notes += report.notes_lines(result, baseline, done.get("checkpoint"))
        notes += report.host_lines(result, baseline)
        run.keep(result)


def run_micro(run: Run) -> int:
    lives = run.args.live
    if run.args.tiny and lives == LIVE:
        lives = "10,40"
    run.record["micro"] = micro.measure_micro([int(text) for text in lives.split(",")], tiny=run.args.tiny)
    print(*run.header_lines(hardware()), *micro.micro_lines(run.record["micro"]), sep="\n")
    return 0


def run_workloads(run: Run) -> int | None:
    """The link, then every workload at every length."""
    args = run.args
    request = RowRequest(row="links", workload="W1", options=RowOptions(), tiny=args.tiny)
    measured = run.measure(request, child.run, here=args.tiny)
    if measured["status"] != "ok":
        print(f"the link was not measured: {measured['reason']}")
        return 2
    link = run.record["links"] = measured["links"]
    print(*run.header_lines(measured["hardware"]), report.link_line(link), report.HEADER, sep="\n")
    lengths = [int(text) for text in args.sequence.split(",")] if args.sequence else [None]
    for workload in ("W1", "W2") if args.workload == "all" else (args.workload,):
        for sequence in lengths:
            run_workload(run, workload, link, sequence)
    return None


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    return main_of(__file__, args, arguments, run_micro if args.micro else run_workloads, child.run)


if __name__ == "__main__":
    sys.exit(main())
