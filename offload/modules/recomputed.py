"""The hooks of a block that is recomputed in the backward, and whose input waits on the host.

One invariant: a recompute of the block passes through its hooks, whoever asked for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offload.checkpoint.hidden_states import RecomputedCall, is_recompute
from offload.checkpoint.operators import default_operators
from offload.checkpoint.selective import Contexts, contexts_for
from offload.modules.root import ModelRoot
from offload.saved.hooks import inside_checkpoint

__all__ = ["RecomputedCalls", "selective_contexts_of"]


def selective_contexts_of(root: ModelRoot) -> Callable[[], Contexts]:
    """The context_fn that keeps outputs of matrix products and attention."""
    return contexts_for(default_operators(), "selective", root.manager)


class RecomputedCalls:
    """name: of the block. context_fn: keeps some outputs of it; None keeps none."""

    def __init__(
        self, root: ModelRoot, module: nn.Module, name: str, context_fn: Callable[[], Contexts] | None
    ) -> None:
        self._root = root
        self._module = weakref.ref(module)
        self._name = name
        self._context_fn = context_fn

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecomputedCall | None:
        module = self._module()
        assert module is not None  # it is called
        if is_recompute(module):
            return None
        if torch._C._current_graph_task_id() != -1:
            self._root.note_checkpointed()
            return None
        self._root.note_block(self._name)
        if inside_checkpoint():
            self._root.note_checkpointed()
            return None
        call = RecomputedCall(self._root.manager(), module, args, kwargs, self._context_fn)
        call.begin()
        return call

    def leave(self, call: RecomputedCall | None, output: Any, failed: bool) -> None:
        if call is not None:
            call.abort() if failed else call.end(output)
            self._root.note_block_end(self._name)
