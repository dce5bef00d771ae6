"""Mode "auto" on a device with a link, where a plan is searched for beside the steps: steps go on without it,
and it is followed when it is ready. No outcome depends on how long a thread takes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offload.auto import plan as auto_plan
from offload.auto.plan import Beside
from offload.policy.mixture import MixedPlan, choose_mixture
from tests.unit.modules.linked import RATE, Run, new_run

__all__ = ["new_run"]


class Gate:
    """Searches that end once it is open. error: what they raise then."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.error: Exception | None = None
        self.searches = 0

    def choose(self, *given: Any, rest: Callable[[], object], **options: Any) -> MixedPlan:
        self.searches += 1
        while not self.opened.wait(0.001):
            rest()
        if self.error is not None:
            raise self.error
        return choose_mixture(*given, **options, max_trials=10)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, new_run: Callable[[float], Run]) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(auto_plan, "Beside", Beside)
    monkeypatch.setattr(auto_plan, "choose_mixture", made.choose)
    yield made
    made.opened.set()


def search_of(run: Run) -> Beside:
    auto = run.handle._auto
    assert auto is not None
    assert auto.plan._search is not None
    return auto.plan._search.plan


def test_steps_go_on_without_a_plan_and_follow_it_once_it_is_ready(
    gate: Gate, new_run: Callable[[float], Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(RATE)
    run.steps(12)
    assert gate.searches == 1
    assert run.plans == []
    assert "no plan yet" in str(run.handle.explain())
    assert not run.handle.explain().is_final
    assert not [text for text in caplog.messages if "has no plan after" in text]
    gate.opened.set()
    found = search_of(run).result()
    assert run.handle.explain().plan is None  # between steps only
    run.steps(1)
    assert run.plans == [found]


def test_a_plan_for_steps_that_come_no_more_is_not_followed_and_another_one_is_made(
    gate: Gate, new_run: Callable[[float], Run]
) -> None:
    run = new_run(RATE)
    run.steps(4)
    late = search_of(run)
    run.microbatches = 1
    run.steps(4)
    gate.opened.set()
    assert len(late.result().problem.blocks) == 2
    gate.opened.clear()
    run.steps(1)
    assert run.plans == []
    gate.opened.set()
    search_of(run).result()
    run.steps(1)
    assert [len(plan.problem.blocks) for plan in run.plans] == [1]
    assert gate.searches == 2


def test_what_a_search_raises_ends_the_step_at_which_it_is_over(
    gate: Gate, new_run: Callable[[float], Run]
) -> None:
    gate.error = ValueError("no step fits")
    run = new_run(RATE)
    run.steps(4)
    gate.opened.set()
    search_of(run)._thread.join()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="no step fits"):
        run.steps(1)


def test_a_search_ends_with_the_last_handle(gate: Gate, new_run: Callable[[float], Run]) -> None:
    run = new_run(RATE)
    run.steps(4)
    search = search_of(run)
    run.handle.remove()
    search._thread.join()  # type: ignore[union-attr]
    assert search.is_over
    assert not gate.opened.is_set()


def test_a_process_ends_whose_search_would_not(tmp_path: Any) -> None:
    program = (
        "import runpy\n"
        f"beside = runpy.run_path({auto_plan.__file__!r})['Beside']\n"
        "def search(rest):\n"
        "    while True: rest()\n"
        "running = beside(search)\n"
        "assert not running.is_over\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
