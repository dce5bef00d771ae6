"""Copies blocks to the host in pieces, and back.

One invariant: a copy comes after the last writer and the last reader of the bytes on both its sides, and a
piece that fails half-way leaves every block in the state that it was in. in_flight.py says when the bytes of
a copy are released.

# [Order: spill]
# hazard  RAW: `d2h` copies a tensor that `compute` is still writing.
# edge    spill records an event on the compute lane of the save, after it; d2h waits for it before the copy.
# alive   the Transfer holds the source storage until the spill is settled.
# proof   tests/property/test_edges.py, edge "spill"
#
# [Order: reuse]
# hazard  WAR: `h2d` still reads a host block for a restore while `d2h` writes it for the next spill.
# edge    a block comes back to the arena with the event of its last copy alone; the next spill into its bytes
#         makes d2h wait for it. That event comes after all that the block was lent with: the spill waited for
#         them, and one that breaks off waits for them before it records its event.
# alive   the arena owns the pinned bytes; the DeviceBlock holds the host block from its spill to its end, or,
#         held back for its reader, to the settling of that spill.
# proof   tests/property/test_edges.py, edge "reuse"
#
# [Order: allocate]
# hazard  allocator reuse: `h2d` writes a new buffer whose bytes earlier work on `compute` still uses.
# edge    restore allocates on compute, records an event there, and h2d waits for it.
# alive   the Transfer and the DeviceBlock hold the buffer.
# proof   tests/property/test_edges.py, edge "allocate"
#
# [Order: restore]
# hazard  RAW: `h2d` reads a host block that `d2h` has not finished writing.
# edge    h2d waits for the block's own last event, whatever else has been waited for.
# alive   the DeviceBlock holds the host block.
# proof   tests/property/test_edges.py, edge "restore"
#
# [Order: read]
# hazard  RAW: `compute` reads a restored buffer before `h2d` has written it.
# edge    the first read of a restore makes compute wait for its event.
# alive   the DeviceBlock, until its last reader has it.
# proof   tests/property/test_edges.py, edge "read"
#
# [Order: read elsewhere]
# hazard  RAW: a reader on another compute lane copies a restored buffer that `h2d` has not finished writing.
# edge    the reader's lane waits, before its copy, for a point of the lane that owns the buffer, which has
#         waited for the restore.
# alive   the DeviceBlock holds the buffer; the reader's own copy is its lane's.
# proof   tests/property/test_edges.py, edge "read elsewhere"
#
# [Order: return]
# hazard  allocator reuse: the buffer goes back to the lane that owns it while the reader's own copy, on
#         another lane, still reads it.
# edge    the owning lane waits for a point of the reader's lane after that copy.
# alive   the DeviceBlock, until after the wait.
# proof   tests/property/test_edges.py, edge "return"

A restore that gets no memory has moved nothing; its blocks can be read later.

What is captured into a graph waits for events of the same capture only; captures.py says why that is enough.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from offload.device import CopyPair, Event
from offload.errors import OffloadError
from offload.ids import owner_of
from offload.memory.arena import Block, HostArena, HostLender
from offload.sizes import bytes_text
from offload.telemetry.speaker import Once, speaker
from offload.transfer.block import ALLOCATED_AT, PLACES, BlockState, DeviceBlock, Transfer, bytes_of
from offload.transfer.captures import CaptureSide
from offload.transfer.copier import Copier, Direction, Priority
from offload.transfer.limits import Limits

logger = speaker(__name__)

_RESIDENT, _SPILLED = BlockState.RESIDENT, BlockState.SPILLED


class TransferEngine(CaptureSide):
    """Moves blocks, for reasons that its callers know. Callers hold the engine's lock.

    arena: lends the host blocks. limits: caps in bytes, read at every call, so they may change between steps.
    copier: issues the copies, on the lanes of its device.
    """

    def __init__(self, arena: HostArena, limits: Limits, copier: Copier, *, audit: bool = False) -> None:
        super().__init__(copier.device, arena, limits)
        self.copier = copier
        self.audit = audit
        self._said = Once()

    # -- out -------------------------------------------------------------------------------------------------
    def spill(self, blocks: Sequence[DeviceBlock], hosts: HostLender | None = None) -> Transfer | None:
        """Send the blocks' bytes to the host, as one piece under one event. Blocks the host: never.

        blocks: saved on one lane, which need not be the current one. RESIDENT ones leave; others are passed
            over. One that gets no host block stays RESIDENT and is counted as refused; so do all of a piece
            that admission denies, and one saved on the other side of a capture's boundary: a graph copies
            what was computed in it.
        hosts: whose host bytes they go to; None for the arena's. Others do not go on to a disk.
        Returns the transfer in flight, None if nothing left. Raises CaptureError in a capture that no region
        watches.
        Order: [Order: spill], [Order: reuse].
        """
        device, capture = self.device, self.capture
        if capture is None and device.is_capturing():
            self.refuse_unwatched("a spill")
        if self.freed_blocks:
            self.reclaim_freed()
        if self.disk is not None:
            self.disk.collect()
        due: list[DeviceBlock] = []
        storages: list[torch.UntypedStorage] = []
        nbytes = 0
        for block in blocks:
            storage = block.device_bytes  # None: freed, as it may be by another thread at any time
            if block.state is not _RESIDENT or storage is None:
                continue
            if block.capture is not capture:
                self._refuse(block)
                continue
            due.append(block)
            storages.append(storage)
            nbytes += block.nbytes
        if not due:
            return None
        owner, lender = owner_of(due[0].group), self.arena if hosts is None else hosts
        lease = self.copier.ask(nbytes, Direction.D2H, owner, Priority.BACKGROUND)
        if lease is None:
            self._refuse(*due)
            return None
        compute, d2h, copying = due[0].lane or device.compute, device.d2h, self._sources
        leaving: list[DeviceBlock] = []
        taken: list[Block] = []
        sources: list[torch.Tensor] = []
        pairs: list[CopyPair] = []
        waited: set[int] = set()
        nbytes = 0
        try:
            for block, storage in zip(due, storages, strict=True):
                host = lender.take(block.nbytes)
                if host is None:
                    self._refuse(block)
                    self._note_wanted(block)
                    continue
                taken.append(host)
                if capture is not None:
                    capture.host_blocks.append(host)
                leaving.append(block)
                sources.append(source := bytes_of(storage, block.start, block.nbytes))
                # `place_of`, without a call
                block.lead = (storage.data_ptr() % ALLOCATED_AT + block.start) % PLACES
                nbytes += block.nbytes
                if block.key not in copying:  # else compute wrote it before the copy that still reads it
                    device.note_write(compute, source)
            storages.clear()  # the transfer's sources alone hold them from here on
            del storage
            if not leaving:
                lease.done(None)
                return None
            if capture is not None:
                capture.forked[d2h] = None
                self._captured.extend(leaving)
            device.wait(d2h, device.record(compute), "spill")
            for source, host in zip(sources, taken, strict=True):
                for last_use in host.after:
                    if id(last_use) not in waited:
                        waited.add(id(last_use))
                        device.wait(d2h, last_use, "reuse")
                parts: Sequence[torch.Tensor] = (source,)
                if len(host.extents) > 1:
                    parts = source.split([part.numel() for part in host.extents])
                pairs.extend(zip(host.extents, parts, strict=True))
            event = self.copier.copy(lease, Direction.D2H, owner, pairs, nbytes)
        except BaseException:
            # all blocks stay; some copies may have been issued. In a capture the region has the host blocks
            broken_off = None
            if taken and capture is None:
                for host in taken:
                    for last_use in host.after:
                        device.wait(d2h, last_use, "reuse")
                broken_off = device.record(d2h)
                device.wait(compute, broken_off, "settle")
                for host in taken:
                    lender.give_back(host, broken_off)
            lease.done(broken_off)
            raise
        transfer = Transfer(tuple(leaving), tuple(sources), compute, event, nbytes, capture)
        del source, sources, parts, pairs  # the transfer's alone: it may be settled below
        for block, host in zip(leaving, taken, strict=True):
            block.state = BlockState.SPILLING  # it was RESIDENT above
            block.device_bytes = None
            block.host, block.event, block.transfer, block.copies = host, event, transfer, 1
            copying[block.key] = copying.get(block.key, 0) + 1
            if self.audit and capture is None:  # every replay writes other bytes
                device.synchronize(event)
                block.checksum = _checksum(host)
        if self.disk is not None and capture is None and hosts is None:
            self.disk.put(leaving)
        self._spilling.append(transfer)
        self.resident_bytes -= nbytes
        self.spilling_bytes += nbytes
        counts, limits = self.counts, self.limits
        counts.spilled += len(leaving)
        counts.spill_bytes += nbytes
        if capture is not None:
            capture.spill_bytes += nbytes
        cap = limits.max_spilling_bytes
        if (cap is not None and self.spilling_bytes > cap) or limits.device_limit_bytes is not None:
            self._make_room(0)
        return transfer

    def _refuse(self, *blocks: DeviceBlock) -> None:
        self.counts.refused += len(blocks)
        self.counts.refused_bytes += sum(block.nbytes for block in blocks)

    def _note_wanted(self, block: DeviceBlock) -> None:
        """Count a block that the host has no memory for."""
        if self.capture is not None:
            self.capture.kept_bytes += block.nbytes
        if self.disk is not None:
            self.disk.note_refused(block.nbytes)
        if not block.refused:
            block.refused = True
            self._refused_bytes += block.nbytes
        wanted = self.arena.lent_bytes + self._refused_bytes
        self.counts.host_bytes_wanted_peak = max(self.counts.host_bytes_wanted_peak, wanted)

    # -- back ------------------------------------------------------------------------------------------------
    def restore(
        self,
        blocks: Sequence[DeviceBlock],
        priority: Priority,
        may_settle: Callable[[Transfer], bool] | None = None,
    ) -> Transfer | None:
        """Fetch SPILLED blocks back as one piece under one event. Blocks the host: never, but for a required
        one that is still on the disk.

        blocks: one that was freed after its caller looked is passed over. Each gets a new storage of
        its `nbytes` behind its `lead`, allocated on compute. Readers go through `ready`.
        Returns None, with nothing moved, if admission, the device limit or a full device denies a speculative
            restore. A required one goes ahead, past the device limit if need be; it raises
            torch.OutOfMemoryError where the device has no room for it at all, and OffloadError where the disk
            cannot read it. In a capture a speculative one is denied until its graph has read something of the
            same forward: it may need nothing of another.
        Raises CaptureError in a capture for bytes that were saved outside: their host block will be lent to
        others when the graph is replayed.
        Order: [Order: allocate], [Order: restore]. Source: allocate-on-compute keeps freed buffers in
        compute's own pool, so that reserved stays near active.
        """
        device, capture = self.device, self.capture
        if capture is None and device.is_capturing():
            self.refuse_unwatched("a restore")
        if self.freed_blocks:
            self.reclaim_freed()
        required = priority >= Priority.REQUIRED
        due: list[DeviceBlock] = []
        nbytes = 0
        for block in blocks:
            if block.is_freed:
                continue
            due.append(block)
            nbytes += block.nbytes
            if not (required or (block.capture in capture.sources if capture else block.capture is None)):
                return None
            if capture is not None:
                self._check_saved_in_capture(block)
        if not due or (self.disk is not None and not self.disk.bring(due, required=required)):
            return None
        owner = owner_of(due[0].group)
        lease = self.copier.ask(nbytes, Direction.H2D, owner, priority)
        if lease is None:
            return None
        compute, h2d = device.compute, device.h2d
        limit, cap = self.limits.device_limit_bytes, self.limits.max_spilling_bytes
        fits = limit is None and (cap is None or self.spilling_bytes <= cap)
        buffers: list[torch.Tensor] | None = None
        try:
            if fits or self._make_room(nbytes, may_settle) or required:
                buffers = self._buffers(due, required=required)
        finally:
            if buffers is None:
                lease.done(None)
        if buffers is None:
            return None
        if capture is not None:
            capture.forked[h2d] = None
            self._captured.extend(due)
        pairs: list[CopyPair] = []
        waited: dict[int, Event] = {}
        try:
            device.wait(h2d, room := device.record(compute), "allocate")
            for block, buffer in zip(due, buffers, strict=True):
                host, last_use = block.host, block.event
                assert host is not None
                assert last_use is not None
                assert block.transfer is not None
                # else it is on the other side of a boundary
                if block.transfer.capture is capture and id(last_use) not in waited:
                    waited[id(last_use)] = last_use
                    device.wait(h2d, last_use, "restore")
                if capture is not None and block.capture is not None:
                    capture.reads(block.capture)
                if self.audit and block.checksum not in (None, found := _checksum(host)):
                    raise OffloadError(
                        f"{block.label}: the {block.nbytes:,} bytes in host memory are not the ones that "
                        f"were written there (checksum {found:#x}, was {block.checksum:#x}); something else "
                        "wrote to the block"
                    )
                parts: Sequence[torch.Tensor] = (buffer,)
                if len(host.extents) > 1:
                    parts = buffer.split([part.numel() for part in host.extents])
                pairs.extend(zip(parts, host.extents, strict=True))
            behind = () if capture is not None else (room, *waited.values())
            event = self.copier.copy(lease, Direction.H2D, owner, pairs, nbytes, behind=behind)
        except BaseException:  # none is restored; some copies may have been issued
            for block in due:
                if block.event is not None:
                    device.wait(h2d, block.event, "restore")
            broken_off = device.record(h2d)
            device.wait(compute, broken_off, "abandon")
            for block in due:
                block.event = broken_off
            lease.done(broken_off)
            raise
        transfer = Transfer(tuple(due), tuple(buffers), compute, event, nbytes, capture)
        for block, buffer in zip(due, buffers, strict=True):
            if block.state is _SPILLED:
                block.state = BlockState.RESTORING
            else:
                block.move_to(BlockState.RESTORING)  # raises
            block.device_bytes = storage = buffer.untyped_storage()
            block.refer_to(storage)
            block.base = block.start - block.lead
            block.event, block.transfer, block.copies = event, transfer, 2
            if block in self.away:
                self.away.pop(block).away_bytes -= block.nbytes
        self._restoring.append(transfer)
        ahead = self._ahead
        ahead.extend(due)
        while ahead and ahead[0].is_freed:
            ahead.popleft()
        self.restoring_bytes += nbytes
        counts = self.counts
        counts.restored += len(due)
        counts.restore_bytes += nbytes
        if capture is not None:
            capture.restore_bytes += nbytes
        held = self.resident_bytes + self.spilling_bytes + self.restoring_bytes + self.limits.claimed_bytes
        if held > counts.device_bytes_peak:
            counts.device_bytes_peak = held
        return transfer

    def _buffers(self, blocks: Sequence[DeviceBlock], *, required: bool) -> list[torch.Tensor] | None:
        """Allocate the buffers of a restore. On a device without room a speculative restore gives up, and so
        do those after it in this step: each try makes torch return its cached blocks, which blocks the host.
        For a required restore everything that can be released is released first.

        Raises torch.OutOfMemoryError if the buffers do not fit even then; nothing has moved.
        """
        if self._no_room and not required:
            return None
        empty = self.device.empty
        buffers: list[torch.Tensor] = []
        try:
            for block in blocks:
                # `_buffer`, without a call
                buffer = empty(block.lead + block.nbytes)
                buffers.append(buffer[block.lead :] if block.lead else buffer)
            return buffers
        except torch.OutOfMemoryError:
            buffers.clear()
            self._no_room = True
        if self._said.first("no room"):
            limit = self.limits.device_limit_bytes
            logger.warning(
                "the device has no room for %s that come back for %s, beside %s of saved tensors "
                "that it holds; for the rest of such a step each tensor comes back when it is read. Lower "
                "device_limit (device_limit_bytes in OffloadConfig, %s here), or the high mark of "
                "mode='watermark', to leave more room",
                bytes_text(sum(block.nbytes for block in blocks)),
                blocks[0].group,
                bytes_text(self.device_bytes),
                "None" if limit is None else bytes_text(limit),
            )
        if not required:
            return None
        self.counts.retries += 1
        # whatever can be: what clients keep that could leave, sources of spills, and what was fetched ahead
        self.limits.relieve()
        while self._spilling:
            self.settle_spill(self._spilling[0])
        self.drop_furthest(self.restoring_bytes)
        return [self._buffer(block) for block in blocks]

    def _buffer(self, block: DeviceBlock) -> torch.Tensor:
        buffer = self.device.empty(block.lead + block.nbytes)
        return buffer[block.lead :] if block.lead else buffer

    def ready(self, block: DeviceBlock) -> torch.UntypedStorage:
        """The restored storage of a RESTORING or RESTORED block, safe to read on the calling thread's
        compute lane.

        Order: [Order: read], [Order: read elsewhere], [Order: return]. A reader on another compute lane than
        the one that allocated the buffer gets a copy of its own there, so that the buffer never has to be
        protected from two lanes. Raises CaptureError in a capture for bytes that were saved outside.
        """
        transfer, device = block.transfer, self.device
        assert transfer is not None
        if self.capture is not None:
            self._check_saved_in_capture(block)
        if not transfer.settled:
            self._settle_restore(transfer, "read")
        storage = block.device_bytes
        assert storage is not None
        lane = device.compute
        if lane is transfer.lane:
            return storage
        device.wait(lane, device.record(transfer.lane), "read elsewhere")
        own, source = device.empty(storage.nbytes()), bytes_of(storage, 0, storage.nbytes())
        device.note_read(lane, source)
        device.note_write(lane, own)
        own.copy_(source)
        device.wait(transfer.lane, device.record(lane), "return")
        return own.untyped_storage()


def _checksum(host: Block) -> int:
    value = 0
    for extent in host.extents:
        value = zlib.crc32(extent.numpy().data, value)
    return value
