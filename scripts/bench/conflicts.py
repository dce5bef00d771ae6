"""Conflicts over one link, each provoked by copies of several clients: how long compute waits for the one
that it needs, with a conductor and without.

One invariant: both arms ask for the same copies in the same order. What is denied is not made.
"""

from __future__ import annotations

import statistics
from typing import Any

from offload.client import Phase
from offload.conductor import Conductor
from offload.device import Event
from offload.engine import OffloadEngine
from offload.ids import Owner
from offload.transfer.copier import Direction, Priority

__all__ = ["CONFLICTS", "stalls_ms"]

CONFLICTS = ("three at once", "the optimizer", "the backward", "saturated")
"""The first three are S1-60's: three runtimes transfer at once; weights are fetched ahead beside the
optimizer's state; a backward that is short of memory fetches saved tensors ahead of the weights that it waits
for. "saturated": the link is full both ways, and a fetch is asked for. Of that one only what it waits before
it begins counts."""

PIECES, PIECE_BYTES, BLOCK_BYTES = 24, 64 << 20, 448 << 20
H2D, D2H = Direction.H2D, Direction.D2H


class _Clients:
    """Clients of one engine whose copies are made by hand. nbytes: of a piece, and of what is waited for."""

    def __init__(self, engine: OffloadEngine, piece_bytes: int, block_bytes: int) -> None:
        self.engine, self.piece_bytes, self.block_bytes = engine, piece_bytes, block_bytes
        # each way has its own memory on both sides
        self.memory = [engine.device.host_memory(block_bytes, block_bytes) for _ in Direction]
        self.host = [memory.pieces[0] for memory in self.memory]
        self.here = [engine.device.empty(block_bytes) for _ in Direction]
        self.last: Event | None = None

    def copy(self, client: str, direction: Direction, priority: Priority, nbytes: int) -> bool:
        copier, owner, device = self.engine.copier, Owner(client, "piece"), self.engine.device
        lease = copier.ask(nbytes, direction, owner, priority)
        if lease is None:
            return False
        lane, place = (device.h2d, 0) if direction is H2D else (device.d2h, 1)
        device.wait(lane, device.record(device.compute), "spill")
        pair = self.here[place][:nbytes], self.host[place][:nbytes]
        self.last = copier.copy(lease, direction, owner, [pair if direction is H2D else pair[::-1]], nbytes)
        return True

    def prefetch(self, client: str) -> None:
        for _ in range(PIECES):
            self.copy(client, H2D, Priority.SPECULATIVE, self.piece_bytes)

    def stall_ms(self, client: str, *, begins: bool) -> float:
        """How long compute waits for a block that is asked for now; or, `begins`, until its copy begins."""
        device, starts = self.engine.device, []

        def note(direction: Direction, owner: Owner, nbytes: int, start: Event, end: Event) -> None:
            starts.append(start)

        before = device.record(device.compute, timed=True)
        self.engine.copier.watch(note)
        self.copy(client, H2D, Priority.REQUIRED, self.block_bytes)
        self.engine.copier.unwatch(note)
        assert self.last is not None
        device.wait(device.compute, self.last, "read")
        after = device.record(device.compute, timed=True)
        device.synchronize(after)
        return device.elapsed_ms(before, starts[0] if begins else after)


def stalls_ms(engine: OffloadEngine, conflict: str, samples: int, scale: int = 1) -> dict[bool, float]:
    """The median, by whether there is a conductor. scale: sizes are divided by it, for a simulated link."""
    clients = _Clients(engine, PIECE_BYTES // scale, BLOCK_BYTES // scale)
    full = 1 << 40  # allocated, for the backward that is short of memory
    found: dict[bool, list[float]] = {False: [], True: []}
    for sample in range(samples + 1):
        for with_it in (False, True):
            conductor = _conductor(engine, conflict, full, scale) if with_it else None
            waiting = "optim" if conflict == "the optimizer" else "weights"
            clients.copy(waiting, H2D, Priority.REQUIRED, clients.piece_bytes)
            if conflict == "saturated":
                for _ in range(PIECES):
                    clients.copy("gradients", D2H, Priority.REQUIRED, clients.piece_bytes)
            for client in {"three at once": ("groups", "experts"), "the optimizer": ("weights",)}.get(
                conflict, ("groups",)
            ):
                clients.prefetch(client)
            stall = clients.stall_ms(waiting, begins=conflict == "saturated")
            for lane in (engine.device.h2d, engine.device.d2h):
                engine.device.synchronize(engine.device.record(lane))
            if conductor is not None:
                conductor.shutdown()
            if sample:  # the first warms up
                found[with_it].append(stall)
    return {with_it: statistics.median(stalls) for with_it, stalls in found.items()}


def _conductor(engine: OffloadEngine, conflict: str, full: int, scale: int) -> Conductor:
    fields: dict[str, Any] = {"slot_mb": 512 / scale, "telemetry_interval": 0}
    if conflict == "the backward":
        fields["allocated"] = lambda: full
    conductor = Conductor(engine=engine, **fields)
    phase = {"the optimizer": Phase.OPTIMIZER, "the backward": Phase.BACKWARD}.get(conflict)
    if phase is not None:
        conductor.begin_step()
        conductor.enter_forward()
        conductor.enter_backward()
    if phase is Phase.OPTIMIZER:
        conductor.enter_optimizer()
    return conductor
