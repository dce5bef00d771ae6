"""Saved tensors: one record a storage and version, a layout for each view, and the way back.

One invariant: a read gives the bytes, sizes, strides and dtype that were saved, or an error; never other
bytes.

# Note: [What may share a copy]
# A save joins a record only if the record's storage object is the same (not merely its address), a handle of
# the record lives, the chunk is the same and the version has not moved. Storages written from outside
# autograd (receive buffers: their version stands still) never join. So x saved for w1 and w3 is copied once,
# and a buffer received into twice is copied twice. Captured graphs share none.
"""

from __future__ import annotations

import weakref

import torch

from offload.device import Device, Lane
from offload.errors import StaleHandleError
from offload.saved.chunk import SavedChunk, SavedGroup
from offload.saved.externals import ExternalKind, ExternalStorages
from offload.saved.handles import Handle, modified
from offload.transfer.admission import Priority
from offload.transfer.engine import TransferEngine
from offload.transfer.layout import (
    Layouts,
    ViewLayout,
    contiguous_stride,
    layout_of,
    overlaps_itself,
    span_of,
    view_of,
)
from offload.transfer.record import Record, RecordState, living

__all__ = ["TensorStore"]

# a lone view that covers less than half of its span is packed first: fewer bytes cross the link (S2-103)
_GATHER_BELOW = 0.5

_sequence_nr = torch._C._autograd._get_sequence_nr


class TensorStore:
    """Saves and reads. Callers hold the engine's lock.

    piece_bytes: a group's records leave as soon as this many wait, or the device limit is passed.
    """

    def __init__(
        self, device: Device, transfers: TransferEngine, externals: ExternalStorages, *, piece_bytes: int
    ) -> None:
        self._device = device
        self._transfers = transfers
        self._externals = externals
        self._piece_bytes = piece_bytes
        self._blanks: dict[torch.dtype, torch.Tensor] = {}
        self._layouts = Layouts()

    # -- saving ----------------------------------------------------------------------------------------------
    def save(
        self, tensor: torch.Tensor, chunk: SavedChunk, group: SavedGroup, lane: Lane | None = None
    ) -> Handle:
        """Take a plain, eligible tensor into `group`. Its bytes may be on their way when this returns. Blocks
        the host: never.

        lane: the compute lane that wrote it; None for the current one.
        """
        storage = tensor.untyped_storage()
        storage_bytes = storage.nbytes()
        nbytes = tensor.numel() * tensor.element_size()
        whole = nbytes == storage_bytes and tensor.is_contiguous()
        start, stop = (0, nbytes) if whole else span_of(tensor, storage_bytes)
        version = tensor._version
        external = self._externals.kind_of(storage._cdata) is ExternalKind.BUFFER
        chunk.touches += 1
        record = None if external else self._joinable(chunk, storage._cdata, start, stop, version)
        if record is None:
            stays = whole and group.keeps(group.slots)
            record = self._new_record(tensor, storage, start, stop, version, chunk, group, stays, lane)
            record.external = external
            if whole or (record.nbytes == storage_bytes and nbytes >= _GATHER_BELOW * storage_bytes):
                self._enqueue(record, group)
            else:
                if group.deferred is None:
                    group.deferred = []
                group.deferred.append(weakref.ref(record))
        record.handles += 1
        record.unread += 1
        record.touch = chunk.touches
        if chunk.noted is not None:
            chunk.noted.append(weakref.ref(record))
        group.logical_bytes += nbytes
        if record.stays:
            record.lone_layout = None
            handle = Handle(record, None, record.probe if record.handles == 1 else tensor.detach(), version)
            record.keepers = (*record.keepers, weakref.ref(handle))
            return handle
        return self._leaving(record, tensor)

    def _leaving(self, record: Record, tensor: torch.Tensor) -> Handle:
        layout = self._layouts.of(tensor)
        if record.handles == 1:
            record.lone_layout, probe = layout, record.probe
        else:
            probe = self._probe(tensor)  # `.data` shares the storage, but counts versions of its own
            if record.lone_layout != layout:
                record.lone_layout = None
        return Handle(record, layout, probe, record.version)

    def _joinable(self, chunk: SavedChunk, key: int, start: int, stop: int, version: int) -> Record | None:
        reference = chunk.table.get(key)
        record = None if reference is None else reference()
        if (
            record is None
            or record.version != version
            or record.probe is None
            or record.probe._version != version
        ):
            return None
        if record.capture is not self._transfers.capture:  # a graph copies what it computed, and nothing else
            return None
        # its bytes are a packed or a restored copy by now, and `key` may be a new storage's
        if record.key != key:
            return None
        if start < record.start or record.stop < stop:
            if record.state is not RecordState.RESIDENT:
                return None
            before = record.nbytes
            # still here: the commit decides on the union of the saved ranges
            record.cover(min(record.start, start), max(record.stop, stop))
            self._transfers.resize(record, before)
        return record

    def _new_record(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        start: int,
        stop: int,
        version: int,
        chunk: SavedChunk,
        group: SavedGroup,
        stays: bool,
        lane: Lane | None,
    ) -> Record:
        slot = group.slots if group.staying is None else group.staying.next_slot()
        record = Record(group.id, slot, start, stop, storage, self._transfers.estate)
        record.lane = lane
        group.slots = slot + 1
        record.device_bytes = storage
        record.version = version
        record.stays = stays
        record.probe = tensor.detach() if stays else self._probe(tensor)
        reference = weakref.ref(record)
        group.records.append(reference)
        chunk.records.append(reference)
        chunk.table[storage._cdata] = reference
        self._transfers.adopt(record)
        return record

    def _probe(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that holds no bytes and shares the version counter of `tensor`, its base and its views."""
        blank = self._blanks.get(tensor.dtype)
        if blank is None:
            blank = self._blanks[tensor.dtype] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        probe = tensor.detach()
        probe.data = blank
        return probe

    def _enqueue(self, record: Record, group: SavedGroup) -> None:
        slot = record.slot
        stays = group.keeps(slot)
        # the same count whether it stays or leaves
        nbytes = record.nbytes if not stays else self._packed_bytes(record) or record.nbytes
        group.nbytes += nbytes
        group.slot_bytes[slot] = nbytes
        if stays:
            return
        if group.pending is None:
            group.pending = []
        group.pending.append(weakref.ref(record))
        group.pending_bytes += nbytes
        if (
            group.pending_bytes >= self._piece_bytes or self._transfers.over_limit
        ) and group.unwritten_until != _sequence_nr():
            self._send(group)

    def _send(self, group: SavedGroup) -> None:
        if group.pending is None:
            return
        pending = list(living(group.pending))
        group.pending = None
        group.pending_bytes = 0
        while pending:
            lane = pending[0].lane
            # nearly always none
            leaving, pending = pending, [record for record in pending if record.lane is not lane]
            if pending:
                leaving = [record for record in leaving if record.lane is lane]
            transfer = self._transfers.spill(leaving)
            if transfer is not None:
                group.transfers.append(transfer)

    def commit(self, group: SavedGroup) -> None:
        """No more saves will come: decide on partial views, and send what is left. Blocks the host: never."""
        # a plan under a limit counts on what stays packed, too
        packs_all = self._transfers.limits.device_limit_bytes is not None
        for record in living(group.deferred or ()):
            if (packs_all or not group.keeps(record.slot)) and record.state is RecordState.RESIDENT:
                self._gather(record)
            self._enqueue(record, group)
        group.deferred = None
        self._send(group)

    def _packed_bytes(self, record: Record) -> int | None:
        """What a sparse view, saved as nothing else, takes when it is packed; None for a record that is worth
        no packing."""
        layout = record.lone_layout
        if layout is None or record.device_bytes is None or overlaps_itself(layout):
            return None
        # nothing orders the current lane after the one that wrote it
        if record.lane is not self._device.compute:
            return None
        packed_bytes = layout.size.numel() * layout.dtype.itemsize
        return packed_bytes if packed_bytes < _GATHER_BELOW * record.nbytes else None

    def _gather(self, record: Record) -> None:
        """Pack a sparse view on the compute lane, so that only its elements cross the link."""
        packed_bytes, layout = self._packed_bytes(record), record.lone_layout
        if packed_bytes is None or layout is None or record.device_bytes is None:
            return
        before = record.nbytes
        with torch.no_grad():
            try:
                packed = torch.empty(layout.size, dtype=layout.dtype, device=record.device_bytes.device)
            except torch.OutOfMemoryError:
                return  # no room to pack it in: it leaves whole
            packed.copy_(view_of(record.device_bytes, layout, 0))
        record.gathered = layout
        record.device_bytes = packed.untyped_storage()
        record.refer_to(record.device_bytes)
        record.cover(0, packed_bytes)
        self._transfers.resize(record, before)

    # -- reading ---------------------------------------------------------------------------------------------
    def read(self, handle: Handle) -> torch.Tensor:
        """The saved tensor, on the device, safe to read on the calling thread's compute lane. Blocks the
        host: never.

        Raises StaleHandleError after the step has ended, RuntimeError if the tensor was modified in place
        after it was saved.
        """
        record = handle.record
        if record.state is RecordState.RELEASED:
            raise StaleHandleError(
                f"{record.label} ({record.nbytes:,} bytes) was saved in a step that has ended; run its "
                "backward before step_end() or "
                "reset(), or save it outside the offload hooks"
            )
        probe = handle.probe
        assert probe is not None
        if probe._version != handle.version:
            layout = handle.layout if handle.layout is not None else layout_of(probe)
            raise modified(layout.dtype, layout.size, probe._version, handle.version)
        # read before: a second pass over the graph begins for this record
        if handle.pass_no == record.pass_no:
            record.pass_no += 1
            record.unread = record.handles
        handle.pass_no = record.pass_no
        record.unread -= 1
        if handle.layout is None:
            # the alias itself is the handle's: an operator's kept output becomes a part of the recompute's
            # graph
            return probe.detach()
        storage = self._on_device(record)
        gathered = record.gathered
        tensor = (
            view_of(storage, handle.layout, record.base)
            if gathered is None
            else _scattered(storage, gathered)
        )
        shared = probe.detach()
        # counts versions with what was saved: a backward that changes it in place is found out by the next
        # read
        shared.data = tensor
        return shared

    def _on_device(self, record: Record) -> torch.UntypedStorage:
        state = record.state
        if state is RecordState.RESIDENT:
            assert record.device_bytes is not None
            return record.device_bytes
        if state is RecordState.SPILLING or state is RecordState.SPILLED:
            storage = self._revived(record)
            if storage is not None:
                return storage
            if state is RecordState.SPILLING:
                assert record.transfer is not None
                self._transfers.settle_spill(record.transfer)
            self._transfers.restore([record], Priority.REQUIRED)
        storage = self._transfers.ready(record)
        if record.unread == 0:
            self._transfers.drop(record)
        return storage

    def _revived(self, record: Record) -> torch.UntypedStorage | None:
        """The storage itself, where something still holds it: no copy. Not one that somebody outside autograd
        may have overwritten."""
        if record.external and record.base == 0:
            return None
        storage = record.storage()
        if storage is None or storage.nbytes() < record.stop - record.base:
            return None  # gone, or freed under its owner's hands (forced release)
        return storage


def _scattered(storage: torch.UntypedStorage, layout: ViewLayout) -> torch.Tensor:
    """A packed view, spread again with the strides that it had."""
    with torch.no_grad():
        packed = view_of(storage, ViewLayout(layout.size, contiguous_stride(layout.size), 0, layout.dtype), 0)
        spread = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=storage.device)
        return spread.copy_(packed)
