"""scripts/bench_park.py runs where there is no GPU, and prints every row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench_park


def test_every_row_runs_on_the_simulated_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row for row in bench_park.ROWS if row != "ranks"]  # which are processes of their own
    out = tmp_path / "out.json"
    assert bench_park.main(["--tiny", "--rows", ",".join(rows), "--out", str(out)]) == 0
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [cells[1].strip() for cells in lines] == ["row", *rows]
    results = {result["row"]: result for result in json.loads(out.read_text())["results"]}
    assert results["saver"]["status"] in ("ok", "not installed")
    assert results["cycles"]["same bits"]
    early, late = results["cycles"]["early"], results["cycles"]["late"]
    assert (early["pinned"], early["lent"]) == (late["pinned"], late["lent"])
    parameters = 2 * 12 * 32 * 32
    assert results["6B"]["bytes"] == 16 * parameters
    assert results["6B state"]["bytes"] == 14 * parameters
    assert results["3B"]["second"]["pinned_bytes"] == results["3B"]["third"]["pinned_bytes"] == 0
