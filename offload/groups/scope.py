"""Which group owns a saved tensor: the group that was open when the scope was entered, or when a checkpointed
region's operator made the tensor.

One invariant: what a scope is given after its chunk was begun again, or after its step, stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload.device import Lane
from offload.groups.chunk import ChunkGroups, Committer
from offload.groups.group import Group
from offload.ids import ChunkId
from offload.saved.chunk import SavedChunk
from offload.saved.handles import Handle
from offload.transfer.block import DeviceBlock


class GroupScope:
    """Takes what autograd saves for `group`, until it is committed; after that a save is passed on to the
    scope outside."""

    __slots__ = ("_group", "_handler", "_saved", "min_elements")

    def __init__(self, handler: ChunkGroups, group: Group) -> None:
        self._handler = handler
        self._group = group
        self._saved = group.saved
        self.min_elements = handler.min_offloaded_tensor_size

    @property
    def name(self) -> str:
        """Name of the group that owns what is saved."""
        return self._group.name

    @property
    def chunk(self) -> ChunkId:
        """Chunk of that group."""
        return self._handler.id

    def take(self, tensor: torch.Tensor) -> Handle | None:
        group, saved, handler = self._group, self._saved, self._handler
        if group.committed or saved is None or group.saved is not saved or not handler.do_offload:
            return None
        if not tensor.requires_grad:
            saved.unwritten_until = torch._C._autograd._get_sequence_nr()
        return handler.engine.store.save(tensor, handler.saved, saved)

    def note_replayed(self, tensor: torch.Tensor) -> None:
        self._group.replayed[tensor.untyped_storage().data_ptr()] = tensor.numel() * tensor.element_size()


class KeptScope(GroupScope):
    """Takes what an operator made while `group` was open, though by now the group may be committed and sent:
    the rest is sent after it.

    lane: the compute lane that the operator ran on; None for the current one at the save.
    """

    __slots__ = ("_lane",)

    def __init__(self, handler: ChunkGroups, group: Group, lane: Lane | None) -> None:
        super().__init__(handler, group)
        self._lane = lane

    def take(self, tensor: torch.Tensor) -> Handle | None:
        group, saved, handler = self._group, self._saved, self._handler
        if saved is None or group.saved is not saved or not handler.do_offload:
            return None
        # the region's dispatch mode would only hand on, at 10 microseconds a call
        with torch._C._DisableTorchDispatch():
            handle = handler.engine.store.save(tensor, handler.saved, saved, self._lane)
            if group.sent:
                handler.send(group, [])
        return handle


class KeptGroup:
    """The group of the outputs that one run of a checkpointed function keeps: the one that is open when they
    are made, or one of the run's own.

    handler: its chunk; None where nothing may leave. name: of the run's own group.
    """

    def __init__(self, manager: Committer, handler: ChunkGroups | None, name: str) -> None:
        self._manager = manager
        self._handler = handler
        self._name = name
        self._own: Group | None = None
        self._together: list[DeviceBlock] = []
        self._chunk: SavedChunk | None = None
        if handler is not None:
            self._chunk = handler.saved
            # what is saved from here to the forward itself are the checkpoint's inputs
            self._chunk.note_saves()

    def begin(self) -> None:
        """The region's forward begins."""
        self._manager.open_regions += 1
        if self._chunk is not None:
            self._together = self._chunk.take_noted()

    def scope(self, lane: Lane | None) -> KeptScope | None:
        """Where an output belongs that is made now, on `lane`; None: on the lane that is current when it
        leaves."""
        handler = self._handler
        if handler is None or handler.saved is not self._chunk:
            return None
        open_group = handler.innermost_open()
        if open_group is None:
            open_group = self._own = handler.on_group_start_forward(self._name)
        return KeptScope(handler, open_group, lane)

    def left(self, blocks: Iterable[DeviceBlock]) -> None:
        """The recompute will read these, after those before."""
        self._together += blocks
        if self._own is not None:
            self._own.hooked = True

    def end(self) -> None:
        """The region's forward has ended, or raised."""
        self._manager.open_regions -= 1
        together, self._together = self._together, []
        handler = self._handler
        if handler is None or handler.saved is not self._chunk:
            return
        with handler.engine.lock:
            if self._own is not None and handler.close_own(self._own):
                self._manager.commit(handler, self._own)
                self._own.committed = self._own.hooked  # the recompute comes past nothing that it would keep
            handler.read_together(together)
