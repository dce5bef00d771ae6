"""Saves of a group that stays, when its forward does again what an earlier one did.

What a save costs is mostly finding out what the tensor is: whether it may leave, which storage it has, who
else has saved that. So the first forward in which a group stays is noted, save by save. In a later one, a
save that looks as it did takes an alias of the tensor and joins its piece: one record for at most
`piece_bytes` of storages, or for one that is larger. Its bytes are counted as they are saved, and until all
of it has been read. At the first save that looks different what the piece was made for and has not come is
taken off it, and from there on all goes the normal way.

One invariant: neither bits nor limits depend on what was noted. A handle holds an alias of its own tensor and
checks its version. What is counted are the bytes that the tensor's layout takes, and that is compared, as is
with which earlier save it shares them. Not looked at again is whether it has become a parameter, and whether
another group saves its storage now; either can only count bytes that need not be counted, and is found within
`JUDGED_EVERY` steps.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from offload.saved.chunk import SavedChunk, SavedGroup
from offload.saved.handles import Handle
from offload.transfer.engine import TransferEngine
from offload.transfer.layout import layout_of
from offload.transfer.record import Record, RecordState

__all__ = ["JUDGED_EVERY", "KnownForward", "KnownSave", "StayingSaves"]

JUDGED_EVERY = 50
"""Steps. One forward in so many of a group that stays is noted anew, different groups in different steps: at
20 microseconds more a tensor, less than half a microsecond a step."""

_PLAIN, _STRIDED = torch.Tensor, torch.strided
_graph_task = torch._C._current_graph_task_id


class KnownSave(NamedTuple):
    """How a tensor looked whose storage only this group saved.

    offset: elements. first: the place of the first save of its storage, its own if it is that. slot: of the
        storage in the group.
    storage_bytes, group_bytes: what its record and its group counted for the storage. logical_bytes: what
        this save is by itself.
    """

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    first: int
    slot: int
    storage_bytes: int
    group_bytes: int
    logical_bytes: int


class _KnownPiece:
    """place: of its first save. saves: those of its storages, wherever they are."""

    __slots__ = ("nbytes", "place", "saves", "storages")

    def __init__(self, place: int) -> None:
        self.place = place
        self.nbytes = self.storages = self.saves = 0


@dataclass(frozen=True, slots=True)
class KnownForward:
    """saves: by place, None for what goes the normal way. slots: by place, the first one that no save before
    it has; one place more.
    taken: every slot of these saves. pieces: in order."""

    saves: tuple[KnownSave | None, ...]
    slots: tuple[int, ...]
    taken: frozenset[int]
    pieces: tuple[_KnownPiece, ...]


class StayingSaves:
    """The pack hook of one forward of one group that stays, from its start to its commit.

    known: what `learnt` gave after an earlier forward; None notes this one. pack: the normal way.
    """

    __slots__ = (
        "_chunk",
        "_group",
        "_handles",
        "_is_noted",
        "_is_noting",
        "_known",
        "_lock",
        "_next_place",
        "_pack",
        "_piece",
        "_piece_bytes",
        "_pieces",
        "_saves",
        "_transfers",
    )

    def __init__(
        self,
        chunk: SavedChunk,
        group: SavedGroup,
        known: KnownForward | None,
        *,
        transfers: TransferEngine,
        pack: Callable[[torch.Tensor], Any],
        lock: AbstractContextManager[object],
        piece_bytes: int,
    ) -> None:
        self._chunk = chunk
        self._group = group
        self._known = known
        self._is_noted = self._is_noting = known is None
        self._saves = None if known is None else known.saves  # None: nothing is taken, from here on or at all
        self._handles: list[weakref.ref[Handle] | None] = []  # by place
        self._pieces: list[weakref.ref[Record]] = []
        self._piece: Record | None = None
        self._next_place = known.pieces[0].place if known is not None and known.pieces else -1
        self._transfers = transfers
        self._pack = pack
        self._lock = lock
        self._piece_bytes = piece_bytes

    # -- in the forward --------------------------------------------------------------------------------------
    def pack(self, tensor: torch.Tensor) -> Any:
        saves, handles = self._saves, self._handles
        if saves is None:
            return self._pack_normally(tensor)
        place = len(handles)
        save = saves[place] if place < len(saves) else None
        if save is None:
            return self._pack_unknown(tensor, place)
        size, stride, offset, dtype, first, _, _, _, _ = save
        if (
            type(tensor) is not _PLAIN
            or tensor.dtype is not dtype
            or tensor.layout is not _STRIDED
            or tensor.is_nested
            or tensor.shape != size
            or tensor.stride() != stride
            or tensor.storage_offset() != offset
            or self._chunk.noted is not None
            or _graph_task() != -1
        ):
            return self._pack_changed(tensor)
        if place == self._next_place:
            self._open_piece(tensor, save.slot)
        if first == place:
            record = self._piece
            assert record is not None
            with self._lock:
                record.nbytes += save.storage_bytes
                self._transfers.resize(record, record.nbytes - save.storage_bytes)
        else:
            joined = self._record_of(first, tensor)
            if joined is None:
                return self._pack_changed(tensor)
            record = joined
        handle = Handle(record, None, tensor.detach(), tensor._version)
        handles.append(weakref.ref(handle))
        return handle

    def _pack_normally(self, tensor: torch.Tensor) -> Any:
        if not self._is_noting:
            return self._pack(tensor)
        # what a checkpointed region saves is read in an order of its own
        is_read_apart = self._chunk.noted is not None
        packed = self._pack(tensor)
        self._handles.append(weakref.ref(packed) if type(packed) is Handle and not is_read_apart else None)
        return packed

    def _pack_unknown(self, tensor: torch.Tensor, place: int) -> Any:
        assert self._known is not None
        if place >= len(self._known.saves):
            return self._pack_changed(tensor)
        self._handles.append(None)
        return self._pack(tensor)

    def _pack_changed(self, tensor: torch.Tensor) -> Any:
        self._change()
        return self._pack(tensor)

    def _change(self) -> None:
        """The forward has changed: what follows goes the normal way, and the next one is noted."""
        self.close()
        self._known = None

    def next_slot(self) -> int:
        """The slot of a record of the group that is made the normal way, by whomever."""
        known, slot = self._known, self._group.slots
        if known is not None and self._saves is not None:
            slot = max(slot, known.slots[len(self._handles)])
            if slot in known.taken:  # one record more than there were
                self._change()
                slot = self._group.slots
        return slot

    def _record_of(self, place: int, tensor: torch.Tensor) -> Record | None:
        """The record of the save at that place, if its storage is the one of `tensor`."""
        reference = self._handles[place]
        first = None if reference is None else reference()
        if (
            first is None
            or first.probe is None
            or first.probe.untyped_storage()._cdata != tensor.untyped_storage()._cdata
        ):
            return None
        return first.record

    def _open_piece(self, tensor: torch.Tensor, slot: int) -> None:
        assert self._known is not None
        pieces, chunk, transfers = self._known.pieces, self._chunk, self._transfers
        known = pieces[len(self._pieces)]
        with self._lock:
            piece = Record(self._group.id, slot, 0, 0, tensor.untyped_storage(), transfers.estate)
            piece.stays = True
            piece.keepers = self._handles
            piece.storages = known.storages
            piece.handles = piece.unread = known.saves
            chunk.touches += known.saves
            piece.touch = chunk.touches
            reference = weakref.ref(piece)
            self._pieces.append(reference)
            self._group.records.append(reference)
            chunk.records.append(reference)
            transfers.adopt(piece)
        self._piece = piece
        self._next_place = pieces[len(self._pieces)].place if len(self._pieces) < len(pieces) else -1

    def close(self) -> None:
        """The group is committed, has changed, or its step has ended: count what it has saved, and no
        more."""
        self._piece = None  # its handles hold it
        self._is_noting = False
        saves, self._saves = self._saves, None
        if saves is None or self._known is None:
            return
        group, num_taken = self._group, len(self._handles)
        with self._lock:
            for place, save in enumerate(saves[:num_taken]):
                if save is not None:
                    group.logical_bytes += save.logical_bytes
                    if save.first == place:
                        group.nbytes += save.group_bytes
                        group.slot_bytes[save.slot] = save.group_bytes
                        group.slots = max(group.slots, save.slot + 1)
            starts = [piece.place for piece in self._known.pieces]
            for place in range(num_taken, len(saves)):
                save = saves[place]
                if save is not None:
                    self._take_back(save, bisect_right(starts, save.first) - 1, is_first=save.first == place)

    def _take_back(self, save: KnownSave, number: int, *, is_first: bool) -> None:
        """A save that was counted with its piece has not come."""
        piece = self._pieces[number]() if number < len(self._pieces) else None
        # else its step has ended, and nothing of it is counted
        if piece is not None and piece.state is RecordState.RESIDENT:
            piece.handles -= 1
            piece.unread -= 1
            if is_first:
                piece.storages -= 1
                self._transfers.counts.saved -= 1

    # -- after it --------------------------------------------------------------------------------------------
    def learnt(self) -> KnownForward | None:
        """What the next forward of the group may take for known, asked when this one is over and nothing of
        it has been read.

        None: it has not gone as the one before, so the next one is noted.
        """
        if not self._is_noted:
            return self._known
        handles = [None if reference is None else reference() for reference in self._handles]
        saves_of = Counter(id(handle.record) for handle in handles if handle is not None)
        firsts: dict[int, int] = {}
        saves: list[KnownSave | None] = []
        pieces: list[_KnownPiece] = []
        piece_of: dict[int, _KnownPiece] = {}
        for place, handle in enumerate(handles):
            record = None if handle is None else handle.record
            group_bytes = None if record is None else self._group.slot_bytes.get(record.slot)
            if (
                handle is None
                or record is None
                or group_bytes is None
                or not self._is_private(record, saves_of[id(record)])
            ):
                saves.append(None)
                continue
            layout = handle.layout
            if layout is None:
                assert handle.probe is not None
                layout = layout_of(handle.probe)
            logical_bytes = layout.size.numel() * layout.dtype.itemsize
            first = firsts.setdefault(id(record), place)
            if first == place:
                if not pieces or pieces[-1].nbytes + record.nbytes > self._piece_bytes:
                    pieces.append(_KnownPiece(place))
                piece_of[place] = pieces[-1]
                pieces[-1].nbytes += record.nbytes
                pieces[-1].storages += 1
            piece_of[first].saves += 1
            saves.append(KnownSave(*layout, first, record.slot, record.nbytes, group_bytes, logical_bytes))
        slots = [0]
        for save in saves:
            slots.append(slots[-1] if save is None else max(slots[-1], save.slot + 1))
        return KnownForward(
            tuple(saves),
            tuple(slots),
            frozenset(save.slot for save in saves if save is not None),
            tuple(pieces),
        )

    def _is_private(self, record: Record, saves: int) -> bool:
        """Whether the record is of storage that nothing but these saves of the group has saved, and is as it
        was saved."""
        return (
            record.handles == saves
            and record.group is self._group.id
            and record.state is RecordState.RESIDENT
            and record.gathered is None
            and not record.external
            and record.capture is None
        )
