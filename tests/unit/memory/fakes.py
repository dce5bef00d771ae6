"""A device for tests of host memory, and arenas on it: events pass when the test says so, pinning waits at a
gate that the test opens.

It implements only what memory/ asks of a device; nothing here is timed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from offload.device.base import Device
from offload.errors import HostBudgetError, OffloadError
from offload.memory.arena import Block, HostArena
from offload.memory.budget import LocalHostBudget

PATIENCE_S = 30.0
"""Only a broken test waits this long."""


PAGE_BYTES = 4096
KIB = 1024
PIECE = 64 * KIB


class FakeEvent:
    def __init__(self, name: str = "") -> None:
        self.name = name
        self.passed = False

    def __repr__(self) -> str:
        return f"FakeEvent({self.name}, passed={self.passed})"


class FakeHostMemory:
    def __init__(self, device: FakeDevice, nbytes: int, registration_bytes: int) -> None:
        self.device = device
        pages = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8)
        slab = pages.narrow(0, -pages.data_ptr() % PAGE_BYTES, nbytes)  # real host memory is whole pages too
        self.pieces = tuple(slab.split(registration_bytes))
        self.nbytes = nbytes
        self.released = False

    def release_piece(self, index: int) -> None:
        piece = self.pieces[index]
        if not piece.numel():
            return
        if self.device.keeps:
            raise OffloadError(f"a piece of {piece.numel():,} bytes stays pinned")
        self.device.host_bytes -= piece.numel()
        self.device.released_alone.append(piece)
        self.pieces = (*self.pieces[:index], torch.empty(0, dtype=torch.uint8), *self.pieces[index + 1 :])
        self.released = not any(left.numel() for left in self.pieces)

    def release(self) -> None:
        self.released = True
        self.device.host_bytes -= sum(piece.numel() for piece in self.pieces)
        self.pieces = ()


class FakeDevice:
    """pins: as on CUDA, so that growth goes to the background by default."""

    name = "fake"

    def __init__(self, *, pins: bool = False) -> None:
        self.pins = pins
        self.capturing = False
        self.refuses = False
        self.keeps = False  # unpins nothing
        self.host_bytes = 0
        self.memories: list[FakeHostMemory] = []
        # pieces, in order; kept alive, so that no later piece has their addresses
        self.released_alone: list[torch.Tensor] = []
        self.polls = 0
        self.polled: list[FakeEvent] = []
        self.synchronized: list[FakeEvent] = []
        self.pinning_threads: list[str] = []
        self.ungated = 0  # calls of host_memory that need not wait
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Semaphore(0)

    @property
    def protocol(self) -> Device:
        return cast(Device, self)

    def host_memory(self, nbytes: int, registration_bytes: int) -> FakeHostMemory:
        self.pinning_threads.append(threading.current_thread().name)
        self.at_gate.release()
        assert len(self.memories) < self.ungated or self.gate.wait(PATIENCE_S), (
            "the test never opened the gate"
        )
        if self.refuses:
            raise HostBudgetError(f"the system refused {nbytes:,} bytes")
        memory = FakeHostMemory(self, nbytes, registration_bytes)
        self.memories.append(memory)
        self.host_bytes += nbytes
        return memory

    def wait_at_gate(self) -> None:
        """Until one more call of host_memory has begun."""
        assert self.at_gate.acquire(timeout=PATIENCE_S), "nothing was pinned"

    def poll(self, event: Any) -> bool:
        self.polls += 1
        self.polled.append(event)
        return bool(event.passed)

    def synchronize(self, event: Any) -> None:
        self.synchronized.append(event)
        event.passed = True

    def is_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def capture(self) -> Iterator[None]:
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    @contextmanager
    def closed_gate(self) -> Iterator[None]:
        """Nothing gets pinned inside; the gate opens at the end, whatever happens."""
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()


def arena_on(device: FakeDevice, limit_bytes: int = 100 * PIECE, **arguments: Any) -> HostArena:
    settings = {
        "budget": LocalHostBudget(limit_bytes),
        "slab_bytes": 4 * PIECE,
        "registration_bytes": PIECE,
        **arguments,
    }
    return HostArena(device.protocol, **settings)


def taken(arena: HostArena, nbytes: int) -> Block:
    block = arena.take(nbytes)
    assert block is not None
    return block
