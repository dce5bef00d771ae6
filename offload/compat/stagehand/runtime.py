"""StagehandRuntime: weights stream by the block between the host and a device with two marks.

    runtime = StagehandRuntime(model, StagehandConfig(vram_high_watermark_mb=9000), r"^blocks\\.\\d+$")

    for step, batch in enumerate(batches):
        with runtime.forward_context(step=step):  # or forward_context(activations), an ActivationRuntime
            loss = model(batch)
            loss.backward()
            optimizer.step()
    runtime.shutdown()

It holds the client of `apply(weights=...)` (weights/stream.py): masters, loads, drops and their order are the
client's, and so are the bits. Only when bytes move is decided here. One invariant: hooks are permanent, so a
recompute in the backward and a forward outside of a step find their weights.

    config.py     marks, windows, guards         blocks.py  the registry, states, users, guards of outputs
    scheduler.py  the window, eviction, figures  layers.py  layer mode
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from offload.compat.stagehand.activations import ActivationRuntime
from offload.compat.stagehand.blocks import BlockRegistry, BlockState, NumericGuard, ResidencyMap
from offload.compat.stagehand.config import StagehandConfig
from offload.compat.stagehand.scheduler import (
    BudgetManager,
    StagehandScheduler,
    StagehandTelemetry,
    StaticLookaheadPolicy,
    StepMetrics,
    TransferKnobs,
)
from offload.config import MIB, config_or_fields
from offload.device import Event
from offload.engine import OffloadEngine, default_engine
from offload.errors import OffloadError
from offload.ids import Owner
from offload.memory.arena import HostArena
from offload.modules.hooks import CallsUnderWay, HookPair
from offload.telemetry.speaker import speaker
from offload.transfer.copier import Direction, total_ms
from offload.watermark.budget import meter_of
from offload.weights.hooks import BlockCalls
from offload.weights.stream import WeightStream
from offload.weights.weight import BlockWeights, Close, Weight

logger = speaker(__name__)


class ResidentPriority(Enum):
    """The value is how late its blocks leave where there is no choice; 0: as any other."""

    PRIMARY = 2
    SECONDARY = 1
    GUEST = 0
    NORMAL = -1


class BlockSource(Protocol):
    """Source of the weights, read once, when the runtime is built: a file, another process, a generator."""

    def read(self, name: str, into: Tensor) -> None:
        """Fill `into`, host memory of the shape and dtype of the parameter `name`, whole. What it raises
        leaves the model as it was."""


class InMemorySource:
    """A BlockSource of tensors by the names of parameters, such as a state dict."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def read(self, name: str, into: Tensor) -> None:
        """Raises ValueError for a name that is not there, or another shape."""
        found = self._tensors.get(name)
        if found is None or found.shape != into.shape:
            has = "nothing" if found is None else tuple(found.shape)
            raise ValueError(f"the source has {has} for {name}, must have {tuple(into.shape)}")
        into.copy_(found)


def _fill(weight: Weight, source: BlockSource) -> None:
    with torch.inference_mode(False), torch.no_grad():
        source.read(weight.name, weight.elements(weight.master))


class _Calls(BlockCalls):
    """The hooks of a block: the client's, and the runtime's around a use."""

    def __init__(self, runtime: StagehandRuntime, stream: WeightStream, block: BlockWeights) -> None:
        super().__init__(stream, block)
        self._runtime = runtime

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Close:
        runtime, block = self._runtime, self._block
        runtime._before(block)
        close = super().enter(module, args, kwargs)
        with runtime.offload_engine.lock:
            runtime.scheduler.begin_use(block)
        return close

    def leave(self, close: Close, output: Any, failed: bool) -> None:
        super().leave(close, output, failed)
        runtime, block = self._runtime, self._block
        with runtime.offload_engine.lock:
            runtime.scheduler.end_use(block)
        if not failed and torch._C._current_graph_task_id() == -1:  # not of a recompute
            promotions = runtime.guard.check(runtime.registry[block.name], output)
            runtime.scheduler.metrics.dtype_promotions += promotions


class StagehandRuntime:
    """See the module.

    config: None for the defaults, with `fields` in their place. block_pattern: a regular expression that is
        found in the names of blocks, the modules themselves, or None, which finds them. group: a label.
        dtype: that all streamed weights have; None: whatever they have. inference_mode: changes nothing, as
        blocks that nobody writes are never copied back. pool: what `shutdown_keep_pool` gave. engine: None
        for the process's own. memory_allocated: tells the allocated bytes of the device; None asks its
        allocator, and on the simulated device counts the streamed weights there. source: where the weights
        come from; None: they are the model's own.
    Raises ValueError, OffloadOOMError for a block larger than the pool, DtypeMismatchError and
    HostBudgetError; nothing has moved then. Blocks the host while memory is pinned and weights move; in a
    step never. Parameters under 1 Mi elements, of adapters and tied ones are resident, as of
    apply(weights=...).
    """

    def __init__(
        self,
        model: nn.Module,
        config: StagehandConfig | None = None,
        block_pattern: str | Sequence[nn.Module] | None = None,
        group: str = "transformer",
        dtype: torch.dtype | None = None,
        inference_mode: bool = False,
        pool: HostArena | None = None,
        *,
        engine: OffloadEngine | None = None,
        memory_allocated: Callable[[], int] | None = None,
        source: BlockSource | None = None,
        **fields: Any,
    ) -> None:
        self.config = config = config_or_fields(StagehandConfig, config, fields, "StagehandRuntime")
        self.closed = False
        if not config.stagehand_enabled:
            return
        self.offload_engine = engine = default_engine() if engine is None else engine
        if pool is not None and pool is not engine.arena:
            raise ValueError(
                "pool is of another engine, and pinned memory is one arena an engine: give the engine of the "
                "runtime that the pool is of, or leave pool out"
            )
        where = engine.device.torch_device
        self.registry = registry = BlockRegistry()
        registry.build_from_model(model, block_pattern, where, group, dtype)
        registry.validate(config.pool_bytes)
        path = config.telemetry_file if config.telemetry_enabled else None
        self.telemetry = StagehandTelemetry(engine.device, path, config.telemetry_interval_steps)
        for weight in (each for weights in registry.choice.blocks.values() for each in weights):
            if source is not None:
                weight.source = partial(_fill, source=source)
        largest = max(entry.size_bytes for entry in registry)
        self._share = engine.limits.contributor("stagehand", self)
        self.engine, policy = TransferKnobs(self._share, largest), StaticLookaheadPolicy(self._share, largest)
        self.engine._max_inflight = config.max_inflight_transfers
        policy.prefetch_window = config.prefetch_window_blocks
        policy.eviction_cooldown_steps = config.eviction_cooldown_steps
        self.residency, self.guard = ResidencyMap(registry), NumericGuard(config, registry, where)
        if memory_allocated is None and engine.device.allocator_bytes() is None:
            memory_allocated = self._present_bytes
        marks = config.vram_high_watermark_mb, config.vram_low_watermark_mb
        meter = meter_of(engine, memory_allocated, resets=False)
        self.budget = BudgetManager(meter, *(round(mark * MIB) for mark in marks))
        self.scheduler = StagehandScheduler(self.residency, self.budget, policy, engine.device)
        try:
            self.stream = WeightStream(engine, model, registry.choice, None, self.scheduler)
        except BaseException:
            self._share.end()
            raise
        self.scheduler.stream = self.stream
        self._reserved: dict[int, tuple[StagehandRuntime, int, ResidentPriority]] = {}
        self._opened: list[tuple[str, Close]] = []
        self._copies: list[tuple[Event, Event]] = []
        self._under_way, self._undo = CallsUnderWay(), ExitStack()
        self._calls = {block.name: _Calls(self, self.stream, block) for block in self.stream.blocks}
        for name, calls in self._calls.items():
            pair = HookPair(self._module(name), calls.enter, calls.leave, self._under_way)
            self._undo.callback(pair.remove)
        if config.telemetry_enabled:
            copies, names = self._copies, self.residency.entries

            def note(direction: Direction, owner: Owner, nbytes: int, start: Event, end: Event) -> None:
                if owner.client == WeightStream.name and owner.label in names:
                    copies.append((start, end))

            engine.copier.watch(note)
            unwatch = weakref.finalize(self, engine.copier.unwatch, note)
            unwatch.atexit = False
            self._undo.callback(unwatch)
        self._announced, self._engine_step = False, -1
        self._start_step(0)

    def _present_bytes(self) -> int:
        return self.stream.residency.present_bytes

    def _module(self, block_id: str) -> nn.Module:
        module = self.registry[block_id].module_ref()
        if module is None:
            raise OffloadError(f"block {block_id} is gone with its model; build another runtime")
        return module

    def _is_off(self) -> bool:
        """Predicate: the runtime was switched off. Raises OffloadError after `shutdown`."""
        if self.closed:
            raise OffloadError("this StagehandRuntime was shut down; build another one")
        return not self.config.stagehand_enabled

    # -- a step ----------------------------------------------------------------------------------------------
    def begin_step(self, step: int | None = None) -> None:
        """A step begins; one that is under way ends. step: its number in the telemetry; None counts on."""
        if self._is_off():
            return
        if self._announced:
            self.end_step()
        self._announced = True
        self.offload_engine.begin_step()
        self._engine_step = self.offload_engine.step
        with self.offload_engine.lock:
            self._start_step(self.scheduler.step if step is None else step)

    def end_step(self) -> None:
        """The step ends, for all clients of the engine unless another one has ended it already. Raises
        OSError where a line cannot be written; the step has ended then. Blocks the host: never."""
        if self._is_off():
            return
        if self._announced and self.offload_engine.step == self._engine_step:
            self.offload_engine.end_step()
        self._announced = False
        self._finish_step()

    def _start_step(self, step: int) -> None:
        scheduler, device = self.scheduler, self.offload_engine.device
        scheduler.step, scheduler.in_step, scheduler.metrics = step, True, StepMetrics(step=step)
        self._counted = self.stream.residency.counted
        self._begun = device.record(device.compute, timed=True)

    def _finish_step(self) -> None:
        engine, scheduler, residency = self.offload_engine, self.scheduler, self.stream.residency
        with engine.lock:
            scheduler.take_stalls()
            metrics, stalls, scheduler.stalls = scheduler.metrics, scheduler.stalls, []
            moved = map(operator.sub, residency.counted, self._counted)
            metrics.h2d_bytes, metrics.d2h_bytes, metrics.prefetch_hits, metrics.prefetch_misses = moved
            metrics.stall_count = len(stalls)
            metrics.vram_used_mb = self.budget.read() / MIB
            metrics.vram_reserved_mb = (engine.device.allocator_bytes() or (0, 0))[0] / MIB
            pinned, slab = engine.arena.stats(), self.config.slab_bytes
            metrics.host_pool_free = pinned.free_bytes // slab
            metrics.host_pool_in_use = -(-pinned.lent_bytes // slab)
            counts, begun, device = self.guard.take(), self._begun, engine.device
            copies = self._copies[:]
            self._copies.clear()
            end = device.record(device.compute, timed=True)
            scheduler.in_step, scheduler.step = False, scheduler.step + 1
            scheduler.evict()

        def complete() -> StepMetrics:
            """The device has got to the step's end. A copy under way is a later step's."""
            for copy in copies:
                if device.poll(copy[1]):
                    metrics.copy_time_ms += device.elapsed_ms(*copy)
                else:
                    self._copies.append(copy)
            metrics.stall_time_ms = total_ms(device, stalls)
            metrics.compute_time_ms = max(0.0, device.elapsed_ms(begun, end) - metrics.stall_time_ms)
            metrics.nan_count, metrics.inf_count = self.guard.total(counts)
            return metrics

        self.telemetry.step_ended(end, complete)

    # -- forwards and backwards ------------------------------------------------------------------------------
    @contextmanager
    def managed_forward(self) -> Iterator[None]:
        """Around forwards. Their hooks are permanent, so nothing is installed; a runtime that was shut down
        is an error."""
        self._is_off()
        yield

    managed_backward = managed_forward
    """Around backwards: as `managed_forward`."""

    @contextmanager
    def forward_context(
        self, activations: ActivationRuntime | None = None, step: int | None = None
    ) -> Iterator[None]:
        """A step, with the activations' runtime inside of the weights': begins both, manages both, and ends
        the activations' step before the weights', also after an exception."""
        with ExitStack() as ends:
            self.begin_step(step)
            ends.callback(self.end_step)
            if activations is not None:
                activations.step_begin(step)
                ends.callback(activations.step_end)
            ends.enter_context(self.managed_forward())
            ends.enter_context(self.managed_backward())
            if activations is not None:
                ends.enter_context(activations.managed_forward())
            yield

    def before_block(self, block_id: str) -> None:
        """Has the block on the device, for the current lane, until `after_block`; modules' hooks do so by
        themselves. Raises ValueError for an unknown block."""
        if not self._is_off():
            module = self._module(block_id)
            self._opened.append((block_id, self._calls[block_id].enter(module, (), {})))

    def after_block(self, block_id: str, output: Any = None) -> None:
        """Ends what `before_block` began last. output: of the block, which the guards look at. Raises
        InvalidStateTransitionError without a `before_block`, and DtypeMismatchError."""
        if self._is_off():
            return
        for at in reversed(range(len(self._opened))):
            if self._opened[at][0] == block_id:
                self._calls[block_id].leave(self._opened.pop(at)[1], output, False)
                return
        self.residency.decrement_refcount(self.registry[block_id].block_id)  # raises

    def _before(self, block: BlockWeights) -> None:
        """A use of the block is about to begin."""

    def states(self) -> dict[str, BlockState]:
        """State of each block now."""
        with self.offload_engine.lock:
            return dict(self.scheduler.states())

    # -- residency -------------------------------------------------------------------------------------------
    @contextmanager
    def keep_resident(self, target: StagehandRuntime | None = None) -> Iterator[None]:
        """Inside, blocks of `target`, by default this runtime's, do not leave once they are on the device,
        unless nothing else can make room: one warning."""
        held = self if target is None else target
        names = [] if held._is_off() else [*held.residency.entries]
        held.residency.protect_blocks(names) if names else None
        try:
            yield
        finally:
            held.residency.unprotect_blocks(names) if names else None

    def reserve_for_resident(
        self,
        target: StagehandRuntime | None = None,
        priority: ResidentPriority = ResidentPriority.PRIMARY,
    ) -> None:
        """Take the bytes of `target`, by default this runtime, off what guests may have, until
        `release_reservation`. PRIMARY and SECONDARY blocks do not leave, unless nothing else can make room,
        and SECONDARY ones first then. Again for the same target: it takes the earlier one's place."""
        held = self if target is None else target
        if held._is_off() or self._is_off():
            return
        self.release_reservation(held)
        self._reserved[id(held)] = held, held.size_bytes, priority
        self.budget.reserve_bytes(held.size_bytes)
        if priority.value > 0:
            held.residency.protect_blocks(held.residency.entries, priority.value)

    def release_reservation(self, target: StagehandRuntime | None = None) -> None:
        """Undo `reserve_for_resident`. Idempotent; without one it does nothing."""
        key = id(self if target is None else target)
        if not self.closed and not self._is_off() and key in self._reserved:
            held, nbytes, priority = self._reserved.pop(key)
            self.budget.release_reserved_bytes(nbytes)
            held.residency.unprotect_blocks(held.residency.entries, priority.value)

    @contextmanager
    def as_guest(self, guest: StagehandRuntime) -> Iterator[None]:
        """A short-lived model runs inside, in what reservations leave. Where it does not fit there, this
        runtime's window is one block meanwhile. Its blocks leave at the end."""
        if self._is_off() or guest._is_off():
            yield
            return
        policy = self.scheduler.policy
        window = policy.prefetch_window
        if not self.budget.can_guest_allocate(guest.size_bytes):
            policy.prefetch_window = 1
        self.reserve_for_resident(guest, ResidentPriority.GUEST)
        try:
            yield
        finally:
            self.release_reservation(guest)
            policy.prefetch_window = window
            for block in guest.stream.blocks:
                guest.stream.free(block)

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(entry.size_bytes for entry in self.registry)

    # -- the end ---------------------------------------------------------------------------------------------
    def shutdown(self) -> None:
        """Weights return to where they were found, lines that wait are written, and the engine closes and
        unpins unless another client uses it. Idempotent. Raises ValueError inside a forward, and
        torch.OutOfMemoryError where the weights do not fit; all goes on then. Blocks the host."""
        if self.closed or not self.config.stagehand_enabled:
            return
        try:
            self.shutdown_keep_pool()
        finally:
            if self.closed:
                self.offload_engine.close_unused()

    def shutdown_keep_pool(self) -> HostArena:
        """Do what `shutdown` does, but the host memory stays pinned, for another runtime: give it `pool=`.
        Raises OffloadError where there is none."""
        if self._is_off():
            raise OffloadError("this StagehandRuntime is switched off and has no pool; leave pool out")
        self._under_way.end_interrupted(sys._getframe())
        if self._under_way or self._opened:
            raise ValueError("shutdown() inside a forward of a block; call it when the forward has returned")
        if self._announced:
            self.end_step()
        for held, _, _ in [*self._reserved.values()]:
            self.release_reservation(held)
        self.stream.remove()
        self.closed = True
        self._undo.close()
        self._share.end()
        self.telemetry.drain()
        return self.offload_engine.arena

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a model, by deepcopy or pickle, has None in its place."""
        return type(None), ()
