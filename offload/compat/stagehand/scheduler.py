"""Decisions on what is fetched ahead and what leaves, by the source's rules: a window along the recorded
order, and eviction by distance times bytes between two marks; and what that came to in a step.

One invariant: it decides only; loads, drops and their order are the client's (`weights/residency.py`). In the
backward the recorded order is the backward's own, so the window and the distances point the way that it runs.

A line of figures is of one step, and is written once the device has got to that step's end, so no figure
blocks the host.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from offload.compat.stagehand.blocks import BlockState, ResidencyMap
from offload.config import MIB, described
from offload.device import Device, Event
from offload.telemetry.records import JsonLines
from offload.telemetry.speaker import Once, speaker
from offload.transfer.copier import Priority, Stall
from offload.transfer.limits import Cap, Contributor
from offload.watermark.budget import ActivationBudgetManager
from offload.weights.order import Pass
from offload.weights.stream import WeightStream
from offload.weights.weight import BlockWeights

logger = speaker(__name__)

_ROLLING_STEPS = 100
_TREND_MB = 50.0


@described
@dataclass(slots=True, kw_only=True)
class StepMetrics:
    """One step of one runtime."""

    step: int
    """Number that `begin_step` was given, else counted from 0."""
    h2d_bytes: int = 0
    """Bytes of weights copied to the device."""
    d2h_bytes: int = 0
    """Bytes of weights copied back: what was written."""
    copy_time_ms: float = 0.0
    """Device time of these copies."""
    compute_time_ms: float = 0.0
    """Device time from the step's begin to its end, without stalls."""
    stall_time_ms: float = 0.0
    """Device time that compute waited for weights."""
    stall_count: int = 0
    """Uses whose weights had not arrived when they were asked for."""
    evictions: int = 0
    """Blocks that left the device."""
    prefetch_hits: int = 0
    """Uses that found their block on the device, or on its way: the host waits for none, and what the device
    waits is `stall_time_ms`."""
    prefetch_misses: int = 0
    """Uses for which the block had to be loaded."""
    vram_used_mb: float = 0.0
    """MiB of device memory allocated at the step's end."""
    vram_reserved_mb: float = 0.0
    """MiB that the allocator has reserved then; 0 on the simulated device."""
    host_pool_free: int = 0
    """Slabs of the engine's pinned memory that are free."""
    host_pool_in_use: int = 0
    """Slabs that are lent."""
    dtype_promotions: int = 0
    """Outputs of blocks that were wider than their weights."""
    nan_count: int = 0
    """NaN elements in outputs of blocks."""
    inf_count: int = 0
    """Infinite elements in them."""


class StagehandTelemetry:
    """Figures of the last 100 steps. path: of the file of lines; None writes none. Raises ValueError for one
    that cannot be written. interval_steps: between two summaries in the log."""

    def __init__(self, device: Device, path: str | None, interval_steps: int) -> None:
        self._device = device
        self._lines = JsonLines(path, off="telemetry_enabled=False")
        self._interval_steps = interval_steps
        self._waiting: deque[tuple[Event, Callable[[], StepMetrics]]] = deque()
        self.history: deque[StepMetrics] = deque(maxlen=_ROLLING_STEPS)

    def step_ended(self, end: Event, complete: Callable[[], StepMetrics]) -> None:
        """complete: gives the step's figures, once `end` has passed. Raises OSError."""
        self._waiting.append((end, complete))
        while self._waiting and self._device.poll(self._waiting[0][0]):
            self._write()

    def drain(self) -> None:
        """Write the lines that wait. Blocks the host until the device is at the last one's end. Raises
        OSError."""
        while self._waiting:
            self._device.synchronize(self._waiting[0][0])
            self._write()

    def _write(self) -> None:
        metrics = self._waiting.popleft()[1]()
        self.history.append(metrics)
        if self._interval_steps and metrics.step % self._interval_steps == 0:
            logger.info("weights, %.1f%% hits of 100 steps, last: %s", 100 * self.hit_rate(), metrics)
        self._lines.write(asdict(metrics))

    @property
    def last(self) -> StepMetrics | None:
        """Figures of the newest step that the device has ended."""
        return self.history[-1] if self.history else None

    def hit_rate(self) -> float:
        """Hits of all uses; 0 where there were none."""
        hits = sum(each.prefetch_hits for each in self.history)
        return hits / max(1, hits + sum(each.prefetch_misses for each in self.history))

    def mean_stall_ms(self) -> float:
        """A step."""
        return sum(each.stall_time_ms for each in self.history) / max(1, len(self.history))

    def max_stall_ms(self) -> float:
        return max((each.stall_time_ms for each in self.history), default=0.0)

    def vram_trend(self) -> str:
        """ "growing", "shrinking" or "stable": whether the later half of the steps has over 50 MiB more."""
        used = [each.vram_used_mb for each in self.history]
        half = len(used) // 2
        if not half:
            return "stable"
        change = sum(used[half:]) / (len(used) - half) - sum(used[:half]) / half
        return "growing" if change > _TREND_MB else "shrinking" if change < -_TREND_MB else "stable"


class BudgetManager(ActivationBudgetManager):
    """The two marks, and bytes that are reserved for models which stay."""

    reserved_bytes = 0

    def reserve_bytes(self, nbytes: int, label: str = "") -> None:
        self.reserved_bytes += nbytes

    def release_reserved_bytes(self, nbytes: int) -> None:
        """Not below 0."""
        self.reserved_bytes = max(0, self.reserved_bytes - nbytes)

    def can_guest_allocate(self, nbytes: int, safety_margin_mb: float = 500) -> bool:
        """Predicate: a guest of so many bytes fits below the high mark, beside what is used and reserved."""
        return nbytes <= self.high_bytes - self.read() - self.reserved_bytes - safety_margin_mb * MIB


def _bounding(cap: Cap) -> Any:
    """An attribute: a number of blocks, which bounds a cap of the engine's limits in bytes; None bounds
    nothing."""

    def write(knobs: _Knobs, value: int | None) -> None:
        knobs.values[cap] = value
        knobs.share.bound(cap, None if value is None else value * knobs.block_bytes)

    return property(lambda knobs: knobs.values[cap], write)


class _Knobs:
    """Attributes that an arbiter writes. block_bytes: of the largest block."""

    def __init__(self, share: Contributor, block_bytes: int) -> None:
        self.share, self.block_bytes = share, block_bytes
        self.values: dict[Cap, int | None] = {}


class TransferKnobs(_Knobs):
    """`_max_inflight`: blocks that are fetched ahead and on their way to the device."""

    _max_inflight = _bounding("weights_in_flight_bytes")


class StaticLookaheadPolicy(_Knobs):
    """`prefetch_window`: blocks that are fetched ahead, None as 0. eviction_cooldown_steps: as in
    StagehandConfig."""

    prefetch_window = _bounding("weights_ahead_bytes")
    eviction_cooldown_steps = 0


class StagehandScheduler:
    """The Policy of a WeightStream.

    | name | | written by |
    |---|---|---|
    | stream | whose blocks they are | the runtime, before the first use |
    | step, in_step | number of the step, and whether one is under way | the runtime |
    | metrics | counts of this step | this class and the runtime |
    | stalls | waits of this step | this class |
    | using | the block that was used last, unless its forward is over | this class |
    | trace | blocks in the order of their first use in a forward | this class |
    """

    stream: WeightStream

    def __init__(
        self, residency: ResidencyMap, budget: BudgetManager, policy: StaticLookaheadPolicy, device: Device
    ) -> None:
        self.residency, self.budget, self.policy = residency, budget, policy
        self.step, self.in_step = 0, True
        self.metrics = StepMetrics(step=0)
        self.stalls: list[Stall] = []
        self.trace: dict[str, None] = {}
        self.using: BlockWeights | None = None
        self.device = device
        self._counted: tuple[list[Stall], int] = [], 0
        self._said = Once()

    # -- the order -------------------------------------------------------------------------------------------
    def window(self) -> set[int]:
        """The next blocks along the recorded order, without the one in use."""
        order = self.stream.order
        found: dict[int, None] = {}
        for index in order.coming():
            if len(found) >= (self.policy.prefetch_window or 0):
                break
            if order.now is None or index != order.now.block:
                found[index] = None
        return set(found)

    def distances(self) -> dict[int, int]:
        """Uses until the next one of each block: as recorded, of others all round as the pass runs."""
        order, number = self.stream.order, len(self.stream.blocks)
        found: dict[int, int] = {}
        for rank, index in enumerate(order.coming(), 1):
            found.setdefault(index, rank)
        known, now = len(found), order.now
        for index in range(number):
            if index not in found and now is not None:
                step = -1 if now.during is Pass.BACKWARD else 1
                found[index] = known + (step * (index - now.block) % number or number)
        return found

    # -- as Policy -------------------------------------------------------------------------------------------
    def admit(self, block: BlockWeights, priority: Priority) -> bool:
        ahead = priority < Priority.REQUIRED
        if ahead and block.index not in self.window():
            return False
        self.evict(block.link_bytes, last_resort=not ahead)
        return not ahead or self.budget.read() + block.link_bytes <= self.budget.high_bytes

    def loaded(self, block: BlockWeights) -> None:
        if self.residency.entries[block.name].state is not BlockState.HOST_STAGED:
            # after EVICTING, too: the way in waits for the way out
            self.residency.transition(block.name, BlockState.HOST_STAGED)
        self.residency.transition(block.name, BlockState.PREFETCHING)

    def used(self, block: BlockWeights) -> None:
        entry = self.residency.entries[block.name]
        if entry.state is BlockState.PREFETCHING:
            self.residency.transition(block.name, BlockState.GPU_READY)
        entry.last_used_step, self.using = self.step, block
        self.take_stalls()
        now = self.stream.order.now
        if now is not None and now.during in (Pass.FORWARD, Pass.INFERENCE):
            self.trace.setdefault(block.name)
        self.evict()

    def begin_use(self, block: BlockWeights) -> None:
        """A forward of the block begins; `used` has been told, unless it goes on from the use before."""
        if self.residency.entries[block.name].state is BlockState.PREFETCHING:
            self.residency.transition(block.name, BlockState.GPU_READY)
        self.residency.increment_refcount(block.name)

    def end_use(self, block: BlockWeights) -> None:
        """The forward is over."""
        self.residency.decrement_refcount(block.name)
        self.using = None
        self.evict()

    def dropped(self, block: BlockWeights) -> None:
        entry = self.residency.entries[block.name]
        if entry.state is BlockState.PREFETCHING:
            self.residency.transition(block.name, BlockState.GPU_READY)  # the drop waits for the way in
        if entry.state is not BlockState.GPU_READY:
            return
        users, entry.refcount = entry.refcount, 0  # the host's copy was written in a forward: it comes again
        if block.left is not None and not self.device.poll(block.left):
            self.residency.transition(block.name, BlockState.EVICTING)
        else:
            self.residency.transition(block.name, BlockState.GPU_FREEING)
            self.residency.transition(block.name, BlockState.UNLOADED)
        entry.refcount = users
        self.metrics.evictions += 1
        if self.residency.protection(block.name) and self._said.first("protected"):
            logger.warning(
                f"block {block.name} is protected (keep_resident or reserve_for_resident), and was evicted "
                f"all the same: nothing else could make room below {self.budget.high_bytes / MIB:,.1f} MiB. "
                "Raise vram_high_watermark_mb, or protect fewer blocks"
            )

    # -- eviction --------------------------------------------------------------------------------------------
    def evict(self, coming_bytes: int = 0, *, last_resort: bool = False) -> None:
        """Drop blocks where device memory, with the bytes that come, is above the high mark: the highest
        distance times bytes first, until it is below the low one. Never what is used, protected or in the
        window; as a last resort what is protected, until it is not above the high mark."""
        budget, blocks = self.budget, {block.name: block for block in self.stream.blocks}
        allocated = budget.read() + coming_bytes
        if allocated <= budget.high_bytes:
            return
        cooldown = 0 if self.in_step or last_resort else self.policy.eviction_cooldown_steps
        window, distance = self.window(), self.distances()
        able = [blocks[name] for name in self.residency.eviction_candidates(self.step, cooldown)]
        able = [b for b in able if b.may_leave and b is not self.using and b.index not in window]
        for block in sorted(able, key=lambda each: -distance.get(each.index, math.inf) * each.held_bytes):
            if allocated < budget.low_bytes:
                return
            allocated -= block.held_bytes
            self.stream.residency.drop(block)
        for name in self.residency.protected_eviction_candidates() if last_resort else ():
            block = blocks[name]
            if allocated > budget.high_bytes and block is not self.using and block.may_leave:
                allocated -= block.held_bytes
                self.stream.residency.drop(block)

    # -- what happened ---------------------------------------------------------------------------------------
    def take_stalls(self) -> None:
        """Take over the waits that the client has recorded since the last call."""
        found = self.stream.residency.stalls
        seen = self._counted[1] if found is self._counted[0] else 0
        self.stalls += found[seen:]
        self._counted = found, len(found)

    def states(self) -> Iterator[tuple[str, BlockState]]:
        """The state of each block now: copies that have ended are seen."""
        for block in self.stream.blocks:
            state = self.residency.entries[block.name].state
            if state is BlockState.PREFETCHING and block.arrived and self.device.poll(block.arrived):
                self.residency.transition(block.name, BlockState.GPU_READY)
            if state is BlockState.EVICTING and block.left and self.device.poll(block.left):
                self.residency.transition(block.name, BlockState.HOST_STAGED)
            yield block.name, self.residency.entries[block.name].state
