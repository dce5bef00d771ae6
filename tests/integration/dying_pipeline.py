"""One rank of a pipeline that never stops by itself, and in which one rank is lost in the middle of a step.
Not a test: started by some.

    RANK=0 ... python tests/integration/dying_pipeline.py FOLDER DEVICE SIGNAL VICTIM ENDING TIMEOUT_S

RANK and its like are what torchrun sets. SIGNAL is what the victim sends to itself as a backward begins in
its third step: KILL, or STOP for a rank that is there and never answers. ENDING is `run_rank` for the way
this repository's scripts end, or `plain` for a user's script, which leaves through the interpreter's exit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch.distributed as dist  # noqa: E402

LAST_STEP = 2


@contextmanager
def started(
    folder: Path, *, device: str, signal_name: str, victim: int, ending: str, timeout_s: float
) -> Iterator[list[subprocess.Popen[str]]]:
    """Both ranks; whatever the test does, neither stays behind."""
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    clean = {name: value for name, value in os.environ.items() if name not in names}
    ranks = []
    try:
        for rank in range(2):
            arguments = [str(folder), device, signal_name, str(victim), ending, str(timeout_s)]
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(Path(__file__).resolve()), *arguments],
                    env={**clean, **place, "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def main(
    rank_number: int, folder: str, device_name: str, signal_name: str, victim: int, timeout_s: float
) -> int:
    import torch

    from bench.workload import GROUPS
    from offload import OffloadConfig, configure
    from parallel.host import reserve_host_together
    from parallel.launch import Ranks, launched
    from pipelines.job import PipelineJob
    from pipelines.requests import JobShape

    device = torch.device("cpu") if device_name == "cpu" else torch.device("cuda", rank_number)
    store = dist.FileStore(str(Path(folder) / "meet"), 2)
    with launched(Ranks(rank_number, 2, rank_number, 2), device, timeout=timeout_s, store=store) as rank:
        config = OffloadConfig(
            min_offloaded_tensor_size=1, max_spilling_bytes=1 << 14, piece_bytes=1 << 12, pp_rank=rank_number
        )
        manager = configure(
            config, device="sim" if device.type == "cpu" else str(device), print_summary=False
        )
        shape = JobShape(sequence=32, microbatches=4, tiny=True)
        job = PipelineJob(shape, "1f1b", 2, rank, manager=manager, groups=GROUPS)
        reserve_host_together(manager, 256 << 20, rank.group)
        step = 0
        begin_backward = manager.begin_backward

        def dies(stage: int, microbatch: int, kind: str) -> None:
            if step == LAST_STEP and microbatch == 1 and rank_number == victim:
                os.kill(os.getpid(), getattr(signal, f"SIG{signal_name}"))
            begin_backward(stage, microbatch, kind)

        wrapped: Any = manager
        wrapped.begin_backward = dies
        while True:
            job.clear_gradients()
            job.step()
            job.clock.drain()
            assert manager.stats.spilled > 0, "nothing left, so nothing is at stake"
            sys.stdout.write(f"{step}\n")
            sys.stdout.flush()
            step += 1


if __name__ == "__main__":
    from parallel.launch import ranks_from_environment, run_rank

    _folder, _device, _signal, _victim, _ending, _timeout = sys.argv[1:]
    _ranks = ranks_from_environment()

    def _main() -> int:
        return main(_ranks.rank, _folder, _device, _signal, int(_victim), float(_timeout))

    if _ending == "run_rank":
        run_rank(_main, _ranks)
    sys.exit(_main())
