"""Warning about saved tensors that found no host memory: how much a step needs, and what gives it that.

One invariant: it is given once for an engine, as soon as host memory cannot grow; else after a few steps,
when what is pinned beside them has had its time.
"""

from __future__ import annotations

from offload.memory.free_ranges import round_up
from offload.memory.growth import PAGE_BYTES
from offload.memory.loans import ALIGN_BYTES
from offload.sizes import bytes_text, enough_text
from offload.telemetry.records import StepStats
from offload.telemetry.speaker import speaker

logger = speaker(__name__)

_STEPS_TO_PIN = 3  # after the first such step


class HostShortage:
    """Steps of one engine that lacked host memory."""

    def __init__(self) -> None:
        self._first: StepStats | None = None  # step that lacked host memory
        self._steps = 0  # from it on; -1: it was said

    def step_ended(self, stats: StepStats, refusal: str) -> None:
        """refusal: why host memory cannot grow, and the way out; "" where it can."""
        if self._first is None and stats.lacked_host:
            self._first = stats
        if self._first is None or self._steps < 0:
            return
        self._steps += 1
        if not refusal and self._steps <= _STEPS_TO_PIN:
            return
        lacking, self._steps = stats if stats.lacked_host else self._first, -1
        padded = lacking.host_bytes_wanted_peak + lacking.saved * ALIGN_BYTES
        needed = enough_text(round_up(padded, PAGE_BYTES))
        logger.warning(
            "%s of step %d found no host memory and stayed on the device, beside any device_limit: of %s "
            "that it needed there, %s were pinned. %s",
            bytes_text(lacking.refused_bytes),
            lacking.step,
            needed,
            bytes_text(lacking.host_bytes_held),
            refusal
            or f"More is pinned beside later steps; host_reserve='{needed}' of apply (host_reserve_bytes in "
            "OffloadConfig) has it before the first",
        )
