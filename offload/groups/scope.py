"""Scopes whose tensors belong to one group, fixed when the scope was entered, or when an operator made the
tensor."""

from __future__ import annotations

import torch

from offload.device import Lane
from offload.engine import OffloadEngine
from offload.groups.chunk import ChunkGroups
from offload.groups.group import OffloadTensorGroup
from offload.saved.handles import Handle

__all__ = ["GroupScope", "KeptScope"]


class GroupScope:
    """Takes what autograd saves for `group`, until it is committed; after that a save is passed on to the
    scope outside."""

    __slots__ = ("_engine", "_group", "_handler", "_saved", "min_elements")

    def __init__(
        self, engine: OffloadEngine, handler: ChunkGroups, group: OffloadTensorGroup
    ) -> None:
        self._engine = engine
        self._handler = handler
        self._group = group
        self._saved = group.saved
        self.min_elements = handler.min_offloaded_tensor_size

    def take(self, tensor: torch.Tensor) -> Handle | None:
        group, saved = self._group, self._saved
        if group.committed or saved is None or group.saved is not saved or not self._handler.do_offload:
            return None  # committed, or of a step that has ended inside the scope
        if not tensor.requires_grad:
            saved.unwritten_until = torch._C._autograd._get_sequence_nr()
        return self._engine.store.save(tensor, self._handler.saved, saved)

    def note_replayed(self, tensor: torch.Tensor) -> None:
        _note_replayed(self._group, tensor)


class KeptScope:
    """Takes what an operator made while `group` was open, though by now the group may be committed and sent:
    the rest is sent after it.

    lane: the compute lane that the operator ran on; None for the current one at the save.
    """

    __slots__ = ("_engine", "_group", "_handler", "_lane", "_saved", "min_elements")

    def __init__(
        self,
        engine: OffloadEngine,
        handler: ChunkGroups,
        group: OffloadTensorGroup,
        lane: Lane | None,
    ) -> None:
        self._engine = engine
        self._handler = handler
        self._group = group
        self._lane = lane
        self._saved = group.saved
        self.min_elements = handler.min_offloaded_tensor_size

    def take(self, tensor: torch.Tensor) -> Handle | None:
        group, saved = self._group, self._saved
        if saved is None or group.saved is not saved or not self._handler.do_offload:
            return None  # of a step that has ended since
        # the region's dispatch mode would only hand on, at 10 microseconds a call
        with torch._C._DisableTorchDispatch():
            handle = self._engine.store.save(tensor, self._handler.saved, saved, self._lane)
            if group.sent:
                self._handler.on_group_commit_forward(group=group)
        return handle

    def note_replayed(self, tensor: torch.Tensor) -> None:
        _note_replayed(self._group, tensor)


def _note_replayed(group: OffloadTensorGroup, tensor: torch.Tensor) -> None:
    group.replayed[tensor.untyped_storage().data_ptr()] = tensor.numel() * tensor.element_size()
