#!/usr/bin/env python3
"""What offload costs and saves in a real pipeline: torch's schedules over NCCL, a GPU for each rank, and the
link they share.

    torchrun --nproc-per-node 2 scripts/bench_pipeline.py --verify --out pipeline.json
    torchrun --nproc-per-node 4 scripts/bench_pipeline.py --schedules 1f1b,zbv --saved-limit-gb 30,15
    --budget-s 300
    torchrun --nproc-per-node 2 scripts/bench_pipeline.py --tiny --verify        gloo and the simulated
                                                                                 device, for the script's own
                                                                                 sake

The model is derived from the GPU's memory so that 1F1B only just fits with nothing offloaded; the calculation
is printed. Rows run in processes of their own, so that one that runs out of memory is a row of the table and
not the end of it. One invariant: rows come in the order of their value, and what a run that is cut short has
measured is printed and written.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

_SCRIPTS = Path(__file__).resolve().parent
for _folder in (str(_SCRIPTS.parent), str(_SCRIPTS)):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)

import torch  # noqa: E402

from parallel.launch import Ranks, choose_device, launched, ranks_from_environment, run_rank  # noqa: E402
from parallel.schedules import check_counts, schedule_named  # noqa: E402
from pipelines.launches import meeting_store  # noqa: E402
from pipelines.record import Run  # noqa: E402
from pipelines.report import equal_gradients  # noqa: E402
from pipelines.requests import KINDS, SCHEDULE_NAMES, JobShape, Request, rows_of  # noqa: E402
from pipelines.sets import run_isolated  # noqa: E402
from pipelines.worker import run_rows, run_worker  # noqa: E402

GB = 1e9
HOST_GB_A_GPU = 110.0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(f"{message} (--help lists the options)")


def parse(arguments: list[str], ranks: Ranks) -> argparse.Namespace:
    """Parse and check. Raises ValueError that says what to give instead."""
    parser = _Parser(
        prog="bench_pipeline.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--schedules",
        default=",".join(SCHEDULE_NAMES),
        help="comma-separated, the most important first (%(default)s)",
    )
    parser.add_argument(
        "--rows", default="nothing,ours,attention,delta", help=f"of {', '.join(KINDS[1:-1])} (%(default)s)"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare every gradient with those without offload, on a smaller model",
    )
    parser.add_argument("--layers", type=int, help="of one rank; derived from the GPU's memory if not given")
    parser.add_argument("--sequence", type=int, help="tokens of a sequence, one a microbatch (8192)")
    parser.add_argument("--microbatches", type=int, help="a step (twice the ranks)")
    parser.add_argument(
        "--optimizer-bytes",
        type=int,
        default=12,
        help="held for each parameter, allocated and not stepped (%(default)s)",
    )
    parser.add_argument(
        "--saved-limit-gb",
        help=(
            "comma-separated GB of 1e9 of saved tensors on each device, a row each (a half "
            "and a quarter of 1f1b's)"
        ),
    )
    parser.add_argument("--samples", type=int, default=3, help="timed steps a row (%(default)s)")
    parser.add_argument(
        "--warmup",
        type=int,
        default=6,
        help="steps after the first, before the timed ones; plan and trial need 6 (%(default)s)",
    )
    parser.add_argument(
        "--host-limit-gb",
        type=float,
        help=f"pinned by all ranks of this host together ({HOST_GB_A_GPU:g} a rank)",
    )
    parser.add_argument(
        "--budget-s", type=float, help="start no row after this many seconds; rows left out are printed"
    )
    parser.add_argument(
        "--row-timeout-s",
        type=float,
        default=200.0,
        help="a row without an end for so long has hung (%(default)s)",
    )
    parser.add_argument(
        "--timeout-s", type=float, default=120.0, help="what a message between ranks may take (%(default)s)"
    )
    parser.add_argument("--out", metavar="FILE", help="write every figure and sample as JSON")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny shapes on gloo and the simulated device: measures nothing"
    )
    parser.add_argument(
        "--isolate",
        action=argparse.BooleanOptionalAction,
        help="rows in processes of their own (not with --tiny)",
    )
    args = parser.parse_args(arguments)
    args.schedule_list = [schedule_named(name).name for name in args.schedules.split(",") if name]
    args.row_list = [name for name in args.rows.split(",") if name]
    unknown = [name for name in args.row_list if name not in KINDS[1:-1]]
    if unknown or not args.schedule_list:
        raise ValueError(
            f"--rows {', '.join(unknown)}: known are {', '.join(KINDS[1:-1])}"
            if unknown
            else "--schedules is empty"
        )
    args.microbatches = args.microbatches if args.microbatches is not None else max(2, 2 * ranks.world)
    args.sequence = args.sequence if args.sequence is not None else (32 if args.tiny else 8192)
    for name in ("layers", "sequence", "samples"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}; it must be at least 1")
    for name in args.schedule_list:
        spec = schedule_named(name)
        virtual = spec.default_virtual_stages
        check_counts(spec, ranks=ranks.world, virtual_stages=virtual, microbatches=args.microbatches)
        if args.layers is not None and args.layers % virtual:
            raise ValueError(
                f"--layers {args.layers} cannot be cut into the {virtual} virtual stages of {name}; give a "
                "multiple"
            )
    args.isolate = (not args.tiny) if args.isolate is None else args.isolate
    return args


def request_of(args: argparse.Namespace, ranks: Ranks, began: float) -> Request:
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
    host_gb = (
        args.host_limit_gb
        if args.host_limit_gb is not None
        else (1.0 if args.tiny else HOST_GB_A_GPU * ranks.local_world)
    )
    return Request(
        rows=rows_of(args.schedule_list, args.row_list, limits, verify=args.verify),
        shape=shape,
        device="cpu" if args.tiny else "cuda",
        host_limit_bytes=round(host_gb * GB),
        timeout_s=args.timeout_s,
        deadline=None if args.budget_s is None else began + args.budget_s,
    )


def run_here(request: Request, ranks: Ranks, run: Run | None) -> None:
    """All rows in this process."""
    device = choose_device(request.device, ranks)
    with launched(ranks, device, timeout=request.timeout_s) as rank:
        run_rows(request, rank, run.add if run is not None else _ignore, _ignore)


def _ignore(_: Any) -> None:
    """Not the first rank, or nobody watches."""


def main(arguments: list[str], ranks: Ranks) -> int:
    began = time.time()
    args = parse(arguments, ranks)
    if args.tiny:
        torch.set_num_threads(1)  # operations this small only lose by threads
    elif not torch.cuda.is_available():
        raise ValueError(
            "these figures need a CUDA GPU for each rank; --tiny runs the script on gloo and the simulated "
            "device"
        )
    request = request_of(args, ranks, began)
    launcher = f"torchrun --nproc-per-node {ranks.local_world}" if ranks.under_torchrun else "python"
    command = " ".join([launcher, "scripts/bench_pipeline.py", *arguments])
    run = Run(request, ranks, command, began=began, out=args.out) if ranks.rank == 0 else None
    if run is not None:
        print("\n".join(run.header()), flush=True)
    if args.isolate:
        run_isolated(request, ranks, run, script=Path(__file__).resolve(), silence_s=args.row_timeout_s)
    else:
        run_here(request, ranks, run)
    if run is None:
        return 0
    print("\n".join(run.report()), flush=True)
    run.write()
    wrong = [result for result in run.results if result["status"] == "failed"]
    wrong += [
        result for result in run.results if result["row"]["kind"] == "verify" and not equal_gradients(result)
    ]
    return 1 if any(result["status"] not in ("not run", "skipped") for result in wrong) else 0


def start() -> NoReturn:
    """This process as the command line says: a rank's launcher, or the worker that a launcher starts."""
    ranks = ranks_from_environment()
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        request = Request.from_json(sys.argv[2])
        run_worker(request, ranks, functools.partial(meeting_store, ranks, request.name, request.timeout_s))
    run_rank(functools.partial(main, sys.argv[1:], ranks), ranks)


if __name__ == "__main__":
    start()
