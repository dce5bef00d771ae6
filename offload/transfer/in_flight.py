"""Saved bytes on the device while copies of them run: how many there are, how room is made, and how they are
let go of.

One invariant: device bytes that a copy still touches are held by that copy's `Transfer`, and they return to
the allocator only after a lane that could reuse them is ordered behind the copy. The host never blocks; where
bytes must wait, the compute lane does.

Three counts say where saved bytes are on the device: resident (kept), spilling (leaving; held by transfers in
`_spilling`, oldest first) and restoring (fetched back and not yet read for the last time). Their sum stays
under `device_limit_bytes` as long as something can be waited for: before bytes are added, the oldest spill is
settled, which makes compute wait for it and drops its source; where none holds bytes, what was held back for
its reader is sent on its way again, whose copy has never stopped.

# [Order: settle]
# hazard  allocator reuse: the source goes back to compute's allocator while `d2h` still reads it.
# edge    settling makes the compute lane that owns the source wait for the spill's event before the last
#         reference goes.
# alive   the Transfer, until just after that wait.
# proof   tests/property/test_edges.py, edge "settle"
#
# [Order: abandon]
# hazard  allocator reuse: a restore that nobody will read is dropped while `h2d` still writes its buffer.
# edge    the compute lane that owns the buffer waits for the restore's event before the last reference goes.
# alive   the Transfer.
# proof   tests/property/test_edges.py, edge "abandon"
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.device import Device, Lane
from offload.ids import ChunkId
from offload.memory.arena import HostArena
from offload.transfer.admission import Limits
from offload.transfer.record import Record, RecordState, Remains, Transfer, living
from offload.transfer.stalls import Stall, total_ms

if TYPE_CHECKING:
    from offload.transfer.captures import CapturedGraph

__all__ = ["InFlight", "TransferCounts"]


@dataclass(slots=True)
class TransferCounts:
    """What one step moved. Bytes, unless the name says otherwise."""

    saved: int = 0
    spilled: int = 0
    spill_bytes: int = 0
    restored: int = 0
    restore_bytes: int = 0
    refused: int = 0
    refused_bytes: int = 0
    wanted_peak_bytes: int = 0  # lent and refused together, at a refusal: what the host would have to hold
    stall_count: int = 0
    device_bytes_peak: int = 0
    largest_bytes: int = 0  # of the records so far, when they were saved
    replays: int = 0
    replayed_bytes: int = 0


class InFlight:
    """The engine's transfers that are not settled, and its counts. Callers hold the engine's lock."""

    def __init__(self, device: Device, arena: HostArena, limits: Limits) -> None:
        self.device = device
        self.arena = arena
        self.limits = limits
        self.estate: deque[Remains] = deque()  # appended to by finalisers of records, on any thread
        self.counts = TransferCounts()
        self.capture: CapturedGraph | None = None  # the one under way; captures.py
        self._joined: Lane | None = None  # comes after every copy of the capture so far
        self.resident_bytes = 0
        self.spilling_bytes = 0
        self.restoring_bytes = 0
        self._refused_bytes = 0  # of living records
        self._spilling: deque[Transfer] = deque()
        self._restoring: deque[Transfer] = deque()
        # fetched, in that order; the dead ones at its start are let go in passing
        self._ahead: deque[weakref.ref[Record]] = deque()
        # chunks of which something fetched ahead was dropped, since the prefetch looked back
        self.dropped: set[ChunkId] = set()
        # spills in flight, by storage: two chunks may save one storage
        self._sources: Counter[int] = Counter()
        self.stalls: list[Stall] = []  # of this step
        self._stalls_before: list[Stall] = []
        self._no_room = False  # the device ran out of memory in this step: nothing more is fetched ahead

    # -- counts ----------------------------------------------------------------------------------------------
    @property
    def device_bytes(self) -> int:
        """Saved bytes on the device in any state."""
        return self.resident_bytes + self.spilling_bytes + self.restoring_bytes

    @property
    def over_limit(self) -> bool:
        """Whether saved bytes are above the device limit: only what is sent now can bring them below it."""
        limit = self.limits.device_limit_bytes
        return limit is not None and self.device_bytes > limit

    def adopt(self, record: Record) -> None:
        """Count a new RESIDENT record, after making room for it. It is on the current compute lane unless it
        says another."""
        if self.estate:
            self.bury()
        if record.lane is None:
            record.lane = self.device.compute
        record.capture = self.capture
        self.resident_bytes += record.nbytes  # first: whatever fails below, a record that dies is counted out
        self._make_room(0)
        counts = self.counts
        counts.saved += record.storages
        # `_note_peak`, two calls fewer for every record
        held = self.resident_bytes + self.spilling_bytes + self.restoring_bytes
        if held > counts.device_bytes_peak:
            counts.device_bytes_peak = held
        if record.nbytes > counts.largest_bytes:
            counts.largest_bytes = record.nbytes

    def resize(self, record: Record, nbytes_before: int) -> None:
        """A RESIDENT record's bytes have changed since it was adopted; room is made for what it grew."""
        self.resident_bytes += record.nbytes - nbytes_before
        self.counts.largest_bytes = max(self.counts.largest_bytes, record.nbytes)
        if record.refused:
            self._refused_bytes += record.nbytes - nbytes_before
        if record.nbytes > nbytes_before:
            self._make_room(0)
        self._note_peak()

    def _note_peak(self) -> None:
        held = self.device_bytes
        if held > self.counts.device_bytes_peak:
            self.counts.device_bytes_peak = held

    def bury(self) -> None:
        """Settle what dead records left behind: their share of the counts and their blocks."""
        while self.estate:
            state, nbytes, block, event, transfer, refused, capture = self.estate[0]
            if state in (RecordState.RESTORING, RecordState.RESTORED):
                assert transfer is not None
                # may raise: what a record left is taken off only then
                self._settle_restore(transfer, "abandon")
                self.restoring_bytes -= nbytes
            self.estate.popleft()
            if refused:
                self._refused_bytes -= nbytes
            if state is RecordState.RESIDENT:
                self.resident_bytes -= nbytes
                # it was reclaimed, and its spill still holds the bytes
                if transfer is not None and not transfer.settled:
                    transfer.nbytes += nbytes
                    self.spilling_bytes += nbytes
            if block is not None and capture is None:  # else its region holds it
                self.arena.give_back(block, event)

    # -- room ------------------------------------------------------------------------------------------------
    def _make_room(self, nbytes: int, may_settle: Callable[[Transfer], bool] | None = None) -> bool:
        """Settle the oldest spills until `nbytes` more fit under the caps. False if they do not fit even
        then.

        may_settle: asked before each; a spill whose bytes are read sooner than the ones that want its room
            must not make way.
        """
        spill_cap, device_cap = self.limits.max_spilling_bytes, self.limits.device_limit_bytes
        if (spill_cap is None or self.spilling_bytes <= spill_cap) and (
            device_cap is None or self.device_bytes + nbytes <= device_cap
        ):
            return True
        reclaimed = 0  # at the front, of which settling makes no room
        while reclaimed < len(self._spilling):
            oldest = self._spilling[reclaimed]
            over_cap = (
                spill_cap is not None
                and self.spilling_bytes > spill_cap
                and self.spilling_bytes > oldest.nbytes
            )
            over_limit = device_cap is not None and self.device_bytes + nbytes > device_cap
            if not (over_cap or over_limit):
                return True
            if oldest.nbytes == 0:
                reclaimed += 1
                continue
            if may_settle is not None and not may_settle(oldest):
                return not over_limit
            self.settle_spill(oldest)
        if device_cap is None or self.device_bytes + nbytes <= device_cap:
            return True
        if may_settle is not None:
            return False
        self._let_held_back_go(device_cap - nbytes)
        return self.device_bytes + nbytes <= device_cap or self._drop_furthest(
            self.device_bytes + nbytes - device_cap
        )

    def _let_held_back_go(self, device_bytes: int) -> None:
        """Settle spills whose records were reclaimed and have not been read, the oldest first, until no more
        than `device_bytes` are left: their copies have gone on, and the host has the bytes."""
        for transfer in [*self._spilling]:
            if self.device_bytes <= device_bytes:
                return
            held = [record for record in living(transfer.records) if self._is_held_back(record, transfer)]
            held = [record for record in held if record.unread == record.handles]
            for record in held:
                record.move_to(RecordState.SPILLING)
                record.device_bytes = None
                transfer.nbytes += record.nbytes
                self.spilling_bytes += record.nbytes
                self.resident_bytes -= record.nbytes
            if held:
                self.settle_spill(transfer)

    @staticmethod
    def _is_held_back(record: Record, transfer: Transfer) -> bool:
        """Whether the record was reclaimed from this spill, whose block it still has. That happens to
        complete chunks only, so no save has joined the record since, and the block has all that will be
        read."""
        return (
            record.state is RecordState.RESIDENT
            and record.transfer is transfer
            and record.block is not None
            and record.capture is None
        )

    def _drop_furthest(self, nbytes: int) -> bool:
        """Drop at least `nbytes` of what was fetched ahead, the latest fetched first: it is read last. False
        if there is not as much."""
        while nbytes > 0 and self._ahead:
            record = self._ahead.pop()()
            if (
                record is None
                or record.transfer is None
                or record.state not in (RecordState.RESTORING, RecordState.RESTORED)
            ):
                continue
            self._settle_restore(record.transfer, "abandon")
            self.drop(record)
            self.dropped.add(record.group.chunk)
            nbytes -= record.nbytes
        return nbytes <= 0

    def reclaim(self, record: Record) -> None:
        """A SPILLING record is about to be read: it stays after all. Its copy runs on unused, so the spill
        keeps its source to the end, and the record its block: until the spill is settled it can be sent on
        its way again (`_let_held_back_go`).

        Not where that would leave less of the device limit than the largest record takes: what is resident
        can make no room, also when an input half has read it and its weight half is far away, and the next
        read has to go ahead.
        """
        storage = record.storage()
        transfer = record.transfer
        if storage is None or transfer is None or record.external:
            return
        limit = self.limits.device_limit_bytes
        if limit is not None and self.resident_bytes + record.nbytes + self.counts.largest_bytes > limit:
            return
        record.move_to(RecordState.RESIDENT)
        record.device_bytes = storage
        transfer.nbytes -= record.nbytes
        self.spilling_bytes -= record.nbytes
        self.resident_bytes += record.nbytes
        if record.capture is not None:
            record.block = None  # each replay writes it all the same

    # -- settling --------------------------------------------------------------------------------------------
    def settle_spill(self, transfer: Transfer) -> None:
        """Make compute wait for this spill and let its source go. A settled transfer is passed over. Order:
        [Order: settle]."""
        if transfer.settled:
            return
        self._await(transfer, "settle")
        transfer.settled = True
        self._spilling.remove(transfer)  # nearly always the first
        self.spilling_bytes -= transfer.nbytes
        for reference, source in zip(transfer.records, transfer.keepalive, strict=True):
            record = reference()
            key = source.untyped_storage()._cdata
            copies = self._sources.pop(key) - 1
            if copies:
                self._sources[key] = copies
            else:
                if record is None or record.state is not RecordState.RESIDENT:
                    self.device.note_free(transfer.lane, source)
            if record is None:
                continue
            if record.state is RecordState.SPILLING:
                record.move_to(RecordState.SPILLED)
            # it stays, and its block is for the next spill
            elif record.block is not None and self._is_held_back(record, transfer):
                self.arena.give_back(record.block, record.event)
                record.block = None
        transfer.let_go()

    def _settle_restore(self, transfer: Transfer, order: str) -> None:
        if transfer.settled:
            return
        self._await(transfer, order)
        transfer.settled = True
        self._restoring.remove(transfer)  # readers come in about the order of issue: near the front
        if order == "read":  # what is abandoned only goes back to the allocator
            for home in transfer.keepalive:
                self.device.note_read(transfer.lane, home)
        for reference in transfer.records:
            record = reference()
            if record is not None and record.state is RecordState.RESTORING:
                record.move_to(RecordState.RESTORED)
        transfer.let_go()

    def drop(self, record: Record) -> None:
        """Let a RESTORED record's device bytes go; its host copy is clean, so this is free. The caller may
        still hold the storage."""
        record.move_to(RecordState.SPILLED)
        record.device_bytes = None
        self.restoring_bytes -= record.nbytes

    def _await(self, transfer: Transfer, order: str) -> None:
        """Order the transfer's lane after it; where it had not passed yet, time the wait."""
        device, lane, event = self.device, transfer.lane, transfer.event
        if transfer.capture is not None:
            if transfer.capture is self.capture and lane is not self._joined:
                device.wait(lane, event, order)
            return
        if device.poll(event):
            return
        before = device.record(lane, timed=True)
        device.wait(lane, event, order)
        self.stalls.append(Stall(lane, before, device.record(lane, timed=True)))
        self.counts.stall_count += 1

    def _settle_all(self, restores_as: str = "abandon") -> None:
        while self._spilling:
            self.settle_spill(self._spilling[0])
        while self._restoring:
            self._settle_restore(self._restoring[0], restores_as)

    # -- step ------------------------------------------------------------------------------------------------
    def release(self, record: Record) -> None:
        """End a record's life whatever its state: a later read finds it RELEASED. Its block and counts are
        settled now."""
        remains = record.remains()
        record.move_to(RecordState.RELEASED)
        record.device_bytes = record.block = record.probe = None
        for keeper in record.living_keepers():
            keeper.probe = None
        self.estate.append(remains)
        self.bury()

    def end_step(self) -> tuple[TransferCounts, float]:
        """Settle everything in flight and start new counts. Returns the step's counts and the stall of the
        step BEFORE it, in ms: a stall is read one step late, so that reading it never blocks the host."""
        self.bury()
        self._settle_all()
        self._ahead.clear()
        self.dropped.clear()
        self._no_room = False
        stall_ms = total_ms(self.device, self._stalls_before)
        self._stalls_before, self.stalls = self.stalls, []
        counts, self.counts = self.counts, TransferCounts(device_bytes_peak=self.device_bytes)
        return counts, stall_ms

    def in_flight(self) -> tuple[int, int]:
        """Transfers not yet settled: (spills, restores)."""
        return len(self._spilling), len(self._restoring)
