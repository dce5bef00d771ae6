"""The watermark runtime: a training loop runs at full speed while device memory is enough, and survives where
it is not. Saved tensors leave only when device memory is short.

A client of the engine, beside its others: records, host blocks, copies, lanes and the order of events are the
engine's. One invariant: below the low mark nothing moves.

    scheduler.py  what leaves and when, in general, and figures of a step
    ahead.py      the forecast and the restore ahead
    forward.py    what a forward saved, its allocation curve, and whose turn it is to leave
    budget.py     the meter, the latch, when the device is asked, and spills in flight

In the scope of a managed forward autograd's saves go to the runtime's scheduler. Leaving the context removes
exactly what entering it installed, also after an exception. The hooks are the engine's one pair: a group's
scope inside is asked first, and what it does not take comes here; inside a checkpoint, torch's own hooks get
all tensors.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch

from offload.client import Client, Phase
from offload.compile import import_compiler, untraced
from offload.config import MIB
from offload.engine import OffloadEngine
from offload.ids import ForwardId
from offload.saved.handles import Handle
from offload.saved.hooks import InstalledScope
from offload.telemetry.records import ClientStats, StepStats
from offload.transfer.block import DeviceBlock
from offload.transfer.limits import DEFAULT
from offload.watermark.ahead import ForecastOrder
from offload.watermark.budget import ActivationBudgetManager, ActivationTransfer, meter_of
from offload.watermark.forward import CLIENT, Forward
from offload.watermark.scheduler import ActivationScheduler, ActivationStepMetrics, Parts, SpillDetails

MIN_ELEMENTS = 512
"""A smaller tensor is not looked at."""

_ENDS_OUTLIVED = 2  # of ends that somebody else has called, by what a graph still holds

_MOST_FORWARDS = 256  # of a step; a loop that never calls `step_end` is noticed by it

_numbers = itertools.count(1)


class WatermarkRuntime(Client):
    """See the module. scheduler: decides what leaves. min_elements: of a tensor that is looked at. attached:
    whether the engine has it as a client; False for one that does nothing. Any thread may run a forward.
    """

    name = CLIENT

    def __init__(
        self, scheduler: ActivationScheduler, *, min_elements: int = MIN_ELEMENTS, attached: bool = True
    ) -> None:
        import_compiler()
        self.scheduler = scheduler
        self.engine = scheduler.engine
        self.budget = scheduler.budget
        self.transfer = scheduler.transfer
        self.min_elements = min_elements
        self.last_metrics: ActivationStepMetrics | None = None
        self.last_details = SpillDetails()
        self._stage = -next(_numbers)
        self._forwards = itertools.count()
        self._most_forwards = _MOST_FORWARDS
        self._by_chunk: dict[ForwardId, Forward] = {}
        self._step = 0
        self._ends_by_hand = False  # the end under way is one that drops what graphs still hold
        self._figures = ClientStats()  # of this step's forwards that are over and forgotten
        self._ended: tuple[ActivationStepMetrics, SpillDetails] | None = None
        self._detach: Callable[[], object] = _attach(self) if attached else int

    @classmethod
    def between(cls, engine: OffloadEngine, high_bytes: int, low_bytes: int) -> Self:
        """The runtime of a pair of marks, which forecasts."""
        budget = ActivationBudgetManager(meter_of(engine, None, resets=False), high_bytes, low_bytes)
        parts = Parts(engine, budget, ActivationTransfer(engine))
        return cls(ForecastOrder(parts, restore_ahead=True))

    @property
    def holds(self) -> bool:
        """Predicate: something that was saved can still be read."""
        with self.engine.lock:
            return any(not forward.is_over for forward in self.scheduler.forwards)

    # -- forwards -------------------------------------------------------------------------------------------
    def begin_forward(self) -> Forward:
        with self.engine.lock:
            scheduler = self.scheduler
            if len(scheduler.forwards) >= self._most_forwards:
                if over := [forward for forward in scheduler.forwards if forward.is_over]:
                    self._forget(over)
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
        """End the step of the runtime. What a graph still holds is carried over, twice at most."""
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
        metrics.step = self._step
        metrics.activations_kept = metrics.activations_saved - metrics.activations_spilled
        metrics.stall_time_ms, metrics.stall_count = self.transfer.end_step()
        metrics.pool_hits = metrics.activations_spilled
        metrics.vram_peak_mb = self.budget.meter.peak() / MIB
        self._ended = metrics, details
        return figures

    def step_ended(self, stats: StepStats) -> None:
        """The step's figures are complete."""
        with self.engine.lock:
            ended, self._ended = self._ended, None
            if ended is None:
                return
            self.last_metrics, self.last_details = metrics, details = ended
            for saves in (stats.clients[name] for name in ("groups", CLIENT) if name in stats.clients):
                metrics.stall_time_ms += saves.stall_ms
                metrics.stall_count += saves.stall_count
            details.retries = stats.retries
            self._step += 1
            self.budget.meter.start_step()

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


def _attach(runtime: WatermarkRuntime) -> Callable[[], object]:
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
        if runtime.scheduler.mark_bounds:
            share.bound("max_spilling_bytes", None, replaces=(DEFAULT,))
    return weakref.finalize(runtime, detach)


class _SpillScope:
    """Scope that takes every eligible tensor that the scheduler wants."""

    __slots__ = ("_forward", "_scheduler", "min_elements")

    def __init__(self, scheduler: ActivationScheduler, forward: Forward, min_elements: int) -> None:
        self._scheduler = scheduler
        self._forward = forward
        self.min_elements = min_elements

    def take(self, tensor: torch.Tensor) -> Handle | None:
        return self._scheduler.take(self._forward, tensor)

    def note_replayed(self, tensor: torch.Tensor) -> None:
        """Nothing: memory of CUDA graphs that torch.compile records never leaves."""


class _Entered(threading.local):
    """Forwards entered by the calling thread, whose own torch's stack of hooks is."""

    def __init__(self) -> None:
        self.stack: list[tuple[Forward, InstalledScope]] = []


class ActivationHookContext:
    """The context that `managed_forward` returns. It may be entered again, nested too, in any thread: each
    time is a forward of its own, which ends in the thread where it began.

    An out-of-memory error of an operator inside gets a note of what was spilled, and what could have been.

    min_elements: of a tensor that is looked at; None for the runtime's.
    """

    def __init__(self, runtime: WatermarkRuntime, min_elements: int | None = None) -> None:
        self._runtime = runtime
        self._min_elements = runtime.min_elements if min_elements is None else min_elements
        self._entered = _Entered()

    @untraced
    def __enter__(self) -> None:
        runtime = self._runtime
        forward = runtime.begin_forward()
        scope = _SpillScope(runtime.scheduler, forward, self._min_elements)
        try:
            installed = runtime.engine.hooks.push(scope)
        except BaseException:  # inside a transform of torch.func, which admits no hooks
            runtime.end_forward(forward)
            raise
        self._entered.stack.append((forward, installed))

    @untraced
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        forward, installed = self._entered.stack.pop()
        self._runtime.engine.hooks.pop(installed)
        self._runtime.end_forward(forward)
        if isinstance(error, torch.OutOfMemoryError):
            self._runtime.explain(error)
