"""Programs as a user starts them, in forks of a process that has imported torch: a start takes a tenth of a
second, where an interpreter of its own takes three seconds of a core.

One invariant: whatever the test does, no process that it started stays behind.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import TCPStore

from tests.ranks import context_of

LONG_S = 120.0
"""Seconds; a loaded machine is slow, not wrong."""

_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ended(NamedTuple):
    """Exit code, standard output and standard error; the code is that of a signal below zero."""

    code: int
    output: str
    errors: str


class Fork:
    """One process under way."""

    def __init__(self, process: Any, folder: Path) -> None:
        self._process, self._folder = process, folder
        self.pid: int = process.pid

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    @property
    def code(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    def end(self) -> None:
        """At once, if it runs."""
        self._process.kill()

    @property
    def output(self) -> str:
        """What it has written so far."""
        return (self._folder / "output").read_text()

    def wait_for(self, text: str) -> None:
        """Until that is in its output."""
        end = time.monotonic() + LONG_S
        while text not in self.output:
            assert self.code is None, (self._folder / "errors").read_text()
            assert time.monotonic() < end, f"{text!r} was not said in {LONG_S:.0f} s"
            time.sleep(0.01)

    def ended(self, seconds: float = LONG_S) -> Ended:
        """Once it has ended. Raises AssertionError if it does not."""
        self._process.join(seconds)
        assert self.code is not None, f"it still runs after {seconds:.0f} s"
        return Ended(self.code, self.output, (self._folder / "errors").read_text())


@contextmanager
def forked(
    program: Path | str, arguments: Sequence[str] = (), environment: Mapping[str, str] = {}
) -> Iterator[Fork]:
    """`python program arguments`, or `python -c program`; `environment` beside this process's own, without
    what names a rank."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("output", "errors"):
            Path(folder, name).touch()
        process = context_of("forkserver").Process(
            target=_run, args=(program, list(arguments), dict(environment), folder)
        )
        process.start()
        try:
            yield Fork(process, Path(folder))
        finally:
            process.kill()
            process.join()


@contextmanager
def forked_ranks(
    program: Path | str, arguments: Sequence[str] = (), *, ranks: int, environment: Mapping[str, str] = {}
) -> Iterator[list[Fork]]:
    """The same as each of `ranks` ranks of one host, told so as torchrun tells it; nobody ends one rank when
    another fails."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True", **environment}
    with _all(
        [
            forked(program, arguments, {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]
    ) as processes:
        yield processes


def run_forked(command: Sequence[str], *, timeout: float, **_: Any) -> subprocess.CompletedProcess[str]:
    """In place of `bench.run.run_shown`, for `python script ...` and `python -m torch.distributed.run
    --standalone --nproc-per-node N script ...`. Where a rank fails, the others are ended."""
    under_torchrun = command[1:3] == ["-m", "torch.distributed.run"]
    ranks, (script, *arguments) = (int(command[5]), command[6:]) if under_torchrun else (1, command[1:])
    started: Any = (
        forked_ranks(Path(script), arguments, ranks=ranks)
        if under_torchrun
        else _all([forked(Path(script), arguments)])
    )
    with started as processes:
        end = time.monotonic() + timeout
        while any(process.code is None for process in processes):
            if any(process.code for process in processes):
                break
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(list(command), timeout)
            time.sleep(0.01)
        for process in processes:
            process.end()
        each = [process.ended() for process in processes]
    output, errors = (
        "".join(texts) for texts in zip(*((one.output, one.errors) for one in each), strict=True)
    )
    return subprocess.CompletedProcess(
        list(command), int(any(one.code for one in each)), stdout=output, stderr=errors
    )


@contextmanager
def _all(managers: list[Any]) -> Iterator[list[Fork]]:
    if not managers:
        yield []
        return
    with managers[0] as first, _all(managers[1:]) as others:
        yield [first, *others]


def _run(program: Path | str, arguments: list[str], environment: dict[str, str], folder: str) -> None:
    import torch

    torch.set_num_threads(1)
    # as in an interpreter of its own: a lock that is made to be inherited leaves no name behind
    multiprocessing.set_start_method("fork", force=True)
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY), number)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    for name in _OF_RANKS:
        os.environ.pop(name, None)
    os.environ.update(environment)
    if isinstance(program, str):
        sys.argv = ["-c", *arguments]
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [str(program), *arguments]
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
