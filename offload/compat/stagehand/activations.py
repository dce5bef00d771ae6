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

Records are a view of the engine's own: nothing here keeps a saved tensor alive, and nothing is copied.
States, buffers and events are those of the engine's blocks at the moment when they are asked for.

order="reactive" is the source system's letter: the tensor that is being saved leaves while the latch is on,
one copy at a time, and each comes back when it is read. A tensor that is kept has no record and costs
nothing; one that leaves has left the device when the next one does, at the latest when its forward ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import torch

from offload.compat.stagehand.backend_cpu import CPUSpillBackend
from offload.compat.stagehand.config import ActivationConfig
from offload.config import config_or_fields
from offload.device import Event
from offload.engine import OffloadEngine, default_engine
from offload.errors import OffloadError
from offload.ids import SlotId
from offload.memory.arena import Block
from offload.saved.handles import Handle
from offload.telemetry.records import ClientStats, JsonLines, StepStats
from offload.transfer.block import BlockState, DeviceBlock, ViewLayout
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


class ActivationState(Enum):
    """Place of a saved tensor's bytes. Each is a state of the engine's block."""

    KEPT = BlockState.RESIDENT
    SPILLING = BlockState.SPILLING
    SPILLED = BlockState.SPILLED
    RESTORING = BlockState.RESTORING
    RESTORED = BlockState.RESTORED
    RELEASED = BlockState.RELEASED


@dataclass(frozen=True, slots=True)
class ActivationRecord:
    """One saved tensor. Equal to another of the same bytes and layout."""

    block: DeviceBlock
    layout: ViewLayout
    device: torch.device

    @property
    def id(self) -> SlotId:
        return self.block.label

    @property
    def state(self) -> ActivationState:
        return ActivationState.RELEASED if self.block.is_freed else ActivationState(self.block.state)

    @property
    def shape(self) -> torch.Size:
        return self.layout.size

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def stride(self) -> tuple[int, ...]:
        return self.layout.stride

    @property
    def offset(self) -> int:
        """Place of the first element in its storage, in elements."""
        return self.layout.offset

    @property
    def nbytes(self) -> int:
        """Bytes of the storage range that moves."""
        return self.block.nbytes

    @property
    def logical_bytes(self) -> int:
        """Bytes of the tensor itself."""
        return self.layout.size.numel() * self.layout.dtype.itemsize

    @property
    def buffer(self) -> Block | None:
        """Its host bytes; None while it has none."""
        return self.block.host

    @property
    def event(self) -> Event | None:
        """The last copy from or to those bytes."""
        return self.block.event

    def move_to(self, state: ActivationState) -> None:
        """Raises RecordStateError for a move that its state does not allow."""
        self.block.move_to(state.value)


class ActivationRegistry:
    """The records of a step. The record id is the engine's handle; `SlotId` prints it."""

    def __init__(self) -> None:
        # handles are held by autograd's graph alone
        self._entries: list[tuple[weakref.ref[Handle], torch.device]] = []

    def create(self, handle: Handle, device: torch.device) -> None:
        """Note a save."""
        self._entries.append((weakref.ref(handle), device))

    def __iter__(self) -> Iterator[ActivationRecord]:
        """Records that can still be read, one a block, in the order of their saves."""
        seen: set[int] = set()
        for reference, device in self._entries:
            handle = reference()
            if handle is not None and handle.layout is not None and id(handle.record.block) not in seen:
                seen.add(id(handle.record.block))
                yield ActivationRecord(handle.record.block, handle.layout, device)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, record_id: Handle | SlotId) -> ActivationRecord | None:
        """The record of a handle, or of an id that a record or a message has; None if it is gone."""
        label = record_id.record.label if isinstance(record_id, Handle) else record_id
        return next((record for record in self if record.id == label), None)

    def iter_by_state(self, state: ActivationState) -> Iterator[ActivationRecord]:
        return (record for record in self if record.state is state)

    def iter_spilling(self) -> Iterator[ActivationRecord]:
        """Records whose copy to the host has been issued and not finalized."""
        return self.iter_by_state(ActivationState.SPILLING)

    def clear(self) -> None:
        """Forget all; their graphs keep what they hold."""
        self._entries.clear()

    def forget_dead(self) -> None:
        """Forget those that nothing can read any more."""
        self._entries = [entry for entry in self._entries if entry[0]() is not None]


class ReactiveOrder(ActivationScheduler):
    """inline_finalize: a spill past the cap finalizes those in flight; without it, it is kept. registry: of
    what was saved."""

    def __init__(self, parts: Parts, registry: ActivationRegistry, *, inline_finalize: bool) -> None:
        super().__init__(parts)
        self.registry = registry
        self._inline_finalize = inline_finalize
        # saved, and maybe still written by the operator that saved them
        self._due: list[tuple[Forward, DeviceBlock]] = []

    def take(self, forward: Forward, tensor: torch.Tensor) -> Handle | None:
        self._send_due()
        self.budget.read()
        spills = self.budget.spilling and self.coordinator.may_spill(tensor.nbytes) and self.can_take()
        if not spills or not (self._inline_finalize or self.transfer.can_spill()):
            self.metrics.activations_saved += 1
            self.details.kept += 1
            self.details.kept_bytes += tensor.nbytes
            self.details.logical_bytes += tensor.nbytes
            self.details.storage_bytes += tensor.untyped_storage().nbytes()
            return None
        handle, is_new = self.save(forward, tensor)
        if is_new:
            self._due.append((forward, handle.record.block))
            self._send_due()
        return handle

    def forward_ends(self, forward: Forward) -> None:
        super().forward_ends(forward)
        self._send_due()
        if self._inline_finalize:
            self.transfer.finalize_all_spills(self.registry.iter_spilling())

    def _send_due(self) -> None:
        due, self._due = self._due, []
        for forward, block in due:
            if block.slot >= forward.written:
                self._due.append((forward, block))
            elif self.may_leave(block):
                if not self.transfer.can_spill() and not self.transfer.sends_nothing:
                    self.transfer.finalize_all_spills(self.registry.iter_spilling())
                if self.transfer.can_spill():
                    self.details.latched_bytes += self.send(forward, [block])


class ActivationTelemetry:
    """Appends a line a step. path: of the file, which need not be there yet; None writes none. Raises
    ValueError for one that cannot be written."""

    def __init__(self, path: str | None) -> None:
        self._lines = JsonLines(path, off="telemetry_enabled=False")

    def write(self, metrics: ActivationStepMetrics) -> None:
        """Raises OSError where the file cannot be written."""
        self._lines.write(asdict(metrics))


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
        """Context in which what autograd saves may leave. For one forward, of one model or of several; the
        backward comes after it, or inside."""
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
        """End the step; the engine closes and unpins, unless another client uses it. Idempotent. Blocks the
        host until the copies in flight have passed. Raises OSError, and is closed, where the step's line
        cannot be written."""
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
