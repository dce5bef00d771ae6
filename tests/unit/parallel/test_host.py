"""Ranks that pin and measure together: real gloo ranks, and engines that only write down what was asked of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
LONG = 60.0

PROGRAM = textwrap.dedent("""
    import json, logging, sys
    from types import SimpleNamespace
    import torch, torch.distributed as dist
    from offload import HostBudgetError
    from parallel.host import line_up, reserve_host_together
    rank, folder, refused, able = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    said = []
    class Engine:
        can_measure_link = able[rank] == "y"
        def measure_link(self, line_up):
            said.append("alone" if line_up is None else "together")
            if line_up is not None:
                for _ in range(3):
                    line_up()
                    said.append("lined up")
    class Manager:
        engine = Engine()
        def reserve_host(self, nbytes, *, measure):
            said.append(f"pin {nbytes} {measure}")
            if refused[rank] == "y":
                raise HostBudgetError(f"no room for {nbytes:,} bytes")
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    try:
        reserve_host_together(Manager(), 1000 * (rank + 1), dist.group.WORLD)
    except HostBudgetError as error:
        said.append(str(error))
    dist.barrier()  # a rank that leaves closes its connections, also those that the other still reads
    dist.destroy_process_group()
    print(json.dumps(said))
""")


def two_ranks(folder: Path, *, refused: str = "nn", able: str = "yy") -> tuple[list[list[str]], list[str]]:
    """What each rank's engine was asked, and what each logged."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    ranks = [subprocess.Popen([sys.executable, "-c", PROGRAM, str(rank), str(folder), refused, able], **settings) for rank in range(2)]
    try:
        ends = [rank.communicate(timeout=LONG) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], [errors for _, errors in ends]
    return [json.loads(output) for output, _ in ends], [errors for _, errors in ends]


def test_ranks_pin_their_own_bytes_and_line_up_before_each_measurement(tmp_path: Path) -> None:
    said, _ = two_ranks(tmp_path)
    assert said == [[f"pin {nbytes} False", "together", "lined up", "lined up", "lined up"] for nbytes in (1000, 2000)]


def test_rank_that_may_not_pin_is_heard_by_all_and_nobody_waits_for_it(tmp_path: Path) -> None:
    said, _ = two_ranks(tmp_path, refused="ny")
    assert said == [[f"pin {nbytes} False", "1 of 2 ranks could not pin: rank 1: no room for 2,000 bytes"] for nbytes in (1000, 2000)]


def test_rank_that_cannot_measure_leaves_the_other_to_measure_alone_with_a_warning(tmp_path: Path) -> None:
    said, logged = two_ranks(tmp_path, able="yn")
    assert said == [["pin 1000 False", "alone"], ["pin 2000 False"]]
    assert "ranks 1 of 2 hold too little host memory to measure the link with" in logged[0]
