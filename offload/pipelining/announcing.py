"""The announcer that a pipeline stage tells of its chunks, and what else that one has to know: the order in
which one rank computes, so that the engine knows which activations are read next, and when a step ends.

One invariant: the answer is found anew for each chunk. So `offload.apply` and `offload.configure` may come
before the stage is built, after it, or between two steps; whoever is the manager then knows as much.

`actions_of` takes a schedule and runs nothing. It is exactly the order in which the stages will announce
their chunks in one step; it is only a hint to the engine, but a wrong hint costs time. A schedule with a
runtime holds its actions, with communication between them. GPipe and 1F1B run a loop instead: for them the
order of the loop is written here, because the order that torch prints for 1F1B has the wrong microbatch
numbers (it skips microbatch 0 on the last stage).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import EllipsisType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from offload import marks
from offload.apply import infer_steps, is_declined
from offload.modules.steps import Root
from offload.policy.actions import Action, Kind, one_f_one_b
from offload.telemetry.speaker import Once, speaker

_KINDS: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}


def actions_of(schedule: Any, rank: int) -> tuple[Action, ...]:
    """Actions of `rank` (in the pipeline's group) in one training step, in order.

    >>> print(*actions_of(schedule_1f1b_of_2_stages_and_3_microbatches, 0))
    0F0 0F1 0B0 0F2 0B1 0B2
    """
    if isinstance(schedule, ScheduleGPipe):
        microbatches = range(schedule._n_microbatches)
        return (*(Action("F", rank, i) for i in microbatches), *(Action("B", rank, i) for i in microbatches))
    if isinstance(schedule, Schedule1F1B):
        return one_f_one_b(rank, schedule._num_stages, schedule._n_microbatches)
    orders = getattr(schedule, "pipeline_order_with_comms", None) or getattr(schedule, "pipeline_order", None)
    if not orders:
        raise ValueError(
            f"{type(schedule).__name__} has no list of actions; give the engine no order (set_order(None))"
        )
    if rank not in orders:
        raise ValueError(
            f"{type(schedule).__name__} has no rank {rank}, only {sorted(orders)}; pass the rank within the "
            "pipeline's group"
        )
    return tuple(_computed(orders[rank]))


def peak_chunks(actions: Sequence[Action]) -> int:
    """The most chunks whose activations exist at once: their forward has run and their last backward has
    not."""
    last_read = {action.chunk: index for index, action in enumerate(actions)}
    alive = peak = 0
    for index, action in enumerate(actions):
        alive += action.kind == "F"
        peak = max(peak, alive)
        alive -= action.kind != "F" and last_read[action.chunk] == index
    return peak


def _computed(actions: Iterable[Any]) -> Iterable[Action]:
    """Only what computes, with an overlapped forward and backward as the two that it is."""
    for action in actions:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _computed(action.sub_actions)
        elif action.computation_type.value in _KINDS:
            yield Action(_KINDS[action.computation_type.value], action.stage_index, action.microbatch_index)


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
        """The backward of this chunk is over."""

    def register_external(self, tensor: Tensor) -> None:
        """This storage is written from outside autograd, so its version says nothing."""


class Announcements:
    """Announcements of one stage. given: the announcer that it was built with; an Ellipsis for whoever is
    this process's manager."""

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
