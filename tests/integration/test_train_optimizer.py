"""The main job with its optimizer's state on the host, while its activations travel too.

pytest tests/integration/test_train_optimizer.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.test_train import SMALL, run


def losses(arguments: list[str], path: Path, *, ranks: int | None = None) -> list[float]:
    code, output, errors = run([*SMALL, *arguments, "--telemetry", str(path)], ranks=ranks)
    assert code == 0, errors + output
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.req("S3-9")
@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", None), ("zbv", 2)])
def test_the_job_learns_as_with_the_optimizer_on_the_device(
    schedule: str, ranks: int | None, tmp_path: Path
) -> None:
    shared = ["--steps", "5", "--schedule", schedule]
    plain = losses(shared, tmp_path / "plain", ranks=ranks)
    hosted = losses([*shared, "--optimizer-offload-fraction", "auto"], tmp_path / "hosted", ranks=ranks)
    assert len(plain) == len(hosted) == 5
    assert hosted == pytest.approx(plain, abs=1e-4)


def test_activations_leave_at_the_same_time_without_changing_a_bit_of_the_losses() -> None:
    code, output, errors = run(
        [*SMALL, "--steps", "4", "--optimizer-offload-fraction", "1", "--compare", "2"], ranks=2
    )
    assert code == 0, errors + output
    assert "The losses of all 4 steps are equal in all 4 runs, bit for bit" in output
    assert "optimizer  its state on the host (rank 0 100%:" in output
