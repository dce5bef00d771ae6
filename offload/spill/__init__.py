"""The watermark runtime: saved tensors leave only when device memory is short. See runtime.py.

Its parts by the names that users of Activation Stagehand know; two have a second one.
"""

from __future__ import annotations

from offload.spill.backend_cpu import CPUSpillBackend
from offload.spill.budget import ActivationBudgetManager
from offload.spill.checkpoint import CheckpointCoordinator
from offload.spill.config import ActivationConfig
from offload.spill.hooks import ActivationHookContext
from offload.spill.registry import ActivationRecord, ActivationRegistry, ActivationState
from offload.spill.runtime import ActivationRuntime
from offload.spill.scheduler import ActivationScheduler
from offload.spill.telemetry import ActivationStepMetrics, ActivationTelemetry
from offload.spill.transfer import ActivationTransfer

ActivationStagehandConfig = ActivationConfig
ActivationTransferEngine = ActivationTransfer

# fmt: off
__all__ = [
    "ActivationBudgetManager", "ActivationConfig", "ActivationHookContext", "ActivationRecord",
    "ActivationRegistry", "ActivationRuntime", "ActivationScheduler", "ActivationStagehandConfig",
    "ActivationState", "ActivationStepMetrics", "ActivationTelemetry", "ActivationTransfer",
    "ActivationTransferEngine", "CPUSpillBackend", "CheckpointCoordinator",
]
