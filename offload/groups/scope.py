"""Which group owns a saved tensor: the group that was open when the scope was entered, or when a checkpointed
region's operator made the tensor; and the group of the one input that leaves of a call whose intermediates
are recomputed.

One invariant: what a scope is given after its chunk was begun again, or after its step, stays on the device.
Of the arguments of a recomputed call at most one leaves, the first that can. The others stay, whoever's group
is open around the call: a mask that all layers share is read by all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from offload.device import Lane
from offload.groups.chunk import ChunkGroups, Committer, Regions
from offload.groups.group import Cost, Group
from offload.groups.halves import CallReads
from offload.ids import ChunkId
from offload.saved.filters import Verdict, is_parameter, is_plain, is_wrapper
from offload.saved.handles import Handle, SavedChunk
from offload.saved.hooks import InstalledScope, inside_checkpoint
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

    def __init__(self, manager: Committer, regions: Regions, handler: ChunkGroups | None, name: str) -> None:
        self._manager = manager
        self._regions = regions
        self._handler = handler
        self._name = name
        self._own: Group | None = None
        self._together: list[DeviceBlock] = []
        self._chunk: SavedChunk | None = None
        if handler is not None:
            self._chunk = handler.saved
            # what is saved from here to the forward itself are the checkpoint's inputs
            self._chunk.noted = []

    def begin(self) -> None:
        """The region's forward begins."""
        self._regions.open_regions += 1
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
        self._regions.open_regions -= 1
        together, self._together = self._together, []
        handler = self._handler
        if handler is None or handler.saved is not self._chunk:
            return
        with handler.engine.lock:
            if self._own is not None and handler.close_own(self._own):
                self._manager.commit(handler, self._own)
                self._own.committed = self._own.hooked  # the recompute comes past nothing that it would keep
            handler.read_together(together)


class InputGroup:
    """Input of one call: `open` before autograd packs the arguments, `send` after, `close` after the call.

    handler: its chunk; None where nothing may leave. name: of the group. required: it leaves whatever the
        plan would keep.
    In a checkpoint that somebody else has opened there is no group: what that one recomputes, it must save
    itself.
    """

    def __init__(
        self, manager: Committer, handler: ChunkGroups | None, name: str, *, required: bool, cost: Cost | None
    ) -> None:
        self._manager = manager
        self._handler = None if inside_checkpoint() else handler
        self._name = name
        self._required = required
        self._cost = cost
        self._chunk: SavedChunk | None = None
        self._group: Group | None = None
        self._installed: InstalledScope | None = None
        self._stays: _AllButOne | None = None

    def open(self, arguments: Sequence[torch.Tensor]) -> None:
        """Start the group. arguments: every tensor of the call, in order. Raises CaptureError in a CUDA graph
        captured outside of `capturing()`."""
        handler = self._handler
        if handler is None:
            return
        handler.engine.transfers.check_capture(f"group {self._name!r}")
        chosen = next((tensor for tensor in arguments if _can_leave(handler, tensor)), None)
        self._chunk = handler.saved
        group = handler.on_group_start_forward(self._name, required=self._required, cost=self._cost)
        group.hooked = True
        self._group = group
        # none is chosen: each is judged, so that a report knows why it stays
        self._stays = None if chosen is None else _AllButOne(arguments, chosen)
        self._installed = handler.engine.hooks.push(GroupScope(handler, group), self._stays)

    def send(self) -> None:
        """The arguments have been packed: what was taken leaves. Blocks the host: never."""
        handler, group = self._handler, self._group
        if self._stays is not None:
            self._stays.end()
        if handler is None or group is None:
            return
        with handler.engine.lock:
            # else its forward was begun again in between, or its step has ended
            if handler.saved is self._chunk and handler.close_own(group):
                self._manager.commit(handler, group)

    def reads(self) -> CallReads | None:
        """Reads known of the halves of the call's backward; None where it is whole, or not announced."""
        handler, group = self._handler, self._group
        if handler is None or handler.cursor is None or group is None or group.saved is None:
            return None
        return handler.cursor.call_reads(handler, group.saved.id.place)

    def close(self, output: Any) -> None:
        """The call is over. output: what it returned, whose backward tells that the input will be read soon;
        None after an exception."""
        installed, self._installed = self._installed, None
        if installed is not None and self._handler is not None:
            self._handler.engine.hooks.pop(installed)
        group, self._group, self._chunk, self._stays = self._group, None, None, None
        if group is None:
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(self._output_has_gradient)
                return

    def _output_has_gradient(self, gradients: object) -> None:
        assert self._handler is not None
        self._manager.input_read_next(self._handler)


class _AllButOne:
    """Which saved tensors stay: every argument but the chosen one, and what the others are made of."""

    __slots__ = ("_arguments", "_chosen", "_is_chosen")

    verdict = Verdict.ARGUMENT  # why they stay, for a report

    def __init__(self, arguments: Sequence[torch.Tensor], chosen: torch.Tensor | None) -> None:
        self._arguments = frozenset(map(id, arguments))  # they live until `end`
        self._chosen = chosen
        self._is_chosen = False

    def __call__(self, tensor: torch.Tensor) -> bool:
        if id(tensor) in self._arguments:  # else a member of the argument before
            self._is_chosen = tensor is self._chosen
        return not self._is_chosen

    def end(self) -> None:
        """Whatever is saved from here on stays."""
        self._arguments = frozenset()
        self._chosen = None
        self._is_chosen = False


def _can_leave(handler: ChunkGroups, tensor: torch.Tensor) -> bool:
    """Return True if the tensor may leave; of a wrapper, such as a DTensor, if one of its members may."""
    if is_plain(tensor) or not is_wrapper(tensor):
        return handler.may_leave(tensor)
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    members = [getattr(tensor, name) for name in names]
    return not is_parameter(tensor) and any(
        isinstance(member, torch.Tensor) and _can_leave(handler, member) for member in members
    )
