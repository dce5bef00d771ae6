"""A rank is lost in the middle of a step, and nobody is there to end the other: it has to notice, say so, and
end by itself.

torchrun would end it within a second; here there is no torchrun, as on the hosts of a job whose launchers see
their own ranks only. Messages go over gloo; tests/gpu/test_lost_rank.py is the same over NCCL.

pytest tests/integration/test_lost_rank.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.dying_pipeline import LAST_STEP, started

BOUND_S = 90.0
"""Start-up on a loaded machine, the message's time limit and the bystander's grace; a rank that hangs takes
for ever."""


def steps_of(output: str) -> list[str]:
    return output.split()


@pytest.mark.parametrize(("victim", "ending"), [(0, "run_rank"), (1, "plain")])
def test_rank_ends_with_an_error_when_the_other_is_killed_in_a_step(
    tmp_path: Path, victim: int, ending: str
) -> None:
    with started(
        tmp_path, device="cpu", signal_name="KILL", victim=victim, ending=ending, timeout_s=60.0
    ) as ranks:
        output, errors = ranks[1 - victim].communicate(timeout=BOUND_S)
        assert ranks[victim].wait(timeout=BOUND_S) == -9
    assert ranks[1 - victim].returncode == 1, errors
    assert steps_of(output) == [str(step) for step in range(LAST_STEP)]
    assert ("lost another rank" if ending == "run_rank" else "RuntimeError") in errors


def test_rank_ends_with_an_error_when_the_other_does_not_answer_in_time(tmp_path: Path) -> None:
    with started(
        tmp_path, device="cpu", signal_name="STOP", victim=1, ending="run_rank", timeout_s=8.0
    ) as ranks:
        output, errors = ranks[0].communicate(timeout=BOUND_S)
    assert ranks[0].returncode == 1, errors
    assert steps_of(output) == [str(step) for step in range(LAST_STEP)]
    assert "lost another rank" in errors
