"""Saved bytes on the device while copies of them run: how many there are, how room is made, and when they are
released.

One invariant: device bytes that a copy still touches are held by that copy's `Transfer`, and they return to
the allocator only after a lane that could reuse them is ordered behind the copy. The host never blocks; where
bytes must wait, the compute lane does.

Three counts say where saved bytes are on the device: resident (kept), spilling (leaving; held by transfers in
`_spilling`, oldest first) and restoring (fetched back and not yet read for the last time). Before bytes are
added, room is made until the sum fits `device_limit_bytes`, in this order:

    1. The oldest spill is settled: compute waits for it, and its source is dropped.
    2. Blocks that `reclaim` kept for their reader release theirs. Their copies to the host were never
       stopped.
    3. What was fetched ahead is dropped, the latest fetched first.
    4. Pieces that are not full are sent and settled: those of groups around the one that saves, too.

A prefetch stops after 1, and is not issued if the bytes do not fit. A save and a required read go through all
four, and pass the limit if that was not enough.

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

from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Protocol

from offload.device import Device, Lane
from offload.disk.tier import DiskTier
from offload.ids import ChunkId
from offload.memory.arena import HostArena
from offload.telemetry.records import TransferCounts
from offload.transfer.block import BlockState, CapturedGraph, DeviceBlock, Transfer, living
from offload.transfer.copier import Stall, Stalls
from offload.transfer.limits import Limits


class Owner(Protocol):
    """Who counts the bytes of its blocks that are on the host alone, until they come back or are freed."""

    away_bytes: int


class InFlight:
    """The engine's transfers that are not settled, and its counts. Callers hold the engine's lock."""

    def __init__(self, device: Device, arena: HostArena, limits: Limits) -> None:
        self.device = device
        self.arena = arena
        self.limits = limits
        self.freed_blocks: deque[DeviceBlock] = deque()  # appended to by finalisers, on any thread
        self.counts = TransferCounts()
        self._largest_bytes = 0  # of the step's storages so far, when they were saved
        # the last resort of `_make_room`: what waits to be sent, and what sends it; False if nothing may go
        self.waiting: Collection[object] = ()
        self.send_waiting: Callable[[], bool] = bool
        self.disk: DiskTier | None = None  # below the host memory, if there is one
        self.capture: CapturedGraph | None = None  # the one under way; captures.py
        self._captured: list[DeviceBlock] = []  # what it moves
        self._joined: Lane | None = None  # comes after every copy of the capture so far
        self.resident_bytes = 0
        self.spilling_bytes = 0
        self.restoring_bytes = 0
        self._grown_bytes = 0  # of the resident ones, of no block: `grow`
        self._refused_bytes = 0  # of blocks that can be read
        self._spilling: deque[Transfer] = deque()
        self._restoring: deque[Transfer] = deque()
        # fetched, in that order; the freed ones at its start are let go in passing
        self._ahead: deque[DeviceBlock] = deque()
        # chunks of which something fetched ahead was dropped, since the prefetch looked back
        self.dropped: set[ChunkId] = set()
        # spills in flight, by storage: two chunks may save one storage
        self._sources: Counter[int] = Counter()
        self.away: dict[DeviceBlock, Owner] = {}  # on the host alone, as their owners count them
        self.stalls = Stalls(device)  # of this step
        self._no_room = False  # the device ran out of memory in this step: nothing more is fetched ahead

    # -- counts ----------------------------------------------------------------------------------------------
    @property
    def device_bytes(self) -> int:
        """Saved bytes on the device in any state, and what is claimed beside them."""
        return self.resident_bytes + self.spilling_bytes + self.restoring_bytes + self.limits.claimed_bytes

    @property
    def over_limit(self) -> bool:
        """Predicate: saved bytes exceed the device limit: only what is sent now can bring them below it."""
        limit = self.limits.device_limit_bytes
        return limit is not None and self.device_bytes > limit

    def may_keep(self, nbytes: int) -> bool:
        """Return True if so many more bytes may stay for as long as they are saved: beside what stays
        already, nothing can make room for them later."""
        limit = self.limits.kept_limit_bytes
        if limit is None or self.resident_bytes + nbytes <= limit:
            return True
        self.reclaim_freed()
        return self.resident_bytes + nbytes <= limit

    def adopt(self, block: DeviceBlock, more_bytes: int | None = None) -> None:
        """Count a new RESIDENT block, after making room for it. It is on the current compute lane unless it
        says another. more_bytes: of one more storage of a block that was counted before and stays."""
        if self.freed_blocks:
            self.reclaim_freed()
        if more_bytes is None:
            nbytes = block.nbytes
            if block.lane is None:
                block.lane = self.device.compute
            block.capture = self.capture
        else:
            nbytes = more_bytes
            block.nbytes += nbytes
            block.storages += 1
        self.resident_bytes += nbytes  # first: whatever fails below, a block that is freed is counted out
        held = self.resident_bytes + self.spilling_bytes + self.restoring_bytes + self.limits.claimed_bytes
        counts, limit, cap = self.counts, self.limits.device_limit_bytes, self.limits.max_spilling_bytes
        if (limit is not None and held > limit) or (cap is not None and self.spilling_bytes > cap):
            self._make_room(0)
            held = self.device_bytes
        counts.saved += 1
        counts.saved_bytes += nbytes
        if held > counts.device_bytes_peak:
            counts.device_bytes_peak = held
        if nbytes > self._largest_bytes:
            self._largest_bytes = nbytes
        if self.limits.watchers:
            self.limits.saved(block, nbytes)

    def claim(self, nbytes: int) -> None:
        """From here on so many bytes of the device limit are for tensors that no block has, such as those
        that a recompute makes again; room is made for them. The next claim takes the place of this one, and a
        step's end ends it. What is restored and read for the last time meanwhile adds to it: a recompute
        holds that until its backward is over. Blocks the host: never."""
        self.limits.claim(nbytes)
        if nbytes:
            if self.freed_blocks:
                self.reclaim_freed()
            self._largest_bytes = max(self._largest_bytes, nbytes)
            self._make_room(0)
            self.counts.device_bytes_peak = max(self.counts.device_bytes_peak, self.device_bytes)

    def hold(self, nbytes: int) -> None:
        """From here on so many bytes more of the device limit, fewer below 0, are for tensors that no block
        has and that wait for a reader; of what is claimed, as many are not any more. Blocks the host:
        never."""
        self.resident_bytes += nbytes
        if nbytes > 0:
            self.limits.claim_more(-nbytes)
            self._make_room(0)
            self.counts.device_bytes_peak = max(self.counts.device_bytes_peak, self.device_bytes)

    def grow(self, nbytes: int) -> None:
        """Take so many bytes of the device limit, in place of those before, for tensors that no block has and
        that stay to the end of the step, such as gradients. Compute waits for the oldest copies out, as for
        `claim`; the host never blocks."""
        more, self._grown_bytes = nbytes - self._grown_bytes, nbytes
        self.resident_bytes += more
        if more > 0:
            if self.freed_blocks:
                self.reclaim_freed()
            self._make_room(0)
            self.counts.device_bytes_peak = max(self.counts.device_bytes_peak, self.device_bytes)

    def resize(self, block: DeviceBlock, start: int, stop: int) -> None:
        """A RESIDENT block has these bytes of its storage from here on; room is made for what it grew."""
        grown = stop - start - block.nbytes
        block.start, block.nbytes = start, stop - start
        self.resident_bytes += grown
        counts = self.counts
        counts.saved_bytes += grown
        self._largest_bytes = max(self._largest_bytes, block.nbytes)
        if block.refused:
            self._refused_bytes += grown
        if grown > 0:
            self._make_room(0)
        counts.device_bytes_peak = max(counts.device_bytes_peak, self.device_bytes)

    def reclaim_freed(self) -> None:
        """Reclaim what freed blocks still hold: their share of the counts and their host bytes."""
        freed = self.freed_blocks
        while freed:
            block = freed[0]
            state, transfer, nbytes = block.state, block.transfer, block.nbytes
            if state is BlockState.RESTORING or state is BlockState.RESTORED:
                if transfer is not None and not transfer.settled:
                    # may raise: what the block holds is taken off only then
                    self._settle_restore(transfer, "abandon")
                self.restoring_bytes -= nbytes
            freed.popleft()
            block.state = BlockState.RELEASED
            block.device_bytes = None
            if block in self.away:
                self.away.pop(block).away_bytes -= nbytes
            if block.refused:
                self._refused_bytes -= nbytes
            if state is BlockState.RESIDENT:
                self.resident_bytes -= nbytes
                # it was reclaimed, and its spill still holds the bytes
                if transfer is not None and not transfer.settled:
                    transfer.nbytes += nbytes
                    self.spilling_bytes += nbytes
            host, event = block.host, block.event
            if self.disk is not None and block.stored is not None:
                self.disk.forget(block)
                host = None
            block.host = block.event = block.transfer = None  # its chunk keeps the block to the step's end
            if host is not None and block.capture is None:  # else its region holds it
                (host.lender or self.arena).give_back(host, event)

    # -- room ------------------------------------------------------------------------------------------------
    def _make_room(self, nbytes: int, may_settle: Callable[[Transfer], bool] | None = None) -> bool:
        """Settle the oldest spills until `nbytes` more fit under the caps. False if they do not fit even
        then.

        may_settle: asked before each; a spill whose bytes are read sooner than the ones that want its room
            must not make way.
        """
        spill_cap, device_cap = self.limits.max_spilling_bytes, self.limits.device_limit_bytes
        reclaimed = 0  # at the front, of which settling makes no room
        while reclaimed < len(self._spilling):
            oldest = self._spilling[reclaimed]
            over_cap = spill_cap is not None and self.spilling_bytes > max(spill_cap, oldest.nbytes)
            over_limit = device_cap is not None and self.device_bytes + nbytes > device_cap
            if not (over_cap or over_limit):
                return True
            if oldest.nbytes == 0:
                reclaimed += 1
                continue
            if may_settle is not None and not may_settle(oldest):
                return not over_limit
            self.settle_spill(oldest)
        over_bytes = 0 if device_cap is None else self.device_bytes + nbytes - device_cap
        if device_cap is None or over_bytes <= 0 or may_settle is not None:
            return over_bytes <= 0
        self._release_reclaimed(device_cap - nbytes)
        if self.drop_furthest(self.device_bytes + nbytes - device_cap):
            return True
        return bool(self.waiting) and self.send_waiting() and self._make_room(nbytes)

    def _release_reclaimed(self, device_bytes: int) -> None:
        """Settle spills whose blocks were reclaimed and are not read in part, the oldest first, until no more
        than `device_bytes` are left. Their copies were never stopped, so the host has the bytes."""
        for transfer in [*self._spilling]:
            if self.device_bytes <= device_bytes:
                return
            bytes_before = transfer.nbytes
            for block in living(transfer.blocks):
                if block.unread == block.readers or not block.unread:
                    self.unreclaim(block)
            if transfer.nbytes > bytes_before:
                self.settle_spill(transfer)

    def settle_oldest(self) -> bool:
        """Settle the oldest spill in flight, whosever it is; False if there is none."""
        if not self._spilling:
            return False
        self.settle_spill(self._spilling[0])
        return True

    def drop_furthest(self, nbytes: int) -> bool:
        """Drop at least `nbytes` of what was fetched ahead, the latest fetched first, as it is read last.
        Returns False if fewer bytes were fetched ahead."""
        while nbytes > 0 and self._ahead:
            block = self._ahead.pop()
            if not block.is_freed and block.state in (BlockState.RESTORING, BlockState.RESTORED):
                assert block.transfer is not None
                self._settle_restore(block.transfer, "abandon")
                self.drop(block)
                self.dropped.add(block.group.chunk)
                nbytes -= block.nbytes
        return nbytes <= 0

    def reclaim(self, block: DeviceBlock) -> None:
        """Keep a SPILLING block on the device, because it is about to be read.

        Its copy runs on unused: the spill holds the source until it is settled, and the block holds its host
        bytes as long. Until then `_release_reclaimed` can still release the device bytes; from then on, where
        a device limit needs it and nothing has read the block, `drop_furthest` can. Nothing is kept if
        less of the device limit would be left than the largest block takes: RESIDENT bytes cannot make room
        while they are read, and the next read needs room.
        """
        storage = block.storage()
        transfer = block.transfer
        if storage is None or transfer is None or block.external or block.is_freed:
            return
        limit = self.limits.device_limit_bytes
        if limit is not None and self.resident_bytes + block.nbytes + self._largest_bytes > limit:
            return
        block.move_to(BlockState.RESIDENT)
        block.device_bytes = storage
        transfer.nbytes -= block.nbytes
        self.spilling_bytes -= block.nbytes
        self.resident_bytes += block.nbytes
        if block.capture is not None:
            block.host = None  # each replay writes it all the same

    def unreclaim(self, block: DeviceBlock) -> None:
        """Let a block go after all that was reclaimed and whose spill is not settled: its bytes leave the
        device when that is. Any other block is passed over."""
        transfer = block.transfer
        if transfer is None or transfer.settled or block.is_freed or not _is_reclaimed(block, transfer):
            return
        block.move_to(BlockState.SPILLING)
        block.device_bytes = None
        transfer.nbytes += block.nbytes
        self.spilling_bytes += block.nbytes
        self.resident_bytes -= block.nbytes

    # -- settling --------------------------------------------------------------------------------------------
    def settle_spill(self, transfer: Transfer) -> None:
        """Make compute wait for this spill, then release its source. A settled transfer is passed over.
        Order: [Order: settle]."""
        if transfer.settled:
            return
        self._await(transfer, "settle")
        self._spilling.remove(transfer)  # nearly always the first
        self.spilling_bytes -= transfer.nbytes
        copying = self._sources
        for block, source in zip(transfer.blocks, transfer.keepalive, strict=True):
            key = source.untyped_storage()._cdata
            copies = copying.pop(key) - 1
            if copies:
                copying[key] = copies
            # of a capture that failed no copy ever runs
            elif transfer.capture is self.capture and (
                block.is_freed or block.state is not BlockState.RESIDENT
            ):
                self.device.note_free(transfer.lane, source)
            if block.state is BlockState.SPILLING:
                block.state = BlockState.SPILLED  # `move_to`, without a call
            elif (block.host is not None or block.stored is not None) and _is_reclaimed(block, transfer):
                if self.limits.device_limit_bytes is not None and block.unread == block.readers:
                    block.state = BlockState.RESTORED  # as what was fetched ahead, it can be dropped
                    self.resident_bytes -= block.nbytes
                    self.restoring_bytes += block.nbytes
                    self._ahead.append(block)
                    continue
                # it stays, and its host block is for the next spill
                if self.disk is not None and block.stored is not None:
                    self.disk.forget(block)
                elif block.host is not None:
                    (block.host.lender or self.arena).give_back(block.host, block.event)
                block.host = None
        transfer.blocks = transfer.keepalive = ()

    def _settle_restore(self, transfer: Transfer, order: str) -> None:
        if transfer.settled:
            return
        self._await(transfer, order)
        self._restoring.remove(transfer)  # one of the first: readers come in about the order of issue
        if order == "read":  # what is abandoned only goes back to the allocator
            for buffer in transfer.keepalive:
                self.device.note_read(transfer.lane, buffer)
        for block in transfer.blocks:
            if block.state is BlockState.RESTORING:
                block.state = BlockState.RESTORED  # `move_to`, without a call
        transfer.blocks = transfer.keepalive = ()

    def drop(self, block: DeviceBlock) -> None:
        """Release a RESTORED block's device bytes without a copy, as the host copy is clean. The caller may
        still hold the storage."""
        if block.state is BlockState.RESTORED:
            block.state = BlockState.SPILLED
        else:
            block.move_to(BlockState.SPILLED)
        block.device_bytes = None
        self.restoring_bytes -= block.nbytes
        if self.disk is not None and block.stored is not None and block.unread == 0:
            self.disk.dropped(block)

    def _await(self, transfer: Transfer, order: str) -> None:
        """Settle the transfer: its compute lane waits for its event, unless it has passed. The wait is
        timed."""
        device, lane, event = self.device, transfer.lane, transfer.event
        if transfer.capture is not None:
            if transfer.capture is self.capture and lane is not self._joined:
                device.wait(lane, event, order)
        elif not device.poll(event):
            before = device.record(lane, timed=True)
            device.wait(lane, event, order)
            self.stalls.append(Stall(lane, before, device.record(lane, timed=True)))
        transfer.settled = True

    def _settle_all(self, restores_as: str = "abandon") -> None:
        while self._spilling:
            self.settle_spill(self._spilling[0])
        while self._restoring:
            self._settle_restore(self._restoring[0], restores_as)

    # -- step ------------------------------------------------------------------------------------------------
    def release(self, block: DeviceBlock) -> None:
        """End a block's life whatever its state: a later read finds it RELEASED. Its counts and its host
        bytes are reclaimed now."""
        block.free()
        for holder in block.living_holders():
            holder.probe = None
        self.reclaim_freed()

    def end_step(self) -> TransferCounts:
        """Settle everything in flight and start new counts. Returns the step's; stalls go on."""
        self.reclaim_freed()
        self._settle_all()
        self._ahead.clear()
        self.limits.claim(0)
        self.grow(0)
        self.dropped.clear()
        self._no_room = False
        self._largest_bytes = 0
        counts, self.counts = self.counts, TransferCounts(device_bytes_peak=self.device_bytes)
        return counts

    def in_flight(self) -> tuple[int, int]:
        """Transfers not yet settled: (spills, restores)."""
        return len(self._spilling), len(self._restoring)


def _is_reclaimed(block: DeviceBlock, transfer: Transfer) -> bool:
    """Predicate: the block was reclaimed from this spill and still has its host block, or its bytes on the
    disk. Only blocks of chunks whose forward is over are reclaimed, so no later save uses the block, and the
    host has all its bytes."""
    return (
        block.state is BlockState.RESIDENT
        and block.transfer is transfer
        and (block.host is not None or block.stored is not None)
        and block.capture is None
    )
