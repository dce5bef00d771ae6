"""Where saved tensors are copied: groups of records out to the host in pieces, and back. The optimizer's copies are optim/mover.py's.

One invariant: device bytes that a copy still touches are held by that copy's `Transfer`, and they return to the allocator only after
a lane that could reuse them is ordered behind the copy. The host never blocks; where bytes must wait, the compute lane does.

Three counts say where saved bytes are on the device: resident (kept), spilling (leaving; held by transfers in `_spilling`, oldest
first) and restoring (fetched back and not yet read for the last time). Their sum stays under `device_limit_bytes` as long as
something can be waited for: before bytes are added, the oldest spill is settled, which makes compute wait for it and drops its source.

# [Order: spill]
# hazard  RAW: `d2h` copies a tensor that `compute` is still writing.
# edge    spill records an event on the compute lane of the save, after it; d2h waits for it before the copy.
# alive   the Transfer holds the source storage until the spill is settled.
# proof   tests/property/test_edges.py, edge "spill"
#
# [Order: reuse]
# hazard  WAR: `h2d` still reads a host block for a restore while `d2h` writes it for the next spill.
# edge    a block comes back to the arena with the event of its last copy; the next spill into its bytes makes d2h wait for it.
# alive   the arena owns the pinned bytes; the record holds the block from its spill to its death.
# proof   tests/property/test_edges.py, edge "reuse"
#
# [Order: settle]
# hazard  allocator reuse: the source goes back to compute's allocator while `d2h` still reads it.
# edge    settling makes the compute lane that owns the source wait for the spill's event before the last reference goes.
# alive   the Transfer, until just after that wait.
# proof   tests/property/test_edges.py, edge "settle"
#
# [Order: allocate]
# hazard  allocator reuse: `h2d` writes a new buffer whose bytes earlier work on `compute` still uses.
# edge    restore allocates on compute, records an event there, and h2d waits for it.
# alive   the Transfer and the record hold the buffer.
# proof   tests/property/test_edges.py, edge "allocate"
#
# [Order: restore]
# hazard  RAW: `h2d` reads a host block that `d2h` has not finished writing.
# edge    h2d waits for the record's own last event, whatever else has been waited for.
# alive   the record holds the block.
# proof   tests/property/test_edges.py, edge "restore"
#
# [Order: read]
# hazard  RAW: `compute` reads a restored buffer before `h2d` has written it.
# edge    the first read of a restore makes compute wait for its event.
# alive   the record, until its last reader has it.
# proof   tests/property/test_edges.py, edge "read"
#
# [Order: abandon]
# hazard  allocator reuse: a restore that nobody will read is dropped while `h2d` still writes its buffer.
# edge    the compute lane that owns the buffer waits for the restore's event before the last reference goes.
# alive   the Transfer.
# proof   tests/property/test_edges.py, edge "abandon"
#
# [Order: join]
# hazard  RAW, WAR: what is replayed after a graph touches bytes that the graph's copies still read or write; CUDA refuses such a graph.
# edge    before a capture ends its compute lane waits for the last point of each copy lane that is part of it.
# alive   the graph's region holds host blocks, its memory pool device buffers (captures.py).
# proof   tests/property/test_edges.py, edge "join"

What is captured into a graph waits for events of the same capture only; captures.py says why that is enough.
"""

from __future__ import annotations

import logging
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from offload.device import CopyPair, Device, Event, Lane
from offload.errors import OffloadError
from offload.memory.arena import Block, HostArena
from offload.transfer.captures import CapturedGraph, CaptureSide
from offload.transfer.door import CapsDoor, Denied, Direction, Door, Limits, Priority
from offload.transfer.layout import WeakStorage, bytes_of
from offload.transfer.ranges import transfer_range
from offload.transfer.record import Record, RecordState, Remains, Transfer, living

__all__ = ["TransferCounts", "TransferEngine"]

logger = logging.getLogger(__name__)


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
    replays: int = 0
    replayed_bytes: int = 0


class TransferEngine(CaptureSide):
    """Moves records. It never asks why; callers hold the engine's lock.

    device: whose lanes the copies run on. arena: lends the host blocks. limits: caps in bytes, read at every call, so they may change
    between steps. door: asked before every transfer.
    """

    def __init__(self, device: Device, arena: HostArena, limits: Limits, *, door: Door | None = None, audit: bool = False) -> None:
        self.device = device
        self.arena = arena
        self.limits = limits
        self.door: Door = door if door is not None else CapsDoor(limits)
        self.audit = audit
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
        self._ahead: deque[weakref.ref[Record]] = deque()  # fetched, in that order; the dead ones at its start are let go in passing
        self._sources: Counter[int] = Counter()  # spills in flight, by storage: two chunks may save one storage
        self.stalls: list[tuple[Event, Event]] = []  # timed events around the waits of this step
        self._stalls_before: list[tuple[Event, Event]] = []
        self._no_room = False  # the device ran out of memory in this step: nothing more is fetched ahead
        self._warned_no_room = False

    # -- counts ---------------------------------------------------------------------------------------------------
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
        """Count a new RESIDENT record, after making room for it. It is on the current compute lane unless it says another."""
        self.bury()
        if record.lane is None:
            record.lane = self.device.compute
        record.capture = self.capture
        self.resident_bytes += record.nbytes  # first: whatever fails below, a record that dies is counted out
        self._make_room(0)
        self.counts.saved += 1
        self._note_peak()

    def resize(self, record: Record, nbytes_before: int) -> None:
        """A RESIDENT record's span has changed since it was adopted; room is made for what it grew."""
        self.resident_bytes += record.nbytes - nbytes_before
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
                self._settle_restore(transfer, "abandon")  # may raise: what a record left is taken off only then
                self.restoring_bytes -= nbytes
            self.estate.popleft()
            if refused:
                self._refused_bytes -= nbytes
            if state is RecordState.RESIDENT:
                self.resident_bytes -= nbytes
                if transfer is not None and not transfer.settled:  # it was reclaimed, and its spill still holds the bytes
                    transfer.nbytes += nbytes
                    self.spilling_bytes += nbytes
            if block is not None and capture is None:  # else its region holds it
                self.arena.give_back(block, event)

    # -- out ------------------------------------------------------------------------------------------------------
    def spill(self, records: Sequence[Record]) -> Transfer | None:
        """Send the records' bytes to the host, as one piece under one event. Blocks the host: never.

        records: saved on one lane, which need not be the current one. RESIDENT ones leave; others are passed over. One that gets no host
            block, or that the door denies, stays RESIDENT and is counted as refused. So does one saved on the other side of a capture's
            boundary: a graph copies what was computed in it.
        Returns the transfer in flight, None if nothing left. Raises CaptureError in a capture that no region watches.
        Order: [Order: spill], [Order: reuse].
        """
        self.check_capture("a spill")
        self.bury()
        device, d2h, capture = self.device, self.device.d2h, self.capture
        leaving: list[Record] = []
        blocks: list[Block] = []
        try:
            for record in records:
                if record.state is not RecordState.RESIDENT:
                    continue
                denied = record.capture is not capture or isinstance(
                    self.door.admit(record.nbytes, Direction.D2H, record.label, Priority.BACKGROUND), Denied
                )
                block = None if denied else self.arena.take(record.nbytes)
                if block is None:
                    self._refuse(record, for_want_of_memory=not denied)
                    continue
                blocks.append(block)
                leaving.append(record)
                if capture is not None:
                    capture.forked[d2h] = None
                    capture.blocks.append(block)
                    capture.records.append(weakref.ref(record))
            if not leaving:
                return None
            compute = leaving[0].lane or device.compute
            sources, event = self._copy_out(leaving, blocks, compute)
        except BaseException:
            if blocks and capture is None:  # all records stay; some copies may have been issued. In a capture the region has the blocks
                broken_off = device.record(d2h)
                device.wait(records[0].lane or device.compute, broken_off, "settle")
                for block in blocks:
                    self.arena.give_back(block, broken_off)
            raise
        nbytes = sum(record.nbytes for record in leaving)
        transfer = Transfer([weakref.ref(record) for record in leaving], sources, compute, event, nbytes, str(leaving[0].label), capture)
        for record, block in zip(leaving, blocks, strict=True):
            record.move_to(RecordState.SPILLING)
            record.device_bytes = None
            record.block, record.event, record.transfer = block, event, transfer
            if self.audit and capture is None:  # every replay writes other bytes
                device.synchronize(event)
                record.checksum = _checksum(block)
        self._spilling.append(transfer)
        self.resident_bytes -= nbytes
        self.spilling_bytes += nbytes
        self.counts.spilled += len(leaving)
        self.counts.spill_bytes += nbytes
        if capture is not None:
            capture.spill_bytes += nbytes
        self._make_room(0)
        return transfer

    def _copy_out(self, leaving: Sequence[Record], blocks: Sequence[Block], compute: Lane) -> tuple[list[torch.Tensor], Event]:
        """Issue the copies of a spill: (their sources, the event after them)."""
        device, d2h = self.device, self.device.d2h
        sources: list[torch.Tensor] = []
        keys: list[int] = []
        for record in leaving:
            assert record.device_bytes is not None
            source = bytes_of(record.device_bytes, record.span)
            key = record.device_bytes._cdata
            if key not in self._sources and key not in keys:  # else compute wrote it before the copy that still reads it
                device.note_write(compute, source)
            keys.append(key)
            sources.append(source)
        device.wait(d2h, device.record(compute), "spill")
        pairs: list[CopyPair] = []
        for last_use in {id(event): event for block in blocks for event in block.after}.values():
            device.wait(d2h, last_use, "reuse")
        for source, block in zip(sources, blocks, strict=True):
            pairs.extend(_parts(block, source))
        with transfer_range("spill", leaving[0].label.group.name):
            device.copy(d2h, pairs)
        event = device.record(d2h)
        for key in keys:
            self._sources[key] = self._sources.get(key, 0) + 1
        return sources, event

    def _refuse(self, record: Record, *, for_want_of_memory: bool) -> None:
        self.counts.refused += 1
        self.counts.refused_bytes += record.nbytes
        if not for_want_of_memory:
            return
        if self.capture is not None:
            self.capture.kept_bytes += record.nbytes
        if not record.refused:
            record.refused = True
            self._refused_bytes += record.nbytes
        wanted = self.arena.lent_bytes + self._refused_bytes
        self.counts.wanted_peak_bytes = max(self.counts.wanted_peak_bytes, wanted)

    def _make_room(self, nbytes: int, may_settle: Callable[[Transfer], bool] | None = None) -> bool:
        """Settle the oldest spills until `nbytes` more fit under the caps. False if they do not fit even then.

        may_settle: asked before each; a spill whose bytes are read sooner than the ones that want its room must not make way.
        """
        spill_cap, device_cap = self.limits.max_spilling_bytes, self.limits.device_limit_bytes
        if (spill_cap is None or self.spilling_bytes <= spill_cap) and (device_cap is None or self.device_bytes + nbytes <= device_cap):
            return True
        for oldest in [*self._spilling]:
            over_cap = spill_cap is not None and self.spilling_bytes > spill_cap and self.spilling_bytes > oldest.nbytes
            over_limit = device_cap is not None and self.device_bytes + nbytes > device_cap
            if not (over_cap or over_limit):
                return True
            if oldest.nbytes == 0:  # reclaimed: settling it makes no room
                continue
            if may_settle is not None and not may_settle(oldest):
                return not over_limit
            self.settle_spill(oldest)
        if device_cap is None or self.device_bytes + nbytes <= device_cap:
            return True
        return may_settle is None and self._drop_furthest(self.device_bytes + nbytes - device_cap)

    def _drop_furthest(self, nbytes: int) -> bool:
        """Drop at least `nbytes` of what was fetched ahead, the latest fetched first: it is read last. False if there is not as much."""
        while nbytes > 0 and self._ahead:
            record = self._ahead.pop()()
            if record is None or record.transfer is None or record.state not in (RecordState.RESTORING, RecordState.RESTORED):
                continue
            self._settle_restore(record.transfer, "abandon")
            self.drop(record)
            nbytes -= record.nbytes
        return nbytes <= 0

    def reclaim(self, record: Record) -> None:
        """A SPILLING record is about to be read: it stays after all. Its copy runs on unused, so the spill keeps its source to the end."""
        storage = record.weak_storage.get()
        transfer = record.transfer
        if storage is None or transfer is None or record.external:
            return
        record.move_to(RecordState.RESIDENT)
        record.device_bytes = storage
        transfer.nbytes -= record.nbytes
        self.spilling_bytes -= record.nbytes
        self.resident_bytes += record.nbytes
        if record.block is not None:
            if record.capture is None:  # else each replay writes it all the same
                self.arena.give_back(record.block, record.event)
            record.block = None

    def settle_spill(self, transfer: Transfer) -> None:
        """Make compute wait for this spill and let its source go. A settled transfer is passed over. Order: [Order: settle]."""
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
            if record is not None and record.state is RecordState.SPILLING:
                record.move_to(RecordState.SPILLED)
        transfer.keepalive.clear()

    # -- back -----------------------------------------------------------------------------------------------------
    def restore(
        self, records: Sequence[Record], priority: Priority, may_settle: Callable[[Transfer], bool] | None = None
    ) -> Transfer | None:
        """Fetch SPILLED records back as one piece under one event. Blocks the host: never.

        Each gets a new storage of span.nbytes, allocated on compute. Readers go through `ready`.
        Returns None, with nothing moved, if the door, the device limit or a full device denies a speculative restore; a required one goes
            ahead, and raises torch.OutOfMemoryError where the device has no room for it at all. In a capture a speculative one is denied
            until its graph has read something of the same forward: it may need nothing of another.
        Raises CaptureError in a capture for bytes that were saved outside: their block will be lent to others when the graph is replayed.
        Order: [Order: allocate], [Order: restore]. Source: allocate-on-compute keeps freed buffers in compute's own pool, so that
        reserved stays near active (hard-parts.md 4.2).
        """
        self.check_capture("a restore")
        self.bury()
        nbytes = sum(record.nbytes for record in records)
        required = priority >= Priority.REQUIRED
        capture = self.capture
        if not required and not all(capture.has_read(record.capture) if capture else record.capture is None for record in records):
            return None
        for record in records:
            self._check_saved_in_capture(record)
        granted = not isinstance(self.door.admit(nbytes, Direction.H2D, records[0].label, priority), Denied)
        if not (granted or required):
            return None
        if not self._make_room(nbytes, may_settle) and not required:
            return None
        device, h2d = self.device, self.device.h2d
        compute = device.compute
        homes = self._homes(records, required=required)
        if homes is None:
            return None
        if capture is not None:
            capture.forked[h2d] = None
            capture.records.extend(weakref.ref(record) for record in records)
        try:
            event = self._copy_in(records, homes, compute)
        except BaseException:  # none is restored; some copies may have been issued
            for record in records:
                if record.event is not None:
                    device.wait(h2d, record.event, "restore")
            broken_off = device.record(h2d)
            device.wait(compute, broken_off, "abandon")
            for record in records:
                record.event = broken_off
            raise
        transfer = Transfer([weakref.ref(record) for record in records], homes, compute, event, nbytes, str(records[0].label), capture)
        for record, home in zip(records, homes, strict=True):
            record.move_to(RecordState.RESTORING)
            record.device_bytes = home.untyped_storage()
            record.weak_storage = WeakStorage(record.device_bytes)
            record.base = record.span.start
            record.event, record.transfer = event, transfer
        self._restoring.append(transfer)
        self._ahead.extend(transfer.records)
        while self._ahead and self._ahead[0]() is None:
            self._ahead.popleft()
        self.restoring_bytes += nbytes
        self.counts.restored += len(records)
        self.counts.restore_bytes += nbytes
        if capture is not None:
            capture.restore_bytes += nbytes
        self._note_peak()
        return transfer

    def _homes(self, records: Sequence[Record], *, required: bool) -> list[torch.Tensor] | None:
        """Buffers for a restore. On a device without room a speculative one gives up, and so do those after it in this step: each try makes
        torch return its cached blocks, which blocks the host. For a required one everything that can go is let go first.

        Raises torch.OutOfMemoryError if the buffers do not fit even then; nothing has moved.
        """
        if self._no_room and not required:
            return None
        try:
            return [self.device.empty(record.nbytes) for record in records]
        except torch.OutOfMemoryError:
            self._no_room = True
        if not self._warned_no_room:
            self._warned_no_room = True
            limit = self.limits.device_limit_bytes
            logger.warning(
                "the device has no room for %s bytes that come back for %s, beside %s saved bytes that it holds (device_limit_bytes %s); "
                "for the rest of such a step each tensor comes back when it is read. Lower device_limit_bytes to leave more room",
                f"{sum(record.nbytes for record in records):,}",
                records[0].label.group,
                f"{self.device_bytes:,}",
                "None" if limit is None else f"{limit:,}",
            )
        if not required:
            return None
        while self._spilling:
            self.settle_spill(self._spilling[0])
        self._drop_furthest(self.restoring_bytes)
        return [self.device.empty(record.nbytes) for record in records]

    def _copy_in(self, records: Sequence[Record], homes: Sequence[torch.Tensor], compute: Lane) -> Event:
        """Issue the copies of a restore; the event after them."""
        device, h2d, capture = self.device, self.device.h2d, self.capture
        device.wait(h2d, device.record(compute), "allocate")
        pairs: list[CopyPair] = []
        waited: set[int] = set()
        for record, home in zip(records, homes, strict=True):
            assert record.block is not None
            assert record.event is not None
            assert record.transfer is not None
            if record.transfer.capture is capture and id(record.event) not in waited:  # else it is on the other side of a boundary
                waited.add(id(record.event))
                device.wait(h2d, record.event, "restore")
            if capture is not None and record.capture is not None:
                capture.reads(record.capture)
            if self.audit and record.checksum is not None and record.checksum != _checksum(record.block):
                raise OffloadError(
                    f"{record.label}: the {record.nbytes:,} bytes in host memory are not the ones that were written there "
                    f"(checksum {_checksum(record.block):#x}, was {record.checksum:#x}); something else wrote to the block"
                )
            pairs.extend((part, extent) for extent, part in _parts(record.block, home))
        with transfer_range("restore", records[0].label.group.name):
            device.copy(h2d, pairs)
        return device.record(h2d)

    def ready(self, record: Record) -> torch.UntypedStorage:
        """The restored storage of a RESTORING or RESTORED record, safe to read on the calling thread's compute lane.

        Order: [Order: read]. A reader on another compute lane than the one that allocated the buffer gets a copy of its own there,
        so that the buffer never has to be protected from two lanes. Raises CaptureError in a capture for bytes that were saved outside.
        """
        transfer = record.transfer
        assert transfer is not None
        self._check_saved_in_capture(record)
        self._settle_restore(transfer, "read")
        assert record.device_bytes is not None
        lane = self.device.compute
        if lane is transfer.lane:
            return record.device_bytes
        self.device.wait(lane, self.device.record(transfer.lane), "read")
        own = self.device.empty(record.nbytes)
        own.copy_(bytes_of(record.device_bytes, type(record.span)(0, record.nbytes)))
        self.device.wait(transfer.lane, self.device.record(lane), "settle")
        return own.untyped_storage()

    def _settle_restore(self, transfer: Transfer, order: str) -> None:
        if transfer.settled:
            return
        self._await(transfer, order)
        transfer.settled = True
        self._restoring.remove(transfer)  # readers come in about the order of issue: near the front
        if order == "read":  # what is abandoned only goes back to the allocator
            for home in transfer.keepalive:
                self.device.note_read(transfer.lane, home)
        transfer.keepalive.clear()
        for record in living(transfer.records):
            if record.state is RecordState.RESTORING:
                record.move_to(RecordState.RESTORED)

    def drop(self, record: Record) -> None:
        """Let a RESTORED record's device bytes go; its host copy is clean, so this is free. The caller may still hold the storage."""
        record.move_to(RecordState.SPILLED)
        record.device_bytes = None
        self.restoring_bytes -= record.nbytes

    # -- lanes ----------------------------------------------------------------------------------------------------
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
        self.stalls.append((before, device.record(lane, timed=True)))
        self.counts.stall_count += 1

    def _settle_all(self, restores_as: str = "abandon") -> None:
        while self._spilling:
            self.settle_spill(self._spilling[0])
        while self._restoring:
            self._settle_restore(self._restoring[0], restores_as)

    # -- step -----------------------------------------------------------------------------------------------------
    def release(self, record: Record) -> None:
        """End a record's life whatever its state: a later read finds it RELEASED. Its block and counts are settled now."""
        remains = record.remains()
        record.move_to(RecordState.RELEASED)
        record.device_bytes = record.block = record.probe = record.views = None
        self.estate.append(remains)
        self.bury()

    def end_step(self) -> tuple[TransferCounts, float]:
        """Settle everything in flight and start new counts. Returns the step's counts and the stall of the step BEFORE it, in ms:
        a stall is read one step late, so that reading it never blocks the host."""
        self.bury()
        self._settle_all()
        self._ahead.clear()
        self._no_room = False
        stall_ms = self._read_stalls(self._stalls_before)
        self._stalls_before, self.stalls = self.stalls, []
        counts, self.counts = self.counts, TransferCounts(device_bytes_peak=self.device_bytes)
        return counts, stall_ms

    def _read_stalls(self, stalls: list[tuple[Event, Event]]) -> float:
        return sum(self.device.elapsed_ms(start, end) for start, end in stalls if self.device.poll(end))

    def in_flight(self) -> tuple[int, int]:
        """Transfers not yet settled: (spills, restores)."""
        return len(self._spilling), len(self._restoring)


def _parts(block: Block, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(extent of the block, the part of the device bytes that belongs there): a copy stays within one registration."""
    if len(block.extents) == 1:
        yield block.extents[0], tensor
        return
    start = 0
    for extent in block.extents:
        nbytes = extent.numel()
        yield extent, tensor.narrow(0, start, nbytes)
        start += nbytes


def _checksum(block: Block) -> int:
    value = 0
    for extent in block.extents:
        value = zlib.crc32(extent.numpy().data, value)
    return value
