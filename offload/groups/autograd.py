"""The marks in autograd's graph: identities whose backward tells the manager where the step is.

One invariant: a marked tensor is its input also for a write in place, through either of them. So a commit's
output, of which `detach_` may be asked at the end of a pipeline stage, is the input itself, with the mark as
its last operation. Every other marked tensor is a view of its input that autograd replays as any view. A
tensor subclass, or a layout that has no views, gets an alias, whose writes its input's graph does not see.
"""

from __future__ import annotations

from typing import Any

import torch

from offload.groups.chunk import ChunkGroups

_unwrap_if_dead = torch._C._functorch.unwrap_if_dead

__all__ = [
    "FineGrainedOffloadingGroupCommitFunction",
    "FineGrainedOffloadingGroupStartFunction",
    "apply_mark",
    "same",
]


def apply_mark(mark: type[torch.autograd.Function], tensor: torch.Tensor, *arguments: object) -> torch.Tensor:
    """`mark.apply`, as an identity."""
    marked: torch.Tensor
    if torch._C._len_torch_dispatch_stack():
        # a dispatch mode (a selective checkpoint) sees no operator that a recompute would not call again
        with torch._C._DisableTorchDispatch():
            marked = _apply(mark, tensor, *arguments)
    else:
        marked = _apply(mark, tensor, *arguments)
    if marked is tensor:  # autograd counts a write, and nothing was written
        torch._C._autograd._unsafe_set_version_counter((tensor,), (tensor._version - 1,))
    elif marked._is_view():
        # else torch refuses a write to it: its history would replace that of the mark, an identity
        as_of = torch._C._autograd._get_creation_meta(tensor) if tensor._is_view() else _PLAIN_VIEW
        torch._C._autograd._set_creation_meta(marked, as_of)
    return marked


_PLAIN_VIEW = torch._C._autograd.CreationMeta.DEFAULT


def _apply(mark: Any, tensor: torch.Tensor, *arguments: object) -> torch.Tensor:
    """`mark.apply`, of whose 10 Python calls a mark needs none but under a transform of torch.func."""
    if torch._C._are_functorch_transforms_active():
        marked: torch.Tensor = mark.apply(tensor, *arguments)
    else:
        marked = super(torch.autograd.Function, mark).apply(_unwrap_if_dead(tensor), *arguments)
    return marked


def same(tensor: torch.Tensor) -> torch.Tensor:
    """What the forward of a mark returns for its input."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return tensor if plain and not (tensor.is_nested or tensor.is_inference()) else tensor.detach()


class FineGrainedOffloadingGroupStartFunction(torch.autograd.Function):
    """Opens a group in the forward; in the backward there is room for the next ones."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, cpu_offload_handler: ChunkGroups, name: str) -> torch.Tensor:
        ctx.cpu_offload_handler = cpu_offload_handler
        cpu_offload_handler.on_group_start_forward(name)
        return same(tensor)

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
        cur_forward_chunk: ChunkGroups,
        name: str,
        forced_released_tensors: list[torch.Tensor] | None,
        delay_offload: bool,
    ) -> torch.Tensor:
        ctx.backward_chunk = cur_forward_chunk
        ctx.group = name
        cur_forward_chunk.commit(name, forced_released_tensors, delay_offload)
        marked = same(tensor)
        if marked is tensor and tensor.requires_grad and not (tensor.is_leaf or tensor._is_view()):
            ctx.mark_dirty(tensor)
        return marked

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        ctx.backward_chunk.on_group_commit_backward(ctx.group)
        return grad_output, None, None, None, None
