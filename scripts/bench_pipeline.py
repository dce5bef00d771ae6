#!/usr/bin/env python3
"""What offload costs and saves in a real pipeline: torch's schedules over NCCL, a GPU for each rank, and the link they share.

    torchrun --nproc-per-node 2 scripts/bench_pipeline.py --verify --out pipeline.json
    torchrun --nproc-per-node 4 scripts/bench_pipeline.py --schedules 1f1b,zbv --saved-limit-gb 30,15 --budget-s 300
    torchrun --nproc-per-node 2 scripts/bench_pipeline.py --tiny --verify        gloo and the simulated device, for the script's own sake

The model is derived from the GPU's memory so that 1F1B only just fits with nothing offloaded; the calculation is printed. Rows run in
processes of their own, so that one that runs out of memory is a row of the table and not the end of it. One invariant: rows come in the
order of their value, and what a run that is cut short has measured is printed and written.
"""

from __future__ import annotations

import argparse
import datetime
import functools
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

from bench.child import hardware  # noqa: E402
from offload.policy.actions import Action  # noqa: E402
from parallel.launch import Ranks, choose_device, launched, ranks_from_environment, run_rank  # noqa: E402
from parallel.schedules import check_counts, schedule_named  # noqa: E402
from pipelines import report  # noqa: E402
from pipelines.bounds import compare_rates, compute_seconds, rates_of  # noqa: E402
from pipelines.launches import Ending, Launcher, meeting_store  # noqa: E402
from pipelines.memory import BlockFacts, need_lines, need_of  # noqa: E402
from pipelines.requests import KINDS, SCHEDULE_NAMES, JobShape, Request, RowRequest, rows_of  # noqa: E402
from pipelines.worker import OUT_OF_MEMORY, complete, run_rows, run_worker  # noqa: E402

GB = 1e9
HOST_GB_A_GPU = 110.0
DONE = "done"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(f"{message} (--help lists the options)")


def parse(arguments: list[str], ranks: Ranks) -> argparse.Namespace:
    """Parse and check. Raises ValueError that says what to give instead."""
    parser = _Parser(prog="bench_pipeline.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default=",".join(SCHEDULE_NAMES), help="comma-separated, the most important first (%(default)s)")
    parser.add_argument("--rows", default="nothing,ours,attention,delta", help=f"of {', '.join(KINDS[1:-1])} (%(default)s)")
    parser.add_argument("--verify", action="store_true", help="compare every gradient with those without offload, on a smaller model")
    parser.add_argument("--layers", type=int, help="of one rank; derived from the GPU's memory if not given")
    parser.add_argument("--sequence", type=int, help="tokens of a sequence, one a microbatch (8192)")
    parser.add_argument("--microbatches", type=int, help="a step (twice the ranks)")
    parser.add_argument("--optimizer-bytes", type=int, default=12, help="held for each parameter, allocated and not stepped (%(default)s)")
    parser.add_argument(
        "--saved-limit-gb", help="comma-separated GB of 1e9 of saved tensors on each device, a row each (a half and a quarter of 1f1b's)"
    )
    parser.add_argument("--samples", type=int, default=3, help="timed steps a row (%(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="steps between the first and the timed ones; the plan needs 3 (%(default)s)")
    parser.add_argument("--host-limit-gb", type=float, help=f"pinned by all ranks of this host together ({HOST_GB_A_GPU:g} a rank)")
    parser.add_argument("--budget-s", type=float, help="start no row after this many seconds; rows left out are printed")
    parser.add_argument("--row-timeout-s", type=float, default=150.0, help="a row without an end for so long has hung (%(default)s)")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="what a message between ranks may take (%(default)s)")
    parser.add_argument("--out", metavar="FILE", help="write every figure and sample as JSON")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on gloo and the simulated device: measures nothing")
    parser.add_argument("--isolate", action=argparse.BooleanOptionalAction, help="rows in processes of their own (not with --tiny)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.schedule_list = [schedule_named(name).name for name in args.schedules.split(",") if name]
    args.row_list = [name for name in args.rows.split(",") if name]
    unknown = [name for name in args.row_list if name not in KINDS[1:-1]]
    if unknown or not args.schedule_list:
        raise ValueError(f"--rows {', '.join(unknown)}: known are {', '.join(KINDS[1:-1])}" if unknown else "--schedules is empty")
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
            raise ValueError(f"--layers {args.layers} cannot be cut into the {virtual} virtual stages of {name}; give a multiple")
    args.isolate = (not args.tiny) if args.isolate is None else args.isolate
    return args


def request_of(args: argparse.Namespace, ranks: Ranks, began: float) -> Request:
    limits = [round(float(text) * GB) for text in args.saved_limit_gb.split(",")] if args.saved_limit_gb else []
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
    host_gb = args.host_limit_gb if args.host_limit_gb is not None else (1.0 if args.tiny else HOST_GB_A_GPU * ranks.local_world)
    return Request(
        rows=rows_of(args.schedule_list, args.row_list, limits, verify=args.verify),
        shape=shape,
        device="cpu" if args.tiny else "cuda",
        host_limit_bytes=round(host_gb * GB),
        timeout_s=args.timeout_s,
        deadline=None if args.budget_s is None else began + args.budget_s,
    )


class Run:
    """The first rank's record of a run: rows as they come, text at the end."""

    def __init__(self, args: argparse.Namespace, request: Request, ranks: Ranks, arguments: list[str], began: float) -> None:
        self.args, self.request, self.ranks, self.began = args, request, ranks, began
        self.results: list[dict[str, Any]] = []
        self.notes: list[str] = []
        launch = [f"torchrun --nproc-per-node {ranks.local_world}"] if ranks.under_torchrun else ["python"]
        self.record: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join([*launch, "scripts/bench_pipeline.py", *arguments]),
            "hardware": {},
        }

    def add(self, result: dict[str, Any]) -> None:
        self.results.append(result)
        print(report.progress_line(result, time.time() - self.began), flush=True)
        if result["row"]["kind"] == "links" and result["status"] == "ok":
            print("\n".join(self._calculation()), flush=True)
        self.write()

    @property
    def facts(self) -> dict[str, Any] | None:
        """What `links` measured; the fullest device's figures are in every rank's."""
        found = [result for result in self.results if result["row"]["kind"] == "links" and result["status"] == "ok"]
        return found[0]["ranks"][0] if found else None

    def completed(self, rows: list[RowRequest]) -> tuple[list[RowRequest], JobShape]:
        """As the workers complete them, from the same figures."""
        if self.facts is None:
            return rows, self.request.shape
        return complete(rows, self.request.shape, BlockFacts.from_json(self.facts["block"]), self.ranks.world)

    def write(self) -> None:
        """After every row, so that a run that is cut short leaves what it has."""
        if self.args.out:
            Path(self.args.out).write_text(json.dumps(self.record | {"results": self.results, "notes": self.notes}, indent=1, default=str))

    def _calculation(self) -> list[str]:
        assert self.facts is not None
        _, shape = self.completed(list(self.request.rows))
        block = BlockFacts.from_json(self.facts["block"])
        assert shape.layers is not None
        live = min(self.ranks.world, shape.microbatches)
        need = need_of(block, layers=shape.layers, live=live, optimizer_bytes=shape.optimizer_bytes)
        return need_lines(
            block,
            need,
            sequence=shape.sequence,
            optimizer_bytes=shape.optimizer_bytes,
            ranks=self.ranks.world,
            microbatches=shape.microbatches,
        )

    def header(self) -> list[str]:
        about = self.record["hardware"] = hardware_without_a_context(self.args.tiny)
        gpu = f"{self.ranks.world} x {about['gpu']}" if about.get("gpu") else "no GPU"
        lines = [f"{gpu}, torch {about['torch']}, Python {about['python']}, {about['cpus']} cores, {self.record['date']}"]
        lines.append(self.record["command"])
        if self.args.tiny:
            lines.append("TINY: gloo and the simulated device; link rates are stand-ins and no figure below is a measurement")
        return lines

    def report(self) -> list[str]:
        tokens = self.request.shape.microbatches * self.request.shape.sequence
        links = [result for result in self.results if result["row"]["kind"] == "links" and result["status"] == "ok"]
        lines = [""]
        if links:
            lines += [*self._calculation(), "", *report.link_lines(links[0]), ""]
        lines += [*report.steps_lines(self.results, tokens), ""]
        lines += report.verify_lines(self.results)
        for result in self.results:
            if result["row"]["kind"] == "delta":
                lines += ["", *report.delta_lines(result)]
        if links:
            lines += ["", *self._rates()]
        return [*lines, *self.notes, f"{time.time() - self.began:.0f} s in all"]

    def _rates(self) -> list[str]:
        """Bounds and plans, for the limited rows of the first schedule."""
        try:
            self.record["rates"] = comparisons = compared(self.results, self.ranks.world)
        except ImportError as error:
            return [str(error)]
        return report.rates_lines(comparisons)


def compared(results: list[dict[str, Any]], world: int) -> list[dict[str, Any]]:
    """`compare_rates` of every limited row of the first schedule that ran, a rank at a time."""
    links = next(result for result in results if result["row"]["kind"] == "links")["ranks"]
    block = BlockFacts.from_json(links[0]["block"])
    found = []
    ours = [result for result in results if result["row"]["kind"] == "ours" and result["status"] == "ok"]
    for result in [result for result in ours if result["row"]["schedule"] == ours[0]["row"]["schedule"]]:
        baseline = next(
            (
                other
                for other in results
                if other["status"] == "ok" and other["row"]["kind"] == "nothing" and other["row"]["schedule"] == result["row"]["schedule"]
            ),
            None,
        )
        for number, rank in enumerate(result["ranks"]):
            actions = [Action(*action) for action in rank["actions"]]
            virtual = len({action.stage for action in actions})
            measured = None
            if baseline is not None:
                timed = baseline["ranks"][number]
                pairs = zip(timed["actions"], timed["action_ms"], strict=True)
                measured = {str(Action(*action)): ms / 1e3 for action, ms in pairs}
            compute_s = compute_seconds(actions, block, rank["layers"] / virtual, measured)
            sets = {tuple(entry["ranks"]): entry["rates"] for entry in links[number]["rates"]}
            lone, shared = rates_of(sets[(number,)]), rates_of(sets[tuple(range(world))])
            limit = result["row"]["saved_limit_bytes"]
            entry = compare_rates(actions, compute_s, block, rank["layers"] // virtual, limit, lone, shared)
            measured_ms = sorted(rank["walls_ms"])[len(rank["walls_ms"]) // 2]
            found.append(entry | {"label": result["label"], "rank": number, "measured_ms": measured_ms})
    return found


def hardware_without_a_context(tiny: bool) -> dict[str, Any]:
    """bench.child's words on the machine; a launcher leaves the GPU alone, so the name is asked of a process that ends."""
    import subprocess

    if tiny or not torch.cuda.is_available():
        return hardware() | {"cuda": False}
    code = "import json, sys; sys.path.insert(0, sys.argv[1]); from bench.child import hardware; print(json.dumps(hardware()))"
    done = subprocess.run([sys.executable, "-c", code, str(_SCRIPTS)], capture_output=True, text=True, check=True, cwd=_SCRIPTS.parent)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_here(request: Request, ranks: Ranks, run: Run | None) -> None:
    """All rows in this process."""
    device = choose_device(request.device, ranks)
    with launched(ranks, device, timeout=request.timeout_s) as rank:
        run_rows(request, rank, run.add if run is not None else _ignore, _ignore)


def _ignore(_: Any) -> None:
    """Not the first rank, or nobody watches."""


def run_isolated(args: argparse.Namespace, request: Request, ranks: Ranks, run: Run | None) -> None:
    """Rows in sets of processes: a new set after one that ended early, with the rows that are left."""
    store = meeting_store(ranks, "launchers", timeout_s=args.row_timeout_s + 120.0)
    with tempfile.TemporaryDirectory(prefix="bench-pipeline-") as folder:
        launcher = Launcher(ranks, store, Path(folder), silence_s=args.row_timeout_s)
        left, number = list(request.rows), 0
        while True:
            name = f"set{number}"
            if run is not None:
                facts = run.facts
                said = DONE if not left else request.with_(rows=tuple(left), name=name, facts=facts).to_json()
                if store is not None:
                    store.set(f"{name}/request", said)
            else:
                said = store.get(f"{name}/request").decode()
            if said == DONE:
                break
            mine = Request.from_json(said).with_(out=folder)
            command = [sys.executable, str(Path(__file__).resolve()), "--worker", mine.to_json()]
            environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")}
            endings = launcher.run(name, command, environment)
            if run is not None:
                left = after_set(run, left, endings, Path(folder) / f"results-{name}.jsonl")
            number += 1
        if store is not None:  # whoever hosts the store leaves last
            store.add("left", 1)
            while ranks.rank == 0 and store.add("left", 0) < ranks.world:
                time.sleep(0.05)


def after_set(run: Run, left: list[RowRequest], endings: list[Ending], results: Path) -> list[RowRequest]:
    """Take in what a set of processes has measured, and the row at which it ended; the rows that are still to be run."""
    found = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    for result in found:
        run.add(result)
    bad = {rank: ending for rank, ending in enumerate(endings) if ending.code != 0}
    rows, _ = run.completed(left)
    left = rows[len(found) :]
    if not bad:
        return []
    full = {rank: ending for rank, ending in bad.items() if ending.code == OUT_OF_MEMORY}
    blamed = full or {rank: ending for rank, ending in bad.items() if ending.ended_by_itself} or bad
    reason = "; ".join(f"rank {rank}: {_why(ending)}" for rank, ending in blamed.items())
    if not left:
        run.notes.append(f"after the last row: {reason}")
        return []
    row = left[0]
    run.add(
        {
            "row": vars_of(row),
            "label": row.label,
            "status": "out of memory" if full else "failed",
            "reason": reason,
            "endings": {rank: {"code": ending.code, "reason": ending.reason, "failure": ending.failure} for rank, ending in bad.items()},
        }
    )
    if row.kind == "links":
        run.notes.append("without the link's rates and the block's figures no other row can run")
        return []
    return left[1:]


def vars_of(row: RowRequest) -> dict[str, Any]:
    return {name: getattr(row, name) for name in RowRequest.__dataclass_fields__}


def _why(ending: Ending) -> str:
    failure = ending.failure or {}
    if failure.get("out_of_memory") and "active_bytes" in failure:
        return f"out of memory with {failure['active_bytes'] / GB:.1f} GB active, {failure['reserved_bytes'] / GB:.1f} GB reserved"
    return str(ending.reason)


def main(arguments: list[str], ranks: Ranks) -> int:
    began = time.time()
    args = parse(arguments, ranks)
    if args.tiny:
        torch.set_num_threads(1)  # operations this small only lose by threads
    elif not torch.cuda.is_available():
        raise ValueError("these figures need a CUDA GPU for each rank; --tiny runs the script on gloo and the simulated device")
    request = request_of(args, ranks, began)
    run = Run(args, request, ranks, arguments, began) if ranks.rank == 0 else None
    if run is not None:
        print("\n".join(run.header()), flush=True)
    if args.isolate:
        run_isolated(args, request, ranks, run)
    else:
        run_here(request, ranks, run)
    if run is None:
        return 0
    print("\n".join(run.report()), flush=True)
    run.write()
    wrong = [result for result in run.results if result["status"] == "failed"]
    wrong += [result for result in run.results if result["row"]["kind"] == "verify" and not report.equal_gradients(result)]
    return 1 if any(result["status"] not in ("not run", "skipped") for result in wrong) else 0


if __name__ == "__main__":
    _ranks = ranks_from_environment()
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        _request = Request.from_json(sys.argv[2])
        run_worker(_request, _ranks, functools.partial(meeting_store, _ranks, _request.name, _request.timeout_s))
    run_rank(functools.partial(main, sys.argv[1:], _ranks), _ranks)
