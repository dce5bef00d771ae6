"""A rank is lost in the middle of a step, and nobody is there to end the other: it has to notice, say so, and
end by itself.

torchrun would end it within a second; here there is no torchrun, as on the hosts of a job whose launchers see
their own ranks only. Messages go over gloo; tests/gpu/test_lost_rank.py is the same over NCCL.

pytest tests/integration/test_lost_rank.py
"""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.forks import Ended, Fork, forked_ranks
from tests.integration import dying_pipeline
from tests.integration.dying_pipeline import LAST_STEP
from tests.once import made_once

Case = tuple[str, int, str]
"""What the victim sends itself, which of the two it is, and how its process ends otherwise."""

KILLED: list[Case] = [("KILL", 0, "run_rank"), ("KILL", 1, "plain")]
SILENT: Case = ("STOP", 1, "run_rank")
SILENCE_S = 8.0
"""What a message may take where one rank never answers: far longer than the steps before."""


def started(folder: Path, case: Case, timeout_s: float) -> AbstractContextManager[list[Fork]]:
    sent, victim, ending = case
    meeting = folder / f"{sent}-{victim}"
    meeting.mkdir()
    arguments = [str(meeting), "cpu", sent, str(victim), ending, str(timeout_s)]
    return forked_ranks(Path(dying_pipeline.__file__), arguments, ranks=2)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[Ended]]:
    """Of each case, how its ranks ended; of the one that is silent, the other alone. The cases that are quick
    run while that one waits."""

    def all_cases(folder: Path) -> dict[Case, list[Ended]]:
        found: dict[Case, list[Ended]] = {}
        with started(folder, SILENT, SILENCE_S) as (bystander, _):
            bystander.wait_for(f"{LAST_STEP - 1}\n")
            for case in KILLED:
                with started(folder, case, 60.0) as ranks:
                    found[case] = [rank.ended() for rank in ranks]
            found[SILENT] = [bystander.ended()]
        return found

    return made_once(tmp_path_factory, "lost-rank", all_cases)


def ended_with_an_error(bystander: Ended, said: str) -> None:
    assert bystander.code == 1, bystander.errors
    assert bystander.output.split() == [str(step) for step in range(LAST_STEP)]
    assert said in bystander.errors


@pytest.mark.parametrize("case", KILLED)
def test_rank_ends_with_an_error_when_the_other_is_killed_in_a_step(
    ends: dict[Case, list[Ended]], case: Case
) -> None:
    _, victim, ending = case
    assert ends[case][victim].code == -signal.SIGKILL
    said = "lost another rank" if ending == "run_rank" else "RuntimeError"
    ended_with_an_error(ends[case][1 - victim], said)


def test_rank_ends_with_an_error_when_the_other_does_not_answer_in_time(
    ends: dict[Case, list[Ended]],
) -> None:
    ended_with_an_error(ends[SILENT][0], "lost another rank")
