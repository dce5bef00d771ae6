#!/usr/bin/env python3
"""What a step costs with the optimizer's state on the GPU, or on the host: one table, one run, one GPU.

    python scripts/bench_optimizer.py                           alone, training and losses: the table
    python scripts/bench_optimizer.py --parts alone --rows ours_alone,torchao
    python scripts/bench_optimizer.py --parts growth            time by number of parameters and by threads
    python scripts/bench_optimizer.py --tiny                    the whole script on a CPU and the simulated
                                                                device, for its own sake

The bound is computed from rates measured in the same run. Each row runs in a process of its own; peers run if
they are installed, and a row that cannot run is printed with the reason. One invariant: a figure is printed
beside the figures of the same run that it is judged by.
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

from bench import optim_child  # noqa: E402
from bench.optim_child import OptimRequest  # noqa: E402
from bench.optim_work import OPTIMIZERS, OURS  # noqa: E402
from bench.outcome import outcome_of_process  # noqa: E402

GB = 1e9
PARTS = ("alone", "training", "losses", "growth")
ALONE = (
    "gpu_fused",
    "ours_alone",
    "ours_alone_half",
    "ours_alone_cpu",
    "ours_alone_streamed",
    "ours_no_overlap",
    "torchao",
    "megatron",
)
TRAINING = ("gpu_fused", "ours", "ours_after_backward", "ours_half", "torchao_gradients", "megatron")
CLIPPED = ("gpu_fused", "ours_after_backward")
LOSSES = ("gpu_fused", "gpu_foreach", "ours_after_backward", "ours_no_overlap")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", default="alone,training,losses", help=f"of {', '.join(PARTS)} (%(default)s)"
    )
    parser.add_argument("--rows", help=f"only these: {', '.join(OPTIMIZERS)}")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="bfloat16 takes float32 masters"
    )
    parser.add_argument("--layers", type=int, help="243 M parameters each (6)")
    parser.add_argument("--sequence", type=int, default=8192, help="of the training part (%(default)s)")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, help="timed steps (5; losses 50)")
    parser.add_argument("--growth-layers", default="1,2,4,8,16", help="of 243 M parameters (%(default)s)")
    parser.add_argument("--threads", default="4,8,16", help="of the CPU optimizer, for growth (%(default)s)")
    parser.add_argument("--bucket-mb", type=float, help="MiB of master weights a bucket, for rows of ours")
    parser.add_argument("--cpu-share", type=float, help="for rows of ours; 0 if not given")
    parser.add_argument("--row-timeout-s", type=float, default=240.0)
    parser.add_argument("--budget-s", type=float, help="start no row after this many seconds")
    parser.add_argument("--out", metavar="FILE", help="write every figure as JSON, after every row")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="on the CPU and the simulated device: proves the script, measures nothing",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--child-out", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    for given, known in ((parsed.parts, PARTS), (parsed.rows or "", tuple(OPTIMIZERS))):
        unknown = [name for name in given.split(",") if name and name not in known]
        if unknown:
            parser.error(f"unknown {', '.join(unknown)}; known are {', '.join(known)}")
    return parsed


class Bench:
    """One run: starts rows, keeps their results, prints them."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.began = time.monotonic()
        self.record: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "rows": [],
        }
        self.chosen = [name for name in (args.rows or "").split(",") if name]
        options = {
            "bucket_bytes": None if args.bucket_mb is None else round(args.bucket_mb * 2**20),
            "cpu_share": args.cpu_share,
        }
        self.options = {key: value for key, value in options.items() if value is not None}

    def wanted(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if not self.chosen or name in self.chosen]

    def row(self, **what: Any) -> dict[str, Any]:
        """One row's result, from a fresh process but for --tiny."""
        args = self.args
        if what.get("optimizer") in OURS:
            what["options"] = {**self.options, **what.get("options", {})}
        request = OptimRequest(**{"dtype": args.dtype, "layers": args.layers, "tiny": args.tiny, **what})
        result: dict[str, Any]
        if args.budget_s is not None and time.monotonic() - self.began > args.budget_s:
            result = {
                "request": what,
                "status": "not run",
                "reason": f"--budget-s {args.budget_s:.0f} is spent",
            }
        elif args.tiny:
            result = optim_child.run(request)
        else:
            result = outcome_of_process(
                Path(__file__).resolve(),
                request.to_json(),
                self.folder / "row.json",
                {"request": what},
                timeout_s=args.row_timeout_s,
                environment=os.environ,
            )
        self.record["rows"].append(result)
        if args.out:
            Path(args.out).write_text(json.dumps(self.record, indent=1, default=str))
        return result


def _line(label: str, result: dict[str, Any], rest: str) -> None:
    if result["status"] != "ok":
        print(f"  {label:<26} {result['status']}: {result.get('reason', '')}", flush=True)
        return
    print(
        f"  {label:<26} {result['step_ms']:>9.1f} ms   active {result['active_peak'] / GB:6.2f}  "
        f"reserved {result['reserved_peak'] / GB:6.2f}  pinned {result['pinned_bytes'] / GB:6.2f} GB   "
        f"{rest}",
        flush=True,
    )


def _ratio(result: dict[str, Any], other: dict[str, Any] | None, name: str) -> str:
    if other is None or other.get("status") != "ok" or other is result or not other["step_ms"]:
        return ""
    return f"{result['step_ms'] / other['step_ms']:.3f} of {name}  "


def run_alone(bench: Bench) -> None:
    args = bench.args
    rates = bench.row(kind="rates")
    bound = None
    if rates["status"] == "ok":
        found = rates["rates"]
        bound = rates["bound_ms_per_g"] * rates["parameters"] / 1e9
        lanes = [found[lane] / GB for lane in ("d2h", "h2d", "duplex")]
        print(
            f"rates: GB/s d2h {lanes[0]:.1f}, h2d {lanes[1]:.1f}, both at once {lanes[2]:.1f}; bound "
            f"{bound:.0f} ms, everything streamed"
        )
    else:
        print(f"no rates: {rates.get('reason', '')}")
    print("alone: from step() to the last new weight, gradients there, nothing else running")
    results: dict[str, dict[str, Any]] = {}
    for name in bench.wanted(ALONE):
        result = results[name] = bench.row(kind="alone", optimizer=name, steps=args.steps or 5)
        rest = ""
        if result["status"] == "ok":
            if name.startswith("ours") and bound and "half" not in name:
                rest += f"{result['step_ms'] / bound:.2f} of the bound  "
            rest += _ratio(result, results.get("ours_alone"), "ours_alone")
            numel = result["parameters"]
            rest += (
                f"step() returns after {result['issue_ms']:.1f} ms  built in {result['construct_s']:.1f} s"
            )
            if result.get("pin_s"):
                rest += (
                    f", of which pinning {result['pin_s']:.1f} "
                    f"({result['pinned_bytes'] / result['pin_s'] / GB:.1f} GB/s)"
                )
            if "host_bytes" in result:
                rest += (
                    f"  CPU share {result['cpu_share']}  host {result['host_bytes'] / numel:.2f} B a "
                    "parameter"
                )
        _line(name, result, rest)
    ours = results.get("ours_alone", {})
    for peer, most in (("torchao", 0.72), ("megatron", 0.25)):
        other = results.get(peer, {})
        if ours.get("status") == other.get("status") == "ok":
            print(f"  ours_alone is {ours['step_ms'] / other['step_ms']:.2f} of {peer} (to reach: {most})")


def run_training(bench: Bench) -> None:
    args = bench.args
    for clip in (False, True):
        names = bench.wanted(CLIPPED if clip else TRAINING)
        if not names:
            continue
        clipped = ", clipped by the global norm" if clip else ""
        print(f"training{clipped}: {args.microbatches} microbatches of {args.sequence}, consecutive steps")
        gpu: dict[str, Any] | None = None
        for name in names:
            result = bench.row(
                kind="training",
                optimizer=name,
                sequence=args.sequence,
                microbatches=args.microbatches,
                clip=clip,
                steps=args.steps or 5,
            )
            gpu = result if name == "gpu_fused" and result["status"] == "ok" else gpu
            rest = _ratio(result, gpu, "gpu_fused") if result["status"] == "ok" else ""
            if (
                result["status"] == "ok"
                and gpu is not None
                and "ring_bytes" in result
                and args.dtype == "float32"
            ):
                # the GPU's optimizer keeps 8 bytes a parameter; ours keeps the ring, of which each slot is
                # one bucket's moments
                most = (
                    gpu["active_peak"]
                    - 8 * result["parameters"] * (0.5 if "half" in name else 1.0)
                    + result["ring_bytes"]
                )
                rest += f"active {result['active_peak'] / max(1, most):.3f} of the limit  "
                rest += f"reserved {result['reserved_peak'] / max(1, result['active_peak']):.3f} of active  "
            if result["status"] == "ok" and "host_bytes" in result:
                rest += f"host {result['host_bytes'] / result['parameters']:.2f} B a parameter"
            _line(name, result, rest)


def run_losses(bench: Bench) -> None:
    steps = bench.args.steps or (5 if bench.args.tiny else 50)
    print(f"losses over {steps} steps, one microbatch of 512")
    results: dict[str, dict[str, Any]] = {}
    for name in bench.wanted(LOSSES):
        share = results.get("ours_after_backward", {}).get("cpu_share")  # bits are compared in one layout
        options = {} if share is None or name not in OURS else {"cpu_share": share}
        result = results[name] = bench.row(
            kind="losses", optimizer=name, sequence=512, microbatches=1, steps=steps, options=options
        )
        if result["status"] != "ok":
            print(f"  {name:<26} {result['status']}: {result.get('reason', '')}")
    good = {name: result for name, result in results.items() if result["status"] == "ok"}
    base = good.get("gpu_fused")
    for name, result in good.items():
        if base is not None and result is not base:
            apart = max(
                abs(one - other) / abs(other)
                for one, other in zip(result["losses"], base["losses"], strict=True)
            )
            print(
                f"  {name:<26} last loss {result['losses'][-1]:.6f}, at most {apart:.2e} apart from gpu_fused"
            )
    pair = [good[name] for name in ("ours_after_backward", "ours_no_overlap") if name in good]
    if len(pair) == 2:
        same = pair[0]["bits"] == pair[1]["bits"] and pair[0]["losses"] == pair[1]["losses"]
        shares = [result["cpu_share"] for result in pair]
        print(
            f"  overlap on and off: {'bitwise equal' if same else 'DIFFERENT'} (CPU shares {shares[0]} and "
            f"{shares[1]})"
        )


def run_growth(bench: Bench) -> None:
    args = bench.args
    layers = [1, 2] if args.tiny else [int(text) for text in args.growth_layers.split(",")]
    threads = [1] if args.tiny else [int(text) for text in args.threads.split(",")]
    print("growth: ours alone, ms by parameters and CPU threads")
    for count in layers:
        cells, numel = [], 0
        for number in threads:
            result = bench.row(
                kind="alone",
                optimizer="ours_alone",
                layers=count,
                threads=number,
                steps=args.steps or 3,
                warmup=2,
            )
            what = (
                f"{result['step_ms']:8.1f} (share {result['cpu_share']})"
                if result["status"] == "ok"
                else result.get("reason", "")
            )
            cells.append(f"{number} threads {what}")
            numel = result.get("parameters", numel)
        print(f"  {numel / 1e9:5.2f} G  " + "   ".join(cells), flush=True)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.tiny:
        torch.set_num_threads(1)
    if args.child is not None:
        Path(args.child_out).write_text(
            json.dumps(optim_child.run(OptimRequest.from_json(args.child)), default=str)
        )
        return 0
    if not args.tiny and not torch.cuda.is_available():
        print("these figures need a CUDA GPU; --tiny runs the arithmetic on the CPU and the simulated device")
        return 2
    with tempfile.TemporaryDirectory(prefix="bench-optimizer-") as name:
        bench = Bench(args, Path(name))
        about = optim_child.hardware()
        bench.record["hardware"] = about
        where = about.get("gpu", "no GPU (tiny)")
        print(
            f"{where}, torch {about['torch']}, Python {about['python']}, {about['cpus']} cores, "
            f"{bench.record['date']}, {args.dtype}"
        )
        if args.tiny:
            print("TINY: CPU and simulated device; no figure below is a measurement")
        for part in args.parts.split(","):
            {"alone": run_alone, "training": run_training, "losses": run_losses, "growth": run_growth}[part](
                bench
            )
        print(f"{time.monotonic() - bench.began:.0f} s in all", flush=True)
    return 1 if any(result["status"] == "failed" for result in bench.record["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
