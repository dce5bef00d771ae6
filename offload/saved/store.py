"""Saves and reads of tensors: one record for a storage at a version, and a layout for each view of it.

One invariant: a read gives the bytes, sizes, strides and dtype that were saved, or an error; never other
bytes.

# Note: [What may share a copy]
# A save joins a record only if the record's storage object is the same (not merely its address), a handle of
# the record lives, the chunk is the same and the version has not moved. Storages written from outside
# autograd (receive buffers: their version stands still) never join. So x saved for w1 and w3 is copied once,
# and a buffer received into twice is copied twice. Captured graphs share none. Once the copy is underway,
# only what counts versions with the saved tensor joins.

# Note: [What stays is counted by the piece]
# A tensor that the plan keeps, and that has its storage to itself, needs no block of its own: nothing of it
# will move. Its handle has an alias, and its bytes are counted on one block with those of its neighbours, of
# which a backward reads the last first. The block counts until all of it has been read, so it is no larger
# than a piece, and small beside a device limit.
"""

from __future__ import annotations

import weakref
from itertools import groupby
from operator import attrgetter
from threading import get_ident

import torch

from offload.device import Device, Lane
from offload.errors import StaleHandleError
from offload.saved.filters import ExternalKind, ExternalStorages
from offload.saved.handles import Handle, Record, SavedChunk, SavedGroup, counts_with, modified
from offload.transfer.block import (
    BlockState,
    DeviceBlock,
    Layouts,
    ViewLayout,
    bytes_of,
    empty_at,
    overlaps_itself,
    place_of,
    span_of,
    view_of,
)
from offload.transfer.copier import Priority
from offload.transfer.engine import TransferEngine

KEPT_SHARE = 256
"""Part of a device limit, one in so many, that is at most counted too high for what stays."""

# a lone view that covers less than half of its span is packed first: fewer bytes cross the link (S2-103)
GATHER_BELOW = 0.5

_RESIDENT, _RELEASED = BlockState.RESIDENT, BlockState.RELEASED
_SPILLING, _SPILLED = BlockState.SPILLING, BlockState.SPILLED
_COME_BACK = BlockState.RESTORING, BlockState.RESTORED
_sequence_nr = torch._C._autograd._get_sequence_nr


class TensorStore:
    """Saves and reads. Callers hold the engine's lock.

    piece_bytes: a group's blocks leave as soon as this many wait, or the device limit is passed.
    """

    def __init__(
        self, device: Device, transfers: TransferEngine, externals: ExternalStorages, *, piece_bytes: int
    ) -> None:
        self._device = device
        self._transfers = transfers
        self._externals = externals
        self.piece_bytes = piece_bytes
        self._blanks: dict[torch.dtype, torch.Tensor] = {}
        self._layouts = Layouts()
        self.waiting: dict[SavedGroup, int] = {}  # groups with a piece that is not full, and their threads
        transfers.waiting, transfers.send_waiting = self.waiting, self.send_waiting

    # -- saving ----------------------------------------------------------------------------------------------
    def save(
        self,
        tensor: torch.Tensor,
        chunk: SavedChunk,
        group: SavedGroup,
        lane: Lane | None = None,
    ) -> Handle:
        """Take a plain, eligible tensor into `group`. Its bytes may be on their way when this returns. Blocks
        the host: never.

        lane: the compute lane that wrote it; None for the current one.
        """
        storage = tensor.untyped_storage()
        storage_bytes = storage.nbytes()
        nbytes = tensor.nbytes
        whole = nbytes == storage_bytes and tensor.is_contiguous()
        start, stop = (0, nbytes) if whole else span_of(tensor, storage_bytes)
        version = tensor._version
        key = storage._cdata
        external = self._externals.kinds.get(key) is ExternalKind.BUFFER
        chunk.touches += 1
        group.logical_bytes += nbytes
        record = (
            None if external or key not in chunk.table else self._joinable(tensor, chunk, key, start, stop)
        )
        if (
            record is None
            and group.kept_by_plan
            and group.slots >= group.first_kept
            and not self._transfers.may_keep(nbytes)
        ):
            group.leaves_after_all()
        if record is None and whole and group.slots >= group.first_kept:
            record = self._keep(storage, version, chunk, group, nbytes)
        elif record is None:
            block = DeviceBlock(
                group.id, group.slots, start, stop - start, storage, self._transfers.freed_blocks
            )
            block.lane = lane
            block.external = external
            group.slots += 1
            probe = self._probe(tensor)
            record = Record(block, probe, version)
            group.blocks.append(block)
            chunk.blocks.append(block)
            chunk.table[key] = weakref.ref(record)
            self._transfers.adopt(block)
            if (
                whole
                or group.waits
                or (block.nbytes == storage_bytes and nbytes >= GATHER_BELOW * storage_bytes)
            ):
                self._enqueue(block, block.nbytes, group)
            else:
                group.deferred.append(weakref.ref(record))
        elif record.block.holders is None:
            probe = self._probe(tensor)  # `.data` shares the storage, but counts versions of its own
        block = record.block
        block.readers += 1
        block.unread += 1
        block.touch = chunk.touches
        if chunk.noted is not None:
            chunk.noted.append(block)
        if block.holders is None:
            layout = self._layouts[tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype]
            if block.readers == 1:
                record.layout = layout
            elif record.layout != layout:
                record.layout = None
            return Handle(record, layout, probe, version)
        handle = Handle(record, None, tensor.detach(), version)
        block.holders.append(weakref.ref(handle))
        chunk.table[key] = weakref.ref(handle)
        return handle

    def _joinable(
        self, tensor: torch.Tensor, chunk: SavedChunk, key: int, start: int, stop: int
    ) -> Record | None:
        """The record of that storage at the version of `tensor`."""
        version = tensor._version
        found = chunk.table[key]()
        if (
            found is None
            or found.version != version
            or found.probe is None
            or found.probe._version != version
        ):
            return None
        record = found.record if isinstance(found, Handle) else found
        block = record.block
        if block.capture is not self._transfers.capture:  # a graph copies what it computed, and nothing else
            return None
        if block.holders is not None:
            return record
        if block.state is not _RESIDENT and not counts_with(found.probe, tensor):
            return None  # its copy is underway, and a write since then may have moved the other counter
        # its bytes are a packed or a restored copy by now, and `key` may be a new storage's
        if block.key != key:
            return None
        if start < block.start or block.stop < stop:
            if block.state is not _RESIDENT:
                return None
            # still here: the commit decides on the union of the saved ranges
            self._transfers.resize(block, min(block.start, start), max(block.stop, stop))
        return record

    def _keep(
        self,
        storage: torch.UntypedStorage,
        version: int,
        chunk: SavedChunk,
        group: SavedGroup,
        nbytes: int,
    ) -> Record:
        """The record that counts a storage that stays, with its piece. Note: [What stays is counted by the
        piece]."""
        transfers, slot = self._transfers, group.slots
        group.slots = slot + 1
        group.nbytes += nbytes
        group.slot_bytes[slot] = nbytes
        most, limit = self.piece_bytes, transfers.limits.device_limit_bytes
        if limit is not None:
            most = min(most, limit // KEPT_SHARE)
        record = None if group.kept is None else group.kept()
        if record is not None and record.block.nbytes + nbytes <= most:
            transfers.adopt(record.block, nbytes)
            return record
        block = DeviceBlock(group.id, slot, 0, nbytes, storage, transfers.freed_blocks)
        block.device_bytes = None
        block.holders = []
        record = Record(block, None, version)
        group.blocks.append(block)
        chunk.blocks.append(block)
        transfers.adopt(block)
        # what a checkpointed region saves is read in an order of its own
        group.kept = weakref.ref(record) if chunk.noted is None else None
        return record

    def _probe(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that holds no bytes and shares the version counter of `tensor`, its base and its views."""
        blank = self._blanks.get(tensor.dtype)
        if blank is None:
            blank = self._blanks[tensor.dtype] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        probe = tensor.detach()
        probe.data = blank
        return probe

    def _enqueue(self, block: DeviceBlock, nbytes: int, group: SavedGroup) -> None:
        """Count a save, and put it into the group's piece. nbytes: the bytes that it would move; they are
        counted whether it leaves or stays."""
        slot = block.slot
        group.nbytes += nbytes
        group.slot_bytes[slot] = nbytes
        if slot >= group.first_kept or group.waits:
            return
        group.pending.append(block)
        group.pending_bytes += nbytes
        self.waiting[group] = get_ident()
        if (
            group.pending_bytes >= self.piece_bytes or self._transfers.over_limit
        ) and group.unwritten_until != _sequence_nr():
            self._send(group)

    def _send(self, group: SavedGroup) -> None:
        pending, group.pending = group.pending, []
        group.pending_bytes = 0
        self.waiting.pop(group, None)
        for _, leaving in groupby(pending, attrgetter("lane")):  # nearly always one
            transfer = self._transfers.spill(list(leaving))
            if transfer is not None:
                group.moved_bytes += transfer.nbytes
                group.transfers.append(transfer)

    def send_waiting(self) -> bool:
        """Send the pieces of this thread that are not full, whichever group they are of, but for saves that
        their operator may still write. Returns False if there are none. Blocks the host: never."""
        own = [group for group, thread in self.waiting.items() if thread == get_ident()]
        due = [group for group in own if group.unwritten_until != _sequence_nr()]
        for group in due:
            self._send(group)
        return bool(due)

    def commit(self, group: SavedGroup) -> None:
        """No more saves will come: decide on partial views, and send what is left. Blocks the host: never."""
        group.kept = None
        # a plan under a limit counts on what stays packed, too
        packs_all = self._transfers.limits.device_limit_bytes is not None
        deferred, group.deferred = group.deferred, []
        for reference in deferred:
            record = reference()
            if record is None:
                continue
            block, packed_bytes = record.block, self._packed_bytes(record)
            stays = group.keeps(block.slot)
            if packed_bytes is not None and (packs_all or not stays):
                self._gather(record, packed_bytes)
            # the same count whether it stays or leaves
            self._enqueue(block, packed_bytes if stays and packed_bytes else block.nbytes, group)
        if group.pending:
            self._send(group)

    def _packed_bytes(self, record: Record) -> int | None:
        """Bytes of a sparse view once it is packed, if it is the record's only layout. None if it
        cannot be packed, or packing does not pay."""
        layout, block = record.layout, record.block
        if layout is None or block.state is not _RESIDENT or overlaps_itself(layout):
            return None
        if block.lane is not self._device.compute:  # which nothing orders after the lane that wrote it
            return None
        packed_bytes = layout.size.numel() * layout.dtype.itemsize
        return packed_bytes if packed_bytes < GATHER_BELOW * block.nbytes else None

    def _gather(self, record: Record, packed_bytes: int) -> None:
        """Pack a sparse view on the compute lane, so that only its elements cross the link."""
        layout, block = record.layout, record.block
        assert layout is not None
        assert block.device_bytes is not None
        with torch.no_grad():
            try:
                packed = torch.empty(layout.size, dtype=layout.dtype, device=block.device_bytes.device)
            except torch.OutOfMemoryError:
                return  # no room to pack it in: it leaves whole
            packed.copy_(view_of(block.device_bytes, layout, 0))
        itemsize = layout.dtype.itemsize
        place = place_of(block.device_bytes, layout.offset * itemsize)
        record.gathered = layout._replace(offset=place // itemsize)
        block.device_bytes = packed.untyped_storage()
        block.refer_to(block.device_bytes)
        self._transfers.resize(block, 0, packed_bytes)

    # -- reading ---------------------------------------------------------------------------------------------
    def read(self, handle: Handle, *, passed: bool = False) -> torch.Tensor:
        """The saved tensor, on the device, safe to read on the calling thread's compute lane. Blocks the
        host: never, but for bytes that are still on the disk.

        passed: its node unpacks it and does not read it. It is counted, but not fetched, and given on meta.
        Raises StaleHandleError after the step has ended, RuntimeError if the tensor was modified in place
        after it was saved.
        """
        record = handle.record
        block, state = record.block, record.block.state
        if state is _RELEASED:
            raise StaleHandleError(
                f"{block.label} ({block.nbytes:,} bytes) was saved in a step that has ended; run its "
                "backward before step_end() or reset(), or, in a loop that calls neither, before the third "
                "step() of an optimizer from then on; or save it outside the offload hooks"
            )
        probe, layout = handle.probe, handle.layout
        assert probe is not None
        if probe._version != handle.version:
            size = probe.size() if layout is None else layout.size
            raise modified(probe.dtype, size, probe._version, handle.version)
        # read before: a second pass over the graph begins for this block
        if handle.pass_no == block.pass_no:
            block.pass_no += 1
            block.unread = block.readers
        handle.pass_no = block.pass_no
        block.unread -= 1
        if passed and layout is not None:
            if block.unread == 0 and not block.reread_soon and state in _COME_BACK:
                self._transfers.ready(block)  # it was fetched for another reader
                self._transfers.drop(block)
            return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device="meta")
        if layout is None:
            # the alias itself is the handle's: an operator's kept output becomes a part of the recompute's
            # graph
            return probe.detach()
        storage = block.device_bytes if state is _RESIDENT else None
        if state is _SPILLING or state is _SPILLED:
            storage = self._revived(block)
            if storage is None:
                if state is _SPILLING:
                    assert block.transfer is not None
                    self._transfers.settle_spill(block.transfer)
                self._transfers.restore([block], Priority.REQUIRED)
        if storage is None:
            storage = self._transfers.ready(block)
            if block.unread == 0 and not block.reread_soon:
                self._transfers.drop(block)
                if (limits := self._transfers.limits).claimed_bytes:  # a recompute's graph holds them now
                    limits.claim_more(block.nbytes)
        gathered = record.gathered
        tensor = view_of(storage, layout, block.base) if gathered is None else _scattered(storage, gathered)
        shared = probe.detach()
        # counts versions with what was saved: a backward that changes it in place is found out by the next
        # read
        shared.data = tensor
        return shared

    def _revived(self, block: DeviceBlock) -> torch.UntypedStorage | None:
        """The saved storage, if something else keeps it alive: no copy is needed then. None for a storage
        that is written outside autograd, whose bytes may be new."""
        storage = None if block.external and block.base == 0 else block.storage()
        if storage is None or storage.nbytes() < block.stop - block.base:
            return None  # gone, or freed under its owner's hands (forced release)
        return storage


def _scattered(storage: torch.UntypedStorage, layout: ViewLayout) -> torch.Tensor:
    """A packed view, spread again with the strides that it had."""
    with torch.no_grad():
        packed = bytes_of(storage, 0, storage.nbytes()).view(layout.dtype).view(layout.size)
        return empty_at(layout, storage.device).copy_(packed)
