"""ActivationRuntime: a training loop runs at full speed while device memory is enough, and survives where it
is not.

    runtime = ActivationRuntime(vram_high_watermark_mb=20000, vram_low_watermark_mb=16000)

    for step, batch in enumerate(batches):
        runtime.step_begin(step)
        with runtime.managed_forward():
            loss = model(batch)
        loss.backward()
        optimizer.step()
        runtime.step_end()

A client of the engine, beside its others: records, host blocks, copies, lanes and the order of events are the
engine's. One invariant: below the low mark nothing moves.

    config.py       marks, caps, defaults           budget.py      the meter and the latch
    hooks.py        the scope of a forward          scheduler.py   what both orders share
    reactive.py     the source system's letter      ahead.py       the forecast and the restore ahead
    curve.py        the allocation curve            readings.py    when the device is asked
    transfer.py     spills in flight                forward.py     what a forward saved
    backend_cpu.py  the fixed pool                  registry.py    records, as the source names them
    checkpoint.py   what is never spilled           telemetry.py   a JSON line a step
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from offload.client import Client, Phase
from offload.compile.untraced import import_compiler
from offload.config import config_or_fields
from offload.engine import OffloadEngine
from offload.engines import default_engine
from offload.errors import OffloadError
from offload.ids import ForwardId
from offload.saved.handles import Handle
from offload.spill.ahead import ForecastOrder
from offload.spill.backend_cpu import CPUSpillBackend
from offload.spill.budget import ActivationBudgetManager, MemoryMeter, meter_of
from offload.spill.checkpoint import CheckpointCoordinator
from offload.spill.config import MIB, ActivationConfig
from offload.spill.forward import CLIENT, Forward
from offload.spill.hooks import ActivationHookContext
from offload.spill.reactive import ReactiveOrder
from offload.spill.registry import ActivationRegistry
from offload.spill.scheduler import ActivationScheduler, Parts
from offload.spill.telemetry import ActivationStepMetrics, ActivationTelemetry, SpillDetails
from offload.spill.transfer import ActivationTransfer
from offload.telemetry.records import ClientStats, StepStats
from offload.transfer.block import DeviceBlock
from offload.transfer.limits import DEFAULT

_ENDS_OUTLIVED = 2  # of ends that somebody else has called, by what a graph still holds

_MOST_FORWARDS = 256  # of a step; a loop that never calls `step_end` is noticed by it

_numbers = itertools.count(1)


class ActivationRuntime(Client):
    """See the module.

    config: None for the defaults, with `fields` in their place. engine: None for the process's own.
    memory_allocated: tells the allocated bytes of the device, or a MemoryMeter; None asks its allocator. The
        simulated device has none: there the saved bytes that the engine knows count.
    Blocks the host while it is built, with order="reactive" on a GPU, to pin its pool. In a step never, but
    for order="reactive", and where the mark is reached and the host has no pinned memory. Any thread may run
    a managed forward.
    """

    name = CLIENT

    def __init__(
        self,
        config: ActivationConfig | None = None,
        *,
        engine: OffloadEngine | None = None,
        memory_allocated: MemoryMeter | Callable[[], int] | None = None,
        **fields: Any,
    ) -> None:
        self.config = config = config_or_fields(ActivationConfig, config, fields, "ActivationRuntime")
        import_compiler()
        writes = config.enabled and config.telemetry_enabled
        self.telemetry = ActivationTelemetry(config.telemetry_file if writes else None)
        self.min_elements = config.min_elements
        self.engine = engine = default_engine() if engine is None else engine
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
        self.budget = ActivationBudgetManager(meter, config.high_bytes, config.low_bytes)
        self.transfer = ActivationTransfer(
            engine,
            max_inflight_d2h=config.max_inflight_d2h if reactive else None,
            max_inflight_h2d=config.max_inflight_h2d if reactive else None,
            hosts=self.pool,
            on_host=reactive,
        )
        self.registry = ActivationRegistry()
        self.checkpoints = CheckpointCoordinator(config.recompute_threshold_bytes)
        parts = Parts(engine, self.budget, self.transfer, self.registry, self.checkpoints)
        self.scheduler: ActivationScheduler = (
            ReactiveOrder(parts, inline_finalize=config.inline_finalize)
            if reactive
            else ForecastOrder(parts, restore_ahead=config.restore_ahead)
        )
        self.last_metrics: ActivationStepMetrics | None = None
        self.last_details = SpillDetails()
        self._stage = -next(_numbers)
        self._forwards = itertools.count()
        self._most_forwards = _MOST_FORWARDS
        self._by_chunk: dict[ForwardId, Forward] = {}
        self._step = 0
        self._ends_by_hand = False  # the end under way is `step_end`'s
        self._figures = ClientStats()  # of this step's forwards that are over and forgotten
        self._ended: tuple[ActivationStepMetrics, SpillDetails] | None = None
        self._pool_counts = (0, 0)
        self._closed = False
        self._detach: Callable[[], object] = _attach(self) if config.enabled else int

    # -- a step ----------------------------------------------------------------------------------------------
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

    @property
    def holds(self) -> bool:
        """Whether something that was saved can still be read."""
        with self.engine.lock:
            return any(not forward.is_over for forward in self.scheduler.forwards)

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

    # -- as ManagedForwards ----------------------------------------------------------------------------------
    def begin_forward(self) -> Forward:
        with self.engine.lock:
            scheduler = self.scheduler
            if len(scheduler.forwards) >= self._most_forwards:
                if over := [forward for forward in scheduler.forwards if forward.is_over]:
                    self._forget(over)
                    self.registry.forget_dead()
                self._most_forwards = max(_MOST_FORWARDS, 2 * len(scheduler.forwards))
            chunk_id = ForwardId(self._stage, next(self._forwards))
            forward = Forward(chunk_id, scheduler.levels)
            self._by_chunk[chunk_id] = forward
            scheduler.forwards.append(forward)
            if (sees := self.engine.on_phase) is not None:
                sees(Phase.FORWARD)
            return forward

    def end_forward(self, forward: Forward) -> None:
        with self.engine.lock:
            self.scheduler.forward_ends(forward)

    def explain(self, error: torch.OutOfMemoryError) -> None:
        """Add to an operator's out-of-memory error what the runtime had done, once."""
        with self.engine.lock:
            note = self.scheduler.out_of_memory_note()
        if note not in getattr(error, "__notes__", ()):  # a forward inside another one
            error.add_note(note)

    # -- as Client -------------------------------------------------------------------------------------------
    def end_step(self) -> ClientStats:
        """End the step of the runtime. At an end that is not `step_end`'s, what a graph still holds is
        carried over, twice at most."""
        ending = []
        for forward in self.scheduler.forwards:
            if self._ends_by_hand or forward.ends == _ENDS_OUTLIVED or forward.is_over:
                ending.append(forward)
            else:
                self._figures += forward.figures()
                forward.ends += 1
        self._forget(ending)
        metrics, details = self.scheduler.end_step()
        figures, self._figures = self._figures, ClientStats()
        figures += self.engine.end_saves([forward.chunk for forward in ending])
        self.registry.clear()
        metrics.step = self._step
        metrics.activations_kept = metrics.activations_saved - metrics.activations_spilled
        metrics.stall_time_ms, metrics.stall_count = self.transfer.end_step()
        metrics.pool_hits, metrics.pool_misses = self._pool_hits(metrics.activations_spilled)
        metrics.vram_peak_mb = self.budget.meter.peak() / MIB
        self._ended = metrics, details
        return figures

    def step_ended(self, stats: StepStats) -> None:
        """Write the step's line."""
        with self.engine.lock:
            ended, self._ended = self._ended, None
            if ended is None or not self.config.enabled:
                return
            self.last_metrics, self.last_details = metrics, details = ended
            for saves in (stats.clients[name] for name in ("groups", CLIENT) if name in stats.clients):
                metrics.stall_time_ms += saves.stall_ms
                metrics.stall_count += saves.stall_count
            details.retries = stats.retries
            self._step += 1
            self.budget.meter.start_step()
        self.telemetry.write(metrics)

    def _pool_hits(self, spilled: int) -> tuple[int, int]:
        """Records spilled in the step to pinned memory, and to other memory."""
        if self.pool is None:
            return spilled, 0
        before, self._pool_counts = self._pool_counts, (self.pool.pool_hits, self.pool.pool_misses)
        return self._pool_counts[0] - before[0], self._pool_counts[1] - before[1]

    def _forget(self, ending: list[Forward]) -> None:
        """These forwards are over, or their step is."""
        for forward in ending:
            del self._by_chunk[forward.chunk.id]  # type: ignore[arg-type]
            self._figures += forward.figures()
        self.scheduler.forget(ending)

    def on_read(self, handle: Handle) -> None:
        """Called after every read of a record of the engine, under its lock."""
        forward = self._by_chunk.get(handle.record.block.group.chunk)  # type: ignore[call-overload]
        if forward is not None:
            if (sees := self.engine.on_phase) is not None and torch._C._current_graph_task_id() != -1:
                sees(Phase.BACKWARD)
            self.scheduler.read(forward, handle)
        else:
            self.scheduler.read_elsewhere(handle)

    # -- as Watcher of the device ----------------------------------------------------------------------------
    def on_save(self, block: DeviceBlock, nbytes: int) -> None:
        if block.group.chunk not in self._by_chunk:
            self.scheduler.saved_elsewhere(nbytes)

    def room(self) -> int:
        return self.scheduler.room()

    def relieve(self) -> None:
        self.scheduler.relieve()


def _attach(runtime: ActivationRuntime) -> Callable[[], object]:
    """Make it a client of its engine, which does not keep it alive. Returns what undoes it, which is also
    done when the runtime is dropped."""
    engine, reference = runtime.engine, weakref.ref(runtime)
    share = engine.limits.contributor(CLIENT, watcher=runtime)

    def on_read(handle: Handle) -> None:
        if (found := reference()) is not None:
            found.on_read(handle)

    def detach() -> None:
        engine.off_read(on_read)
        share.end()
        if (found := reference()) is not None:
            engine.detach(found)
        if not any(client.name == CLIENT for client in engine.clients):
            engine.transfers.audit = engine.config.audit

    engine.attach(runtime)
    engine.on_read(on_read)
    with engine.lock:
        if runtime.config.order == "forecast":  # the mark bounds what is in flight
            share.bound("max_spilling_bytes", None, replaces=(DEFAULT,))
        if runtime.config.debug_checksums:
            engine.transfers.audit = True
    return weakref.finalize(runtime, detach)
