"""A link of two directions on a clock: one queue each, in order, slower while both are busy.

One invariant: the clock only moves forward, and what is issued at a moment changes nothing before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from offload.policy.actions import Rates

D2H, H2D = 0, 1
_FOR_EVER = float("inf")


class Link:
    """Copies are issued with a time and asked for their end; in between the two queues run dry at the rates
    of `Rates`."""

    def __init__(self, rates: Rates) -> None:
        self._alone = (rates.d2h_bytes_per_s, rates.h2d_bytes_per_s)
        self._shared = rates.shared
        self._now_s = 0.0
        self._queues: tuple[deque[tuple[Hashable, int]], deque[tuple[Hashable, int]]] = (deque(), deque())
        self._head_left: list[float] = [0.0, 0.0]  # bytes of the first of each queue that are still to go
        self._ends_s: tuple[dict[Hashable, float], dict[Hashable, float]] = ({}, {})  # by lane

    def issue(self, lane: int, key: Hashable, nbytes: int, now_s: float) -> None:
        """Queue a copy at `now_s`, which is no earlier than any moment named before. A key's later copy
        replaces its earlier end."""
        queues = self._queues
        while self._now_s < now_s and (queues[D2H] or queues[H2D]):
            self._run(now_s - self._now_s)
        self._now_s = max(self._now_s, now_s)
        self._ends_s[lane].pop(key, None)
        if not queues[lane]:
            self._head_left[lane] = nbytes
        queues[lane].append((key, nbytes))

    def finish(self, lane: int, key: Hashable) -> float:
        """When the copy ends if nothing more is issued before that."""
        ends_s = self._ends_s[lane]
        while key not in ends_s:
            if not self._queues[lane]:
                raise KeyError(f"no copy of {key} was issued in lane {lane}")
            self._run(_FOR_EVER)
        return ends_s[key]

    def _run(self, at_most_s: float) -> None:
        """Run to the next end of a copy, or for `at_most_s`. A search calls it most of all, so each lane is
        written out."""
        d2h, h2d = self._queues
        out_rate, in_rate = self._shared if d2h and h2d else self._alone
        left = self._head_left
        out_s = left[D2H] / out_rate if d2h else _FOR_EVER
        in_s = left[H2D] / in_rate if h2d else _FOR_EVER
        step_s = min(at_most_s, out_s, in_s)
        self._now_s += step_s
        if out_s <= step_s:
            self._ends_s[D2H][d2h.popleft()[0]] = self._now_s
            left[D2H] = d2h[0][1] if d2h else 0.0
        else:
            left[D2H] -= step_s * out_rate
        if in_s <= step_s:
            self._ends_s[H2D][h2d.popleft()[0]] = self._now_s
            left[H2D] = h2d[0][1] if h2d else 0.0
        else:
            left[H2D] -= step_s * in_rate
