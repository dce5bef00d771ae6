"""Saved tensors out to the host in pieces of records, and back.

One invariant: a copy comes after the last writer and the last reader of the bytes on both its sides, and a
piece that fails half-way leaves every record in the state that it was in. How the bytes of a copy are let go
of is in in_flight.py.

# [Order: spill]
# hazard  RAW: `d2h` copies a tensor that `compute` is still writing.
# edge    spill records an event on the compute lane of the save, after it; d2h waits for it before the copy.
# alive   the Transfer holds the source storage until the spill is settled.
# proof   tests/property/test_edges.py, edge "spill"
#
# [Order: reuse]
# hazard  WAR: `h2d` still reads a host block for a restore while `d2h` writes it for the next spill.
# edge    a block comes back to the arena with the event of its last copy; the next spill into its bytes makes
#         d2h wait for it.
# alive   the arena owns the pinned bytes; the record holds the block from its spill to its death, or, held
#         back for its reader, to the settling of that spill.
# proof   tests/property/test_edges.py, edge "reuse"
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

What is captured into a graph waits for events of the same capture only; captures.py says why that is enough.
"""

from __future__ import annotations

import logging
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence

import torch

from offload.device import CopyPair, Event, Lane
from offload.errors import OffloadError
from offload.ids import Owner, owner_of
from offload.memory.arena import Block, HostArena
from offload.transfer.admission import Direction, Lease, Limits, Priority
from offload.transfer.captures import CaptureSide
from offload.transfer.copier import Copier
from offload.transfer.layout import bytes_of
from offload.transfer.record import Record, RecordState, Transfer

__all__ = ["TransferEngine"]

logger = logging.getLogger(__name__)


class TransferEngine(CaptureSide):
    """Moves records. It never asks why; callers hold the engine's lock.

    arena: lends the host blocks. limits: caps in bytes, read at every call, so they may change between steps.
    copier: issues the copies, on the lanes of its device.
    """

    def __init__(self, arena: HostArena, limits: Limits, copier: Copier, *, audit: bool = False) -> None:
        super().__init__(copier.device, arena, limits)
        self.copier = copier
        self.audit = audit
        self._warned_no_room = False

    # -- out -------------------------------------------------------------------------------------------------
    def spill(self, records: Sequence[Record]) -> Transfer | None:
        """Send the records' bytes to the host, as one piece under one event. Blocks the host: never.

        records: saved on one lane, which need not be the current one. RESIDENT ones leave; others are passed
            over. One that gets no host block stays RESIDENT and is counted as refused; so do all of a piece
            that admission denies, and one saved on the other side of a capture's boundary: a graph copies
            what was computed in it.
        Returns the transfer in flight, None if nothing left. Raises CaptureError in a capture that no region
        watches.
        Order: [Order: spill], [Order: reuse].
        """
        self.check_capture("a spill")
        if self.estate:
            self.bury()
        device, d2h, capture = self.device, self.device.d2h, self.capture
        due: list[Record] = []
        nbytes = 0
        for record in records:
            if record.state is not RecordState.RESIDENT:
                continue
            if record.capture is not capture:
                self._refuse(record, for_want_of_memory=False)
                continue
            due.append(record)
            nbytes += record.nbytes
        if not due:
            return None
        owner = owner_of(due[0].group)
        lease = self.copier.ask(nbytes, Direction.D2H, owner, Priority.BACKGROUND)
        if lease is None:
            for record in due:
                self._refuse(record, for_want_of_memory=False)
            return None
        leaving: list[Record] = []
        blocks: list[Block] = []
        nbytes = 0
        try:
            for record in due:
                block = self.arena.take(record.nbytes)
                if block is None:
                    self._refuse(record, for_want_of_memory=True)
                    continue
                blocks.append(block)
                leaving.append(record)
                nbytes += record.nbytes
                if capture is not None:
                    capture.forked[d2h] = None
                    capture.blocks.append(block)
                    capture.records.append(weakref.ref(record))
            if not leaving:
                lease.done(None)
                return None
            compute = leaving[0].lane or device.compute
            sources, event = self._copy_out(leaving, blocks, compute, lease, owner, nbytes)
        except BaseException:
            # all records stay; some copies may have been issued. In a capture the region has the blocks
            broken_off = None
            if blocks and capture is None:
                broken_off = device.record(d2h)
                device.wait(records[0].lane or device.compute, broken_off, "settle")
                for block in blocks:
                    self.arena.give_back(block, broken_off)
            lease.done(broken_off)
            raise
        transfer = Transfer(tuple(map(weakref.ref, leaving)), sources, compute, event, nbytes, capture)
        del sources  # the transfer's alone: it may be settled below
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

    def _copy_out(
        self,
        leaving: Sequence[Record],
        blocks: Sequence[Block],
        compute: Lane,
        lease: Lease,
        owner: Owner,
        nbytes: int,
    ) -> tuple[tuple[torch.Tensor, ...], Event]:
        """Issue the copies of a spill: (their sources, the event after them)."""
        device, d2h = self.device, self.device.d2h
        sources: list[torch.Tensor] = []
        keys: list[int] = []
        for record in leaving:
            assert record.device_bytes is not None
            source = bytes_of(record.device_bytes, record.start, record.nbytes)
            key = record.device_bytes._cdata
            # else compute wrote it before the copy that still reads it
            if key not in self._sources and key not in keys:
                device.note_write(compute, source)
            keys.append(key)
            sources.append(source)
        device.wait(d2h, device.record(compute), "spill")
        pairs: list[CopyPair] = []
        waited: set[int] = set()
        for source, block in zip(sources, blocks, strict=True):
            for last_use in block.after:
                if id(last_use) not in waited:
                    waited.add(id(last_use))
                    device.wait(d2h, last_use, "reuse")
            if len(block.extents) == 1:
                pairs.append((block.extents[0], source))
            else:
                pairs.extend(_parts(block, source))
        event = self.copier.copy(lease, Direction.D2H, owner, pairs, nbytes)
        for key in keys:
            self._sources[key] = self._sources.get(key, 0) + 1
        return tuple(sources), event

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

    # -- back ------------------------------------------------------------------------------------------------
    def restore(
        self,
        records: Sequence[Record],
        priority: Priority,
        may_settle: Callable[[Transfer], bool] | None = None,
    ) -> Transfer | None:
        """Fetch SPILLED records back as one piece under one event. Blocks the host: never.

        Each gets a new storage of its `nbytes`, allocated on compute. Readers go through `ready`.
        Returns None, with nothing moved, if admission, the device limit or a full device denies a speculative
            restore; a required one goes ahead, and raises torch.OutOfMemoryError where the device has no room
            for it at all. In a capture a speculative one is denied until its graph has read something of the
            same forward: it may need nothing of another.
        Raises CaptureError in a capture for bytes that were saved outside: their block will be lent to others
        when the graph is replayed.
        Order: [Order: allocate], [Order: restore]. Source: allocate-on-compute keeps freed buffers in
        compute's own pool, so that reserved stays near active (hard-parts.md 4.2).
        """
        self.check_capture("a restore")
        if self.estate:
            self.bury()
        required = priority >= Priority.REQUIRED
        capture = self.capture
        nbytes = 0
        for record in records:
            nbytes += record.nbytes
            if not (required or (capture.has_read(record.capture) if capture else record.capture is None)):
                return None
        if capture is not None:
            for record in records:
                self._check_saved_in_capture(record)
        owner = owner_of(records[0].group)
        lease = self.copier.ask(nbytes, Direction.H2D, owner, priority)
        if lease is None:
            return None
        device, h2d = self.device, self.device.h2d
        compute = device.compute
        homes: list[torch.Tensor] | None = None
        try:
            if self._make_room(nbytes, may_settle) or required:
                homes = self._homes(records, required=required)
        finally:
            if homes is None:
                lease.done(None)
        if homes is None:
            return None
        if capture is not None:
            capture.forked[h2d] = None
            capture.records.extend(weakref.ref(record) for record in records)
        try:
            event = self._copy_in(records, homes, compute, lease, owner, nbytes)
        except BaseException:  # none is restored; some copies may have been issued
            for record in records:
                if record.event is not None:
                    device.wait(h2d, record.event, "restore")
            broken_off = device.record(h2d)
            device.wait(compute, broken_off, "abandon")
            for record in records:
                record.event = broken_off
            lease.done(broken_off)
            raise
        transfer = Transfer(tuple(map(weakref.ref, records)), tuple(homes), compute, event, nbytes, capture)
        for record, home in zip(records, homes, strict=True):
            record.move_to(RecordState.RESTORING)
            record.device_bytes = home.untyped_storage()
            record.refer_to(record.device_bytes)
            record.base = record.start
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
        """Buffers for a restore. On a device without room a speculative one gives up, and so do those after
        it in this step: each try makes torch return its cached blocks, which blocks the host. For a required
        one everything that can go is let go first.

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
                "the device has no room for %s bytes that come back for %s, beside %s saved bytes that it "
                "holds (device_limit_bytes %s); "
                "for the rest of such a step each tensor comes back when it is read. Lower "
                "device_limit_bytes to leave more room",
                f"{sum(record.nbytes for record in records):,}",
                records[0].group,
                f"{self.device_bytes:,}",
                "None" if limit is None else f"{limit:,}",
            )
        if not required:
            return None
        while self._spilling:
            self.settle_spill(self._spilling[0])
        self._drop_furthest(self.restoring_bytes)
        return [self.device.empty(record.nbytes) for record in records]

    def _copy_in(
        self,
        records: Sequence[Record],
        homes: Sequence[torch.Tensor],
        compute: Lane,
        lease: Lease,
        owner: Owner,
        nbytes: int,
    ) -> Event:
        """Issue the copies of a restore; the event after them."""
        device, h2d, capture = self.device, self.device.h2d, self.capture
        device.wait(h2d, device.record(compute), "allocate")
        pairs: list[CopyPair] = []
        waited: set[int] = set()
        for record, home in zip(records, homes, strict=True):
            assert record.block is not None
            assert record.event is not None
            assert record.transfer is not None
            # else it is on the other side of a boundary
            if record.transfer.capture is capture and id(record.event) not in waited:
                waited.add(id(record.event))
                device.wait(h2d, record.event, "restore")
            if capture is not None and record.capture is not None:
                capture.reads(record.capture)
            if self.audit and record.checksum is not None and record.checksum != _checksum(record.block):
                raise OffloadError(
                    f"{record.label}: the {record.nbytes:,} bytes in host memory are not the ones that were "
                    "written there "
                    f"(checksum {_checksum(record.block):#x}, was {record.checksum:#x}); something else "
                    "wrote to the block"
                )
            if len(record.block.extents) == 1:
                pairs.append((home, record.block.extents[0]))
            else:
                pairs.extend((part, extent) for extent, part in _parts(record.block, home))
        return self.copier.copy(lease, Direction.H2D, owner, pairs, nbytes)

    def ready(self, record: Record) -> torch.UntypedStorage:
        """The restored storage of a RESTORING or RESTORED record, safe to read on the calling thread's
        compute lane.

        Order: [Order: read]. A reader on another compute lane than the one that allocated the buffer gets a
        copy of its own there, so that the buffer never has to be protected from two lanes. Raises
        CaptureError in a capture for bytes that were saved outside.
        """
        transfer = record.transfer
        assert transfer is not None
        if self.capture is not None:
            self._check_saved_in_capture(record)
        if not transfer.settled:
            self._settle_restore(transfer, "read")
        assert record.device_bytes is not None
        lane = self.device.compute
        if lane is transfer.lane:
            return record.device_bytes
        self.device.wait(lane, self.device.record(transfer.lane), "read")
        own = self.device.empty(record.nbytes)
        own.copy_(bytes_of(record.device_bytes, 0, record.nbytes))
        self.device.wait(transfer.lane, self.device.record(lane), "settle")
        return own.untyped_storage()


def _parts(block: Block, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(extent of the block, the part of the device bytes that belongs there): a copy stays within one
    registration."""
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
