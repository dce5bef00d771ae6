"""The optimizer benchmark runs whole on a machine without a GPU, and says what it could not run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import bench_optimizer
from bench.optim_child import OptimRequest, run
from bench.optim_work import OPTIMIZERS, TINY, FusedStack, OptimShape


def test_w4_has_as_many_parameters_as_the_stack_that_is_built() -> None:
    assert OptimShape().parameters == 1_459_666_944
    model = FusedStack(TINY, torch.device("cpu"), torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == TINY.parameters


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name.startswith(("ours", "gpu"))])
def test_every_row_of_ours_runs_and_reports_what_the_table_prints(optimizer: str, dtype: str) -> None:
    for kind in ("alone", "training"):
        result = run(
            OptimRequest(
                kind=kind, optimizer=optimizer, dtype=dtype, tiny=True, steps=2, warmup=1, microbatches=2
            )
        )
        assert result["status"] == "ok", result.get("traceback")
        assert {"active_peak", "reserved_peak", "pinned_bytes", "construct_s", "parameters"} <= result.keys()
        json.dumps(result)


def test_what_overlaps_the_step_and_what_leaves_beside_it_does_not_change_a_bit() -> None:
    cells = [("ours_step", ""), ("ours_forward", ""), ("ours_backward", "")]
    rows = [
        run(OptimRequest(kind="training", optimizer=name, groups=groups, tiny=True, steps=3, microbatches=2))
        for name, groups in [*cells, ("ours_forward", "one"), ("ours_forward", "two")]
    ]
    assert [row["status"] for row in rows] == ["ok"] * len(rows), [row.get("reason") for row in rows]
    assert len({json.dumps(row["bits"]) for row in rows}) == 1
    assert all(row["groups"]["spill_bytes"] > 0 for row in rows[-2:])


def test_a_peer_that_is_not_installed_is_named_and_is_no_failure() -> None:
    result = run(OptimRequest(kind="alone", optimizer="torchao", tiny=True))
    assert result["status"] in ("not installed", "ok")
    assert run(OptimRequest(kind="alone", optimizer="no such", tiny=True))["status"] == "failed"


@pytest.mark.req("S3-93")
def test_the_tiny_run_prints_every_part_and_writes_every_row(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "rows.json"
    code = bench_optimizer.main(
        ["--tiny", "--steps", "1", "--warmup", "1", "--microbatches", "2", "--out", str(out)]
    )
    text = capsys.readouterr().out
    assert code == 0, text
    for said in ("clipped by the global norm", "ours_forward + groups, 2 pairs", "all state streamed"):
        assert said in text
    rows = json.loads(out.read_text())["results"]
    assert {row["request"]["kind"] for row in rows} == {"alone", "training", "rates"}


def test_unknown_rows_and_parts_are_refused() -> None:
    for wrong in (["--rows", "ours_step,nobody"], ["--parts", "everything"]):
        with pytest.raises(SystemExit):
            bench_optimizer.parse(wrong)
