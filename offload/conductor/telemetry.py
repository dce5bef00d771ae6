"""One JSON line every so many steps, and the event trace.

One invariant: a line has exactly the source system's fields, and `events` beside them where they are traced.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from offload.conductor.config import MIB, ConductorConfig
from offload.telemetry.lines import JsonLines

__all__ = ["TelemetryHub"]

_MOST_EVENTS = 100_000  # between two lines; of more, the latest


class TelemetryHub:
    """last: line of the last step, written or not. Raises ValueError for a file that cannot be written."""

    def __init__(self, config: ConductorConfig) -> None:
        self.last: dict[str, Any] | None = None
        self.traces = config.debug_event_trace
        self._every = config.telemetry_interval
        self._events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self._steps = 0
        self._lines = JsonLines(config.telemetry_file if self._every else None, off="telemetry_interval=0")

    def event(self, what: str, **fields: Any) -> None:
        """Where events are traced, one of them."""
        if self.traces:
            self._events.append({"event": what, **fields})

    def step_ended(
        self,
        *,
        step: int,
        allocated_bytes: int,
        hard_bytes: int,
        pinned_bytes: int,
        in_flight: tuple[int, int],
        counts: tuple[int, int, int],
        seconds: dict[str, float],
        snapshots: dict[str, dict[str, int | None]],
    ) -> None:
        """in_flight: to the device, to the host. counts: grants, denials, partials, since the start. Raises
        OSError where the line cannot be written."""
        self.last = {
            "step_id": step,
            "vram_allocated_mb": allocated_bytes / MIB,
            "vram_headroom_mb": (hard_bytes - allocated_bytes) / MIB,
            "pinned_granted_mb": pinned_bytes / MIB,
            "h2d_inflight": in_flight[0],
            "d2h_inflight": in_flight[1],
            "grant_count": counts[0],
            "deny_count": counts[1],
            "partial_count": counts[2],
            "phase_durations": seconds,
            "runtime_snapshots": snapshots,
        }
        self._steps += 1
        if not self._every or self._steps % self._every:
            return
        if self.traces:
            self.last["events"] = list(self._events)
            self._events.clear()
        self._lines.write(self.last)
