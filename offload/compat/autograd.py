"""The marks as autograd Functions, by the names that Megatron's code has for them (S2-90). The long names of
offload/fine_grained_activation_offload.py apply them.

The engine's own marks are hooks on nodes (offload/marks.py). These Functions return a view of their input,
and add one node to the graph.
"""

from __future__ import annotations

from typing import Any

import torch

from offload.compat.handler import ChunkOffloadHandler
from offload.compat.manager import PipelineOffloadManager
from offload.groups.graphs import record_event


class FineGrainedOffloadingGroupStartFunction(torch.autograd.Function):
    """Opens a group in the forward. In the backward it lets the prefetch fetch more."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, cpu_offload_handler: ChunkOffloadHandler, name: str
    ) -> torch.Tensor:
        ctx.cpu_offload_handler = cpu_offload_handler
        cpu_offload_handler.on_group_start_forward(name)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.cpu_offload_handler.on_group_start_backward()
        return grad_output, None, None


class FineGrainedOffloadingGroupCommitFunction(torch.autograd.Function):
    """Sends (or delays) a group in the forward; in the backward its chunk is the one being read."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        cur_forward_chunk: ChunkOffloadHandler,
        name: str,
        forced_released_tensors: list[torch.Tensor] | None,
        delay_offload: bool,
    ) -> torch.Tensor:
        ctx.backward_chunk = cur_forward_chunk
        ctx.group = name
        cur_forward_chunk.commit(name, forced_released_tensors, delay_offload, tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        ctx.backward_chunk.on_group_commit_backward(ctx.group)
        return grad_output, None, None, None, None


class FineGrainedOffloadingBackwardRecordFunction(torch.autograd.Function):
    """Its backward records `event` on the current lane, and orders what comes next there after the
    restores."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, event: Any) -> torch.Tensor:
        ctx.event = event
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        record_event(PipelineOffloadManager.get_instance().engine, ctx.event, "h2d")
        return grad_output, None
