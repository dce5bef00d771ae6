"""torch's pipeline stage, which says aloud what it is about to do; and whom it tells.

The engine must know whose activations it sees: the chunk (virtual stage, microbatch) is announced here, by
the only code that knows it, and is never guessed from the order of calls. One invariant: every `begin_*` has
its `end_*`, also when the chunk raised, and nothing is announced when no backward will come
(`schedule.eval()`).

Whom a stage tells is found anew for each chunk. So `offload.apply` and `offload.configure` may come before
the stage is built, after it, or between two steps; whoever is the manager then knows as much: the order of
the rank's actions, and when a step ends.

`actions_of` takes a schedule and runs nothing. It is exactly the order in which the stages will announce
their chunks in one step; it is only a hint to the engine, but a wrong hint costs time. A schedule with a
runtime holds its actions, with communication between them. GPipe and 1F1B run a loop instead: for them the
order of the loop is written here, because the order that torch prints for 1F1B has the wrong microbatch
numbers (it skips microbatch 0 on the last stage).

Around that, four repairs of torch's stage, all of them about bytes or about evaluation. What differs between
versions of torch is in `versions.py`:

* Shapes are given, so that no hidden forward runs to find them (torch would run one in the first step and at
  each switch to evaluation).
* Receive buffers exist only between their receive and the last backward that can need them; torch keeps one a
  microbatch for ever, and from 2.15 on until the weight half of a split backward or the end of an evaluation.
* `schedule.eval()` works on the V-shaped schedules, keeps no autograd graph, and does not divide the
  gradients that are already there.
* Two neighbouring stages on one rank are not connected with a message to oneself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import EllipsisType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from offload import marks
from offload.apply import infer_steps, is_declined
from offload.modules.steps import Root
from offload.pipelining.versions import AdaptedStage
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
            f"stage {stage} announces its chunks to nobody, so nothing leaves: this process has no manager. "
            "Before the first step call offload.apply(module) for each stage's module, or "
            "offload.configure(...) if its layers carry marks; announcer=None says that nothing is to leave"
        )


class OffloadPipelineStage(AdaptedStage):
    """A `PipelineStage` that announces each chunk.

    announcer: left out, the manager of this process, as soon as `offload.apply` or `offload.configure` has
    built it; a forward before then is told in one warning. None announces nothing and keeps the repairs.
    The coming reads are those of the step before; with `follow(schedule)` they are known from step 1 on.
    A step ends where an optimizer of the module steps, unless `step_end` is called. An announcer that is
    given is told of chunks and nothing else.
    `input_args` and `output_args` are meta tensors of one microbatch, with `requires_grad=True` where
    gradients flow.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        input_args: Tensor | tuple[Tensor, ...],
        output_args: Tensor | tuple[Tensor, ...],
        announcer: Announcer | EllipsisType | None = ...,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
    ) -> None:
        _check_differentiable(stage_index, num_stages, input_args, output_args)
        shapes: dict[str, Any] = {"input_args": input_args, "output_args": output_args}
        super().__init__(
            submodule, stage_index, num_stages, device, group=group, dw_builder=dw_builder, **shapes
        )
        self._announcements = Announcements(announcer, submodule, stage_index)

    @property
    def announcer(self) -> Announcer | None:
        """Who is told; None for nobody."""
        return self._announcements.announcer()

    def follow(self, schedule: Any) -> None:
        """The coming reads are those of `schedule`, from its first step on, for whichever manager this
        process has then. Call it once a rank, on any of its stages: torch tells a stage nothing of its
        schedule.

        schedule: of torch, built over this stage. Raises ValueError for one that does not run this stage, for
        one without a list of actions, and for an announcer that was given and takes no order. With
        announcer=None nothing happens. Blocks the host: never.
        """
        single = getattr(schedule, "_stage", None)  # of GPipe and 1F1B, whose lists go by stage
        actions = actions_of(schedule, self.group_rank if single is None else single.stage_index)
        own = sorted({action.stage for action in actions})
        if self.stage_index not in own:
            raise ValueError(
                f"stage {self.stage_index} was told to follow a {type(schedule).__name__} that runs stages "
                f"{own} on rank {self.group_rank}; give it the schedule that it was built into"
            )
        self._announcements.follow(actions)

    # ---- the three methods that every schedule goes through ----

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the forward of one microbatch; under `schedule.eval()` without a graph, since nothing could
        ever release it."""
        if self.has_backward:
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        with torch.no_grad():
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        self.forget_inputs(fwd_chunk_id)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run the whole backward of one microbatch, or the half that makes its input gradients."""
        if not self.has_backward:
            return
        with self._announced_backward(bwd_chunk_id, "B" if full_backward else "I"):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None and not loss._is_view():
            # the schedule keeps it to the step's end, and with it would keep the graph and the stage's input
            loss.detach_()
        if not full_backward:
            if self.is_first:  # its weight half is a whole backward
                return
            if bwd_chunk_id in self.backward_state:
                # between the halves only the graph is needed: no input and no output gradient
                _inputs, param_groups, outputs, _grads = self.backward_state[bwd_chunk_id]
                self.backward_state[bwd_chunk_id] = ([], param_groups, outputs, None)
        self.release_received(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the half of one microbatch's backward that makes its weight gradients.

        On stage 0 it is the whole backward: torch runs nothing in the input half of a stage that has no input
        gradient to send.
        """
        if not self.has_backward:
            return
        with self._announced_backward(bwd_chunk_id, "W"):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        self.release_received(bwd_chunk_id)

    def announced_forward(self, microbatch: int) -> AbstractContextManager[None]:
        """Around a forward; nobody is told of an evaluation."""
        found = self._announcements.announcer_of_forward() if self.has_backward else None
        chunk = self.stage_index, microbatch
        return nullcontext() if found is None else _between(found.begin_chunk, found.end_forward, *chunk)

    def _announced_backward(self, microbatch: int, kind: str) -> AbstractContextManager[None]:
        found, chunk = self.announcer, (self.stage_index, microbatch, kind)
        return nullcontext() if found is None else _between(found.begin_backward, found.end_backward, *chunk)

    # ---- receive buffers ----

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of one microbatch's input."""
        return self._told(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of one microbatch's output gradient."""
        return self._told(super().get_bwd_recv_ops(bwd_chunk_id))

    def _told(self, receives: list[dist.P2POp]) -> list[dist.P2POp]:
        announcer = self.announcer
        if announcer is not None and self.has_backward:
            for op in receives:
                announcer.register_external(op.tensor)
        return receives

    def clear_runtime_states(self) -> None:
        """Start a step with nothing left over, also when the last one raised in its middle."""
        super().clear_runtime_states()
        for microbatch in self.args_recv_info:
            self.release_received(microbatch)
        for left_over in (self.bwd_cache, self.backward_state, self.dw_runner):
            left_over.clear()

    # ---- evaluation, and neighbours on one rank ----

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """The input gradients for the previous stage on this rank; none in an evaluation, where torch would
        assert."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the output gradients from the next stage on this rank; nothing in an evaluation, where torch
        would assert."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients by the number of microbatches; an evaluation leaves them alone, which torch's
        does not."""
        if self.has_backward:
            super().scale_grads(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Finish the step's gradients; nothing in an evaluation."""
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)


@contextmanager
def _between(begin: Callable[..., None], end: Callable[..., None], *chunk: Any) -> Iterator[None]:
    begin(*chunk)
    try:
        yield
    finally:
        end(*chunk)


def _check_differentiable(
    stage: int, stages: int, inputs: Tensor | tuple[Tensor, ...], outputs: Tensor | tuple[Tensor, ...]
) -> None:
    """Without requires_grad torch derives that no gradient comes back, and a rank waits for one for ever."""
    checked = [("output_args", outputs)] if stage == 0 else [("input_args", inputs), ("output_args", outputs)]
    for name, value in checked:
        tensors = (value,) if isinstance(value, Tensor) else value
        for index, tensor in enumerate(tensors):
            if tensor.is_floating_point() and not tensor.requires_grad:
                raise ValueError(
                    f"stage {stage} of {stages}: {name}[{index}] of shape {tuple(tensor.shape)} does not "
                    "require grad, so no gradient "
                    "would be sent for it; make it with torch.empty(..., device='meta', requires_grad=True)"
                )
