"""Whom a pipeline stage tells of its chunks, and what else that one has to know: the schedule's order, and
when a step ends.

One invariant: the answer is found anew for each chunk. So `offload.apply` and `offload.configure` may come
before the stage is built, after it, or between two steps; whoever is the manager then knows as much.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import EllipsisType
from typing import Any, Protocol

from torch import Tensor, nn

from offload import marks
from offload.apply import infer_steps, is_declined
from offload.modules.steps import Root
from offload.policy.actions import Action
from offload.telemetry.speaker import Once, speaker

logger = speaker(__name__)

_said = Once()


class Announcer(Protocol):
    """Who wants to know: the offload manager, or a test that records."""

    def begin_chunk(self, stage: int, microbatch: int) -> None:
        """The forward of this chunk starts; what the layers save from here on belongs to it."""

    def end_forward(self, stage: int, microbatch: int) -> None:
        """The forward is complete: from now on its activations may be fetched back."""

    def begin_backward(self, stage: int, microbatch: int, kind: str) -> None:
        """A backward of this chunk starts: "B" the whole of it, "I" its input half, "W" its weight half."""

    def end_backward(self, stage: int, microbatch: int, kind: str) -> None:
        """That backward is over."""

    def register_external(self, tensor: Tensor) -> None:
        """This storage is written from outside autograd, so its version says nothing."""


class Announcements:
    """Those of one stage. given: the announcer that it was built with; an Ellipsis for whoever is this
    process's manager."""

    def __init__(self, given: Announcer | EllipsisType | None, module: nn.Module, stage: int) -> None:
        self._given = given
        self._module = weakref.ref(module)
        self._stage = stage
        self._actions: tuple[Action, ...] | None = None  # of this rank's step
        self._ordered: weakref.ref[object] | None = None  # who was told them last
        self._root: _StageRoot | None = None

    def announcer(self) -> Announcer | None:
        """Who is told; None for nobody."""
        given = self._given
        found = marks.existing_manager() if isinstance(given, EllipsisType) else given
        if found is not None and self._actions is not None:
            self._give_order(found, self._actions)
        return found

    def announcer_of_forward(self) -> Announcer | None:
        """Announcer of a forward with a backward that begins. Says once a process that there is no manager,
        unless somebody wanted none. From the first such forward on the manager's steps end with those of the
        module's optimizer, as after `offload.apply`."""
        found = self.announcer()
        module = self._module()
        if module is None or not isinstance(self._given, EllipsisType):
            return found
        if found is None:
            if not is_declined(module):
                _warn_without_manager(self._stage)
        elif self._root is None:
            self._root = _StageRoot(module)
            infer_steps(self._root)
        return found

    def follow(self, actions: tuple[Action, ...]) -> None:
        """Tell the announcer, and each that comes after it, that a step does this. Raises ValueError for one
        that was given and takes no order."""
        if not isinstance(self._given, EllipsisType | None) and not hasattr(self._given, "set_order"):
            raise ValueError(
                f"the announcer is a {type(self._given).__name__} without set_order(actions); leave "
                "announcer out, or give it that method"
            )
        self._actions, self._ordered = actions, None

    def _give_order(self, announcer: Any, actions: tuple[Action, ...]) -> None:
        if self._ordered is None or self._ordered() is not announcer:
            self._ordered = weakref.ref(announcer)
            announcer.set_order(actions)


class _StageRoot(Root):
    """A stage's module, whose optimizer ends steps. Its forwards are announced and not inferred."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """None while nobody is told."""
        return iter(()) if marks.existing_manager() is None else super().parameters()


def _warn_without_manager(stage: int) -> None:
    if _said.first("no manager"):
        logger.warning(
            "stage %d announces its chunks to nobody, so nothing leaves: this process has no manager. Before "
            "the first step call offload.apply(module) for each stage's module, or offload.configure(...) if "
            "its layers carry marks; announcer=None says that nothing is to leave",
            stage,
        )
