"""What the system says of the host that this process runs on: /proc, /sys, and its limits.

One invariant: what cannot be read is None or empty and never an error, so that a container that hides half of
/sys gets the other half of the answer.
"""

from __future__ import annotations

import os
import re
import resource
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from offload.device.cuda import cores_in
from offload.memory.budget import available_bytes, cgroups, default_host_limit_bytes

UNLIMITED = resource.RLIM_INFINITY
_ROOT = Path("/")
_GENERATIONS = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}
"""PCIe generation by GT/s of a lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Of this process's host.

    | name | None or empty where it cannot be read | unit |
    |---|---|---|
    | memory_bytes | the machine's | bytes |
    | free_bytes | available to this process, under the limits of its control groups | bytes |
    | container_bytes | lowest limit of its control groups, where it is below the machine's memory | bytes |
    | pinnable_bytes | what an engine pins at most by default | bytes |
    | memlock_bytes | most that it may lock by itself, or UNLIMITED | bytes |
    | huge_pages | "always", "madvise" or "never" | |
    | maps, most_maps | mappings that it has, and may have | |
    | nodes | cores of each NUMA node | |
    | cores, memory_nodes | where its threads and its memory may be | |
    | driver | version of NVIDIA's | |
    """

    memory_bytes: int | None = None
    free_bytes: int | None = None
    container_bytes: int | None = None
    pinnable_bytes: int | None = None
    memlock_bytes: int = UNLIMITED
    huge_pages: str = ""
    maps: int | None = None
    most_maps: int | None = None
    nodes: dict[int, frozenset[int]] = field(default_factory=dict)
    cores: frozenset[int] = frozenset()
    memory_nodes: frozenset[int] = frozenset()
    driver: str = ""


class Pcie(NamedTuple):
    """A link's generation and lanes: as they are, and the most that the device and its slot can."""

    generation: int
    width: int
    most_generation: int
    most_width: int


def read_host(root: Path = _ROOT) -> Host:
    """root: where /proc and /sys are; another one is a test's."""
    memory_bytes = pinnable = None
    free: list[int] = []
    with suppress(OSError, ValueError, KeyError):
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free.append(available_bytes(root / "proc/meminfo"))
        pinnable = default_host_limit_bytes(root=root)
    groups = []
    with suppress(ValueError):  # a line of another form
        groups = cgroups(root / "proc/self/cgroup", root / "sys/fs/cgroup")
    limits = [group.limit_bytes for group in groups if group.limit_bytes < (memory_bytes or 1 << 60)]
    chosen = re.search(r"\[(\w+)\]", _text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    allowed = re.search(r"^Mems_allowed_list:\s*(\S+)", _text(root / "proc/self/status"), re.MULTILINE)
    nodes = {
        int(folder.name[4:]): _cores(_text(folder / "cpulist"))
        for folder in sorted(root.glob("sys/devices/system/node/node[0-9]*"))
    }
    most = _text(root / "proc/sys/vm/max_map_count")
    return Host(
        memory_bytes=memory_bytes,
        free_bytes=min([*free, *(group.available_bytes for group in groups)], default=None),
        container_bytes=min(limits, default=None),
        pinnable_bytes=pinnable,
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        huge_pages=chosen[1] if chosen else "",
        maps=map_count(root),
        most_maps=int(most) if most.isdecimal() else None,
        nodes=nodes,
        cores=frozenset(os.sched_getaffinity(0)),
        memory_nodes=_cores(allowed[1]) if allowed else frozenset(nodes),
        driver=_text(root / "sys/module/nvidia/version"),
    )


def map_count(root: Path = _ROOT) -> int | None:
    """Mappings of this process."""
    return len(_text(root / "proc/self/maps").splitlines()) or None


def node_of(address: str, root: Path = _ROOT) -> int | None:
    """NUMA node of the device at this PCI address; None where the system knows none."""
    text = _text(root / "sys/bus/pci/devices" / address / "numa_node")
    return int(text) if text.isdecimal() else None  # -1: of a machine that has no nodes, or hides them


def pcie_of(address: str, root: Path = _ROOT) -> Pcie | None:
    """As NVIDIA's library says, where nvidia-ml-py is installed, else as /sys does. For right after a copy:
    an idle link falls back to a lower generation."""
    with suppress(Exception):  # no such package, no such library, no permission, a GPU that has gone
        import pynvml

        pynvml.nvmlInit()
        try:
            gpu = pynvml.nvmlDeviceGetHandleByPciBusId(address.encode())
            return Pcie(
                int(pynvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu)),
                int(pynvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)),
                int(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu)),
                int(pynvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)),
            )
        finally:
            pynvml.nvmlShutdown()
    found = []
    for which in ("current", "max"):
        folder = root / "sys/bus/pci/devices" / address
        speed = _text(folder / f"{which}_link_speed").split(" ")[0].removesuffix(".0")
        width = _text(folder / f"{which}_link_width")
        if speed not in _GENERATIONS or not width.isdecimal() or width == "0":  # "Unknown" in some machines
            return None
        found += [_GENERATIONS[speed], int(width)]
    return Pcie(*found)


def _cores(text: str) -> frozenset[int]:
    try:
        return cores_in(text)
    except ValueError:
        return frozenset()


def _text(path: Path) -> str:
    """Its content without the newline at the end; "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
