"""Starts a test's ranks, each a process of its own, and collects what they return.

One invariant: the wait is bounded. A rank that fails ends the others, and the error says which rank and shows
its traceback; none is left running, whatever happened.
"""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

GRACE_S = 5.0
"""After a rank has failed, how long the others may take to fail by themselves, so that their tracebacks are
told too."""


def run_ranks(
    main: Callable[..., Any],
    world: int,
    folder: Path,
    *arguments: Any,
    backend: str = "gloo",
    timeout_s: float = 240.0,
) -> list[Any]:
    """`main(rank, world, *arguments)` on each rank of a process group; what they returned, by rank.

    main: a function at the top of a module, which each process imports anew; it and the arguments must be
    picklable. folder: empty; the ranks meet in a file there. backend: one with "nccl" in it gives rank r the
    CUDA device r. Raises AssertionError if a rank fails or time runs out.
    """
    context = context_of("spawn" if "nccl" in backend else "forkserver")
    meeting = folder / "store"
    processes = [
        context.Process(target=_rank, args=(main, rank, world, meeting, backend, timeout_s, arguments))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + timeout_s
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            time.sleep(0.05)
        exits = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    errors = [
        f"rank {rank}:\n{path.read_text()}"
        for rank in range(world)
        if (path := _error_of(meeting, rank)).exists()
    ]
    assert not errors, "\n".join(errors)
    assert exits == [0] * world, f"exit codes {exits} after at most {timeout_s:.0f} s; None was still running"
    return [pickle.loads(_result_of(meeting, rank).read_bytes()) for rank in range(world)]


def context_of(method: str) -> Any:
    """forkserver: ranks are forks of a process that has imported torch and done nothing else, which takes
    each of them 5 s of a core. It has no thread and knows no device; a process that is to use CUDA shall
    import torch itself."""
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(
            [
                "torch",
                "torch._dynamo",
                "torch.distributed.fsdp",
                "torch.distributed.pipelining",
                "offload",
                "offload.pipelining",
                "tests.frozen",
            ]
        )
    return context


def _rank(
    main: Callable[..., Any],
    rank: int,
    world: int,
    meeting: Path,
    backend: str,
    timeout_s: float,
    arguments: tuple[Any, ...],
) -> None:
    try:
        torch.set_num_threads(1)
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        store = dist.FileStore(str(meeting), world)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
        )
        result = main(rank, world, *arguments)
        dist.barrier()
        dist.destroy_process_group()
        _result_of(meeting, rank).write_bytes(pickle.dumps(result))
    except BaseException:
        _error_of(meeting, rank).write_text(traceback.format_exc())
        raise


def _result_of(meeting: Path, rank: int) -> Path:
    return meeting.with_name(f"result-{rank}")


def _error_of(meeting: Path, rank: int) -> Path:
    return meeting.with_name(f"error-{rank}")
