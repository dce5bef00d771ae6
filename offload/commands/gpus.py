"""The links of the GPUs of this process, each alone and all at once, and the rate of pinning.

The engine's own measurement (`OffloadEngine.measure_link`), on an engine for each GPU and a thread for each
engine. One invariant: a GPU that fails, or never answers, is a figure that is missing, with the reason; the
others are measured, and nothing waits longer than `patience_s`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress

import torch

from offload.commands.machine import Pcie, map_count, node_of, pcie_of
from offload.device.cuda import pci_address
from offload.engine import OffloadEngine
from offload.errors import HostBudgetError
from offload.policy.actions import Rates
from offload.transfer.measured import LINK_TEST_BYTES

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
