"""The group of the one input that leaves of a call whose intermediates are recomputed.

One invariant: of the arguments of a call at most one leaves, the first that can. The others stay, whoever's
group is open around the call: a mask that all layers share is read by all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from offload.groups.again import CallReads
from offload.groups.chunk import ChunkGroups, Committer
from offload.groups.group import Cost, Group
from offload.groups.scope import GroupScope
from offload.saved.chunk import SavedChunk
from offload.saved.filters import Verdict, is_parameter, is_plain, is_wrapper
from offload.saved.hooks import InstalledScope, inside_checkpoint


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
        """What is known of the halves of the call's backward; None where it is whole, or not announced."""
        saved = None if self._group is None else self._group.saved
        if self._handler is None or saved is None:
            return None
        return self._manager.call_reads(self._handler, saved.id.place)

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
    """Whether the tensor may leave; of a wrapper, such as a DTensor, whether one of its members may."""
    if is_plain(tensor) or not is_wrapper(tensor):
        return handler.may_leave(tensor)
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    members = [getattr(tensor, name) for name in names]
    return not is_parameter(tensor) and any(
        isinstance(member, torch.Tensor) and _can_leave(handler, member) for member in members
    )
