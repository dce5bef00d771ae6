"""One rank of one launch: it measures the rows it is asked for, and the first rank writes the figures of all.

One invariant: a row that runs out of device memory ends this process, after it has written down how much
there was; torchrun ends the ranks that wait for it. Nothing tries to go on with a process group whose ranks
are no longer in step.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel.launch import Rank, Ranks, choose_device, launched
from pipelines.requests import Request, RowRequest
from pipelines.rows import Bench

GB = 1e9
_EMPTIES_S = 15.0
_EMPTY_SHARE = 0.96
"""Of a device's memory: torch's context and NCCL's first buffers are there by then."""


def run(request: Request, ranks: Ranks, folder: str) -> dict[str, Any] | None:
    """Measure; each row's result is in the folder as soon as it is over. A failure is written there and
    raised. None but on the first rank."""
    device = choose_device(request.device, ranks)
    with launched(ranks, device, timeout=request.timeout_s) as rank:
        if device.type == "cuda":
            _await_empty(device)
        try:
            bench = Bench(request, rank)
            for number, row in enumerate(request.rows):
                found = _row(bench, rank, row)
                if ranks.rank == 0:
                    path = Path(folder) / f"row-{number:03d}.json"
                    path.with_suffix(".part").write_text(json.dumps(found, default=str))
                    path.with_suffix(".part").rename(path)
        except Exception as error:
            (Path(folder) / f"failure-{ranks.rank}.json").write_text(json.dumps(_failure(error, rank)))
            raise
    return {"status": "ok"} if ranks.rank == 0 else None


def with_failures(result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A launch's result with the reason that a rank wrote down before it ended: the first, or a full
    device's."""
    failures = [json.loads(path.read_text()) for path in folder.glob("failure-*.json")]
    if result["status"] != "failed" or not failures:
        return result
    return result | min(failures, key=lambda failure: (failure["status"] != "out of memory", failure["at"]))


def _row(bench: Bench, rank: Rank, row: RowRequest) -> dict[str, Any]:
    began = time.perf_counter()
    mine = bench.measure(row)
    everything: list[Any] = [None] * rank.ranks.world
    dist.all_gather_object(everything, mine, group=rank.group)
    row_s = time.perf_counter() - began
    return {"row": asdict(row), "label": row.label, "status": "ok", "ranks": everything, "row_s": row_s}


def _failure(error: Exception, rank: Rank) -> dict[str, Any]:
    full = _is_out_of_memory(error)
    reason = f"rank {rank.ranks.rank}: {type(error).__name__}: {str(error).strip()[:600]}"
    if full and rank.device.type == "cuda":
        stats = torch.cuda.memory_stats()
        active, reserved = (stats[f"{name}_bytes.all.current"] / GB for name in ("active", "reserved"))
        reason = (
            f"rank {rank.ranks.rank}: out of memory with {active:.1f} GB active, {reserved:.1f} GB reserved"
        )
    return {"status": "out of memory" if full else "failed", "reason": reason, "at": time.time()}


def _is_out_of_memory(error: BaseException) -> bool:
    """torch's own error, or NCCL's or cuBLAS's, who say it in words; behind what a schedule wraps around
    it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError) or "out of memory" in str(cause).lower():
            return True
        cause = cause.__cause__ or cause.__context__
    return False


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
