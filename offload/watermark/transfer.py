"""The runtime's spills in flight: how many there may be, and who waits for them.

One invariant: bytes move by the transfer engine alone; here is only counted what it was asked for.

    device waits    a spill is settled by the compute lane, which waits for its event; the host never does
    host waits      `on_host`: the host waits for the event first. Its time is counted as stall
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Protocol

from offload.engine import OffloadEngine
from offload.memory.arena import HostLender
from offload.transfer.block import BlockState, DeviceBlock, Transfer


class _OfBlock(Protocol):
    """Record of a saved tensor."""

    @property
    def block(self) -> DeviceBlock: ...


class ActivationTransfer:
    """Issues and finalizes spills. Callers hold the engine's lock.

    max_inflight_d2h, max_inflight_h2d: spills and restores in flight; None where something else bounds them.
        A conductor writes them as the source's does (`_max_d2h`, `_max_h2d`). hosts: whose host memory spills
        go to; None for the arena's. on_host: the host waits, not the compute lane.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        *,
        max_inflight_d2h: int | None = None,
        max_inflight_h2d: int | None = None,
        hosts: HostLender | None = None,
        on_host: bool = False,
    ) -> None:
        self._engine = engine
        self.away = engine.transfers.away
        self._share = engine.limits.contributor("watermark", self)
        self._max_d2h, self._max_h2d = max_inflight_d2h, max_inflight_h2d
        self._hosts = hosts
        self._on_host = on_host
        self._in_flight: deque[tuple[Transfer, tuple[DeviceBlock, ...]]] = deque()
        self.blocked_ms = 0.0  # in this step
        self.blocked_count = 0

    def end(self) -> None:
        """It bounds nothing any more."""
        self._share.end()

    # -- what is in flight -----------------------------------------------------------------------------------
    @property
    def _max_d2h(self) -> int | None:
        return self._most

    @_max_d2h.setter
    def _max_d2h(self, most: int | None) -> None:
        self._most = most
        self._share.bound("spills_in_flight", most)

    def can_spill(self) -> bool:
        """Whether one more may be in flight."""
        limits = self._engine.limits
        if limits.spills_in_flight is None:
            return limits.max_spilling_bytes != 0
        return sum(1 for transfer, _ in self._in_flight if not transfer.settled) < limits.spills_in_flight

    @property
    def sends_nothing(self) -> bool:
        """Whether the cap is 0: what could leave stays, and nobody waits for room."""
        return self._engine.limits.spills_in_flight == 0

    def take_settled(self) -> list[DeviceBlock]:
        """Blocks of spills that have been settled since the last call, by whomever."""
        found: list[DeviceBlock] = []
        in_flight = self._in_flight
        while in_flight and in_flight[0][0].settled:
            found += in_flight.popleft()[1]
        return found

    # -- spill and finalize ----------------------------------------------------------------------------------
    def spill(self, blocks: Sequence[DeviceBlock]) -> list[DeviceBlock]:
        """Send these to the host; those that do leave. The others are as they were: freed, without a host
        block, or denied. Blocks the host: never, but for a slab that is pinned on its first use."""
        left: list[DeviceBlock] = []
        for _, together in groupby(blocks, attrgetter("lane")):  # nearly always one
            due = list(together)
            transfer = self._engine.transfers.spill(due, self._hosts)
            if transfer is not None:  # it may have been settled already, under a cap
                leaving = tuple(block for block in due if block.transfer is transfer)
                self._in_flight.append((transfer, leaving))
                left += leaving
        return left

    def finalize_all_spills(self, records: Iterable[_OfBlock]) -> None:
        """Finalize the spills of these records: their device memory is free when this returns. Blocks the
        host until their copies have ended, if it is `on_host`'s to wait; else compute waits for them."""
        engine = self._engine
        with engine.lock:
            spilling = [record.block for record in records if record.block.state is BlockState.SPILLING]
            transfers = {id(found): found for block in spilling if (found := block.transfer) is not None}
            for transfer in transfers.values():
                if self._on_host and not transfer.settled and not engine.device.poll(transfer.event):
                    began = time.perf_counter()
                    engine.device.synchronize(transfer.event)
                    self.blocked_ms += (time.perf_counter() - began) * 1000
                    self.blocked_count += 1
                engine.transfers.settle_spill(transfer)

    def end_step(self) -> tuple[float, int]:
        """The time in ms that the host was blocked in the step, and how often; counted anew from here."""
        found = self.blocked_ms, self.blocked_count
        self.blocked_ms, self.blocked_count = 0.0, 0
        self._in_flight.clear()  # the engine has settled all
        return found
