"""The hooks of a block that mode "auto" keeps, moves or recomputes, each chunk as the plan says.

One invariant: whatever the plan says of a call, its gradients, random numbers and buffers are those of a
block that runs once.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from offload.auto.calls import Look
from offload.auto.controller import Auto
from offload.checkpoint.hidden_states import RecomputedCall
from offload.checkpoint.members import inner_modules, is_trained
from offload.modules.hooks import output_tensors
from offload.modules.recomputed import RecomputedCalls, is_forward_ad
from offload.modules.root import GroupCall, ModelRoot
from offload.planner.profiler import BlockProfiler
from offload.policy.actions import ChunkKey


class _Call(NamedTuple):
    """One forward of the block. call: None for a plain one of which nothing may leave. place: of the call in
    its chunk. took: whether the root's own group was taking what is saved. look, profiler: of a forward that
    is measured, or profiled."""

    call: RecomputedCall | GroupCall | None
    place: tuple[ChunkKey, int] | None = None
    took: bool = False
    look: Look | None = None
    profiler: BlockProfiler | None = None


class MixedCalls(RecomputedCalls):
    """name: of the block."""

    def __init__(self, root: ModelRoot, name: str, auto: Auto) -> None:
        super().__init__(root, name, "auto")
        self._auto = auto

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or not _has_backward(module, args, kwargs):
            return None
        if is_forward_ad():  # a profile, and calls that keep outputs, run under a dispatch mode
            return super()._begin(module, args, kwargs)
        self._refuse_compiled(module)
        root, auto = self._root, self._auto
        chosen = auto.choose(root, self._name, module, args, kwargs)
        if chosen.is_plain:
            look, group, took = None, None, root.takes
            if chosen.moves:
                group = root.open_group(self._name, cost=chosen.cost, required=chosen.required)
            else:
                root.takes = False  # what the model's own group would take
            if chosen.profiler is not None:
                chosen.profiler.begin()
            if chosen.look is not None:
                look = chosen.look()
            return _Call(group, chosen.place, took, look, chosen.profiler)
        call = self._recomputed(
            module,
            args,
            kwargs,
            chosen.contexts,
            may_stay=True,
            moves=chosen.moves,
            before_again=chosen.before_again,
            cost=chosen.cost,
        )
        look = None if chosen.look is None else chosen.look()
        call.begin()
        return _Call(call, chosen.place, root.takes, look)

    def _checkpointed(self, module: nn.Module) -> GroupCall | None:
        self._root.say_once(
            "auto",
            "%s checkpoints its layers itself: mode='auto' moves their inputs, and chooses nothing. Write %s",
            self._root.checkpoints_off,
        )
        return super()._checkpointed(module)

    def leave(self, state: Any, output: Any, failed: bool) -> None:
        if not isinstance(state, _Call):
            super().leave(state, output, failed)
            return
        call, place, took, look, profiler = state
        if profiler is not None:
            profiler.end(failed=failed)
        self._root.takes = took
        super().leave(call, output, failed)
        if failed:
            return
        if call is None:
            self._root.note_block_end(self._name, output)
        auto, is_recomputed = self._auto, isinstance(call, RecomputedCall)
        if look is not None:
            look.end()
        if place is not None and auto.calls.trace is not None:
            auto.forward_ended(place)
        if self._root.is_last(self._name):
            auto.blocks_end(self._root, output)
        if is_recomputed or (call is None and profiler is None):
            return
        for made in output_tensors(output):
            assert made.grad_fn is not None
            made.grad_fn.register_prehook(partial(auto.plain_is_read, place))
            if profiler is not None:
                made.grad_fn.register_prehook(profiler.backward_begins)
            break


def _has_backward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if anything of a call needs a gradient. The first look spares most calls the others."""
    return (
        any(type(value) is torch.Tensor and value.requires_grad for value in args)
        or is_trained(inner_modules(module))
        or any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs)))
    )
