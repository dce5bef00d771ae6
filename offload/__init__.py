"""Offload engine: saved activations leave for pinned host memory and come back, beside the compute, without
changing a bit.

from offload import configure, group_commit, group_start, init_chunk_handler, offload_hooks, step_end

init_chunk_handler(None, None)              # a forward begins
x = group_start(x, "core_attn")
with offload_hooks():
    y = attention(x)
y = group_commit(y, "core_attn")
...                                         # backward, optimizer
step_end()
"""

from offload.config import OffloadConfig
from offload.engine import OffloadEngine
from offload.errors import (
    CaptureError,
    DeviceLimitError,
    GroupOrderError,
    HazardError,
    HostBudgetError,
    OffloadError,
    PoolError,
    RecordStateError,
    StaleHandleError,
)
from offload.groups.chunk import ChunkOffloadHandler
from offload.groups.group import OffloadTensorGroup
from offload.groups.interface import (
    ActivationOffloadContext,
    FineGrainedActivationOffloadingInterface,
    backward_record,
    capturing,
    configure,
    disable_offload,
    enable_offload,
    flush_delayed_groups,
    forward_record,
    group_commit,
    group_start,
    init_chunk_handler,
    mark_not_offloadable,
    offload_hooks,
    reset,
    step_end,
)
from offload.groups.manager import PipelineOffloadManager
from offload.groups.selective import selective_contexts
from offload.memory.size_class_pool import CPUSpillBackend
from offload.memory.tensor_pool import GPUTensorPool, TensorPool
from offload.optim import FSDPGPUOptimizerWrapper, HybridDeviceOptimizer
from offload.telemetry.records import StepStats
from offload.telemetry.summary import print_offload_summary_table
from offload.transfer.captures import CapturedRegion

OffloadManager = PipelineOffloadManager

__all__ = [
    "ActivationOffloadContext",
    "CPUSpillBackend",
    "CaptureError",
    "CapturedRegion",
    "ChunkOffloadHandler",
    "DeviceLimitError",
    "FSDPGPUOptimizerWrapper",
    "FineGrainedActivationOffloadingInterface",
    "GPUTensorPool",
    "GroupOrderError",
    "HazardError",
    "HostBudgetError",
    "HybridDeviceOptimizer",
    "OffloadConfig",
    "OffloadEngine",
    "OffloadError",
    "OffloadManager",
    "OffloadTensorGroup",
    "PipelineOffloadManager",
    "PoolError",
    "RecordStateError",
    "StaleHandleError",
    "StepStats",
    "TensorPool",
    "backward_record",
    "capturing",
    "configure",
    "disable_offload",
    "enable_offload",
    "flush_delayed_groups",
    "forward_record",
    "group_commit",
    "group_start",
    "init_chunk_handler",
    "mark_not_offloadable",
    "offload_hooks",
    "print_offload_summary_table",
    "reset",
    "selective_contexts",
    "step_end",
]
