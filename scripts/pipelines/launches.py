"""Sets of processes, one of each rank, started beside one another and ended together.

A rank whose device is full cannot tell the others, which wait for its messages inside NCCL, where no
exception reaches them. So rows run in processes of their own, one a rank, under a launcher that waits for
nothing but files, a key in the job's store and the clock. One
invariant: when one process of a set has ended badly, or none has shown a sign of life for too long, every
    launcher ends its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from parallel.launch import Ranks

__all__ = ["Ending", "Launcher", "meeting_store"]

GRACE_S = 3.0
"""What is left to a process to say why, once another one of its set has failed."""
_POLL_S = 0.05
_ASK_S = 0.25
_TAIL = 4000


def meeting_store(ranks: Ranks, prefix: str, timeout_s: float = 300.0) -> Any:
    """The store that torchrun's ranks meet in, under a prefix of our own; None for a process alone."""
    if not ranks.under_torchrun:
        return None
    hosted_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=ranks.rank == 0 and prefix == "launchers" and not hosted_by_torchrun,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    return PrefixStore(f"bench_pipeline/{prefix}", store)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one rank's process of a set ended."""

    code: int
    reason: str | None = None
    """Why it was ended, or what it said last; None after a good end."""
    failure: dict[str, Any] | None = None
    """What it wrote down before it ended by itself: worker.py."""
    said: str = ""
    """The end of its standard error, where warnings go."""

    @property
    def ended_by_itself(self) -> bool:
        return self.code >= 0


class Launcher:
    """One rank's launcher. ranks that run the same sets in the same order share `store`; None where there is
    one rank."""

    def __init__(self, ranks: Ranks, store: Any, folder: Path, *, silence_s: float) -> None:
        self._ranks, self._store, self._folder, self._silence_s = ranks, store, folder, silence_s

    def run(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        look: Callable[[], None] | None = None,
    ) -> list[Ending]:
        """Start this rank's process of the set and wait for its end, at most `silence_s` after its last sign
        of life.

        look: called again and again meanwhile, to take in what the process has to show.
        Returns how each rank's process ended, on the first rank; elsewhere this rank's alone. Blocks until
        then.
        """
        errors = self._folder / f"errors-{name}-{self._ranks.rank}.txt"
        signs = self._folder / f"signs-{name}-{self._ranks.rank}.txt"
        with errors.open("wb") as out:
            process = subprocess.Popen(command, stderr=out, env=environment)
        try:
            ended_for = self._wait(name, process, lambda: signs.stat().st_size if signs.exists() else 0, look)
        finally:
            if process.poll() is None:  # this launcher is being ended itself
                process.kill()
                process.wait()
        ending = self._ending(name, process.returncode, ended_for, errors)
        return self._gathered(name, ending)

    def _wait(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        size: Callable[[], int],
        look: Callable[[], None] | None,
    ) -> str | None:
        """Until it ends, by itself or by us; why, if by us."""
        alive_at = asked_at = time.monotonic()
        last_size = size()
        failed_at: float | None = None
        why: str | None = None
        while process.poll() is None:
            time.sleep(_POLL_S)
            if look is not None:
                look()
            now = time.monotonic()
            if (new_size := size()) != last_size:
                last_size, alive_at = new_size, now
            if self._store is not None and now - asked_at > _ASK_S:
                asked_at = now
                if failed_at is None and self._store.add(f"{name}/failed", 0) > 0:
                    failed_at = now
            if failed_at is not None and now - failed_at > GRACE_S:
                why = "ended because another rank had failed"
            elif now - alive_at > self._silence_s:
                why = f"ended after {self._silence_s:.0f} s without a sign of life"
            if why is not None:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
                process.wait()
        if process.returncode != 0 and failed_at is None and self._store is not None:
            self._store.add(f"{name}/failed", 1)
        return why

    def _ending(self, name: str, code: int, why: str | None, errors: Path) -> Ending:
        said = errors.read_text(errors="replace")[-_TAIL:].strip()
        found = self._folder / f"failure-{name}-{self._ranks.rank}.json"
        failure: dict[str, Any] | None = None
        with suppress(OSError, json.JSONDecodeError):  # a process that was killed while it wrote
            failure = json.loads(found.read_text())
        if code == 0:
            return Ending(code=0, said=said)
        if why is None and failure is not None:
            why = str(failure["reason"])
        if why is None:
            why = f"ended with {code}: {said.splitlines()[-1][:300] if said else 'without a word'}"
        return Ending(code=code, reason=why, failure=failure, said=said)

    def _gathered(self, name: str, mine: Ending) -> list[Ending]:
        if self._store is None:
            return [mine]
        self._store.set(f"{name}/ended/{self._ranks.rank}", json.dumps(asdict(mine)))
        if self._ranks.rank != 0:
            return [mine]
        return [
            Ending(**json.loads(self._store.get(f"{name}/ended/{rank}"))) for rank in range(self._ranks.world)
        ]
