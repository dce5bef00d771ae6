"""What is read of a host, from a /proc and a /sys that are whole, of cgroup v1, half hidden, or absent."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from offload.commands.machine import Pcie, node_of, pcie_of, read_host
from tests.unit.commands.machines import tree

ADDRESS = "0000:1a:00.0"
PCI = f"sys/bus/pci/devices/{ADDRESS}"
WHOLE = {
    "proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 2000000 kB\n",
    "proc/self/cgroup": "0::/pod\n",
    "proc/self/status": "Name: x\nMems_allowed:\t3\nMems_allowed_list:\t0-1\n",
    "proc/self/maps": "a\nb\nc\n",
    "proc/sys/vm/max_map_count": "65530\n",
    "sys/fs/cgroup/pod/memory.max": "1000000\n",
    "sys/fs/cgroup/pod/memory.current": "400000\n",
    "sys/fs/cgroup/pod/memory.stat": "anon 5\ninactive_file 100000\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/devices/system/node/node0/cpulist": "0-3\n",
    "sys/devices/system/node/node1/cpulist": "4-7\n",
    "sys/module/nvidia/version": "580.65.06\n",
    f"{PCI}/numa_node": "1\n",
    f"{PCI}/current_link_speed": "16.0 GT/s PCIe\n",
    f"{PCI}/current_link_width": "8\n",
    f"{PCI}/max_link_speed": "32.0 GT/s PCIe\n",
    f"{PCI}/max_link_width": "16\n",
}


@pytest.fixture(autouse=True)
def _no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


def test_a_whole_tree_is_read(tmp_path: Path) -> None:
    found = read_host(tree(tmp_path, WHOLE))
    assert (found.container_bytes, found.free_bytes, found.pinnable_bytes) == (1_000_000, 700_000, 700_000)
    assert (found.huge_pages, found.maps, found.most_maps) == ("madvise", 3, 65530)
    assert found.nodes == {0: frozenset(range(4)), 1: frozenset(range(4, 8))}
    assert (found.memory_nodes, found.driver) == (frozenset({0, 1}), "580.65.06")
    assert node_of(ADDRESS, tmp_path) == 1
    assert pcie_of(ADDRESS, tmp_path) == Pcie(4, 8, 5, 16)


def test_a_container_of_cgroup_v1_has_its_limit(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/job"
    old = {
        "proc/self/cgroup": "4:memory:/job\n3:cpuset:/\nno such line\n",
        f"{folder}/memory.limit_in_bytes": "2000000\n",
        f"{folder}/memory.usage_in_bytes": "500000\n",
        f"{folder}/memory.stat": "total_inactive_file 0\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    lines = old["proc/self/cgroup"].splitlines()
    found = read_host(tree(tmp_path / "good", WHOLE | old | {"proc/self/cgroup": "\n".join(lines[:2])}))
    assert (found.container_bytes, found.free_bytes) == (2_000_000, 1_500_000)
    broken = read_host(tree(tmp_path / "broken", WHOLE | old))
    assert broken.container_bytes is None, "a line of another form is no limit, and no error"
    assert broken.pinnable_bytes is None


def test_without_a_limit_the_machine_is_the_limit(tmp_path: Path) -> None:
    found = read_host(tree(tmp_path, WHOLE | {"sys/fs/cgroup/pod/memory.max": "max\n"}))
    assert (found.container_bytes, found.free_bytes) == (None, 2_048_000_000)
    none_of_v1 = {
        "proc/self/cgroup": "4:memory:/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    found = read_host(tree(tmp_path / "v1", WHOLE | none_of_v1))
    assert (found.container_bytes, found.free_bytes) == (None, 2_048_000_000)


def test_what_is_not_there_or_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    for root in (tmp_path / "nothing", tmp_path / "folders", tmp_path / "garbage"):
        if root.name == "folders":  # in place of files: every read of them is an OSError
            for name in WHOLE:
                (root / name).mkdir(parents=True)
        elif root.name == "garbage":
            for name in WHOLE:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(b"\xff\xfe[\x00 x-y")
        found = read_host(root)
        assert (found.free_bytes, found.pinnable_bytes, found.container_bytes) == (None, None, None)
        assert (found.huge_pages, found.most_maps) == ("", None)
        assert not any(found.nodes.values())
        assert node_of(ADDRESS, root) is None
        assert pcie_of(ADDRESS, root) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [("current_link_speed", "Unknown"), ("max_link_width", "0"), ("current_link_speed", "7.0 GT/s PCIe")],
)
def test_a_link_that_the_system_does_not_know_is_none(name: str, text: str, tmp_path: Path) -> None:
    tree(tmp_path, WHOLE | {f"{PCI}/{name}": text, f"{PCI}/numa_node": "-1"})
    assert pcie_of(ADDRESS, tmp_path) is None
    assert node_of(ADDRESS, tmp_path) is None


def nvml(handle: bytes) -> SimpleNamespace:
    calls: list[str] = []

    def get(address: bytes) -> str:
        if address != handle:
            raise RuntimeError("no such GPU")
        return "handle"

    return SimpleNamespace(
        calls=calls,
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetHandleByPciBusId=get,
        nvmlDeviceGetCurrPcieLinkGeneration=lambda handle: 5,
        nvmlDeviceGetCurrPcieLinkWidth=lambda handle: 16,
        nvmlDeviceGetMaxPcieLinkGeneration=lambda handle: 5,
        nvmlDeviceGetMaxPcieLinkWidth=lambda handle: 16,
    )


def test_nvidias_library_is_asked_first_and_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, WHOLE)
    for known, expected in ((ADDRESS.encode(), Pcie(5, 16, 5, 16)), (b"another", Pcie(4, 8, 5, 16))):
        library = nvml(known)
        monkeypatch.setitem(sys.modules, "pynvml", library)
        assert pcie_of(ADDRESS, tmp_path) == expected
        assert library.calls == ["init", "shutdown"]
