"""scripts/bench_auto.py runs without a GPU, and sets auto's row beside the fastest split within its total."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench_auto


def test_auto_stands_beside_the_fixed_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    rows = ["--rows", "auto,plain-half,moved-host", "--device-total-gb", "24"]
    assert bench_auto.main(["--tiny", "--works", "full", *rows, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    auto, half, host = record["results"]
    assert [row["label"] for row in record["results"]] == ["auto@24", "plain-half", "moved-host"]
    (asked,) = record["asked"]
    fastest = min((half, host), key=lambda row: row["ms"])
    assert (asked["best"], asked["best_ms"]) == (fastest["row"], fastest["ms"])
    assert asked["measured"] == auto["ms"] / fastest["ms"]
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1:3] for line in printed if line.startswith("| full")][-1] == [" full ", " 24 "]


def test_a_split_beyond_the_total_is_not_the_best() -> None:
    """Nor one that another work ran, or that failed."""
    ok = {"status": "ok", "work": "full", "active_any_bytes": 20, "total_bytes": 0}
    rows = [
        ok | {"row": "auto", "ms": 12.0, "total_bytes": 24, "active_any_bytes": 25},
        ok | {"row": "plain-resident", "ms": 1.0, "active_any_bytes": 30},
        ok | {"row": "moved-host", "ms": 10.0},
        ok | {"row": "plain-host", "ms": 2.0, "work": "lora"},
        {"status": "failed", "work": "full", "row": "plain-half"},
    ]
    (asked,) = bench_auto.compared(rows)
    assert (asked["best"], asked["best_ms"], asked["splits"], asked["passed"]) == (
        "moved-host",
        10.0,
        1,
        "yes",
    )
    assert asked["measured"] == 1.2
