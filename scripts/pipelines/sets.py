"""A run in sets of processes: one set runs rows until one of them ends it, the next takes up what is left.

One invariant: every launcher starts the same sets in the same order; the first rank's says which, and the
others ask the store.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from parallel.launch import Ranks
from pipelines.launches import Ending, Launcher, meeting_store
from pipelines.record import Run
from pipelines.requests import Request, RowRequest
from pipelines.worker import OUT_OF_MEMORY

__all__ = ["Results", "after_set", "run_isolated"]

GB = 1e9
DONE = "done"
_LINES_SAID = 5
"""Of each rank's warnings that the report repeats."""


def run_isolated(request: Request, ranks: Ranks, run: Run | None, *, script: Path, silence_s: float) -> None:
    """Rows in sets of processes: a new set after one that ended early, with the rows that are left.

    run: on the first rank, who decides; None elsewhere. script: what is started with `--worker REQUEST`.
        silence_s: after so long without a sign of life a process has hung.
    """
    store = meeting_store(ranks, "launchers", timeout_s=silence_s + 120.0)
    with tempfile.TemporaryDirectory(prefix="bench-pipeline-") as folder:
        launcher = Launcher(ranks, store, Path(folder), silence_s=silence_s)
        left, number = list(request.rows), 0
        while True:
            name = f"set{number}"
            if run is not None:
                left = within_budget(run, left)
                said = (
                    DONE
                    if not left
                    else request.with_(
                        rows=tuple(left), shape=run.shape, name=name, facts=run.facts
                    ).to_json()
                )
                if store is not None:
                    store.set(f"{name}/request", said)
            else:
                said = store.get(f"{name}/request").decode()
            if said == DONE:
                break
            mine = Request.from_json(said).with_(out=folder)
            command = [sys.executable, str(script), "--worker", mine.to_json()]
            environment = {
                **os.environ,
                "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
            }
            results = Results(Path(folder) / f"results-{name}.jsonl", run)
            endings = launcher.run(name, command, environment, results.take)
            results.take()
            if run is not None:
                left = after_set(run, left, endings, results.taken)
            number += 1
        if store is not None:  # whoever hosts the store leaves last
            store.add("left", 1)
            while ranks.rank == 0 and store.add("left", 0) < ranks.world:
                time.sleep(0.05)


def within_budget(run: Run, left: list[RowRequest]) -> list[RowRequest]:
    """What is left, or nothing once the time is up: the rows are told, and no set is started for them."""
    deadline = run.request.deadline
    if deadline is None or time.time() < deadline:
        return left
    for row in left:
        run.add(
            {"row": asdict(row), "label": row.label, "status": "not run", "reason": "--budget-s is spent"}
        )
    return []


class Results:
    """The file that the first rank's worker writes its rows to, taken in line by line."""

    def __init__(self, path: Path, run: Run | None) -> None:
        self._path, self._run = path, run
        self.taken = 0

    def take(self) -> None:
        """What is new since the last call; nothing on other ranks."""
        if self._run is None or not self._path.exists():
            return
        # what follows the last newline is still being written
        lines = self._path.read_text().split("\n")[:-1]
        for line in lines[self.taken :]:
            self.taken += 1
            self._run.add(json.loads(line))


def after_set(run: Run, left: list[RowRequest], endings: list[Ending], taken: int) -> list[RowRequest]:
    """The rows that are still to be run after a set of processes that measured the first `taken`; the one at
    which it ended is told."""
    bad = {rank: ending for rank, ending in enumerate(endings) if ending.code != 0}
    for rank, ending in enumerate(endings):
        if ending.said and rank not in bad:
            lines = list(dict.fromkeys(ending.said.splitlines()))[-_LINES_SAID:]
            run.notes += [f"rank {rank} said: {line[:300]}" for line in lines]
    rows = run.completed(left)
    left = rows[taken:]
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
            "row": asdict(row),
            "label": row.label,
            "status": "out of memory" if full else "failed",
            "reason": reason,
            "endings": {rank: asdict(ending) for rank, ending in bad.items()},
        }
    )
    if row.kind == "links":
        run.notes.append("without the link's rates and the block's figures no other row can run")
        return []
    return left[1:]


def _why(ending: Ending) -> str:
    failure = ending.failure or {}
    if failure.get("out_of_memory") and "active_bytes" in failure:
        return (
            f"out of memory with {failure['active_bytes'] / GB:.1f} GB active, "
            f"{failure['reserved_bytes'] / GB:.1f} GB reserved"
        )
    return str(ending.reason)
