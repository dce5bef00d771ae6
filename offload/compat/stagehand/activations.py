"""ActivationRuntime, the watermark runtime by the names of Activation Stagehand:

    runtime = ActivationRuntime(vram_high_watermark_mb=20000, vram_low_watermark_mb=16000)

    for step, batch in enumerate(batches):
        runtime.step_begin(step)
        with runtime.managed_forward():
            loss = model(batch)
        loss.backward()
        optimizer.step()
        runtime.step_end()

What mode="watermark" of `offload.apply` has no use for is here and beside: the config, steps that end by
hand, a line of JSON a step, records by id, and order="reactive" with its fixed pool. One invariant: what
leaves and when is decided in `offload.watermark`, but for order="reactive".
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from offload.compat.stagehand.backend_cpu import CPUSpillBackend
from offload.compat.stagehand.config import ActivationConfig
from offload.compat.stagehand.reactive import ReactiveOrder
from offload.compat.stagehand.registry import ActivationRecord, ActivationRegistry, ActivationState
from offload.compat.stagehand.telemetry import ActivationTelemetry
from offload.config import config_or_fields
from offload.engine import OffloadEngine
from offload.engines import default_engine
from offload.errors import OffloadError
from offload.telemetry.records import ClientStats, StepStats
from offload.watermark.ahead import ForecastOrder
from offload.watermark.budget import ActivationBudgetManager, ActivationTransfer, MemoryMeter, meter_of
from offload.watermark.forward import Forward
from offload.watermark.runtime import ActivationHookContext, WatermarkRuntime
from offload.watermark.scheduler import (
    ActivationScheduler,
    ActivationStepMetrics,
    CheckpointCoordinator,
    Parts,
)

ActivationStagehandConfig = ActivationConfig
ActivationTransferEngine = ActivationTransfer

# fmt: off
__all__ = [
    "ActivationBudgetManager", "ActivationConfig", "ActivationHookContext", "ActivationRecord",
    "ActivationRegistry", "ActivationRuntime", "ActivationScheduler", "ActivationStagehandConfig",
    "ActivationState", "ActivationStepMetrics", "ActivationTelemetry", "ActivationTransfer",
    "ActivationTransferEngine", "CPUSpillBackend", "CheckpointCoordinator",
]
# fmt: on


class ActivationRuntime(WatermarkRuntime):
    """See the module.

    config: None for the defaults, with `fields` in their place. engine: None for the process's own.
    memory_allocated: tells the allocated bytes of the device, or a MemoryMeter; None asks its allocator. The
        simulated device has none: there the saved bytes that the engine knows count.
    Blocks the host while it is built, with order="reactive" on a GPU, to pin its pool. In a step never, but
    for order="reactive", and where the mark is reached and the host has no pinned memory. Any thread may run
    a managed forward.
    """

    def __init__(
        self,
        config: ActivationConfig | None = None,
        *,
        engine: OffloadEngine | None = None,
        memory_allocated: MemoryMeter | Callable[[], int] | None = None,
        **fields: Any,
    ) -> None:
        self.config = config = config_or_fields(ActivationConfig, config, fields, "ActivationRuntime")
        writes = config.enabled and config.telemetry_enabled
        self.telemetry = ActivationTelemetry(config.telemetry_file if writes else None)
        engine = default_engine() if engine is None else engine
        self.pool: CPUSpillBackend | None = None
        reactive = config.order == "reactive"
        if reactive and config.enabled:
            self.pool = CPUSpillBackend(
                config.pinned_pool_classes_mb, config.slabs_per_class, arena=engine.arena
            )
            if engine.device.pins:
                self.pool.reserve()  # so that no hook pins
        if reactive and memory_allocated is None and engine.device.allocator_bytes() is None:
            raise ValueError(
                "order='reactive' keeps tensors that the engine does not know of, and the simulated device "
                "counts no others; give memory_allocated=, a function that returns the allocated bytes"
            )
        meter = meter_of(engine, memory_allocated, resets=config.telemetry_enabled)
        out, back = (config.max_inflight_d2h, config.max_inflight_h2d) if reactive else (None, None)
        transfer = ActivationTransfer(
            engine, max_inflight_d2h=out, max_inflight_h2d=back, hosts=self.pool, on_host=reactive
        )
        self.registry = ActivationRegistry()
        self.checkpoints = CheckpointCoordinator(config.recompute_threshold_bytes)
        budget = ActivationBudgetManager(meter, config.high_bytes, config.low_bytes)
        parts = Parts(engine, budget, transfer, self.checkpoints, self.registry.create)
        self._pool_counts = (0, 0)
        self._closed = False
        super().__init__(
            ReactiveOrder(parts, self.registry, inline_finalize=config.inline_finalize)
            if reactive
            else ForecastOrder(parts, restore_ahead=config.restore_ahead),
            min_elements=config.min_elements,
            attached=config.enabled,
        )
        if config.enabled and config.debug_checksums:
            engine.transfers.audit = True

    def step_begin(self, step: int | None = None) -> None:
        """A step begins. step: its number in the telemetry; None counts on."""
        if not self.config.enabled:
            return
        self._refuse_closed()
        with self.engine.lock:
            if step is not None:
                self._step = step
            self.budget.meter.start_step()
            self.engine.begin_step()

    def managed_forward(self) -> AbstractContextManager[None]:
        """What autograd saves inside may leave. For one forward, of one model or of several; the backward
        comes after it, or inside."""
        if not self.config.enabled:
            return nullcontext()
        self._refuse_closed()
        return ActivationHookContext(self)

    def step_end(self) -> ActivationStepMetrics | None:
        """The step ends, for all clients of the engine, once its gradients are final: saved tensors whose
        backward has not run are dropped, with one warning. Returns the step's figures; None if the runtime is
        disabled. Raises OSError where the step's line cannot be written; the step has ended then. Blocks the
        host: never."""
        if not self.config.enabled:
            return None
        self._refuse_closed()
        self._ends_by_hand = True
        try:
            self.engine.end_step()
        finally:
            self._ends_by_hand = False
        return self.last_metrics

    def register_parameters(self, module: torch.nn.Module) -> None:
        """Parameters and buffers of `module` never leave, recognised even behind `detach()`."""
        self.engine.register_parameters(module)

    def close(self) -> None:
        """End the step; the engine closes and unpins, unless another client uses it. Called again, it does
        nothing. Blocks the host until the copies in flight have passed. Raises OSError, and is closed, where
        the step's line cannot be written."""
        if self._closed:
            return
        with self.engine.lock:
            try:
                self.step_end()
            finally:
                self._closed = True
                self._detach()
                self.transfer.end()
                if self.pool is not None:
                    self.pool.clear()
                self.engine.close_unused()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise OffloadError("this ActivationRuntime was closed; build another one")

    def _forget(self, ending: list[Forward]) -> None:
        super()._forget(ending)
        self.registry.forget_dead()

    def end_step(self) -> ClientStats:
        """End the step of the runtime. At an end that is not `step_end`'s, what a graph still holds is
        carried over, twice at most."""
        figures = super().end_step()
        self.registry.clear()
        if self.pool is not None:
            assert self._ended is not None
            metrics, before = self._ended[0], self._pool_counts
            self._pool_counts = hits, misses = self.pool.pool_hits, self.pool.pool_misses
            metrics.pool_hits, metrics.pool_misses = hits - before[0], misses - before[1]
        return figures

    def step_ended(self, stats: StepStats) -> None:
        """Write the step's line."""
        before = self.last_metrics
        super().step_ended(stats)
        if self.last_metrics is not None and self.last_metrics is not before:
            self.telemetry.write(self.last_metrics)
