"""Differences of torch's pipeline stage from version to version: who is told of a forward, and whose the
receive buffers are.

    up to 2.14   A forward is announced around torch's method. torch makes a receive buffer for each
                 microbatch at once and for ever; here they are meta tensors until they are received into,
                 and again when they are dead.
    2.15         A forward is announced by the context that torch calls around it. torch makes a buffer when
                 it is received into and lets it go with the chunk, so nothing is done about them.

One invariant: a stage asks for no version. `AdaptedStage` is the class of the installed torch; it calls the
stage's `announced_forward` around each forward, and has `forget_inputs` and `release_received`.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.utils.hooks import RemovableHandle

from offload.errors import OffloadError


class ContextStage(PipelineStage):
    """torch from 2.15 on. It admits one context, which is the announcement; those of the user's run inside
    it."""

    announced_forward: Callable[[int], AbstractContextManager[None]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._users_contexts: OrderedDict[int, Any] = OrderedDict()
        of_self: Any = weakref.ref(self)  # else only the garbage collector would free the stage
        super().register_forward_context(lambda info: of_self()._around_forward(info))  # type: ignore[misc]

    def register_forward_context(self, context_factory: Any) -> RemovableHandle:
        """Register a context as torch does, but for as many contexts as are wanted, each inside the one
        before."""
        handle = RemovableHandle(self._users_contexts)
        self._users_contexts[handle.id] = context_factory
        return handle

    @contextmanager
    def _around_forward(self, info: Any) -> Iterator[None]:
        if info.is_metadata_inference:
            raise _hidden_forward(self)
        with self.announced_forward(info.microbatch_index), ExitStack() as users:
            for factory in self._users_contexts.values():
                users.enter_context(factory(info))
            yield

    def forget_inputs(self, microbatch: int) -> None:
        """No backward will read what the forward of this microbatch was given."""
        self._forward_chunk_states[microbatch].input_values.clear()  # type: ignore[attr-defined]

    def release_received(self, microbatch: int) -> None:
        """Release what a stage on this rank has handed over and nobody has read: torch keeps it, and would
        raise in the next step. What a message may still be written to stays, and torch raises."""
        for info in _received(self, microbatch):
            if self.stage_index_to_group_rank[info.source] == self.group_rank:
                info.buffer = None


class BufferStage(PipelineStage):
    """torch up to 2.14."""

    announced_forward: Callable[[int], AbstractContextManager[None]]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of one microbatch, announced."""
        if self.has_backward:
            for buffer in (info.buffer for info in _with_buffer(self.args_recv_info[fwd_chunk_id])):
                buffer.requires_grad_(buffer.is_floating_point())
        with self.announced_forward(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run torch's method. torch 2.11 and 2.12 hold the nodes of autograd.Functions by Python objects,
        which own nothing."""
        try:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        except RuntimeError as error:
            if "_input_metadata" not in str(error):
                raise
            raise OffloadError(
                f"stage {self.stage_index} of {self.num_stages}: torch {torch.__version__} has lost an "
                "autograd.Function between the halves of a split backward; update to torch 2.13, or take a "
                "schedule of whole backwards, such as 1F1B"
            ) from error

    def forget_inputs(self, microbatch: int) -> None:
        """No backward will read what the forward of this microbatch was given."""
        self.release_received(microbatch)
        self.fwd_cache[microbatch][1].clear()

    def release_received(self, microbatch: int) -> None:
        """The input and the output gradient of this microbatch are read no more."""
        for info in _received(self, microbatch):
            if not info.buffer.is_meta:
                info.buffer = torch.empty_like(info.buffer, device="meta", requires_grad=False)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        # torch 2.13 votes on it over all ranks; 2.11 asks only this stage
        mode = getattr(self, "_inference_mode", None)
        if mode is not None and mode.name != "STATIC":
            raise _hidden_forward(self)
        with self._buffers_on_meta():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._buffers_on_meta():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _buffers_on_meta(self) -> Iterator[None]:
        """torch makes a buffer for every microbatch at once; made on meta they hold a shape and no bytes."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _get_recv_ops(self, recv_infos: Any, *group: Any) -> list[dist.P2POp]:
        self._allocate(recv_infos)
        return super()._get_recv_ops(recv_infos, *group)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the output gradients from the next stage on this rank."""
        if any(grad is None for grad in next_stage_bwd_outputs):
            self._allocate(self.grad_recv_info[mb_index])  # torch fills the missing one with zeros
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _allocate(self, infos: Sequence[Any]) -> None:
        for info in _with_buffer(infos):
            if info.buffer.is_meta:
                info.buffer = torch.empty_like(info.buffer, device=self.device, requires_grad=False)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:  # of torch up to 2.12; none to oneself
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


def _received(stage: PipelineStage, microbatch: int) -> list[Any]:
    return _with_buffer((*stage.args_recv_info[microbatch], *stage.grad_recv_info.get(microbatch, ())))


def _with_buffer(infos: Sequence[Any]) -> list[Any]:
    """Inputs of a stage that another stage makes; the model's own arguments have no buffer here."""
    return [info for info in infos if getattr(info, "buffer", None) is not None]


def _hidden_forward(stage: PipelineStage) -> ValueError:
    return ValueError(
        f"stage {stage.stage_index} of {stage.num_stages} would run a hidden forward, since some stage was "
        "given no shapes; build every stage as OffloadPipelineStage"
    )


AdaptedStage = BufferStage
if hasattr(PipelineStage, "register_forward_context"):
    AdaptedStage = ContextStage  # type: ignore[assignment,misc]
