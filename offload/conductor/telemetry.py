"""One JSON line every so many steps, and the event trace.

One invariant: a line has the fields that its writer gave it, and `events` beside them where they are traced.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from offload.conductor.config import ConductorConfig
from offload.telemetry.records import JsonLines

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

    def step_ended(self, line: dict[str, Any]) -> None:
        """A step is over, with this line. Raises OSError where it cannot be written."""
        self.last = line
        self._steps += 1
        if self._every and self._steps % self._every == 0:
            if self.traces:
                line["events"] = list(self._events)
                self._events.clear()
            self._lines.write(line)
