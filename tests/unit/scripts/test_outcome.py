"""A row that cannot be measured is a row with a reason, in this process and in one of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bench.outcome import outcome, outcome_of_process
from bench.rows import NotInstalledError, SkippedError


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
        ('import pathlib, sys; pathlib.Path(sys.argv[4]).write_text(\'{"status": "ok"}\')', "ok", None),
        ("import sys; sys.exit('out of luck')", "failed", "process ended with 1: out of luck"),
    ],
)
def test_a_process_that_dies_is_a_failed_row(
    tmp_path: Path, program: str, status: str, said: str | None
) -> None:
    script, out = tmp_path / "script.py", tmp_path / "row.json"
    script.write_text(program)
    out.write_text('{"status": "of the row before"}')
    result = outcome_of_process(script, "{}", out, {"row": "ours"}, timeout_s=60.0, environment=os.environ)
    assert (result["status"], result.get("reason")) == (status, said)
