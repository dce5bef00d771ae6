"""The host budget: one number, never exceeded, by threads of one process and by ranks of one host."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from offload.memory.budget import (
    DEFAULT_SHARE,
    LocalHostBudget,
    StoreHostBudget,
    cgroup_limits_bytes,
    default_host_limit_bytes,
)


@pytest.fixture(params=["local", "store"])
def budget(request: pytest.FixtureRequest) -> LocalHostBudget | StoreHostBudget:
    return (
        LocalHostBudget(100) if request.param == "local" else StoreHostBudget(dist.HashStore(), "host-a", 100)
    )


def test_a_refused_reservation_leaves_no_trace(budget: LocalHostBudget | StoreHostBudget) -> None:
    assert budget.reserve(60)
    assert not budget.reserve(41)
    assert budget.used_bytes == 60
    assert budget.reserve(40)
    assert budget.used_bytes == budget.limit_bytes == 100


def test_released_bytes_can_be_reserved_again(budget: LocalHostBudget | StoreHostBudget) -> None:
    assert budget.reserve(100)
    budget.release(30)
    assert budget.used_bytes == 70
    assert budget.reserve(30)
    assert not budget.reserve(1)


def test_releasing_more_than_was_reserved_is_a_bug(budget: LocalHostBudget | StoreHostBudget) -> None:
    assert budget.reserve(10)
    with pytest.raises(AssertionError):
        budget.release(11)


def test_a_limit_may_change_between_steps(budget: LocalHostBudget | StoreHostBudget) -> None:
    assert budget.reserve(100)
    budget.limit_bytes = 150
    assert budget.reserve(50)
    budget.limit_bytes = 0
    assert not budget.reserve(1)


@pytest.mark.parametrize(
    "make", [LocalHostBudget, lambda limit: StoreHostBudget(dist.HashStore(), "h", limit)]
)
def test_a_negative_limit_is_a_configuration_error(make: type[LocalHostBudget]) -> None:
    with pytest.raises(ValueError, match="negative"):
        make(-1)


def test_ranks_of_one_host_share_a_number_and_hosts_do_not(tmp_path: Path) -> None:
    def store() -> dist.Store:  # each rank opens the job's store by itself
        return dist.FileStore(str(tmp_path / "store"), 3)

    first, second = (StoreHostBudget(store(), "host-a", 100) for _ in range(2))
    other = StoreHostBudget(store(), "host-b", 100)
    assert first.reserve(80)
    assert not second.reserve(30)
    assert second.reserve(20)
    assert first.used_bytes == second.used_bytes == 100
    assert other.reserve(100)


def test_ranks_that_ask_at_once_never_exceed_the_limit() -> None:
    store = dist.HashStore()
    limit_bytes, each_bytes, num_ranks = 1000, 7, 8
    granted = [0] * num_ranks
    start = threading.Barrier(num_ranks)

    def rank(index: int) -> None:
        budget = StoreHostBudget(store, "host", limit_bytes)
        start.wait()
        for _ in range(100):
            if budget.reserve(each_bytes):
                granted[index] += each_bytes

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert StoreHostBudget(store, "host", limit_bytes).used_bytes == sum(granted) <= limit_bytes
    # 800 requests of 7: nobody gave up while bytes were left
    assert sum(granted) == limit_bytes - limit_bytes % each_bytes


def test_a_rank_that_lost_a_race_asks_again() -> None:
    class Racing:
        """A store in which another rank overshoots, and rolls back, just between our look and our add."""

        def __init__(self) -> None:
            self.value = 0
            self.others = [50]

        def add(self, key: str, amount: int) -> int:
            self.value += amount
            if amount > 0 and self.others:
                return self.value + self.others.pop()
            return self.value

    store = Racing()
    assert StoreHostBudget(store, "host", 100).reserve(80)  # type: ignore[arg-type]
    assert store.value == 80


def test_the_default_limit_is_a_share_of_what_this_process_may_use() -> None:
    total_bytes = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal")
    )
    assert 0 < default_host_limit_bytes() <= total_bytes * DEFAULT_SHARE


def test_the_lowest_limit_above_a_cgroup_counts(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/jobs/mine\n")
    root = tmp_path / "cgroup"
    (root / "jobs" / "mine").mkdir(parents=True)
    (root / "jobs" / "mine" / "memory.max").write_text("max\n")
    (root / "jobs" / "memory.max").write_text("4096\n")
    (tmp_path / "memory.max").write_text("1\n")  # outside the tree
    assert cgroup_limits_bytes(membership, root) == [4096]


def test_the_older_cgroup_layout_is_read_too(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("3:cpu,cpuacct:/a\n2:memory:/a\n")
    folder = tmp_path / "cgroup" / "memory" / "a"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("8192\n")
    assert cgroup_limits_bytes(membership, tmp_path / "cgroup") == [8192]


def test_no_cgroup_means_no_further_limit(tmp_path: Path) -> None:
    assert cgroup_limits_bytes(tmp_path / "absent", tmp_path) == []
