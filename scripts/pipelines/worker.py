"""One rank of one set of processes: run the rows, gather each on the first rank, and say so in files that the
launcher watches.

One invariant: a row that runs out of device memory ends this process, after it has written down how much
there was; the ranks that wait for it are ended by their launchers. Nothing tries to go on with a process
group whose ranks are no longer in step.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from parallel.launch import Rank, Ranks, choose_device, launched, run_rank
from parallel.schedules import schedule_named
from pipelines.memory import BlockFacts, most_layers, need_of
from pipelines.requests import JobShape, Request, RowRequest
from pipelines.rows import Bench, SkippedError

__all__ = ["OUT_OF_MEMORY", "complete", "run_rows", "run_worker"]

OUT_OF_MEMORY = 3
"""Exit code of a rank whose device was full."""

_EMPTIES_S = 15.0
_EMPTY_SHARE = 0.96
"""Of a device's memory: torch's context and NCCL's first buffers are there by then."""

Emit = Callable[[dict[str, Any]], None]


def run_worker(request: Request, ranks: Ranks, meet: Callable[[], Any]) -> NoReturn:
    """The whole life of this process; never returns. meet: connects to the store that the ranks meet in; None
    where there is one rank."""
    assert request.out is not None, "the launcher names a folder"
    signs = Path(request.out) / f"signs-{request.name}-{ranks.rank}.txt"
    failure = Path(request.out) / f"failure-{request.name}-{ranks.rank}.json"
    results = Path(request.out) / f"results-{request.name}.jsonl"

    def emit(result: dict[str, Any]) -> None:
        with results.open("a") as file:
            file.write(json.dumps(result) + "\n")

    def sign(text: str) -> None:
        with signs.open("a") as file:
            file.write(f"{time.time():.1f} {text}\n")

    def main() -> int:
        device = choose_device(request.device, ranks)
        sign("up")
        with launched(ranks, device, timeout=request.timeout_s, store=meet()) as rank:
            if device.type == "cuda":
                _await_empty(device)
            try:
                run_rows(request, rank, emit, sign)
            except Exception as error:
                failure.write_text(json.dumps(_failure(error, rank)))
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(OUT_OF_MEMORY if _is_out_of_memory(error) else 1)
        sign("down")
        return 0

    run_rank(main, ranks)


def run_rows(request: Request, rank: Rank, emit: Emit, sign: Callable[[str], None]) -> None:
    """Measure the rows in turn. emit: called on the first rank with each row's figures of all ranks."""
    bench = Bench(request, rank)
    first = rank.ranks.rank == 0
    rows = list(request.rows)
    if request.facts is not None:
        rows = _completed(bench, rows)
    for index in range(len(rows)):
        row = rows[index]
        if not _agreed_to_start(request, rank):
            if first:
                emit(_result(row, "not run", reason="--budget-s is spent"))
            continue
        sign(f"begin {row.label}")
        began = time.perf_counter()
        try:
            mine = bench.measure(row)
        except SkippedError as skipped:
            if first:
                emit(_result(row, "skipped", reason=str(skipped)))
            continue
        everything: list[Any] | None = [None] * rank.ranks.world if first else None
        dist.gather_object(mine, everything, group=rank.group, group_dst=0)
        if everything is not None:
            emit(_result(row, "ok", ranks=everything, row_s=time.perf_counter() - began))
        if row.kind == "links":
            rows = _completed(bench, rows)
        sign(f"end {row.label}")


def complete(
    rows: list[RowRequest], shape: JobShape, facts: BlockFacts, ranks: int
) -> tuple[list[RowRequest], JobShape]:
    """The layers and the limits that were left open, from the figures of one block."""
    live = min(ranks, shape.microbatches)
    if shape.layers is None:
        stages = max(schedule_named(row.schedule).default_virtual_stages for row in rows)
        fits = (
            stages * 2
            if shape.tiny
            else most_layers(facts, live=live, optimizer_bytes=shape.optimizer_bytes, multiple=stages)
        )
        shape = shape.with_(layers=fits)
    assert shape.layers is not None
    saved_bytes = need_of(facts, layers=shape.layers, live=live, optimizer_bytes=0).saved_bytes
    done = [
        row
        if row.limit_share is None
        else RowRequest(
            kind=row.kind, schedule=row.schedule, saved_limit_bytes=_rounded(row.limit_share * saved_bytes)
        )
        for row in rows
    ]
    return done, shape


def _completed(bench: Bench, rows: list[RowRequest]) -> list[RowRequest]:
    """As `complete`, from this rank's figures of a block; all ranks take the first one's, so that none
    differs by a millisecond."""
    facts: list[Any] = [bench.facts]
    dist.broadcast_object_list(facts, group=bench.rank.group, group_src=0)
    bench.facts = facts[0]
    done, shape = complete(
        rows, bench.request.shape, BlockFacts.from_json(facts[0]["block"]), bench.rank.ranks.world
    )
    bench.with_shape(shape)
    return done


def _rounded(nbytes: float) -> int:
    """To whole GB where that changes little."""
    return round(nbytes / 1e9) * 10**9 if nbytes > 20e9 else round(nbytes)


def _await_empty(device: torch.device) -> None:
    """Wait a little for the driver to take back what a process held that was ended before this one."""
    end = time.monotonic() + _EMPTIES_S
    while time.monotonic() < end:
        free, total = torch.cuda.mem_get_info(device)
        if free > _EMPTY_SHARE * total:
            return
        time.sleep(0.2)
    sys.stderr.write(
        f"{device}: {free:,} of {total:,} bytes are free before anything runs; something else holds the "
        "rest\n"
    )


def _agreed_to_start(request: Request, rank: Rank) -> bool:
    """The first rank's clock decides."""
    go: list[Any] = [request.deadline is None or time.time() < request.deadline]
    dist.broadcast_object_list(go, group=rank.group, group_src=0)
    return bool(go[0])


def _result(row: RowRequest, status: str, **more: Any) -> dict[str, Any]:
    return {"row": asdict(row), "label": row.label, "status": status, **more}


def _is_out_of_memory(error: BaseException) -> bool:
    """torch's own error, or NCCL's or cuBLAS's, who say it in words; behind what a schedule wraps around
    it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError) or "out of memory" in str(cause).lower():
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _failure(error: BaseException, rank: Rank) -> dict[str, Any]:
    found: dict[str, Any] = {
        "out_of_memory": _is_out_of_memory(error),
        "reason": f"{type(error).__name__}: {str(error).strip()[:600]}",
    }
    if rank.device.type == "cuda":
        found |= {
            "active_bytes": torch.cuda.memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
        }
    return found
