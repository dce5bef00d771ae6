"""How much device memory is allocated, the two marks that say whether spilling is on, when the device is
asked; and the spills in flight.

Two invariants: the latch turns on at or above the high mark and off below the low one; between them it stays
as it was. Between two readings no more than an eighth of the room below the high mark, or a piece, is saved,
and there are at most 64 saves and reads, eight from half of the mark on: memory that nobody saves may grow
meanwhile, and is seen soon.

Spills in flight are bounded, and waited for by one of two. Bytes move by the transfer engine alone; here is
only counted what it was asked for.

    device waits    a spill is settled by the compute lane, which waits for its event; the host never does
    host waits      `on_host`: the host waits for the event first. Its time is counted as stall
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Protocol

from offload.engine import OffloadEngine
from offload.ids import GroupId
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
        """Predicate: one more spill may be in flight."""
        limits = self._engine.limits
        if limits.spills_in_flight is None:
            return limits.max_spilling_bytes != 0
        return sum(1 for transfer, _ in self._in_flight if not transfer.settled) < limits.spills_in_flight

    @property
    def sends_nothing(self) -> bool:
        """Predicate: the cap is 0, so what could leave stays, and nobody waits for room."""
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


_SHARE = 8
"""Part of the free bytes below the mark, one in so many, that may be saved before the next reading."""

_MOST_CALLS = 64
_MOST_CALLS_ABOVE_HALF = 8
"""Saves and reads. A reading costs about as much as a save."""

_LINGERING = 16
"""Blocks that linger and are looked at for each reading."""

_STRIDE = 64
"""In a backward, the part of the high mark that may be read."""


class MemoryMeter(Protocol):
    """Allocated device memory, in bytes. Never blocks the host."""

    def allocated(self) -> int:
        """Now."""

    def peak(self) -> int:
        """At most, since `start_step`."""

    def start_step(self) -> None:
        """The peak begins anew."""


class ReadingsMeter:
    """A meter made of a function that tells the allocated bytes: the peak is the highest of its answers."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._peak = 0

    def allocated(self) -> int:
        found = self._read()
        self._peak = max(self._peak, found)
        return found

    def peak(self) -> int:
        return self._peak

    def start_step(self) -> None:
        self._peak = 0


class DeviceMeter(ReadingsMeter):
    """A device whose allocator counts: its peak has what lies between two readings, too.

    resets: whether `start_step` may start the allocator's own peak anew, which others may be reading.
    """

    def __init__(self, engine: OffloadEngine, *, resets: bool) -> None:
        super().__init__(engine.device.active_bytes)
        self._device = engine.device
        self._resets = resets

    def peak(self) -> int:
        found = self._device.allocator_bytes() if self._resets else None
        return super().peak() if found is None else max(super().peak(), found[1])

    def start_step(self) -> None:
        super().start_step()
        if self._resets:
            self._device.reset_allocator_peak()


def meter_of(
    engine: OffloadEngine, given: MemoryMeter | Callable[[], int] | None, *, resets: bool
) -> MemoryMeter:
    """The meter that was given, else the device's. The simulated device has none: there it is the saved bytes
    that the engine knows. resets: as of DeviceMeter."""
    if given is None:
        if engine.device.allocator_bytes() is None:
            return ReadingsMeter(lambda: engine.transfers.device_bytes)
        return DeviceMeter(engine, resets=resets)
    if callable(getattr(given, "allocated", None)):
        return given  # type: ignore[return-value]
    if callable(given):
        return ReadingsMeter(given)
    raise ValueError(
        f"memory_allocated is a {type(given).__name__}, must be a function that returns the allocated bytes "
        "of the device, as torch.cuda.memory_allocated does, or None for that one"
    )


class ActivationBudgetManager:
    """The meter beside the marks. high_bytes, low_bytes: the marks."""

    def __init__(self, meter: MemoryMeter, high_bytes: int, low_bytes: int) -> None:
        self.meter = meter
        self.high_bytes = high_bytes
        self.low_bytes = low_bytes
        self.last_bytes = 0  # the last reading
        self.spilling = False

    def read(self) -> int:
        """The allocated bytes now; the latch follows."""
        self.last_bytes = allocated = self.meter.allocated()
        if allocated >= self.high_bytes:
            self.spilling = True
        elif allocated < self.low_bytes:
            self.spilling = False
        return allocated

    def above_high_watermark(self) -> bool:
        """Predicate: the last reading was at the high mark or above."""
        return self.last_bytes >= self.high_bytes

    def below_low_watermark(self) -> bool:
        """Predicate: the last reading was below the low mark."""
        return self.last_bytes < self.low_bytes


class Readings:
    """piece_bytes: no more is saved or read between two readings."""

    def __init__(
        self, budget: ActivationBudgetManager, transfer: ActivationTransfer, piece_bytes: int
    ) -> None:
        self._budget = budget
        self._transfer = transfer
        self._piece_bytes = piece_bytes
        self._lingering: list[DeviceBlock] = []  # spilled, and something else holds their device memory
        self._unlooked = 0  # readings since those were looked at
        self.away_bytes = 0  # spilled, and their device memory is free
        self.released_bytes = 0  # in this step
        self._saved_bytes = 0  # since the last reading
        self._read_bytes = 0
        self._calls = 0
        self._next_saved_bytes = 0  # at which the next one is due

    def after_save(self, nbytes: int) -> int:
        """Bytes on the device, after a save of so many."""
        self._saved_bytes += nbytes
        self._calls += 1
        if self._saved_bytes < self._next_saved_bytes and not self._many_calls():
            return self._budget.last_bytes + self._saved_bytes
        return self.read()

    def is_due_after_read(self, nbytes: int) -> bool:
        """Predicate: a reading is due, after so many bytes have been read for the last time."""
        self._read_bytes += nbytes
        self._calls += 1
        due_bytes = min(self._piece_bytes, self._budget.high_bytes // _STRIDE)
        return self._read_bytes >= due_bytes or self._many_calls()

    def _many_calls(self) -> bool:
        is_above_half = 2 * self._budget.last_bytes >= self._budget.high_bytes
        return self._calls >= (_MOST_CALLS_ABOVE_HALF if is_above_half else _MOST_CALLS)

    def read(self) -> int:
        """Bytes on the device, asked now."""
        self._count_away()
        allocated = self._budget.read()
        self._saved_bytes = self._read_bytes = self._calls = 0
        room = max(0, self._budget.high_bytes - allocated)
        self._next_saved_bytes = min(self._piece_bytes, room // _SHARE)
        return allocated

    def look(self) -> int:
        """Read for whoever fetches ahead: what was read before still counts for the next reading."""
        reads = self._read_bytes, self._calls
        allocated = self.read()
        self._read_bytes, self._calls = reads
        return allocated

    def _count_away(self) -> None:
        """Bytes that would be on the device if nothing had left. Many that linger are not looked at in each
        reading."""
        away, settled = self._transfer.away, self._transfer.take_settled()
        self._unlooked += 1
        if len(self._lingering) <= _LINGERING * self._unlooked:
            settled = [*self._lingering, *settled]
            self._lingering, self._unlooked = [], 0
        for block in settled:
            if block.state is not BlockState.SPILLED or block.is_freed:
                continue
            if block.storage() is not None:
                self._lingering.append(block)
                continue
            self.released_bytes += block.nbytes
            if block.unread:
                away[block] = self
                self.away_bytes += block.nbytes

    def lingering_slots(self, group: GroupId) -> set[int]:
        """Slots of a group's blocks whose device memory something else holds."""
        held = (block for block in self._lingering if block.group is group)
        return {block.slot for block in held if block.storage() is not None}

    def end_step(self) -> int:
        """The released bytes of the step; counted anew from here."""
        found, self.released_bytes = self.released_bytes, 0
        for block in [block for block, owner in self._transfer.away.items() if owner is self]:
            del self._transfer.away[block]
        self._lingering.clear()
        self.away_bytes = self._saved_bytes = self._read_bytes = self._calls = self._next_saved_bytes = 0
        return found
