"""A budget that processes share: never over, and what a killed one held comes back."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from offload.memory.budget import SharedHostBudget, shared_by_store, shared_by_torchrun
from offload.sizes import bytes_text

FORK = multiprocessing.get_context("fork")
LIMIT = 1000


class Other:
    """Another process with a budget: it does what it is sent."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.pipe, other = FORK.Pipe()
        self.process = FORK.Process(target=self._run, args=(make, other), daemon=True)
        self.process.start()
        assert self.pipe.recv() == "ready"

    @staticmethod
    def _run(make: Callable[[], Any], pipe: Connection) -> None:
        budget = make()
        pipe.send("ready")
        while True:
            name, arguments = pipe.recv()
            found = getattr(budget, name)
            pipe.send(found(*arguments) if callable(found) else found)

    def __call__(self, name: str, *arguments: int) -> Any:
        self.pipe.send((name, arguments))
        return self.pipe.recv()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def _work(path: Path, seed: int, requests: int) -> None:
    rng, budget, mine = random.Random(seed), SharedHostBudget(path, LIMIT), 0
    for _ in range(requests):
        nbytes = rng.randint(1, LIMIT // 2)
        if mine and rng.random() < 0.5:
            nbytes = rng.randint(1, mine)
            mine -= nbytes
            budget.release(nbytes)
        elif budget.reserve(nbytes):
            mine += nbytes
        if rng.random() < 0.02:
            budget.settle()
    with budget._here.lines() as lines:
        os._exit(lines[budget._here.mine].used != mine)  # with what it holds


def test_ten_thousand_requests_are_never_over_and_a_killed_process_gives_back(path: Path) -> None:
    watching = SharedHostBudget(path, LIMIT)
    workers = [
        FORK.Process(target=_work, args=(path, seed, 10_000 if seed == 0 else 2_500)) for seed in range(4)
    ]
    for worker in workers:
        worker.start()
    most, killed = 0, False
    while any(worker.is_alive() for worker in workers):
        counted = watching.used_bytes
        assert counted <= LIMIT
        most = max(most, counted)
        if not killed and most > LIMIT // 2:
            assert workers[0].pid is not None
            os.kill(workers[0].pid, signal.SIGKILL)
            killed = True
    for worker in workers:
        worker.join()
    assert killed
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL, 0, 0, 0]
    assert watching.used_bytes == 0  # all have ended, and none gave back by itself
    assert watching.reserve(LIMIT)


def test_a_share_comes_back_when_its_process_has_ended_and_not_before(path: Path) -> None:
    mine, other = SharedHostBudget(path, LIMIT), Other(lambda: SharedHostBudget(path, LIMIT))
    assert other("reserve", 700)
    other("settle")
    assert not mine.reserve(301)
    assert mine.reserve(300)
    other.kill()
    assert mine.used_bytes == 300
    assert mine.reserve(700)


def test_a_process_can_get_its_guaranteed_share_whatever_another_holds(path: Path) -> None:
    mine, other = SharedHostBudget(path, LIMIT), Other(lambda: SharedHostBudget(path, LIMIT))
    assert not mine.reserve(LIMIT * 3 // 4 + 1)  # the other's demand is not known: a quarter is kept for it
    assert mine.reserve(LIMIT * 3 // 4)
    assert other("reserve", LIMIT // 4)
    other("release", LIMIT // 4)
    other("settle")  # it needs 250 at most, of which 100 are guaranteed
    assert not mine.reserve(151)
    assert mine.reserve(150)
    assert other("reserve", 100)
    assert not other("reserve", 1)
    other.kill()


def test_the_least_limit_of_a_living_process_holds(path: Path) -> None:
    mine, other = SharedHostBudget(path, LIMIT), Other(lambda: SharedHostBudget(path, LIMIT // 2))
    other("settle")
    assert not mine.reserve(LIMIT // 2 + 1)
    other.kill()
    assert mine.reserve(LIMIT)


def test_the_last_process_takes_the_file_away(path: Path) -> None:
    def held_and_left() -> None:
        budget = SharedHostBudget(path, LIMIT)
        assert budget.reserve(1)
        assert budget._here.pid == os.getpid()  # not its parent's line
        budget._here._leave()
        os._exit(path.exists())

    for _ in range(2):
        process = FORK.Process(target=held_and_left)
        process.start()
        process.join()
        assert process.exitcode == 0


def test_ranks_of_one_host_share_a_number_and_hosts_do_not(tmp_path: Path) -> None:
    def store() -> dist.Store:  # each rank opens the job's store by itself
        return dist.FileStore(str(tmp_path / "store"), 3)

    first = shared_by_store(store(), "host-a", LIMIT)
    second = Other(lambda: shared_by_store(store(), "host-a", LIMIT))
    third = Other(lambda: shared_by_store(store(), "host-b", LIMIT))
    assert first.reserve(300)
    assert (second("used_bytes"), third("used_bytes")) == (300, 0)
    assert third("reserve", LIMIT)
    second.kill()
    third.kill()


def test_ranks_that_share_no_memory_are_told(tmp_path: Path) -> None:
    store = dist.HashStore()
    store.set("offload/host_budget/host", "1 0123456789abcdef")  # of a container with another /dev/shm
    with pytest.raises(ValueError, match="give containers one /dev/shm, or each a host_key of its own"):
        shared_by_store(store, "host", LIMIT)


def test_ranks_of_torchrun_share_by_default_and_a_process_alone_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert shared_by_torchrun(LIMIT) is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"a test/{time.time_ns()}")
    mine, other = shared_by_torchrun(LIMIT), Other(lambda: shared_by_torchrun(LIMIT))
    assert mine.reserve(300)
    assert other("used_bytes") == 300
    other.kill()
    mine._here._leave()
    assert not mine.is_named


def test_jobs_with_long_names_and_like_ones_have_a_budget_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    budgets = []
    for name in ("a.job", "a-job", "long" * 100):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"{name}/{time.time_ns()}" if len(name) > 9 else name)
        budgets.append(shared_by_torchrun(LIMIT))
    for budget in budgets:
        assert budget is not None
        assert sum(budget.counts_with(each) for each in budgets if each is not None) == 1
        budget._here._leave()


def test_ranks_that_can_share_nothing_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("offload.memory.budget._folder", lambda: tmp_path / "absent")
    assert shared_by_torchrun(LIMIT) is None
    assert f"so each rank of this host may pin {bytes_text(LIMIT)} by itself" in caplog.text
