"""When forwards begin and steps end, where nobody says so.

The forward of a model that was given to `apply` begins a chunk, of a virtual stage of its own. A step ends
when an optimizer that holds a parameter of such a model begins its `step()`, outside of any backward.
- A `step(closure)` ends it when it returns: the closure may run forwards, as LBFGS's and Lightning's do.
- A wrapped optimizer calls a second `step()` inside the first: by then no forward has begun since, and a step
  without one is none.
- An optimizer that steps in the backward, once a parameter, ends nothing.
- Where no activations move, and a module inside the model is called, no forward is seen: one optimizer's
  `step()` ends what has come since its last one (`WeightsRoot`).
- A GradScaler may skip `step()`: the next one ends both steps together.
- Where no end was ever seen, a forward that finds no saved tensor alive ends the step before it; where a
  pipeline's stages announce their chunks, only the forward of one that this step has had already. Such an
  end is a guess. A report counts what it guessed before an optimizer's step, such as the microbatches of a
  first step, as one step with it (`telemetry/figures.py`).

One invariant: inference is a default. A user's `init_chunk_handler`, a pipeline stage's announcement and a
user's `step_end` are believed instead, from the first on; `step_end` until a model is applied alone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from offload.client import Phase
from offload.compile import untraced
from offload.groups.manager import GroupsManager


class _Forwards(threading.local):
    """running: forwards of one root in this thread, one inside the other."""

    running = 0


class Root:
    """A model whose steps are inferred. end_seen: whether an optimizer's step has ended one of them."""

    def __init__(self, model: nn.Module) -> None:
        self.stage = 0
        self.end_seen = False
        self._model = weakref.ref(model)
        self._here = _Forwards()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the model as it is now."""
        model = self._model()
        return iter(()) if model is None else model.parameters()

    @property
    def is_running(self) -> bool:
        """Predicate: a forward of the model is under way in this thread."""
        return self._here.running > 0

    def step_ends(self, by: Optimizer | None) -> None:
        """A step is about to end. An optimizer of this model that begins its `step()` tells it first. by:
        that optimizer, or another model's; None for a guess."""


class Steps:
    """The models of this process whose steps are inferred. manager: asked at each forward."""

    def __init__(self, manager: Callable[[], GroupsManager]) -> None:
        self._manager = manager
        self._roots: list[weakref.ref[Any]] = []
        self._hooks: list[Any] = []
        self._sees: Callable[[Phase], None] | None = None  # who is told as the `step()` under way returns
        self._ending = threading.Lock()

    def roots(self) -> list[Root]:
        """Models that are alive."""
        return [root for reference in self._roots if (root := reference()) is not None]

    def add(self, root: Root) -> None:
        """From now on the steps of `root` are inferred. Its stage is the first that is free."""
        manager, taken = self._manager(), {other.stage for other in self.roots()}
        root.stage = next(stage for stage in range(len(taken) + 1) if stage not in taken)
        self._roots = [weakref.ref(other) for other in (*self.roots(), root)]
        if not taken or manager.follower.ends_by_hand == 1:  # which may be a reset() between two runs
            manager.follower.infer_ends()
        manager.tracker.mark_report.expect(root.stage)
        if not self._hooks:
            begins, returns = partial(self._optimizer_steps, False), partial(self._optimizer_steps, True)
            self._hooks.append(register_optimizer_step_pre_hook(begins))
            self._hooks.append(register_optimizer_step_post_hook(returns))

    def discard(self, root: Root) -> None:
        self._roots = [weakref.ref(other) for other in self.roots() if other is not root]
        if not self._roots:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def forward_begins(self, root: Root, min_elements: int | None, *, may_end: bool = True) -> None:
        """A forward of `root` begins: a chunk, unless it is part of another root's forward. min_elements: as
        `ChunkTracker.begin_inferred_forward`. may_end: it may be the first of a step."""
        if any(other.is_running for other in self.roots() if other is not root):
            return  # of a model around it
        manager = self._manager()
        manager.follower.guesses_ends = not root.end_seen
        # inside an announced forward it is too late: its chunk has begun (`Follower.begin_chunk`)
        if (
            may_end
            and not (root.end_seen or manager.tracker.inside_announced_forward)
            and next(manager.tracker.living_blocks(), None) is None
        ):
            self._end(manager, by=None)
        manager.tracker.begin_inferred_forward(root.stage, min_elements)

    @untraced
    def _optimizer_steps(self, returns: bool, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Its `step()` begins, or returns. args: the optimizer first."""
        has_closure = any(callable(given) for given in (*args[1:2], kwargs.get("closure")))
        if has_closure is not returns or torch._C._current_graph_task_id() != -1:
            sees, self._sees = self._sees, None
            if sees is not None:
                sees(Phase.STEP_END)
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        ended = False
        for root in self.roots():
            if any(id(parameter) in stepped for parameter in root.parameters()):
                root.end_seen = ended = True
        if ended:
            manager = self._manager()
            self._end(manager, by=optimizer)
            if not returns and (sees := manager.engine.on_phase) is not None:
                self._sees = sees
                sees(Phase.OPTIMIZER)

    def _end(self, manager: GroupsManager, *, by: Optimizer | None) -> None:
        """by: None for a guess. Where another thread ends the step already, that adds nothing."""
        if not self._ending.acquire(blocking=by is not None):
            return
        try:
            for root in self.roots():
                root.step_ends(by)
            manager.follower.end_inferred_step(guessed=by is None)
        finally:
            self._ending.release()
