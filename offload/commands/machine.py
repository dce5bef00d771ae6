"""Figures that the system has of the host that this process runs on (/proc, /sys, and its limits), and what
the links of its GPUs carry, each alone and all at once, with the rate of pinning.

One invariant: what cannot be read is None or empty and never an error, so that a container that hides half of
/sys gets the other half of the answer. A GPU that fails, or never answers, is a figure that is missing, with
the reason; the others are measured, and nothing waits longer than `patience_s`. Links are measured by the
engine (`OffloadEngine.measure_link`), on an engine for each GPU and a thread for each engine.
"""

from __future__ import annotations

import os
import re
import resource
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from offload.device.cuda import cores_in, pci_address
from offload.engine import OffloadEngine
from offload.errors import HostBudgetError
from offload.memory.budget import available_bytes, cgroups, default_host_limit_bytes
from offload.policy.actions import Rates
from offload.transfer.copier import LINK_TEST_BYTES

UNLIMITED = resource.RLIM_INFINITY
_ROOT = Path("/")
_GENERATIONS = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}
"""PCIe generation by GT/s of a lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Figures of this process's host.

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
    """The link's generation and lanes, as NVIDIA's library says, where nvidia-ml-py is installed, else as
    /sys does. For right after a copy: an idle link falls back to a lower generation."""
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


_GRACE_S = 2.0

Maker = Callable[[str], OffloadEngine]


class Gpu(threading.Thread):
    """One GPU, measured by a thread, which is a daemon: a driver that hangs is left behind.

    | name | None or empty where it was not measured | unit |
    |---|---|---|
    | name, model | "cuda:0", "NVIDIA H200" | |
    | memory_bytes | of the device | bytes |
    | node, pcie | where it is, and its link | |
    | alone, together | rates of its link by itself, and with all GPUs copying | bytes/s |
    | pinned_bytes, pinning_s | pinned after the link's own blocks, and how long it took | bytes, s |
    | pinned_maps | mappings that it took | |
    | error, refused | why it failed; whether that was for want of host memory | |
    """

    def __init__(
        self, name: str, make: Maker, pin_bytes: int, turn: threading.Lock, barrier: threading.Barrier
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.model = self.error = ""
        self.refused = False
        self.memory_bytes = self.pinned_bytes = 0
        self.pinning_s = 0.0
        self.pinned_maps: int | None = None
        self.node: int | None = None
        self.pcie: Pcie | None = None
        self.alone: Rates | None = None
        self.together: Rates | None = None
        self._make, self._pin_bytes, self._turn, self._barrier = make, pin_bytes, turn, barrier

    def run(self) -> None:
        engine = None
        try:
            with self._turn:
                engine = self._make(self.name)
                self._alone(engine)
            if self._barrier.parties > 1:
                with suppress(threading.BrokenBarrierError), self._current(engine):
                    self.together = engine.measure_link(self._line_up)
        except Exception as error:
            self.error = str(error).partition("\n")[0] or type(error).__name__
            self.refused = isinstance(error, HostBudgetError)
            self._barrier.abort()
        finally:
            if engine is not None:
                with suppress(Exception):  # of a GPU that has gone, which `error` has
                    engine.close()

    def _line_up(self) -> None:
        self._barrier.wait()

    def _alone(self, engine: OffloadEngine) -> None:
        device = engine.device.torch_device
        address = ""
        if device.type == "cuda":
            about = torch.cuda.get_device_properties(device)
            self.model, self.memory_bytes = about.name, int(about.total_memory)
            address = pci_address(device)
            self.node = node_of(address)
        with self._current(engine):
            engine.reserve_host(LINK_TEST_BYTES, measure=False)
            maps, begun = map_count(), time.perf_counter()
            if self._pin_bytes:
                engine.reserve_host(LINK_TEST_BYTES + self._pin_bytes, measure=False)
                self.pinning_s = time.perf_counter() - begun
                self.pinned_bytes = self._pin_bytes
                after = map_count()
                self.pinned_maps = None if maps is None or after is None else after - maps
            self.alone = engine.measure_link()
        self.pcie = pcie_of(address) if address else None

    @staticmethod
    def _current(engine: OffloadEngine) -> torch.cuda.device | nullcontext[None]:
        """Host memory is registered with the thread's current GPU."""
        device = engine.device.torch_device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def measure(
    names: Sequence[str],
    *,
    pin_bytes: int,
    patience_s: float,
    make: Maker = lambda name: OffloadEngine(device=name),
) -> list[Gpu]:
    """Measure these devices. Blocks for about a second a GPU, and `patience_s` at most.

    pin_bytes: how much the first one pins to measure the rate of it.
    """
    turn, barrier = threading.Lock(), threading.Barrier(len(names) or 1)
    gpus = [Gpu(name, make, 0 if at else pin_bytes, turn, barrier) for at, name in enumerate(names)]
    ends = time.monotonic() + patience_s
    for gpu in gpus:
        gpu.start()
    for gpu in gpus:
        gpu.join(max(0.0, ends - time.monotonic()))
    barrier.abort()  # who waits there for one that does not answer has its own figures
    for gpu in gpus:
        gpu.join(max(0.0, ends + _GRACE_S - time.monotonic()))
        if gpu.is_alive():
            gpu.error = f"did not answer within {patience_s:g} s, or waited for one that did not"
    return gpus
