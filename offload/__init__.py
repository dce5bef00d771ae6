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

from offload import packages, versions
from offload.apply import Applied as Applied
from offload.apply import activations, apply, remove
from offload.compare import Compared as Compared
from offload.compare import Comparison as Comparison
from offload.compare import compare
from offload.conductor.arbiter import Conductor
from offload.conductor.config import ConductorConfig as ConductorConfig
from offload.config import OffloadConfig
from offload.device._cuda_memory import read_numbers
from offload.engine import OffloadEngine

# the errors one by one are importable, and no part of `__all__`
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
    from offload.compat import *  # noqa: F403
    from offload.compat import ActivationRuntime, PipelineOffloadManager
else:
    # fmt: off
    _OF_COMPAT = {
        "ActivationConfig", "ActivationOffloadContext", "ActivationRuntime", "CPUSpillBackend",
        "ChunkOffloadHandler", "FineGrainedActivationOffloadingInterface",
        "FineGrainedOffloadingGroupCommitFunction", "FineGrainedOffloadingGroupStartFunction",
        "GPUTensorPool", "GradientOffloadHook", "OffloadManager", "OffloadTensorGroup",
        "PipelineOffloadManager", "TensorOffloader", "TensorPool", "VirtualPipelineQueue",
        "WeightOffloadHook", "hidden_states_offload", "patch_hidden_states_offload",
        "unpatch_hidden_states_offload",
    }
    # fmt: on
    """The sources' spellings: importable, and of offload.compat, which is imported with the first of them."""

    def __getattr__(name: str) -> object:
        if name in _OF_COMPAT:
            return getattr(import_module("offload.compat"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return [*globals(), *_OF_COMPAT]


__version__ = "0.1.0"

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
