"""What a runtime did in a step: the JSON lines of both, and rolling figures of the one of weights.

One invariant: a line is of one step, and is written once the device has got to that step's end, so no figure
blocks the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

from offload.described import described
from offload.device import Device, Event
from offload.telemetry.records import JsonLines
from offload.telemetry.speaker import speaker
from offload.watermark.telemetry import ActivationStepMetrics

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
        """Of the newest step that the device has ended."""
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


class ActivationTelemetry:
    """Appends a line a step. path: of the file, which need not be there yet; None writes none. Raises
    ValueError for one that cannot be written."""

    def __init__(self, path: str | None) -> None:
        self._lines = JsonLines(path, off="telemetry_enabled=False")

    def write(self, metrics: ActivationStepMetrics) -> None:
        """Raises OSError where the file cannot be written."""
        self._lines.write(asdict(metrics))
