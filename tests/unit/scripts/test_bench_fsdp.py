"""scripts/bench_fsdp.py runs without a GPU, its ranks started anew for each row, and each row has the bits of
the first."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest

import bench.run
import bench_fsdp
from tests.forks import run_forked


def test_each_row_is_printed_and_has_the_bits_of_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    short = ["--samples", "1", "--warmup", "0", "--threads", "1,2", "--out", str(out)]
    with patch.object(bench.run, "run_shown", run_forked):
        assert bench_fsdp.main(["--tiny", *short]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    peers = [f"cpu_offload_policy, {threads} threads" for threads in (1, 2)]
    names = ["nothing", *peers, "wrapper", "wrapper, hidden_states"]
    assert [line.split("|")[1].strip() for line in printed] == names
    assert all(line.endswith("| same |") for line in printed[1:]), printed
    first, *_, wrapper, moved = json.loads(out.read_text())["results"]
    of_ranks = {rank["digest"] for rank in first["ranks"]}
    assert len(of_ranks) == len(first["ranks"]) == 2
    assert first["ranks"][0]["pinned"] == 0 < wrapper["ranks"][0]["pinned"]
    assert moved["ranks"][0]["moved_bytes"] > 0 == wrapper["ranks"][0]["moved_bytes"]
