"""Experts whose saved tensors leave, on a GPU: the rows of scripts/bench_moe.py, each in its own process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench_moe

pytestmark = pytest.mark.gpu


@pytest.mark.req("S3-57", "S3-91")
def test_what_experts_save_leaves_in_torchs_memory_for_a_quarter_of_its_cost(tmp_path: Path) -> None:
    """The published save_on_cpu waits for each of its copies, and 0.165 of the tokens a second remain."""
    out = tmp_path / "rows.json"
    rows = "torch_save_on_cpu,experts_save_on_cpu"
    assert bench_moe.main(["--work", "layer", "--rows", rows, "--samples", "3", "--out", str(out)]) == 0
    found = {row["row"]: row for row in json.loads(out.read_text())["results"]}
    nothing, torchs, ours = (found[name] for name in ("nothing", *rows.split(",")))
    assert [torchs["gradients"]["verdict"], ours["gradients"]["verdict"]] == ["bitwise", "bitwise"]
    assert ours["active_bytes"] <= 1.05 * torchs["active_bytes"]
    # of both as much leaves; what is still on its way out or back at the peak is the difference
    fell = nothing["active_bytes"] - ours["active_bytes"]
    assert fell >= 0.7 * ours["engine"]["spill_bytes"] > 0
    lost = {name: row["step_ms"] - nothing["step_ms"] for name, row in (("torch", torchs), ("ours", ours))}
    assert lost["ours"] <= 0.25 * lost["torch"]
