"""A row that cannot be measured is a row with a reason, in this process and in one of its own."""

from __future__ import annotations

import argparse
import json
import os
import pickle
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import bench.measure
import bench.run
import bench_optimizer
import bench_stage
from bench.child import RowRequest
from bench.gradients import deterministic
from bench.measure import Clock
from bench.optim_child import OptimRequest
from bench.rows import RowOptions
from bench.run import NotInstalledError, Run, SkippedError, answer_child, outcome, outcome_of_process
from tests.forks import run_forked


def test_figures_are_added_to_what_the_row_is_about() -> None:
    result = outcome({"row": "ours"}, lambda: {"step_ms": 3.0})
    assert result.pop("process_s") >= 0
    assert result == {"row": "ours", "step_ms": 3.0, "status": "ok"}


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (NotInstalledError("trl is not here"), "not installed", "trl is not here"),
        (SkippedError("no CUDA device here"), "skipped", "no CUDA device here"),
        (ValueError("first\nsecond"), "failed", "ValueError: first"),
        (ValueError(), "failed", "ValueError: "),
    ],
)
def test_a_row_that_raises_has_a_status_and_a_reason(error: Exception, status: str, reason: str) -> None:
    def measure() -> dict[str, Any]:
        raise error

    result = outcome({"row": "ours"}, measure)
    assert (result["row"], result["status"], result["reason"]) == ("ours", status, reason)
    assert ("traceback" in result) == (status == "failed")


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("open(sys.argv[2] + '/result.json', 'w').write('{\"status\": \"ok\"}')", "ok", None),
        ("sys.exit('out of luck')", "failed", "process ended with 1: out of luck"),
        ("time.sleep(600)", "failed", "took longer than --row-timeout-s 1"),
    ],
)
def test_a_process_that_dies_or_hangs_is_a_failed_row(
    tmp_path: Path, program: str, status: str, said: str | None
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys, time; {program}")
    (tmp_path / "result.json").write_text('{"status": "of the row before"}')
    result = outcome_of_process(script, {}, tmp_path, timeout_s=1.0 if "sleep" in program else 60.0)
    assert (result["status"], result.get("reason")) == (status, said)


def test_a_child_answers_what_it_was_asked(tmp_path: Path) -> None:
    (tmp_path / "request.pickle").write_bytes(pickle.dumps({"row": "nothing"}))
    assert answer_child(str(tmp_path), lambda request: {"status": "ok", "said": request["row"]}) == 0
    assert json.loads((tmp_path / "result.json").read_text()) == {"status": "ok", "said": "nothing"}


def test_rows_after_the_budget_are_told_and_what_ran_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    args = argparse.Namespace(budget_s=100.0, out=str(out), tiny=True, row_timeout_s=1.0)
    with Run("bench_stage.py", args, ["--tiny"]) as run:
        run.keep(run.measure({}, lambda request: {"status": "ok"}, here=True))
        assert json.loads(out.read_text())["results"] == [{"status": "ok"}]
        run.began -= 101.0
        late = run.measure({}, lambda request: {"status": "ok"}, here=True)
        assert late == {"status": "not run", "reason": "--budget-s 100 is spent"}
        run.keep({"status": "failed"})
        assert run.end() == 1
    assert json.loads(out.read_text())["command"] == ["bench_stage.py", "--tiny"]


@pytest.mark.parametrize(
    ("script", "asked"),
    [
        (bench_stage, RowRequest(row="links", workload="W1", options=RowOptions(), tiny=True)),
        (bench_optimizer, OptimRequest(kind="rates", tiny=True)),
    ],
)
def test_each_script_answers_in_a_process_of_its_own(script: ModuleType, asked: Any, tmp_path: Path) -> None:
    with patch.object(bench.run, "run_shown", run_forked):
        result = outcome_of_process(Path(str(script.__file__)), asked, tmp_path, timeout_s=120.0)
    assert result["status"] == "ok", result
    assert result["links"]["measured"] is False


@pytest.mark.req("S3-92")
def test_a_time_is_from_the_start_to_the_end() -> None:
    """A swapped pair of events gives a negative time, which passes every comparison that it should fail."""
    with patch.object(bench.measure, "read_cublas_setting"):  # wants a GPU
        host, device = Clock(torch.device("cpu")), Clock(torch.device("cuda"))
    assert host.ms(1.0, 1.5) == 500.0
    at = {"start": 1.0, "end": 3.5}
    start, end = (SimpleNamespace(at=at[name]) for name in ("start", "end"))
    start.elapsed_time = lambda other: other.at - start.at
    assert device.ms(start, end) == 2.5


def test_a_deterministic_step_leaves_no_setting_behind_that_timed_steps_pay_for() -> None:
    with deterministic():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
