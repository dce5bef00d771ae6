"""How busy each lane of the device was in one step, read from a profiler trace: so that one sees where time
goes without a viewer.

Pure: it takes the events of a chrome trace (dictionaries with cat, name, ts, dur in microseconds) and returns
numbers and text. One invariant: a lane is busy when at least one of its operations runs; operations that
overlap count once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LANES = ("compute", "d2h", "h2d")
_GAP_US, _LONGEST = 200.0, 4
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class LaneUse:
    name: str
    operations: int
    busy_ms: float
    idle_ms: float
    nbytes: int
    gap_count: int
    """Stretches of 0.2 ms and more without an operation, between the step's start and its end."""
    longest: tuple[tuple[float, float], ...]
    """(start, length) in ms of the longest of them."""

    @property
    def gigabytes_per_s(self) -> float:
        return self.nbytes / self.busy_ms / 1e6 if self.busy_ms else 0.0


@dataclass(frozen=True, slots=True)
class StepLanes:
    span_ms: float
    lanes: tuple[LaneUse, ...]
    all_idle_ms: float
    compute_idle_while_h2d_ms: float
    compute_idle_while_d2h_ms: float


def lane_of(event: Mapping[str, Any]) -> str | None:
    """The lane of a device event; None for anything that did not run on the device."""
    category = str(event.get("cat", ""))
    if category == "kernel" or category == "gpu_memset":
        return "compute"
    if category == "gpu_memcpy":
        name = str(event.get("name", ""))
        return "d2h" if "DtoH" in name else "h2d" if "HtoD" in name else "compute"
    return None


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def overlap_us(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """How long both were busy; each argument as `merge` returns it."""
    return _total_us(first) + _total_us(second) - _total_us(merge([*first, *second]))


def summarise_events(events: Iterable[Mapping[str, Any]]) -> StepLanes:
    """One step's lanes from the events of its trace."""
    found: dict[str, list[Interval]] = {name: [] for name in LANES}
    nbytes = dict.fromkeys(LANES, 0)
    for event in events:
        lane = lane_of(event)
        if lane is None or "dur" not in event:
            continue
        start = float(event["ts"])
        found[lane].append((start, start + float(event["dur"])))
        nbytes[lane] += int(event.get("args", {}).get("bytes", 0) or 0)
    anything = merge(interval for intervals in found.values() for interval in intervals)
    if not anything:
        return StepLanes(0.0, (), 0.0, 0.0, 0.0)
    first, last = anything[0][0], anything[-1][1]
    busy = {name: merge(intervals) for name, intervals in found.items()}
    lanes = []
    for name in LANES:
        gaps = [gap for gap in _complement(busy[name], first, last) if gap[1] - gap[0] >= _GAP_US]
        longest = sorted(gaps, key=lambda gap: gap[0] - gap[1])[:_LONGEST]
        busy_us = _total_us(busy[name])
        lanes.append(
            LaneUse(
                name=name,
                operations=len(found[name]),
                busy_ms=busy_us / 1e3,
                idle_ms=(last - first - busy_us) / 1e3,
                nbytes=nbytes[name],
                gap_count=len(gaps),
                longest=tuple(((start - first) / 1e3, (end - start) / 1e3) for start, end in longest),
            )
        )
    idle = _complement(busy["compute"], first, last)
    return StepLanes(
        span_ms=(last - first) / 1e3,
        lanes=tuple(lanes),
        all_idle_ms=(last - first - _total_us(anything)) / 1e3,
        compute_idle_while_h2d_ms=overlap_us(idle, busy["h2d"]) / 1e3,
        compute_idle_while_d2h_ms=overlap_us(idle, busy["d2h"]) / 1e3,
    )


def render(step: StepLanes, label: str) -> list[str]:
    """A line a lane: totals and the longest gaps."""
    if not step.lanes:
        return [f"lanes of {label}: the trace holds no device operations"]
    lines = [
        f"lanes of {label}: span {step.span_ms:.1f} ms, all idle {step.all_idle_ms:.1f}; compute idle while "
        f"h2d ran {step.compute_idle_while_h2d_ms:.1f}, while d2h ran {step.compute_idle_while_d2h_ms:.1f}"
    ]
    for lane in step.lanes:
        moved = f", {lane.nbytes / 1e9:.2f} GB at {lane.gigabytes_per_s:.1f} GB/s"
        longest = ", ".join(f"{length:.1f} at {start:.0f}" for start, length in lane.longest)
        lines.append(
            f"  {lane.name:<7} busy {lane.busy_ms:8.1f} idle {lane.idle_ms:8.1f} ms, {lane.operations} ops"
            f"{moved if lane.nbytes and lane.name != 'compute' else ''}; {lane.gap_count} gaps"
            f"{f', longest ms: {longest}' if longest else ''}"
        )
    return lines


def _total_us(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _complement(busy: Sequence[Interval], first: float, last: float) -> list[Interval]:
    starts = [first, *(end for _, end in busy)]
    ends = [*(start for start, _ in busy), last]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if end > start]
