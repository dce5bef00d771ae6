"""Offload engine: saved activations leave for pinned host memory and come back, beside the compute, without
changing a bit.

    handle = offload.apply(model)               # any model, unedited; any training loop

Or by hand, around layers:

    from offload import configure, group_commit, group_start, init_chunk_handler, offload_hooks, step_end

    init_chunk_handler()                        # a forward begins
    x = group_start(x, "core_attn")
    with offload_hooks():
        y = attention(x)
    y = group_commit(y, "core_attn")
    ...                                         # backward, optimizer
    step_end()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from offload import packages, process, versions
from offload.apply import Applied as Applied
from offload.apply import activations, apply, remove
from offload.compare import Compared as Compared
from offload.compare import Comparison as Comparison
from offload.compare import compare

# the errors one by one and the sources' spellings are importable, and no part of `__all__`
from offload.compat import autograd, interface
from offload.compat.gradients import GradientOffloadHook as GradientOffloadHook
from offload.compat.group import OffloadTensorGroup as OffloadTensorGroup
from offload.compat.handler import ChunkOffloadHandler as ChunkOffloadHandler
from offload.compat.hidden_states import hidden_states_offload as hidden_states_offload
from offload.compat.hidden_states import patch_hidden_states_offload as patch_hidden_states_offload
from offload.compat.hidden_states import unpatch_hidden_states_offload as unpatch_hidden_states_offload
from offload.compat.manager import PipelineOffloadManager
from offload.compat.queue import VirtualPipelineQueue as VirtualPipelineQueue
from offload.compat.tensor_pool import GPUTensorPool as GPUTensorPool
from offload.compat.tensor_pool import TensorPool as TensorPool
from offload.compat.tensors import TensorOffloader as TensorOffloader
from offload.compat.weights import WeightOffloadHook as WeightOffloadHook
from offload.conductor.arbiter import Conductor
from offload.conductor.config import ConductorConfig as ConductorConfig
from offload.config import OffloadConfig
from offload.device.numbers import read_numbers
from offload.engine import OffloadEngine
from offload.errors import CaptureError as CaptureError
from offload.errors import GroupOrderError as GroupOrderError
from offload.errors import HazardError as HazardError
from offload.errors import HostBudgetError, OffloadError
from offload.errors import PoolError as PoolError
from offload.errors import RecomputeDiffersError as RecomputeDiffersError
from offload.errors import RecordStateError as RecordStateError
from offload.errors import StaleHandleError as StaleHandleError
from offload.errors import WeightFileError as WeightFileError
from offload.load import load_weights
from offload.marks import (
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
    selective_contexts,
    step_end,
)
from offload.marks import reset as reset
from offload.memory.arena import HostArena
from offload.optim import FSDPGPUOptimizerWrapper, HybridDeviceOptimizer
from offload.park import Parked as Parked
from offload.park import park, parked
from offload.plot import Trace as Trace
from offload.plot import plot, tracing
from offload.policies import Activations, Auto, Fixed, Gradients, Watermark, Weights
from offload.report import Report as Report
from offload.report import report
from offload.telemetry.records import StepStats
from offload.telemetry.summary import print_offload_summary_table as print_offload_summary_table
from offload.transfer.captures import CapturedRegion as CapturedRegion
from offload.weights.quant_linear import QuantLinear, QuantLinearLoRA

if TYPE_CHECKING:
    from offload.compat.stagehand.activations import ActivationConfig as ActivationConfig
    from offload.compat.stagehand.activations import ActivationRuntime
    from offload.compat.stagehand.activations import CPUSpillBackend as CPUSpillBackend
else:
    _OF_COMPAT = {
        "stagehand.activations": ("ActivationConfig", "ActivationRuntime", "CPUSpillBackend"),
    }
    """Names that are imported once they are asked for, by their modules in offload.compat."""

    def __getattr__(name: str) -> object:
        for module, names in _OF_COMPAT.items():
            if name in names:
                return getattr(import_module(f"offload.compat.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"

OffloadManager = PipelineOffloadManager
ActivationOffloadContext = interface.ActivationOffloadContext
FineGrainedActivationOffloadingInterface = interface.FineGrainedActivationOffloadingInterface
FineGrainedOffloadingGroupStartFunction = autograd.FineGrainedOffloadingGroupStartFunction
FineGrainedOffloadingGroupCommitFunction = autograd.FineGrainedOffloadingGroupCommitFunction
process.manager_type = PipelineOffloadManager
packages.install()
versions.warn_if_untested()

__all__ = [
    "ActivationRuntime",
    "Activations",
    "Auto",
    "Conductor",
    "FSDPGPUOptimizerWrapper",
    "Fixed",
    "Gradients",
    "HostArena",
    "HostBudgetError",
    "HybridDeviceOptimizer",
    "OffloadConfig",
    "OffloadEngine",
    "OffloadError",
    "PipelineOffloadManager",
    "QuantLinear",
    "QuantLinearLoRA",
    "StepStats",
    "Watermark",
    "Weights",
    "activations",
    "apply",
    "backward_record",
    "capturing",
    "compare",
    "configure",
    "disable_offload",
    "enable_offload",
    "flush_delayed_groups",
    "forward_record",
    "group_commit",
    "group_start",
    "init_chunk_handler",
    "load_weights",
    "mark_not_offloadable",
    "offload_hooks",
    "park",
    "parked",
    "plot",
    "read_numbers",
    "remove",
    "report",
    "selective_contexts",
    "step_end",
    "tracing",
]
