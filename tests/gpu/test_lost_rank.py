"""A rank is killed in the middle of a step over NCCL: the other waits inside a kernel, where no exception
reaches it, and has to end too.

Its end comes from the process group's time limit: NCCL's watchdog ends the process, whose pinned memory and
copies in flight the driver takes back. Nothing of the engine may stand in the way of that. The same over gloo
is tests/integration/test_lost_rank.py.

pytest -m gpu tests/gpu/test_lost_rank.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.dying_pipeline import LAST_STEP, started

TIMEOUT_S = 30.0
BOUND_S = 180.0
"""Start-up, the time limit, and what the watchdog takes to write down what it saw; a rank that hangs takes
for ever."""


@pytest.mark.gpus(2)
@pytest.mark.parametrize("ending", ["run_rank", "plain"])
def test_rank_ends_with_an_error_when_the_other_is_killed_in_a_step(tmp_path: Path, ending: str) -> None:
    with started(
        tmp_path, device="cuda", signal_name="KILL", victim=1, ending=ending, timeout_s=TIMEOUT_S
    ) as ranks:
        output, errors = ranks[0].communicate(timeout=BOUND_S)
        assert ranks[1].wait(timeout=BOUND_S) == -9
    assert ranks[0].returncode not in (0, -9), errors
    assert output.split() == [str(step) for step in range(LAST_STEP)]
    assert errors
