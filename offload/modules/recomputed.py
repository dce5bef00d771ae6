"""The hooks of a block that is recomputed in the backward, and whose input waits on the host.

One invariant: a recompute of the block passes through its hooks, whoever asked for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from offload.checkpoint.decisions import Decisions, default_operators
from offload.checkpoint.hidden_states import HIDDEN_STATES, RecomputedCall, is_recompute
from offload.checkpoint.members import has_lazy, inner_modules
from offload.checkpoint.selective import Contexts, contexts_for, is_traced
from offload.config import Mode
from offload.errors import OffloadError
from offload.groups.group import ROUTING
from offload.modules.hooks import INTERRUPTED
from offload.modules.root import GroupCall, ModelRoot
from offload.modules.settings import is_checkpointing
from offload.saved.hooks import inside_checkpoint


def is_forward_ad() -> bool:
    """Predicate: a level of forward AD is open."""
    return forward_ad._current_level >= 0


_WRITTEN = """%s changes what %s returns in place, so mode='selective' recomputes it instead of keeping \
it. To keep it, make that change out of place, as ReLU(inplace=False) does"""


class RecomputedCalls:
    """name: of the block. mode: "selective" keeps outputs of matrix products and attention, beside what the
    block decides, which every mode keeps. "checkpoint" moves nothing."""

    def __init__(self, root: ModelRoot, name: str, mode: Mode) -> None:
        self._root = root
        root.recomputes = True
        self._name = name
        self._keeps = keeps = mode == "selective"
        self._moves = mode != "checkpoint"
        self._decisions = Decisions(default_operators() if keeps else ())
        group = "selective" if keeps else ROUTING if self._moves else None
        self._context_fn = contexts_for(self._decisions, group, root.manager)

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> RecomputedCall | GroupCall | None:
        if is_recompute(module):
            return None
        if torch._C._current_graph_task_id() != -1:
            self._root.note_checkpointed()
            return None
        if self._root.is_transformed():
            return None
        self._root.note_block(self._name)
        if inside_checkpoint():
            self._root.note_checkpointed()
            return None
        if module.training and is_checkpointing(module):
            return self._checkpointed(module)
        if has_lazy(inner_modules(module)):  # this forward makes what a recompute would find made
            return self._plain()
        return self._begin(module, args, kwargs)

    def _begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> RecomputedCall | GroupCall | None:
        if self._root.watch.refuses(self._name, module):
            return self._plain()
        self._refuse_compiled(module)
        context_fn = self._contexts(args, kwargs)
        may_stay = self._keeps and context_fn is not None
        call = self._recomputed(module, args, kwargs, context_fn, may_stay=may_stay, moves=self._moves)
        call.begin()
        return call

    def _recomputed(self, *given: Any, **settings: Any) -> RecomputedCall:
        """A RecomputedCall of this block."""
        root = self._root
        return RecomputedCall(root.manager(), *given, watch=root.watch, name=self._name, **settings)

    def _plain(self) -> GroupCall | None:
        """A call that is not recomputed."""
        return self._root.open_group(self._name) if self._moves else None

    def _contexts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Contexts] | None:
        """Contexts that keep some outputs of a call; None keeps none."""
        if is_forward_ad():  # under a dispatch mode torch takes other formulas
            return None
        if not self._keeps and (self._decisions.are_none or is_traced()):
            return None
        self._decisions.is_given(args, kwargs)
        return self._context_fn

    def _refuse_compiled(self, module: nn.Module) -> None:
        """Raise where a compiled function calls the block: its graphs save other tensors than the block does
        by itself, which is how it would be recomputed."""
        compiler = sys.modules.get("torch._dynamo.eval_frame")
        if compiler is None or getattr(module, "_compiled_call_impl", None) is not None:
            return  # nothing is compiled yet, or the block by itself, and so is its recompute
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            code = frame.f_code
            if code.co_filename == compiler.__file__ and code.co_name == "compile_wrapper":
                raise OffloadError(
                    f"block {self._name} is recomputed in the backward, and a compiled function calls it: "
                    "compile the blocks, block.compile() for each, and not what is around them; or use "
                    "mode='groups', which goes with any. A Trainer's torch_compile=True compiles all of it"
                )

    def _checkpointed(self, module: nn.Module) -> GroupCall | None:
        """A layer of transformers that checkpoints its own forward, inside of its hooks: all that is saved
        between the two is the checkpoint's input. A second recompute around it would only cost time."""
        if self._keeps:
            self._root.say_once(
                "selective",
                "%s checkpoints its layers itself, and recomputes all of them: mode='selective' keeps "
                "nothing. Write %s",
                self._root.checkpoints_off,
            )
        return self._root.open_group(HIDDEN_STATES, required=True) if self._moves else None

    def leave(self, call: RecomputedCall | GroupCall | None, output: Any, failed: bool) -> None:
        if isinstance(call, GroupCall):
            call.close(output, failed)
        elif call is not None:
            call.abort(interrupted=output is INTERRUPTED) if failed else call.end(output)
            if self._decisions.written:
                names = sorted({str(operator) for operator, _ in self._decisions.written})
                self._root.say_once("written", _WRITTEN, ", ".join(names))
        if call is not None:
            self._root.note_block_end(self._name, output)
