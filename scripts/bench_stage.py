#!/usr/bin/env python3
"""What a training step costs with its activations on the device, recomputed, or on the host: one table, one
run, one GPU.

    python scripts/bench_stage.py --workload W1                 every default row of W1
    python scripts/bench_stage.py --workload W2 --rows ours_all --device-limit-gb 40 --profile-summary
    python scripts/bench_stage.py --workload W5 --profile       small operators: the host's time, by function
    python scripts/bench_stage.py --micro                       host cost a saved tensor
    python scripts/bench_stage.py --tiny                        the whole script on a CPU and the simulated
                                                                device, for its own sake

The limits of the machine, the baseline and every row are measured in the same run. Each row runs in a process
of its own unless --no-isolate is given. A row that cannot run is printed with the reason. One invariant: the
timed steps are never profiled, never deterministic, and never share a process with another row's pinned
memory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_SCRIPTS = Path(__file__).resolve().parent
for _folder in (str(_SCRIPTS.parent), str(_SCRIPTS)):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)

import torch  # noqa: E402

from bench import child, micro, profiling, report  # noqa: E402
from bench.child import DEFAULT_ROWS, LIMITED_ROWS, ROWS, RowRequest  # noqa: E402
from bench.outcome import outcome_of_process  # noqa: E402
from bench.rows import RowOptions  # noqa: E402

GB = 1e9
LIVE = "100,1000,10000"
_DEFAULT_LIMITS_GB = {"W1": (3.0,), "W2": (50.0, 40.0, 32.0, 22.0), "W3": (3.0,), "W5": (0.0,)}
_LIMIT_MEANS = {"W1": "saved", "W2": "total", "W3": "saved", "W5": "saved"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workload", choices=[*DEFAULT_ROWS, "all"], default="all", help='"all" is W1 and W2'
    )
    parser.add_argument(
        "--rows", help=f"comma-separated, of {', '.join(ROWS)}; nothing is always run first, for the ratios"
    )
    parser.add_argument(
        "--device-limit-gb",
        help=(
            f"comma-separated GB of 1e9 for {' and '.join(LIMITED_ROWS)}, a row each; 0 is no "
            "limit (W1: 3; W2: 50,40,32,22; W5: 0)"
        ),
    )
    parser.add_argument(
        "--limit-means",
        choices=["auto", "saved", "total"],
        default="auto",
        help="saved: saved tensors on the device. total: all active bytes; the engine is "
        "given the total less what is measured as resident "
        "(weights, gradients, inputs) less --working-set-gb. auto: total on W2, saved elsewhere",
    )
    parser.add_argument(
        "--working-set-gb",
        type=float,
        default=2.0,
        help="set aside from a total limit for a backward's own tensors (%(default)s)",
    )
    parser.add_argument(
        "--max-spilling-gb", type=float, help="bytes in flight to the host; the engine's default if not given"
    )
    parser.add_argument(
        "--max-restoring-gb", type=float, help="bytes fetched ahead; the engine's default if not given"
    )
    parser.add_argument("--piece-mb", type=float, help="piece of a group that leaves at once, MB of 2**20")
    parser.add_argument("--min-elements", type=int, help="smallest saved tensor that leaves, in elements")
    parser.add_argument(
        "--host-limit-gb",
        type=float,
        default=110.0,
        help="pinned bytes that a row may need at most (%(default)s)",
    )
    parser.add_argument(
        "--host-reserve-gb",
        type=float,
        help="pinned before step 1; derived from the bytes to be moved if not given",
    )
    parser.add_argument("--layers", type=int)
    parser.add_argument("--sequence", type=int)
    parser.add_argument("--samples", type=int, help="timed steps a row (W1 10, the others 5)")
    parser.add_argument("--warmup", type=int, help="steps between the first and the timed ones")
    parser.add_argument("--no-gradients", action="store_true", help="leave out the comparison of gradients")
    parser.add_argument("--no-isolate", action="store_true", help="run the rows in this process")
    parser.add_argument("--row-timeout-s", type=float, default=300.0)
    parser.add_argument(
        "--budget-s", type=float, help="start no row after this many seconds; rows left out are printed"
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="chrome trace of one step of each row but nothing (the row's name is put before the suffix)",
    )
    parser.add_argument(
        "--profile-summary",
        action="store_true",
        help="how busy compute, d2h and h2d were in one profiled step of each row but nothing",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="functions of the host that take most of two steady steps, by cProfile, for each row",
    )
    parser.add_argument(
        "--micro", action="store_true", help="host cost a saved tensor instead of the workloads"
    )
    parser.add_argument("--live", default=LIVE, help="live tensors for --micro (%(default)s)")
    parser.add_argument("--out", metavar="FILE", help="write every figure and sample as JSON")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="tiny shapes on the CPU and the simulated device: proves the script, measures nothing",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--child-out", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    unknown = [name for name in (parsed.rows or "").split(",") if name and name not in ROWS]
    if unknown:
        parser.error(f"unknown rows {', '.join(unknown)}; known are {', '.join(ROWS)}")
    return parsed


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else round(gigabytes * GB)


def requests_for(args: argparse.Namespace, workload: str, folder: Path) -> list[tuple[str, RowRequest]]:
    """(label, request) of every row of one workload, nothing first."""
    names = [name for name in (args.rows.split(",") if args.rows else DEFAULT_ROWS[workload]) if name]
    names = ["nothing", *(name for name in names if name != "nothing")]
    limits = (
        [float(text) for text in args.device_limit_gb.split(",")]
        if args.device_limit_gb
        else list(_DEFAULT_LIMITS_GB[workload])
    )
    means = _LIMIT_MEANS[workload] if args.limit_means == "auto" else args.limit_means
    if args.tiny and not args.device_limit_gb:
        limits, means = [0.0002], "saved"
    shared: dict[str, Any] = {
        "working_set_bytes": _bytes(args.working_set_gb),
        "max_spilling_bytes": _bytes(args.max_spilling_gb),
        "max_restoring_bytes": _bytes(args.max_restoring_gb),
        "piece_bytes": None if args.piece_mb is None else round(args.piece_mb * 2**20),
        "host_limit_bytes": _bytes(args.host_limit_gb),
        "host_reserve_bytes": _bytes(args.host_reserve_gb),
        "min_elements": args.min_elements if args.min_elements is not None else (1 if args.tiny else None),
    }
    rows: list[tuple[str, RowRequest]] = []
    for name in names:
        for limit in limits if name in LIMITED_ROWS else [0.0]:
            label = f"{name}@{limit:g}{means[0]}" if limit else name
            options = RowOptions(**shared | ({f"{means}_limit_bytes": _bytes(limit)} if limit else {}))
            chosen = name != "nothing" or names == ["nothing"]
            request = RowRequest(
                row=name,
                workload=workload,
                options=options,
                tiny=args.tiny,
                layers=args.layers,
                sequence=args.sequence,
                samples=args.samples,
                warmup=args.warmup,
                gradients=not args.no_gradients,
                reference=str(folder / f"reference-{workload}.pt"),
                trace=_trace_path(args.trace, workload, label) if args.trace is not None and chosen else None,
                profile=args.profile_summary and chosen,
                host_profile=args.profile,
                label=label,
            )
            rows.append((label, request))
    return rows


def _trace_path(given: str, workload: str, label: str) -> str:
    path = Path(given)
    return str(path.with_name(f"{path.stem}.{workload}.{label}{path.suffix or '.json'}").resolve())


def run_row(args: argparse.Namespace, request: RowRequest, folder: Path) -> dict[str, Any]:
    """One row's result, from a fresh process unless told otherwise; a process that dies is a failed row."""
    if args.no_isolate or args.tiny:
        return child.run(request)
    # cuBLAS reads this once, when the process first uses it
    environment = {
        **os.environ,
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
    }
    about = {"row": request.row, "workload": request.workload}
    return outcome_of_process(
        Path(__file__).resolve(),
        request.to_json(),
        folder / "row.json",
        about,
        timeout_s=args.row_timeout_s,
        environment=environment,
    )


def run_workload(
    args: argparse.Namespace, workload: str, link: dict[str, Any] | None, folder: Path, record: dict[str, Any]
) -> None:
    """Run and print one workload's rows."""
    baseline: dict[str, Any] | None = None
    checkpoint: dict[str, Any] | None = None
    selective: dict[str, Any] | None = None
    requests = requests_for(args, workload, folder)
    results: list[dict[str, Any]] = record["results"]
    notes: list[str] = []
    for label, request in requests:
        result: dict[str, Any]
        if args.budget_s is not None and time.monotonic() - record["began"] > args.budget_s:
            result = {
                "row": request.row,
                "workload": workload,
                "status": "not run",
                "reason": f"--budget-s {args.budget_s:.0f} is spent",
            }
        else:
            result = run_row(args, request, folder)
        result["label"] = label
        if request.row == "nothing":
            baseline = result if result["status"] == "ok" else None
            for line in (
                report.facts_lines(result, request.options.working_set_bytes)
                if baseline
                else [f"{workload}: no baseline"]
            ):
                print(line)
            print(report.header_line())
        if request.row == "checkpoint" and result["status"] == "ok":
            checkpoint = result
        if request.row == "selective" and result["status"] == "ok":
            selective = result
        report.add_bound(result, baseline, link, selective)
        print(report.row_line(result), flush=True)
        notes += report.notes_lines(result, baseline, checkpoint) + report.host_lines(result, baseline)
        notes += result["lanes"]["text"] if "lanes" in result else []
        notes += profiling.profile_lines(result) if "host_profile" in result else []
        results.append(result)
        write(args, record)
    left_out = [name for name in ROWS if name not in {request.row for _, request in requests}]
    for line in notes:
        print(line)
    print(f"  not among this run's rows: {', '.join(left_out)}", flush=True)


def write(args: argparse.Namespace, record: dict[str, Any]) -> None:
    """After every row, so that a run that is cut short leaves what it has."""
    if args.out:
        Path(args.out).write_text(
            json.dumps({key: value for key, value in record.items() if key != "began"}, indent=1, default=str)
        )


def run_micro(args: argparse.Namespace, record: dict[str, Any]) -> int:
    record["hardware"] = child.hardware()
    if not args.tiny and not record["hardware"]["cuda"]:
        print(
            "no CUDA device: these figures need a GPU; --tiny --micro runs the arithmetic on the simulated "
            "device"
        )
        return 2
    lives = [10, 40] if args.tiny and args.live == LIVE else [int(text) for text in args.live.split(",")]
    record["micro"] = micro.measure_micro(lives, tiny=args.tiny)
    for line in micro.micro_lines(record["micro"]):
        print(line)
    write(args, record)
    return 0


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.tiny:
        torch.set_num_threads(1)  # operations this small only lose by threads
    if args.child is not None:
        Path(args.child_out).write_text(json.dumps(child.run(RowRequest.from_json(args.child)), default=str))
        return 0
    record: dict[str, Any] = {
        "began": time.monotonic(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": ["bench_stage.py", *(sys.argv[1:] if arguments is None else arguments)],
        "results": [],
    }
    if args.micro:
        return run_micro(args, record)
    with tempfile.TemporaryDirectory(prefix="bench-stage-") as name:
        folder = Path(name)
        measured = run_row(
            args, RowRequest(row="links", workload="W1", options=RowOptions(), tiny=args.tiny), folder
        )
        record["hardware"], link = measured.get("hardware", {}), measured.get("links", {})
        if measured["status"] != "ok":
            reason = measured.get("reason", "")
            print(
                f"{reason}: these figures need a CUDA GPU; --tiny runs the arithmetic on the CPU and the "
                "simulated device"
            )
            return 2
        record["links"] = link
        about = record["hardware"]
        versions = f"torch {about['torch']}, Python {about['python']}"
        print(f"{about.get('gpu', 'no GPU (tiny)')}, {versions}, {about['cpus']} cores, {record['date']}")
        if args.tiny:
            print(
                "TINY: CPU and simulated device; link rates are stand-ins and no figure below is a "
                "measurement"
            )
        print(
            f"link GB/s: d2h {link['d2h'] / GB:.1f}, h2d {link['h2d'] / GB:.1f}; both at once "
            f"{link['duplex_d2h'] / GB:.1f} + "
            f"{link['duplex_h2d'] / GB:.1f} = {(link['duplex_d2h'] + link['duplex_h2d']) / GB:.1f}"
        )
        print(report.HEADER)
        for workload in ("W1", "W2") if args.workload == "all" else (args.workload,):
            run_workload(args, workload, link, folder, record)
        print(f"{time.monotonic() - record['began']:.0f} s in all", flush=True)
        write(args, record)
    bad = [result["label"] for result in record["results"] if result["status"] == "failed"]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
