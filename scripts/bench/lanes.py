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

__all__ = [
    "LANES",
    "Gap",
    "LaneUse",
    "StepLanes",
    "lane_of",
    "merge",
    "overlap_us",
    "render",
    "summarise_events",
]

LANES = ("compute", "d2h", "h2d")
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch in which a lane was idle, and how long the other lanes were busy in it."""

    start_ms: float
    length_ms: float
    others_ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class LaneUse:
    name: str
    operations: int
    busy_ms: float
    idle_ms: float
    nbytes: int
    gap_count: int
    """Gaps longer than the threshold, between the step's start and its end."""
    gap_ms: float
    longest: tuple[Gap, ...]
    busy_share: tuple[float, ...]
    """Share of each of the equal slots of the step in which the lane was busy."""

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
    merged: list[list[float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]


def overlap_us(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """How long both were busy; each argument as `merge` returns it."""
    total = 0.0
    at = 0
    for start, end in first:
        while at < len(second) and second[at][1] <= start:
            at += 1
        scan = at
        while scan < len(second) and second[scan][0] < end:
            total += min(end, second[scan][1]) - max(start, second[scan][0])
            scan += 1
    return total


def summarise_events(
    events: Iterable[Mapping[str, Any]], *, gap_threshold_ms: float = 0.2, longest: int = 4, slots: int = 72
) -> StepLanes:
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
    if not any(found.values()):
        return StepLanes(0.0, (), 0.0, 0.0, 0.0)
    first = min(start for intervals in found.values() for start, _ in intervals)
    last = max(end for intervals in found.values() for _, end in intervals)
    busy = {name: merge(intervals) for name, intervals in found.items()}
    idle = {name: _complement(busy[name], first, last) for name in LANES}
    lanes = []
    for name in LANES:
        gaps = [gap for gap in idle[name] if gap[1] - gap[0] >= gap_threshold_ms * 1e3]
        worst = sorted(gaps, key=lambda gap: gap[0] - gap[1])[:longest]
        busy_us = sum(end - start for start, end in busy[name])
        lanes.append(
            LaneUse(
                name=name,
                operations=len(found[name]),
                busy_ms=busy_us / 1e3,
                idle_ms=(last - first - busy_us) / 1e3,
                nbytes=nbytes[name],
                gap_count=len(gaps),
                gap_ms=sum(end - start for start, end in gaps) / 1e3,
                longest=tuple(
                    _gap(gap, first, {other: busy[other] for other in LANES if other != name})
                    for gap in worst
                ),
                busy_share=_shares(busy[name], first, last, slots),
            )
        )
    anything = merge(interval for intervals in busy.values() for interval in intervals)
    return StepLanes(
        span_ms=(last - first) / 1e3,
        lanes=tuple(lanes),
        all_idle_ms=(last - first - sum(end - start for start, end in anything)) / 1e3,
        compute_idle_while_h2d_ms=overlap_us(idle["compute"], busy["h2d"]) / 1e3,
        compute_idle_while_d2h_ms=overlap_us(idle["compute"], busy["d2h"]) / 1e3,
    )


def render(step: StepLanes, label: str) -> list[str]:
    """A few lines a lane: totals, the longest gaps, and a strip with a digit of busyness a slot (# is full,
    blank is idle)."""
    if not step.lanes:
        return [f"lanes of {label}: the trace holds no device operations"]
    lines = [
        f"lanes of {label}: span {step.span_ms:.1f} ms, all idle {step.all_idle_ms:.1f}; compute idle while "
        "h2d ran "
        f"{step.compute_idle_while_h2d_ms:.1f}, while d2h ran {step.compute_idle_while_d2h_ms:.1f}"
    ]
    for lane in step.lanes:
        moved = (
            f", {lane.nbytes / 1e9:.2f} GB at {lane.gigabytes_per_s:.1f} GB/s"
            if lane.nbytes and lane.name != "compute"
            else ""
        )
        lines.append(
            f"  {lane.name:<7} busy {lane.busy_ms:8.1f} idle {lane.idle_ms:8.1f} ms, {lane.operations} "
            f"ops{moved}; "
            f"{lane.gap_count} gaps, {lane.gap_ms:.1f} ms"
        )
        if lane.longest:
            gaps = "; ".join(
                f"{gap.length_ms:.1f} at {gap.start_ms:.0f} "
                f"({', '.join(f'{name} {ms:.1f}' for name, ms in gap.others_ms.items())})"
                for gap in lane.longest
            )
            lines.append(f"          longest: {gaps}")
        lines.append(f"          |{''.join(_glyph(share) for share in lane.busy_share)}|")
    return lines


def _glyph(share: float) -> str:
    if share <= 0.005:
        return " "
    return "#" if share >= 0.995 else str(min(9, int(share * 10)))


def _complement(busy: Sequence[Interval], first: float, last: float) -> list[Interval]:
    idle: list[Interval] = []
    at = first
    for start, end in busy:
        if start > at:
            idle.append((at, start))
        at = max(at, end)
    if at < last:
        idle.append((at, last))
    return idle


def _gap(gap: Interval, first: float, others: Mapping[str, Sequence[Interval]]) -> Gap:
    shared = {name: overlap_us([gap], busy) / 1e3 for name, busy in others.items()}
    return Gap((gap[0] - first) / 1e3, (gap[1] - gap[0]) / 1e3, shared)


def _shares(busy: Sequence[Interval], first: float, last: float, slots: int) -> tuple[float, ...]:
    width = (last - first) / slots
    if width <= 0:
        return (0.0,) * slots
    return tuple(
        overlap_us([(first + slot * width, first + (slot + 1) * width)], busy) / width
        for slot in range(slots)
    )
