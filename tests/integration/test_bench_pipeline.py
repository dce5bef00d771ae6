"""The pipeline benchmark as a user starts it, on two gloo ranks and the simulated device: all rows, in one
launch or apart.

pytest tests/integration/test_bench_pipeline.py
"""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import bench.run
import bench_pipeline
from tests.forks import run_forked
from tests.once import made_once

ROOT = Path(__file__).resolve().parents[2]


def run(
    folder: Path,
    *arguments: str,
    script: Path = ROOT / "scripts" / "bench_pipeline.py",
    launch: Callable[..., subprocess.CompletedProcess[str]] = run_forked,
) -> tuple[dict[str, Any], str]:
    """What it wrote, and what it said. script: of the ranks. launch: starts them."""
    out = folder / "out.json"
    tiny = ["--tiny", "--samples", "1", "--warmup", "3", "--out", str(out)]
    with (
        patch.object(bench.run, "run_shown", launch),
        patch.object(bench_pipeline, "__file__", str(script)),
        redirect_stdout(io.StringIO()) as said,
    ):
        assert bench_pipeline.main([*tiny, *arguments]) == 0, said.getvalue()
    written: dict[str, Any] = json.loads(out.read_text())
    return written, said.getvalue()


pytestmark = pytest.mark.slow  # two launches of two ranks


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    options = ("--schedules", "1f1b,zbv", "--rows", "nothing,ours", "--verify")
    return made_once(tmp_path_factory, "bench-pipeline", lambda folder: run(folder, *options))


def named(written: dict[str, Any], label: str) -> dict[str, Any]:
    return next(result for result in written["results"] if result["label"].startswith(label))


@pytest.mark.req("S3-93")
def test_every_row_runs_in_the_order_of_its_value_and_is_written(both: tuple[dict[str, Any], str]) -> None:
    written, said = both
    labels = [result["label"] for result in written["results"]]
    assert [label.split(" 0.")[0] for label in labels] == [
        "links",
        "1f1b nothing",
        "1f1b ours",
        "1f1b verify",
        "zbv verify",
        "zbv ours",
        "1f1b ours",
        "zbv nothing",
    ]
    assert {result["status"] for result in written["results"]} == {"ok"}
    assert "no figure below is a measurement" in said
    assert written["command"][:2] == ["bench_pipeline.py", "--tiny"]
    assert all(f"\n{label} " in said for label in labels if "verify" not in label and label != "links")


def test_gradients_of_both_schedules_are_those_without_offload(both: tuple[dict[str, Any], str]) -> None:
    written, said = both
    for schedule in ("1f1b", "zbv"):
        for rank in named(written, f"{schedule} verify")["ranks"]:
            assert (rank["num_wrong"], rank["repeatable"], rank["steps"]) == (0, True, 5)
            assert rank["left"] > 0
        assert f"gradients {schedule}: bitwise equal on every rank" in said


def test_saved_bytes_on_each_device_stay_within_the_limit(both: tuple[dict[str, Any], str]) -> None:
    written, _ = both
    for result in written["results"]:
        if result["row"]["kind"] != "ours":
            continue
        limit = result["row"]["saved_limit_bytes"]
        for rank in result["ranks"]:
            assert 0 < rank["engine"]["device_bytes_peak"] <= limit
            assert rank["engine"]["refused_bytes"] == 0


def test_first_rank_keeps_as_many_microbatches_as_there_are_ranks_and_the_limits_are_shares_of_them(
    both: tuple[dict[str, Any], str],
) -> None:
    written, _ = both
    assert [rank["live_microbatches"] for rank in named(written, "1f1b nothing")["ranks"]] == [2, 1]
    assert [rank["live_microbatches"] for rank in named(written, "zbv nothing")["ranks"]] == [2, 2]
    block = named(written, "links")["ranks"][0]["block"]
    layers = named(written, "1f1b nothing")["ranks"][0]["layers"]
    limits = [
        result["row"]["saved_limit_bytes"] for result in written["results"] if result["row"]["kind"] == "ours"
    ]
    live_bytes = 2 * layers * block["saved_bytes"]
    assert limits == [round(live_bytes / 2), round(live_bytes / 2), round(live_bytes / 4)]


def test_row_that_fills_a_device_is_a_row_of_the_table_and_the_next_ones_run_in_a_new_launch(
    tmp_path: Path,
) -> None:
    """Rank 0 finds its device full in the row without offload, while rank 1 waits for its first message;
    torchrun ends it. Behind it half of the weights are away."""
    full = tmp_path / "full.py"
    full.write_text(
        "import sys\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'scripts')!r}]\n"
        "import torch, bench_pipeline\n"
        "from pipelines.rows import Bench\n"
        "def nothing(self, row):\n"
        "    if self.rank.ranks.rank == 0:\n"
        "        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 1.00 GiB')\n"
        "    torch.distributed.recv(torch.zeros(1), src=0)\n"
        "Bench._nothing = nothing\n"
        "sys.exit(bench_pipeline.main())\n"
    )
    launches: list[str] = []
    under_torchrun = bench.run.run_shown

    def launch(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        launches.append(" ".join(command[1:3]))
        return (under_torchrun if len(launches) == 2 else run_forked)(command, **options)

    arguments = ["--schedules", "1f1b", "--rows", "nothing,weights", "--verify"]
    written, said = run(tmp_path, *arguments, script=full, launch=launch)
    assert launches == ["-m torch.distributed.run"] * 3
    assert [result["status"] for result in written["results"]] == ["ok", "out of memory", "ok", "ok"]
    assert written["results"][1]["reason"].startswith(
        "rank 0: OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB"
    )
    assert "1f1b nothing: out of memory: rank 0: OutOfMemoryError" in said
    for rank in named(written, "1f1b weights")["ranks"]:
        (weights,) = rank["weights"]
        assert weights["limit_bytes"] == weights["streamed_bytes"] // 2
        # of 4 microbatches, in the forward and in the backward
        assert 0 < weights["in_bytes"] < 2 * 4 * weights["streamed_bytes"]
        assert (weights["out_bytes"], weights["gradients"]) == (0, None)
        assert weights["steps"] == 1 + rank["warmup"] + 1
    for rank in named(written, "1f1b verify")["ranks"]:
        assert rank["num_wrong"] == 0 < rank["came"]["weights"]
    assert all(rank["sums"]["beside_copies"] > 0 for rank in named(written, "links")["ranks"])
