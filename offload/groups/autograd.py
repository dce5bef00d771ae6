"""The marks in autograd's graph: identities whose backward tells the manager where the step is.

Each returns `tensor.detach()`: the same storage and version counter, but not a view, so that a later in-place
operation or `detach_` works as on any tensor (torch-facts: a Function that returns its input returns a view,
which refuses both).
"""

from __future__ import annotations

from typing import Any

import torch

from offload.groups.chunk import ChunkOffloadHandler
from offload.groups.graphs import record_backward

__all__ = [
    "FineGrainedOffloadingBackwardRecordFunction",
    "FineGrainedOffloadingGroupCommitFunction",
    "FineGrainedOffloadingGroupStartFunction",
    "apply_mark",
]


def apply_mark(mark: type[torch.autograd.Function], tensor: torch.Tensor, *arguments: object) -> torch.Tensor:
    """`mark.apply`, typed."""
    marked: torch.Tensor = mark.apply(tensor, *arguments)
    return marked


class FineGrainedOffloadingGroupStartFunction(torch.autograd.Function):
    """Opens a group in the forward; in the backward there is room for the next ones."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, cpu_offload_handler: ChunkOffloadHandler, name: str
    ) -> torch.Tensor:
        ctx.cpu_offload_handler = cpu_offload_handler
        cpu_offload_handler.on_group_start_forward(name)
        return tensor.detach()

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
        cur_forward_chunk.commit(name, forced_released_tensors, delay_offload)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        ctx.backward_chunk.on_group_commit_backward(ctx.group)
        return grad_output, None, None, None, None


class FineGrainedOffloadingBackwardRecordFunction(torch.autograd.Function):
    """An identity whose backward records `event` on the current lane, and orders what comes next there after
    the restores."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, event: Any) -> torch.Tensor:
        ctx.event = event
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        record_backward(ctx.event)
        return grad_output, None
