"""A device whose lanes are always idle: its copies move nothing.

For counts and timings of the engine's own calls, in which neither a GPU nor the simulated device's checks
shall take part.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from offload.device import CaptureWatcher, CopyPair, Event, Graph, Lane
from offload.device._sim_bytes import PlainMemory

__all__ = ["IdleDevice"]


class _Lane:
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _Event:
    __slots__ = ()


class IdleDevice:
    """Copies are dropped, so what comes back has other bytes. passed: what every poll says."""

    def __init__(self, *, passed: bool = True) -> None:
        self.passed = passed
        self.name = "idle"
        self.torch_device = torch.device("cpu")
        self.compute: Lane = _Lane("compute")
        self.d2h: Lane = _Lane("d2h")
        self.h2d: Lane = _Lane("h2d")
        self.host: Lane = _Lane("host")
        self.near_cores = frozenset(os.sched_getaffinity(0))
        self.pins = False
        self._event = _Event()

    def new_compute_lane(self, name: str) -> Lane:
        return _Lane(name)

    new_copy_lane = new_compute_lane

    @contextmanager
    def use_lane(self, lane: Lane) -> Iterator[None]:
        before, self.compute = self.compute, lane
        try:
            yield
        finally:
            self.compute = before

    def owns(self, tensor: torch.Tensor) -> bool:
        return True

    def record(self, lane: Lane, *, timed: bool = False) -> Event:
        return _Event()

    def wait(self, lane: Lane, event: Event, order: str) -> None:
        return

    def poll(self, event: Event) -> bool:
        return self.passed

    def synchronize(self, event: Event) -> None:
        return

    def elapsed_ms(self, start: Event, end: Event) -> float:
        return 0.0

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, lane: Lane, pairs: Sequence[CopyPair]) -> None:
        return

    def host_memory(self, nbytes: int, registration_bytes: int) -> PlainMemory:
        return PlainMemory(nbytes, registration_bytes, lambda pieces: None)

    def note_write(self, lane: Lane, tensor: torch.Tensor) -> None:
        return

    def note_read(self, lane: Lane, tensor: torch.Tensor) -> None:
        return

    def note_free(self, lane: Lane, tensor: torch.Tensor) -> None:
        return

    def is_capturing(self) -> bool:
        return False

    @contextmanager
    def watch_captures(self, watcher: CaptureWatcher) -> Iterator[None]:
        yield

    def watch_replays(self, graph: Graph, before: Callable[[], None], after: Callable[[], None]) -> None:
        return

    def active_bytes(self) -> int:
        return 0

    def allocator_bytes(self) -> None:
        return None

    def release_cached(self, worth: int) -> int:
        return 0
