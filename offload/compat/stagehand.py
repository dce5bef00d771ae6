"""The watermark runtime under the names of its source system. They are the parts of `offload.spill`."""

from __future__ import annotations

from offload.spill.backend_cpu import CPUSpillBackend as CPUSpillBackend
from offload.spill.budget import ActivationBudgetManager as ActivationBudgetManager
from offload.spill.checkpoint import CheckpointCoordinator as CheckpointCoordinator
from offload.spill.config import ActivationConfig as ActivationConfig
from offload.spill.hooks import ActivationHookContext as ActivationHookContext
from offload.spill.registry import ActivationRecord as ActivationRecord
from offload.spill.registry import ActivationRegistry as ActivationRegistry
from offload.spill.registry import ActivationState as ActivationState
from offload.spill.runtime import ActivationRuntime as ActivationRuntime
from offload.spill.scheduler import ActivationScheduler as ActivationScheduler
from offload.spill.telemetry import ActivationStepMetrics as ActivationStepMetrics
from offload.spill.telemetry import ActivationTelemetry as ActivationTelemetry
from offload.spill.transfer import ActivationTransfer as ActivationTransfer
