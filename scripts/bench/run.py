"""A run of a benchmark: its rows, each in a process of its own, and the record of them.

The caching allocator, the pinned pool and the libraries' handles of one row would change the next, hence the
processes. Two invariants: whatever happens to a row, its result is a dictionary with a status and, unless
that is "ok", the reason; and the record is written after every row, so a run that is cut short leaves what it
has measured.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import json
import math
import os
import pickle
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

_STDERR_CHARACTERS = 4000
NEEDS_GPU = "these figures need a CUDA GPU; --tiny runs the script on the CPU and the simulated device"


class NotInstalledError(Exception):
    """The library that this row needs is not importable."""


class SkippedError(Exception):
    """The row was not run, for a reason other than a missing library."""


def parser_of(
    doc: str | None,
    *,
    row_timeout_s: float | None = None,
    kind: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> argparse.ArgumentParser:
    """Parser with the options that all benchmarks have. row_timeout_s: None for a script that measures in its
    own process alone, which then has no --row-timeout-s and no --budget-s."""
    parser = kind(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(budget_s=None, child=None)
    out = "write every figure and sample as JSON, after every row"
    tiny = "tiny shapes on the CPU and the simulated device: proves the script, measures nothing"
    parser.add_argument("--out", metavar="FILE", help=out)
    parser.add_argument("--tiny", action="store_true", help=tiny)
    if row_timeout_s is not None:
        limit = "a row that takes longer is ended and has failed (%(default)s)"
        budget = "start no row after this many seconds; rows left out are printed"
        parser.add_argument("--row-timeout-s", type=float, default=row_timeout_s, help=limit)
        parser.add_argument("--budget-s", type=float, help=budget)
        parser.add_argument("--child", metavar="FOLDER", help=argparse.SUPPRESS)
    return parser


def check_names(
    parser: argparse.ArgumentParser, names: Iterable[str], known: Collection[str], what: str = ""
) -> None:
    """End with the parser's error if a name is unknown. what: plural noun of the names."""
    if unknown := [name for name in names if name and name not in known]:
        found = " ".join(filter(None, ["unknown", what, ", ".join(unknown)]))
        parser.error(f"{found}; known are {', '.join(known)}")


def check_positive(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> None:
    """End with the parser's error if one of these options is given and below 1."""
    for name in names:
        given = getattr(args, name)
        if given is not None and given < 1:
            parser.error(f"--{name} is {given}; it must be at least 1")


def numbers(parser: argparse.ArgumentParser, option: str, text: str | None) -> list[float]:
    """Comma-separated numbers, none without text. End with the parser's error unless all are above 0."""
    try:
        found = [float(one) for one in text.split(",")] if text is not None else []
    except ValueError:
        found = [0.0]
    if not all(0 < one < math.inf for one in found):
        parser.error(f"{option} is {text!r}; must be numbers above 0, as 12,14.5")
    return found


def main_of(
    script: str,
    args: argparse.Namespace,
    arguments: list[str] | None,
    rows: Callable[[Run], int | None],
    child: Callable[..., dict[str, Any] | None] | None = None,
    *,
    ranks: bool = False,
) -> int:
    """Exit code of a benchmark: 2 where it cannot measure, 1 if a row failed.

    rows: measures and prints the rows of the run; returns an exit code to end with, else None.
    child: what a process of its own makes of one request; None for a script that starts none.
    ranks: `child` is run by each rank that torchrun starts, and gets the ranks as `ranks`, too.
    """
    if args.tiny:
        torch.set_num_threads(1)  # operations this small only lose by threads
    if child is not None and args.child is not None:
        if not ranks:
            return answer_child(args.child, child)
        from parallel.launch import ranks_from_environment, run_rank

        found = ranks_from_environment()
        run_rank(lambda: answer_child(args.child, functools.partial(child, ranks=found)), found)
    if not args.tiny and not torch.cuda.is_available():
        print(NEEDS_GPU)
        return 2
    with Run(script, args, arguments) as run:
        code = rows(run)
        return run.end() if code is None else code


def hardware() -> dict[str, Any]:
    """What the figures were measured on."""
    cuda = torch.cuda.is_available()
    found = {
        "cuda": cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        or os.environ.get("PYTORCH_ALLOC_CONF")
        or "default",
    }
    if cuda:
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "gpu_bytes": torch.cuda.get_device_properties(0).total_memory,
            "runtime": torch.version.cuda,
        }
    return found


def imported(name: str, what: str = "") -> Any:
    """Module that a row needs and that may be absent. what: name of it in the reason. Raises
    NotInstalledError."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        first_line = str(error).partition("\n")[0]
        raise NotInstalledError(f"{what or name} ({first_line})") from error


def device_of(tiny: bool) -> torch.device:
    """Device of a row: the GPU, or the CPU of a tiny run. Raises SkippedError without a GPU."""
    if not tiny and not torch.cuda.is_available():
        raise SkippedError("no CUDA device here")
    return torch.device("cpu" if tiny else "cuda")


def outcome(about: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """`about`, and what `measure` returns or why it did not."""
    began = time.perf_counter()
    result: dict[str, Any] = {**about}
    try:
        result |= measure()
        result["status"] = "ok"
    except NotInstalledError as error:
        result |= {"status": "not installed", "reason": str(error)}
    except SkippedError as error:
        result |= {"status": "skipped", "reason": str(error)}
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        result |= {
            "status": "failed",
            "reason": f"{type(error).__name__}: {first_line}",
            "traceback": traceback.format_exc(),
        }
    result["process_s"] = time.perf_counter() - began
    return result


def run_shown(command: Sequence[str], *, what: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a command as subprocess.run() does with all output captured, beside a bar on a terminal. Raises
    subprocess.TimeoutExpired; the process is killed then."""
    pipe, ends = subprocess.PIPE, time.monotonic() + timeout
    with (
        tqdm(desc=what, bar_format="{desc}: {elapsed}", leave=False, disable=None) as bar,
        subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process,
    ):
        try:
            while True:
                try:
                    output, errors = process.communicate(timeout=min(1.0, timeout))
                    return subprocess.CompletedProcess(command, process.returncode, output, errors)
                except subprocess.TimeoutExpired:
                    if time.monotonic() > ends:
                        raise
                bar.refresh()
        except BaseException:
            process.kill()
            raise


def outcome_of_process(
    script: Path, request: Any, folder: Path, *, timeout_s: float, ranks: int = 0
) -> dict[str, Any]:
    """What `script --child folder` answers to the request; a process that dies or takes too long has failed.

    ranks: processes of the script that torchrun starts, instead of one of this Python.
    """
    (folder / "request.pickle").write_bytes(pickle.dumps(request))
    answer = folder / "result.json"
    answer.unlink(missing_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(torchrun if ranks else ()), str(script), "--child", str(folder)]
    what = getattr(request, "label", "") or type(request).__name__
    try:
        ended = run_shown(command, what=what, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"took longer than --row-timeout-s {timeout_s:.0f}"}
    last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
    died = {"status": "failed", "reason": f"process ended with {ended.returncode}: {last}"}
    result: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else died
    result["stderr"] = ended.stderr[-_STDERR_CHARACTERS:]
    return result


def answer_child(folder: str, run: Callable[[Any], dict[str, Any] | None]) -> int:
    """The other side of `outcome_of_process`: measure what is asked for, in this process. run: returns None
    where another of several processes has the answer."""
    request = pickle.loads((Path(folder) / "request.pickle").read_bytes())
    result = run(request)
    if result is not None:
        (Path(folder) / "result.json").write_text(json.dumps(result, default=str))
    return 0


class Run:
    """The rows of one run, kept and written as they come. A context: its folder ends with it."""

    def __init__(self, script: str, args: argparse.Namespace, arguments: list[str] | None) -> None:
        self.script = Path(script).resolve()
        self.args = args
        self.began = time.monotonic()
        self.results: list[dict[str, Any]] = []
        self.record: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": [self.script.name, *(sys.argv[1:] if arguments is None else arguments)],
            "results": self.results,
        }
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        self.folder = Path(self._folder.name)

    def __enter__(self) -> Run:
        # whoever ends a run that takes too long gets what it has, and no row goes on by itself
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        return self

    def __exit__(self, *raised: object) -> None:
        self.write()
        self._folder.cleanup()

    def measure(
        self,
        request: Any,
        run: Callable[[Any], dict[str, Any]] | None = None,
        *,
        here: bool = False,
        ranks: int = 0,
        rows: int = 1,
    ) -> dict[str, Any]:
        """What `run` makes of the request: in this process if `here`, else in one of its own, or in those of
        so many ranks, whose child knows what to run. rows: each may take --row-timeout-s."""
        if self.spent:
            return {"status": "not run", "reason": f"--budget-s {self.args.budget_s:.0f} is spent"}
        if here and run is not None:
            return run(request)
        timeout_s = rows * self.args.row_timeout_s
        return outcome_of_process(self.script, request, self.folder, timeout_s=timeout_s, ranks=ranks)

    @property
    def spent(self) -> bool:
        return self.args.budget_s is not None and self.elapsed_s > self.args.budget_s

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    def keep(self, result: dict[str, Any]) -> dict[str, Any]:
        self.results.append(result)
        self.write()
        return result

    def write(self) -> None:
        if self.args.out:
            Path(self.args.out).write_text(json.dumps(self.record, indent=1, default=str))

    def header_lines(self, about: Mapping[str, Any]) -> list[str]:
        """about: `hardware()` of the process that measures."""
        self.record["hardware"] = dict(about)
        gpu = about.get("gpu", "no GPU (tiny)")
        lines = [
            f"{gpu}, torch {about['torch']}, Python {about['python']}, {about['cpus']} cores, "
            f"{self.record['date']}"
        ]
        if self.args.tiny:
            lines.append(
                "TINY: CPU and simulated device; link rates are stand-ins and no figure below is a "
                "measurement"
            )
        return lines

    def end(self) -> int:
        """Print how long it took; the exit code."""
        print(f"{self.elapsed_s:.0f} s in all", flush=True)
        return 1 if any(result["status"] == "failed" for result in self.results) else 0
