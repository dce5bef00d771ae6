"""Groups of the current chunk, from their start to their sending: the hooks that are installed while one is
open, the commit that sends it or queues it for a flush; and the groups that are opened and closed for a
caller who sets no marks: of what a checkpointed region keeps, and of the one input that leaves of a call
whose intermediates are recomputed.

One invariant: exactly what a `with`, or a group that closes its hooks at its commit, has installed is
removed, whatever was switched or raised in between; at the end of the step at the latest. Of the arguments of
a recomputed call at most one leaves, the first that can. The others stay, whoever's group is open around the
call: a mask that all layers share is read by all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from offload.compile import CompileReport, untraced
from offload.device import Lane
from offload.groups.chunk import ChunkGroups, GroupScope, KeptScope
from offload.groups.group import ROUTING, Cost, Group, LeavingGroups
from offload.groups.halves import CallReads
from offload.groups.release import checked_tensors
from offload.groups.step_planner import StepPlanner
from offload.groups.tracker import ChunkTracker
from offload.saved.filters import Verdict, is_parameter, is_plain, is_wrapper
from offload.saved.handles import SavedChunk
from offload.saved.hooks import InstalledScope, inside_checkpoint
from offload.transfer.block import CapturedGraph, DeviceBlock


class Scopes:
    """Hooks and commits of one engine's groups, for the chunk that `tracker` has as the current one.

    planner: knows whether warm-up has ended.
    """

    def __init__(self, tracker: ChunkTracker, planner: StepPlanner) -> None:
        self.tracker = tracker
        self.planner = planner
        self._engine = tracker.engine
        # by the name of the group whose commit closes it
        self.until_commit: list[tuple[str, InstalledScope | None]] = []
        # with the capture of the commit
        self.delayed: list[tuple[CapturedGraph | None, Callable[[], None]]] = []
        self.leaving = LeavingGroups(tracker.engine)
        self._compile_report = CompileReport()

    # -- whose they are --------------------------------------------------------------------------------------
    def active_handler(self) -> ChunkGroups | None:
        """The chunk that a mark in a forward belongs to, if anything may leave now."""
        tracker = self.tracker
        may_leave = tracker.do_offload and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        return tracker.forward if may_leave else None

    def muted_handler(self) -> ChunkGroups | None:
        """The chunk that a mark belongs to although nothing may leave: its starts and commits are still
        paired. None in a backward."""
        return None if torch._C._current_graph_task_id() != -1 else self.tracker.forward

    def needs_chunk(self) -> bool:
        """Return True if something that runs now would leave, were a chunk current."""
        tracker = self.tracker
        return tracker.do_offload and tracker.forward is None and torch._C._current_graph_task_id() == -1

    # -- hooks -----------------------------------------------------------------------------------------------
    @untraced
    def open_scope(self, stays: Callable[[torch.Tensor], bool] | None = None) -> InstalledScope | None:
        """Install the hooks for the innermost open group of the current chunk; None if nothing may leave now.

        stays: predicate, asked of each saved tensor, a wrapper and then its members; True keeps it on the
            device.
        """
        handler = self.active_handler()
        if handler is None:
            return None
        group = handler.innermost_open()
        if group is None:
            self.tracker.mark_report.no_group(handler.id)
            return None
        group.hooked = True
        if recomputed_by := inside_checkpoint():
            # mode "auto" plans, and recomputes a block in some steps only; a checkpoint that keeps what was
            # asked for is what the warning would advise
            is_auto = self._engine.limits.again_room_bytes is not None
            by_torch = recomputed_by == "torch.utils.checkpoint"
            is_asked_for = self.tracker.open_regions > 0 if by_torch else is_auto
            self.tracker.mark_report.inside_checkpoint(group.name, "" if is_asked_for else recomputed_by)
            return None
        self._engine.transfers.check_capture(f"group {group.name!r}")
        return self._engine.hooks.push(GroupScope(handler, group), stays)

    @untraced
    def close_scope(self, installed: InstalledScope | None) -> None:
        if installed is not None:
            self._engine.hooks.pop(installed)

    def end_step(self) -> None:
        """Undo each `open_until_commit` that no commit undid."""
        while self.until_commit:
            self.close_scope(self.until_commit.pop()[1])

    def open_until_commit(self, name: str) -> None:
        """`open_scope`, undone by `close_at_commit` of the same name, or by the step's end if an exception
        came in between."""
        self.until_commit.append((name, self.open_scope()))

    def close_at_commit(self, name: str) -> None:
        """Undo the latest `open_until_commit` of this name; nothing to do where there was none."""
        for position in range(len(self.until_commit) - 1, -1, -1):
            if self.until_commit[position][0] == name:
                self.close_scope(self.until_commit.pop(position)[1])
                return

    # -- sending ---------------------------------------------------------------------------------------------
    def commit(
        self,
        handler: ChunkGroups,
        group: Group,
        forced_released_tensors: list[torch.Tensor] | None = None,
        delay_offload: bool = False,
        output: torch.Tensor | None = None,
    ) -> None:
        """Send a group that was closed, or queue it for `flush_delayed_groups`.

        output: of the group's layers. In warm-up, what compiled functions before it keep where no hook sees
            it is reported.
        """
        forced = [] if forced_released_tensors is None else checked_tensors(forced_released_tensors)
        with self._engine.lock:
            if output is not None and self.planner.is_warmup:
                self._compile_report.look(group.name, handler.id, output, group.since, handler.may_leave)
            if replayed := group.replayed:
                self._compile_report.replayed(group.name, handler.id, len(replayed), sum(replayed.values()))
            capture = self._engine.transfers.capture
            if capture is not None:
                self.tracker.captured.add(handler)
            if delay_offload:
                self.delayed.append((capture, partial(self._send, handler, group, forced)))
            else:
                self._send(handler, group, forced)

    def kept_group(self, name: str | None) -> KeptGroup:
        """For the outputs that a checkpointed region keeps, which is called now. name: of the group that they
        belong to where none is open; None: they stay on the device."""
        if name == ROUTING:
            self.leaving.input_names.add(name)
        return KeptGroup(self, None if name is None else self.active_handler(), name or "")

    def input_group(
        self, name: str, *, alone: bool = True, leaves: bool = True, cost: Cost | None = None
    ) -> InputGroup:
        """For the input of a call that is recomputed, which is called now. name: of its group.

        alone: nothing else of the call leaves. Then no plan keeps the input. And its block computes longer
            than its bytes are copied: so two such copies out are under way at most, and one input is fetched
            ahead, unless the config says otherwise; more would only hold memory.
        leaves: False for an input that stays as well. cost: of its block, where it is known.
        """
        if not leaves:
            return InputGroup(self, None, name, required=False, cost=None)
        if alone:
            self.leaving.input_names.add(name)
        if self.needs_chunk() and torch.is_grad_enabled():
            self.tracker.mark_report.not_announced(name)
        return InputGroup(self, self.active_handler(), name, required=alone, cost=cost)

    def _send(self, handler: ChunkGroups, group: Group, forced: list[torch.Tensor]) -> None:
        handler.send(group, forced)
        if self._engine.limits.groups_in_flight is not None or self.leaving.input_names:
            self.leaving.sent(group)
        self.tracker.pump()

    def flush_delayed_groups(self) -> None:
        """Send every delayed group, in the order of their commits. In a capture, those that it delayed: a
        graph copies what it computed."""
        with self._engine.lock:
            capture = self._engine.transfers.capture
            due = [send for made_in, send in self.delayed if made_in is capture]
            self.delayed = [entry for entry in self.delayed if entry[0] is not capture]
            for send in due:
                send()


class KeptGroup:
    """The group of the outputs that one run of a checkpointed function keeps: the one that is open when they
    are made, or one of the run's own.

    handler: its chunk; None where nothing may leave. name: of the run's own group.
    """

    def __init__(self, scopes: Scopes, handler: ChunkGroups | None, name: str) -> None:
        self._scopes = scopes
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
        self._scopes.tracker.open_regions += 1
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
        self._scopes.tracker.open_regions -= 1
        together, self._together = self._together, []
        handler = self._handler
        if handler is None or handler.saved is not self._chunk:
            return
        with handler.engine.lock:
            if self._own is not None and handler.close_own(self._own):
                self._scopes.commit(handler, self._own)
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
        self, scopes: Scopes, handler: ChunkGroups | None, name: str, *, required: bool, cost: Cost | None
    ) -> None:
        self._scopes = scopes
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
                self._scopes.commit(handler, group)

    def reads(self) -> CallReads | None:
        """Reads known of the halves of the call's backward; None where it is whole, or not announced."""
        saved = None if self._group is None else self._group.saved
        if self._handler is None or saved is None:
            return None
        return self._scopes.tracker.call_reads(self._handler, saved.id.place)

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
        """Hook of the node that made the call's output. Of inputs that the backward is done with, the sources
        of copies under way are released: no later copy would make compute wait for them."""
        assert self._handler is not None
        with self._handler.engine.lock:
            self._handler.output_has_gradient(None)
            self._scopes.leaving.settle_freed_inputs()


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
