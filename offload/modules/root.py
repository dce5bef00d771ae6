"""One model whose saved tensors leave without an edit: what its own forward and those of its blocks open and
close.

    forward of the model     begins a chunk; opens a group for what is saved between the blocks
      forward of a block     opens a group; its hooks take what autograd saves in it
                             closes it: the group's bytes leave
                             closes the outer group

One invariant: a call opens only what it closes itself. Where nothing may leave (no gradients, a recompute,
offload switched off), it opens nothing.

# Note: [A block inside a checkpoint]
# Where the model, or its user, checkpoints a block by calling it inside torch.utils.checkpoint, the block's
# hooks run inside the checkpoint as well. In a non-reentrant one the checkpoint's own saved-tensor hooks are
# innermost, and must get all tensors; in a reentrant one gradients are off. So the block opens nothing. What
# such a checkpoint keeps is its input, which it saves outside of the block: the model's own group takes that.
# The group is open from the begin of the model's forward to the end of its last block, where checkpoints are
# expected: transformers says so by an attribute, and others are seen in the first forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from offload.checkpoint.members import inner_modules
from offload.checkpoint.net import Watch
from offload.groups.chunk import ChunkGroups, GroupScope
from offload.groups.group import Cost, Group
from offload.groups.manager import GroupsManager
from offload.modules.blocks import Blocks
from offload.modules.hooks import CallsUnderWay, output_tensors
from offload.modules.memory import BACKWARD, HEAD, PeakWatch
from offload.modules.settings import checkpoints_off, is_checkpointing
from offload.modules.steps import Root, Steps
from offload.saved.handles import Handle, SavedChunk
from offload.saved.hooks import InstalledScope, admits_hooks, inside_checkpoint
from offload.telemetry.speaker import Once, speaker

logger = speaker(__name__)

INPUTS = "inputs"
"""The group of what is saved between the blocks."""


class OpenCall(Protocol):
    """A group, or a scope, that a forward has opened."""

    def close(self, output: Any, failed: bool) -> None: ...


class GroupCall(NamedTuple):
    """A group that a forward has opened, as OpenCall."""

    manager: GroupsManager
    handler: ChunkGroups
    group: Group
    installed: InstalledScope | None

    def close(self, output: Any, failed: bool) -> None:
        """Its forward is over: the hooks go, and the group's bytes leave unless the forward raised."""
        self.manager.scopes.close_scope(self.installed)
        with self.manager.engine.lock:  # another thread may run a forward beside this one
            closed = self.handler.close_own(self.group)
        if not closed or failed:  # not: the chunk was begun again inside the forward
            return
        made = next(output_tensors(output), None)
        self.manager.commit(self.handler, self.group, output=made)
        if made is not None and made.grad_fn is not None:
            made.grad_fn.register_prehook(self.handler.output_has_gradient)


class _Between(GroupScope):
    """Takes what is saved while its root wants it."""

    __slots__ = ("_root",)

    def __init__(self, handler: ChunkGroups, group: Group, root: ModelRoot) -> None:
        super().__init__(handler, group)
        self._root = root

    def take(self, tensor: torch.Tensor) -> Handle | None:
        return super().take(tensor) if self._root.takes else None


class ModelRoot(Root):
    """A model, its blocks and the hooks on both.

    min_elements: of a saved tensor that leaves; None for the config's. everything: the model's own group
    takes what is saved anywhere, not only between blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        steps: Steps,
        manager: Callable[[], GroupsManager],
        *,
        min_elements: int | None,
        everything: str | None = None,
    ) -> None:
        super().__init__(model)
        self.takes = False  # what is saved in no block, at this moment
        self.recomputes = False  # its blocks say themselves what checkpoints of others mean for them
        self.min_elements = min_elements
        self.forwards = 0  # with gradients
        self.checkpoints_off = checkpoints_off(model)  # what to write for it
        self._name = type(model).__name__
        self._blocks = {name: group for group, modules in blocks.items() for name in modules}
        self._last = next(reversed(self._blocks), None)
        self._steps = steps
        self.manager = manager
        self._everything = everything
        self.has_checkpoints = False
        """Others checkpoint what the model calls, so that its own group takes what is saved between."""
        self._begun = 0  # forwards since the last step's end
        self._ran: set[str] = set()
        self._alone: tuple[SavedChunk, set[str]] | None = None  # a forward without the model, and its blocks
        self._said = Once()
        self._registered: weakref.ref[GroupsManager] | None = None
        self._ends_without = 0  # a forward, since apply()
        self.resting = frozenset[str]()  # blocks whose hooks are off, since they run plain
        self.runs_inside = True  # no block was called without the model
        self.given_bytes = 0  # of the model's inputs, at most, while it `looks_at_given`
        self.looks_at_given = False
        self.calls = CallsUnderWay()
        self.watch = Watch()  # of its recomputes
        self.peak = PeakWatch(bool(self._blocks))

    # -- the model's own forward -----------------------------------------------------------------------------
    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Forward | None:
        """The model's forward begins."""
        if torch._C._current_graph_task_id() != -1:  # a recompute of all of it
            if self.forwards == 0 and torch.is_grad_enabled():
                self._say_inside()  # of a reentrant checkpoint, whose forward has no gradients
            return None
        if self.is_transformed():
            return None
        call = watched = None
        if self._here.running == 0:
            if self.looks_at_given:
                self.given_bytes = max(self.given_bytes, given_bytes((args, kwargs)))
            self._begin_chunk()
        if inside_checkpoint():
            self._say_inside()
        elif self._here.running == 0:
            if torch.is_grad_enabled() and self.peak.forward_begins(self.manager().follower.ends_by_hand):
                watched = self.manager().engine.hooks.push(self.peak)
            checkpoints = self.has_checkpoints or (self._begun <= 1 and self._checkpoints())
            if self._everything or checkpoints:
                try:
                    call = self.open_own()
                except BaseException:
                    self.manager().scopes.close_scope(watched)
                    raise
                self.takes = call is not None
        self._here.running += 1
        return _Forward(call, watched)

    def leave(self, forward: _Forward | None, output: Any, failed: bool) -> None:
        """It is over."""
        if forward is None:
            return
        self._here.running -= 1
        if self._here.running == 0:
            self.manager().tracker.end_inferred_forward()
        if forward.call is not None:
            self.takes = False
            forward.call.close(output, failed)
        if forward.watched is not None:
            self.manager().scopes.close_scope(forward.watched)

    def _say_inside(self) -> None:
        self.say_once(
            "inside",
            "all of %s runs inside a checkpoint, which recomputes what it saves: nothing leaves. Checkpoint "
            "its blocks instead; or use mode='hidden_states', and no checkpoint",
        )

    def is_transformed(self) -> bool:
        """Predicate: a call that begins now can have no saved-tensor hooks, which is said once. It opens
        nothing then."""
        if admits_hooks():
            return False
        self.say_once(
            "transformed",
            "a forward of %s runs inside a transform of torch.func (grad, vjp, vmap, ...) or "
            "disable_saved_tensors_hooks(): torch admits no saved-tensor hooks there, so nothing of it "
            "leaves and nothing is recomputed. torch.autograd.grad() and backward() have no such limit",
        )
        return True

    def _checkpoints(self) -> bool:
        """Predicate: blocks run inside checkpoints. Looked at in the first forward of a step. Note: [A block
        inside a checkpoint]."""
        if not self.has_checkpoints:
            model = self._model()
            assert model is not None
            self.has_checkpoints = any(
                module.training and is_checkpointing(module) for module in inner_modules(model)
            )
            if self.has_checkpoints and not self.recomputes:
                self.say_once(
                    "checkpoints",
                    "%s runs its layers in checkpoints of its own: they run twice, and only their inputs "
                    "leave, not what they save. To move that instead, switch them off: %s. To recompute, "
                    "switch them off too, and choose mode='auto' or 'hidden_states'",
                    self.checkpoints_off,
                )
        return self.has_checkpoints

    def _begin_chunk(self, *, may_end: bool = True) -> None:
        """A forward begins: of the model, or of a block that is called without it. may_end: it may be the
        first of a step."""
        manager = self.manager()
        if self._registered is None or self._registered() is not manager:
            self._registered = weakref.ref(manager)
            model = self._model()
            if model is not None:
                manager.register_parameters(model)
        self._steps.forward_begins(self, self.min_elements, may_end=may_end)
        self.forwards += torch.is_grad_enabled()
        self._begun += torch.is_grad_enabled()

    # -- the forwards inside ---------------------------------------------------------------------------------
    def note_block(self, name: str) -> None:
        """The forward of a block begins, outside of any backward."""
        if self._here.running == 0:
            self.runs_inside = False
            self._note_alone(name)
        self._ran.add(name)

    def _note_alone(self, name: str) -> None:
        """A block is called without the model, as where a loss calls an inner model. Blocks that follow one
        another so are one forward, until one comes again or what they saved is read."""
        handler = self.manager().scopes.active_handler()
        if self._alone is not None and handler is not None:
            saved, names = self._alone
            if handler.saved is saved and not saved.readable and name not in names:
                names.add(name)
                return
        self._begin_chunk(may_end=name in self._ran)
        handler = self.manager().scopes.active_handler()
        self._alone = None if handler is None else (handler.saved, {name})

    def is_last(self, name: str) -> bool:
        """Predicate: after this block come the head and the loss."""
        return name == self._last

    def note_block_end(self, name: str, output: Any) -> None:
        """It is over."""
        if name != self._last:
            return
        if self._here.running == 0:
            self.manager().tracker.end_inferred_forward()
        if not self._everything:
            self.takes = False
        if self._here.running and not self.peak.is_over:
            self.peak.begins(HEAD)
            for tensor in output_tensors(output):
                assert tensor.grad_fn is not None
                tensor.grad_fn.register_prehook(lambda _: self.peak.begins(BACKWARD))

    def note_checkpointed(self) -> None:
        """A block is called inside a checkpoint: from the next forward on, the model's group takes its
        input."""
        self.has_checkpoints = True

    def open_own(self) -> OpenCall | None:
        """Open the group of the model's own forward, for what is saved in no block."""
        return self.open_group(self._everything or INPUTS, between=True, required=bool(self._everything))

    def open_group(
        self, name: str, *, between: bool = False, required: bool = False, cost: Cost | None = None
    ) -> GroupCall | None:
        """Open a group in the current chunk, and install hooks; None where nothing may leave. between: it
        takes only while `takes` is set. required: no plan keeps it on the device. cost: of its block."""
        manager = self.manager()
        handler = manager.scopes.active_handler()
        if handler is None:
            return None
        manager.engine.transfers.check_capture(f"group {name!r}")
        group = handler.on_group_start_forward(name, required=required, cost=cost)
        group.hooked = True
        owner = _Between(handler, group, self) if between else GroupScope(handler, group)
        return GroupCall(manager, handler, group, manager.engine.hooks.push(owner))

    # -- step ------------------------------------------------------------------------------------------------
    def step_ends(self, by: Optimizer | None) -> None:
        """Say once which blocks did not run, or that nothing of the model did."""
        if self.end_seen:
            self.peak.step_ends()
        ran, begun = self._ran | self.resting, self._begun
        self._ran, self._begun, self._alone = set(), 0, None
        if self.forwards == 0:
            self._ends_without += self.end_seen
            # a closure runs its first forward inside the first step()
            if self._ends_without > 1 and ("inside",) not in self._said:
                self.say_once(
                    "never",
                    "an optimizer steps parameters of %s, and no forward of it was seen since apply(): "
                    "nothing leaves. Hooks run where a module is called, not its forward(): where a loss "
                    "calls an inner model alone, give apply() that. A model that was copied, or compiled "
                    "before apply(), has none",
                )
            return
        missed = [name for name in self._blocks if name not in ran]
        if missed and begun:
            skips = len(missed) < len(self._blocks)
            self.say_once(
                "missed",
                "blocks of %s did not run through their hooks in this step, %d of %d, and nothing of them "
                "left: %s. %s a block as a module, block(x), not block.forward(x)",
                len(missed),
                len(self._blocks),
                ", ".join(missed[:4]) + (", ..." if len(missed) > 4 else ""),
                "Where the model skips them, all is well; else call" if skips else "Call",
            )

    def say_once(self, what: str, text: str, *values: object) -> None:
        """Warn of `what`, the first time. text: its first %s is the model's class, then come `values`."""
        if self._said.first(what):
            logger.warning(text, self._name, *values)


def given_bytes(given: object) -> int:
    """Bytes of all tensors in the arguments of a call."""
    tensors = (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _Forward(NamedTuple):
    """A forward of the root. call: its group, watched: the scope that watches its saves; None where there is
    none."""

    call: OpenCall | None
    watched: InstalledScope | None


class GroupCalls:
    """The hooks of a module that is a group, or a block. name: of the block or module; group: its group's,
    None for a block whose groups are finer."""

    def __init__(self, root: ModelRoot, name: str, group: str | None, block: bool) -> None:
        self._root = root
        self._name = name
        self._group = group
        self._block = block

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GroupCall | None:
        recomputed = torch._C._current_graph_task_id() != -1
        if not recomputed and self._root.is_transformed():
            return None
        if self._block and not recomputed:
            self._root.note_block(self._name)
        if recomputed or inside_checkpoint():
            self._root.note_checkpointed()
            return None
        return None if self._group is None else self._root.open_group(self._group)

    def leave(self, call: GroupCall | None, output: Any, failed: bool) -> None:
        if call is not None:
            call.close(output, failed)
        if self._block:
            self._root.note_block_end(self._name, output)


class HeadCalls:
    """The hooks of the output head, where all tensors leave."""

    def __init__(self, root: ModelRoot) -> None:
        self._root = root

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._root.takes = False  # what is saved from here on is read back at once

    def leave(self, state: None, output: Any, failed: bool) -> None:
        """The head is over. What comes after it, the loss, is read back as soon."""
