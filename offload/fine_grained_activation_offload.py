"""Fine-grained activation offloading under the names of Megatron-core's module page. Re-exports, and the long
function names.

DEBUG and DEBUG_RANK: `debug_rank` logs on that rank only, and only when DEBUG is set.
"""

from __future__ import annotations

import torch

from offload.compat.autograd import (
    FineGrainedOffloadingBackwardRecordFunction,
    FineGrainedOffloadingGroupCommitFunction,
    FineGrainedOffloadingGroupStartFunction,
)
from offload.compat.group import OffloadTensorGroup
from offload.compat.handler import ChunkOffloadHandler
from offload.compat.interface import FineGrainedActivationOffloadingInterface
from offload.compat.manager import PipelineOffloadManager
from offload.compat.tensor_pool import GPUTensorPool
from offload.groups.graphs import is_graph_capturing
from offload.marks import (
    backward_record,
    disable_offload,
    enable_offload,
    flush_delayed_groups,
    forward_record,
    group_commit,
    group_start,
    init_chunk_handler,
    offload_hooks,
    reset,
)
from offload.telemetry.speaker import speaker
from offload.telemetry.summary import print_offload_summary_table

__all__ = [
    "DEBUG",
    "DEBUG_RANK",
    "ChunkOffloadHandler",
    "FineGrainedActivationOffloadingInterface",
    "FineGrainedOffloadingBackwardRecordFunction",
    "FineGrainedOffloadingGroupCommitFunction",
    "FineGrainedOffloadingGroupStartFunction",
    "GPUTensorPool",
    "OffloadTensorGroup",
    "PipelineOffloadManager",
    "debug_rank",
    "fine_grained_offloading_backward_record",
    "fine_grained_offloading_disable_offload",
    "fine_grained_offloading_enable_offload",
    "fine_grained_offloading_forward_record",
    "fine_grained_offloading_group_commit",
    "fine_grained_offloading_group_flush_delayed_groups",
    "fine_grained_offloading_group_start",
    "fine_grained_offloading_init_chunk_handler",
    "fine_grained_offloading_reset",
    "get_fine_grained_offloading_context",
    "is_graph_capturing",
    "print_offload_summary_table",
]

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


def fine_grained_offloading_group_start(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """`group_start`; a missing name is an error that says so."""
    return group_start(tensor, name)  # type: ignore[arg-type]


fine_grained_offloading_group_commit = group_commit
fine_grained_offloading_group_flush_delayed_groups = flush_delayed_groups
fine_grained_offloading_disable_offload = disable_offload
fine_grained_offloading_enable_offload = enable_offload
fine_grained_offloading_forward_record = forward_record
fine_grained_offloading_backward_record = backward_record
fine_grained_offloading_init_chunk_handler = init_chunk_handler
fine_grained_offloading_reset = reset
fine_grained_offloading_hooks = offload_hooks
get_fine_grained_offloading_context = FineGrainedActivationOffloadingInterface.get_context
