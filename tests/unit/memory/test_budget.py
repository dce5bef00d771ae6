"""The host budget: one number, never exceeded, by threads of one process; test_ledger.py has processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.memory.budget import (
    DEFAULT_SHARE,
    LocalHostBudget,
    SharedHostBudget,
    available_bytes,
    cgroups,
    default_host_limit_bytes,
)


@pytest.fixture(params=["local", "shared"])
def budget(request: pytest.FixtureRequest, tmp_path: Path) -> LocalHostBudget | SharedHostBudget:
    return LocalHostBudget(100) if request.param == "local" else SharedHostBudget(tmp_path / "ledger", 100)


def test_bytes_are_reserved_up_to_the_limit_of_the_moment_and_again_once_released(
    budget: LocalHostBudget | SharedHostBudget,
) -> None:
    assert budget.reserve(60)
    assert not budget.reserve(41)
    assert budget.used_bytes == 60
    assert budget.reserve(40)
    assert budget.used_bytes == budget.limit_bytes == 100
    budget.release(30)
    assert budget.used_bytes == 70
    assert budget.reserve(30)
    assert not budget.reserve(1)
    budget.limit_bytes = 150
    assert budget.reserve(50)
    budget.limit_bytes = 0
    assert not budget.reserve(1)
    with pytest.raises(AssertionError):
        budget.release(151)


def test_a_negative_limit_is_a_configuration_error(tmp_path: Path) -> None:
    for make in (LocalHostBudget, lambda limit: SharedHostBudget(tmp_path / "ledger", limit)):
        with pytest.raises(ValueError, match="negative"):
            make(-1)


def test_the_default_limit_is_a_share_of_the_machine_and_no_more_than_is_available() -> None:
    meminfo = Path("/proc/meminfo")
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    total_bytes = int(lines["MemTotal"].split()[0]) * 1024
    assert 0 < default_host_limit_bytes() <= total_bytes * DEFAULT_SHARE
    assert default_host_limit_bytes() <= available_bytes(meminfo) + (1 << 30)  # of this moment
    assert default_host_limit_bytes(held_bytes=1 << 60) <= total_bytes * DEFAULT_SHARE


def test_the_limit_of_each_cgroup_above_counts_and_what_is_used_below_it_but_dropped_files(
    tmp_path: Path,
) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/jobs/mine\n")
    root = tmp_path / "cgroup"
    (root / "jobs" / "mine").mkdir(parents=True)
    (root / "jobs" / "mine" / "memory.max").write_text("max\n")
    (root / "jobs" / "memory.max").write_text("4096\n")
    assert cgroups(membership, root) == [(4096, 4096)]  # nobody says what is used
    (root / "jobs" / "memory.current").write_text("3000\n")
    (root / "jobs" / "memory.stat").write_text("anon 1000\ninactive_file 500\nactive_file 1500\n")
    (tmp_path / "memory.max").write_text("1\n")  # outside the tree
    assert cgroups(membership, root) == [(4096, 4096 - 2500)]


def test_the_older_cgroup_layout_is_read_too(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("3:cpu,cpuacct:/a\n2:memory:/a\n")
    folder = tmp_path / "cgroup" / "memory" / "a"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("8192\n")
    (folder / "memory.usage_in_bytes").write_text("8000\n")
    (folder / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 1000\n")
    assert cgroups(membership, tmp_path / "cgroup") == [(8192, 1192)]


def test_no_cgroup_means_no_further_limit(tmp_path: Path) -> None:
    assert cgroups(tmp_path / "absent", tmp_path) == []
