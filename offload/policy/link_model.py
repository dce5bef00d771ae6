"""A link of two directions on a clock: one queue each, in order, slower while both are busy.

One invariant: the clock only moves forward, and what is issued at a moment changes nothing before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from offload.policy.actions import Rates

__all__ = ["D2H", "H2D", "Link"]

D2H, H2D = 0, 1


class Link:
    """Copies are issued with a time and asked for their end; in between the two queues run dry at the rates
    of `Rates`."""

    def __init__(self, rates: Rates) -> None:
        self._alone = (rates.d2h_bytes_per_s, rates.h2d_bytes_per_s)
        self._shared = rates.shared
        self._now_s = 0.0
        self._queues: tuple[deque[tuple[Hashable, int]], deque[tuple[Hashable, int]]] = (deque(), deque())
        self._head_left: list[float] = [0.0, 0.0]  # bytes of the first of each queue that are still to go
        self._ends_s: dict[tuple[int, Hashable], float] = {}

    def issue(self, lane: int, key: Hashable, nbytes: int, now_s: float) -> None:
        """Queue a copy at `now_s`, which is no earlier than any moment named before. A key's later copy
        replaces its earlier end."""
        while self._now_s < now_s and any(self._queues):
            self._run(now_s - self._now_s)
        self._now_s = max(self._now_s, now_s)
        self._ends_s.pop((lane, key), None)
        if not self._queues[lane]:
            self._head_left[lane] = nbytes
        self._queues[lane].append((key, nbytes))

    def finish(self, lane: int, key: Hashable) -> float:
        """When the copy ends if nothing more is issued before that."""
        while (lane, key) not in self._ends_s:
            if not self._queues[lane]:
                raise KeyError(f"no copy of {key} was issued in lane {lane}")
            self._run(float("inf"))
        return self._ends_s[lane, key]

    def _run(self, at_most_s: float) -> None:
        """Run to the next end of a copy, or for `at_most_s`."""
        d2h, h2d = self._queues
        rates = self._shared if d2h and h2d else self._alone
        left_s = [
            self._head_left[lane] / rates[lane] if self._queues[lane] else float("inf") for lane in (D2H, H2D)
        ]
        step_s = min(at_most_s, *left_s)
        self._now_s += step_s
        for lane, queue in enumerate(self._queues):
            if queue and left_s[lane] <= step_s:
                self._ends_s[lane, queue.popleft()[0]] = self._now_s
                self._head_left[lane] = queue[0][1] if queue else 0.0
            elif queue:
                self._head_left[lane] -= step_s * rates[lane]
