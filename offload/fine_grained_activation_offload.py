"""Fine-grained activation offloading under the names of Megatron-core's module page: re-exports, and the long
function names.

Three of these apply autograd Functions, as Megatron's do, where the short names and the class put a hook on a
node: `..._group_start`, `..._group_commit`, `..._backward_record`. What they return is a view with a node of
its own. So where a tensor has several readers inside of its group and one outside, gradients add up inside of
it first, and their last bits may differ from those without marks; and no operator may change that view in
place. Where nothing leaves, the tensor itself comes back.

DEBUG and DEBUG_RANK: `debug_rank` logs on that rank only, and only when DEBUG is set.
"""

from __future__ import annotations

from typing import Any

import torch

from offload import marks
from offload.compat.handler import ChunkOffloadHandler, OffloadTensorGroup
from offload.compat.manager import (
    FineGrainedActivationOffloadingInterface,
    FineGrainedOffloadingBackwardRecordFunction,
    FineGrainedOffloadingGroupCommitFunction,
    FineGrainedOffloadingGroupStartFunction,
    PipelineOffloadManager,
)
from offload.compat.tensor_pool import GPUTensorPool
from offload.compile import untraced
from offload.marks import (
    T,
    check_event,
    disable_offload,
    enable_offload,
    flush_delayed_groups,
    forward_record,
    init_chunk_handler,
    is_graph_capturing,
    offload_hooks,
    reset,
)
from offload.telemetry.speaker import speaker
from offload.telemetry.summary import print_offload_summary_table

# fmt: off
__all__ = [
    "DEBUG", "DEBUG_RANK", "ChunkOffloadHandler", "FineGrainedActivationOffloadingInterface",
    "FineGrainedOffloadingBackwardRecordFunction", "FineGrainedOffloadingGroupCommitFunction",
    "FineGrainedOffloadingGroupStartFunction", "GPUTensorPool", "OffloadTensorGroup",
    "PipelineOffloadManager", "debug_rank", "fine_grained_offloading_backward_record",
    "fine_grained_offloading_disable_offload", "fine_grained_offloading_enable_offload",
    "fine_grained_offloading_forward_record", "fine_grained_offloading_group_commit",
    "fine_grained_offloading_group_flush_delayed_groups", "fine_grained_offloading_group_start",
    "fine_grained_offloading_init_chunk_handler", "fine_grained_offloading_reset",
    "get_fine_grained_offloading_context", "is_graph_capturing", "print_offload_summary_table",
]
# fmt: on

logger = speaker(__name__)

DEBUG = False
DEBUG_RANK = 0


def debug_rank(message: str) -> None:
    """Print `message` if DEBUG, on rank DEBUG_RANK only; works without a process group."""
    if not DEBUG:
        return
    initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
    if (torch.distributed.get_rank() if initialised else 0) == DEBUG_RANK:
        print(message)  # noqa: T201 - this function's one purpose


@untraced
def fine_grained_offloading_group_start(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Open group `name`; in the backward, the prefetch may fetch more once the group's has run.

    tensor: an input of the group's layers, any shape and dtype. Raises as `group_start`, so for no name.
    Blocks the host: never.
    """
    apply = FineGrainedOffloadingGroupStartFunction.apply
    PipelineOffloadManager.OFFLOAD_MGR  # noqa: B018 - chunks have what the Function calls from here on
    handler = marks.chunk_to_start_in(tensor, name)  # type: ignore[arg-type]
    return tensor if handler is None else apply(tensor, handler, name)  # type: ignore[no-untyped-call]


@untraced
def fine_grained_offloading_group_commit(
    tensor: T,
    name: str,
    forced_released_tensors: list[torch.Tensor] | None = None,
    delay_offload: bool = False,
) -> T:
    """Close the innermost open group called `name`, as `group_commit`; of a tuple or list, the first element
    gets the node. Raises as `group_commit`. Blocks the host: never."""
    manager, arguments = PipelineOffloadManager.OFFLOAD_MGR, (name, forced_released_tensors, delay_offload)
    if manager is None or (handler := manager.scopes.active_handler()) is None:
        return marks.group_commit(tensor, *arguments)
    if isinstance(tensor, (tuple, list)):
        make: Any = getattr(tensor, "_make", type(tensor))  # a named tuple keeps its type
        first: Any = [fine_grained_offloading_group_commit(one, *arguments) for one in tensor[:1]]
        return make([*first, *tensor[1:]])  # type: ignore[no-any-return]
    marks.check_mark("group_commit", tensor, name)
    manager.scopes.close_at_commit(name)
    apply = FineGrainedOffloadingGroupCommitFunction.apply
    return apply(tensor, handler, *arguments)  # type: ignore[no-any-return, no-untyped-call]


@untraced
def fine_grained_offloading_backward_record(tensor: torch.Tensor, event: Any) -> torch.Tensor:
    """Record `event` as `backward_record` does, by the backward of a node of its own."""
    if not isinstance(tensor, torch.Tensor):
        return marks.backward_record(tensor, event)  # which refuses it
    check_event("backward_record", event)
    apply = FineGrainedOffloadingBackwardRecordFunction.apply
    return apply(tensor, event)  # type: ignore[no-any-return, no-untyped-call]


fine_grained_offloading_group_flush_delayed_groups = flush_delayed_groups
fine_grained_offloading_disable_offload = disable_offload
fine_grained_offloading_enable_offload = enable_offload
fine_grained_offloading_forward_record = forward_record
fine_grained_offloading_init_chunk_handler = init_chunk_handler
fine_grained_offloading_reset = reset
fine_grained_offloading_hooks = offload_hooks
get_fine_grained_offloading_context = FineGrainedActivationOffloadingInterface.get_context
