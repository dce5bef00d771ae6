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
    for kind in ("alone", "training", "losses"):
        result = run(
            OptimRequest(
                kind=kind, optimizer=optimizer, dtype=dtype, tiny=True, steps=2, warmup=1, microbatches=2
            )
        )
        assert result["status"] == "ok", result.get("traceback")
        assert {"active_peak", "reserved_peak", "pinned_bytes", "construct_s", "parameters"} <= result.keys()
        json.dumps(result)


def test_overlap_on_and_off_have_the_same_losses_and_bits() -> None:
    rows = [
        run(OptimRequest(kind="losses", optimizer=name, tiny=True, steps=4, microbatches=2))
        for name in ("ours", "ours_after_backward", "ours_no_overlap")
    ]
    assert len({json.dumps([row["losses"], row["bits"]]) for row in rows}) == 1


def test_a_peer_that_is_not_installed_is_named_and_is_no_failure() -> None:
    result = run(OptimRequest(kind="alone", optimizer="torchao", tiny=True))
    assert result["status"] in ("not installed", "ok")
    assert run(OptimRequest(kind="alone", optimizer="no such", tiny=True))["status"] == "failed"


def test_the_tiny_run_prints_every_part_and_writes_every_row(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "rows.json"
    code = bench_optimizer.main(
        ["--tiny", "--parts", "alone,training,losses,growth", "--steps", "2", "--out", str(out)]
    )
    text = capsys.readouterr().out
    assert code == 0, text
    assert "overlap on and off: bitwise equal" in text
    assert "clipped by the global norm" in text
    rows = json.loads(out.read_text())["rows"]
    assert {row["request"]["kind"] for row in rows} == {"alone", "training", "losses", "rates"}


def test_unknown_rows_and_parts_are_refused() -> None:
    for wrong in (["--rows", "ours,nobody"], ["--parts", "everything"]):
        with pytest.raises(SystemExit):
            bench_optimizer.parse(wrong)
