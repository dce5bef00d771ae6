"""scripts/bench_weights.py runs without a GPU, a row a process, and each row has the bits of the first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench.run
import bench_weights
from tests.forks import run_forked


@pytest.fixture(autouse=True)
def _rows_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.run, "run_shown", run_forked)


@pytest.mark.slow
def test_int8_rows_have_the_bits_of_the_expanded_weights(capsys: pytest.CaptureFixture[str]) -> None:
    bench_weights.main(["--tiny", "--work", "70b", "--rows", "nothing,host"])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in printed] == ["row", "nothing", "host"]
    assert all(line.endswith("| same |") for line in printed[1:]), printed


def test_each_row_is_printed_and_has_the_bits_of_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    bench_weights.main(["--tiny", "--rows", "nothing,host", "--out", str(out)])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in printed] == ["row", "nothing", "host"]
    assert all(line.endswith("| same |") for line in printed[1:]), printed
    rows = {row["row"]: row for row in json.loads(out.read_text())["results"]}
    figures = rows["host"]["weights"]
    assert (figures["misses"], figures["hits"]) == (0, 6)
    assert figures["in_bytes"] == 2 * 7 * 4 * 1024 * 1024  # of one block, in each direction of the step


@pytest.mark.slow
def test_full_training_is_measured_beside_its_law(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    bench_weights.main(["--tiny", "--work", "full", "--out", str(out)])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in printed] == ["row", "nothing", "backward", "clipped"]
    rows = {row["row"]: row for row in json.loads(out.read_text())["results"]}
    block = 7 * 4 * 1024 * 1024
    # of one block, in each direction of a step: the step itself fetches none
    assert rows["backward"]["weights"]["in_bytes"] == rows["clipped"]["weights"]["in_bytes"] == 2 * block
