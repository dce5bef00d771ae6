"""One recorded stretch of training, usually a step: what ran on which lane, and where saved bytes were. It
can be saved as a Chrome trace, which ui.perfetto.dev and chrome://tracing open: a track for microbatches and
for each lane, and counters of the bytes on the device and of host memory.

One invariant: plain values, complete when they are made; times are device time in ms since the recording
began. An event of a trace says what the timeline says, on the clock of torch.profiler: microseconds of Unix
time since the file's `baseTimeNanoseconds`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

Kind = Literal["forward", "backward", "optimizer", "spill", "restore", "stall"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Work of one lane.

    lane: "compute", "d2h" or "h2d". name: the group's, the same in all microbatches. owner: whose it is, such
    as "s0m1/core_attn"; empty for a stall and an optimizer's step, whose name is its class. nbytes: copied;
    0 for compute.
    A group's forward is from the opening of its hooks to their end. Its backward is from its first read to
    the next thing seen after its last.
    """

    lane: str
    kind: Kind
    name: str
    owner: str
    start_ms: float
    end_ms: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Bytes at a point of the compute lane: of the device by kind, and of the host.

    | name | |
    |---|---|
    | saved_bytes | saved tensors on the device, in any state; at a new peak, that since the sample before |
    | without_bytes | what they would be if none had left: all that the graphs still hold |
    | weights_bytes, gradient_bytes | of modules that there were when the recording began |
    | optimizer_bytes | the state of optimizers that there were then |
    | other_bytes | all else in use on the device: work, buffers; 0 on the simulated device |
    | host_bytes, pinned_bytes | host memory in use, by all clients, and held for them |
    """

    ms: float
    saved_bytes: int
    without_bytes: int
    host_bytes: int
    weights_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    other_bytes: int = 0
    pinned_bytes: int = 0

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes on the device, by kind; the saved ones last."""
        return {
            "weights": self.weights_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "others": self.other_bytes,
            "activations": self.saved_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Spans in the order of their start, and samples in the order of time."""

    spans: Sequence[Span]
    memory: Sequence[MemorySample]
    device_limit_bytes: int | None
    simulated: bool
    """Compute took the host's time, and copies their bytes over the simulated link's rate."""

    began_ns: int = 0
    """Unix time of 0 ms, as torch.profiler has it."""

    @property
    def duration_ms(self) -> float:
        """To the end of the last span or sample."""
        ends = [span.end_ms for span in self.spans] + [sample.ms for sample in self.memory]
        return max(ends, default=0.0)

    def check_recorded(self) -> None:
        """Raises ValueError where there is nothing to draw."""
        if not self.spans:
            raise ValueError(
                "nothing was recorded: no group was open and nothing was copied in the traced block; run a "
                "whole training step with offload on inside `with offload.tracing()`"
            )


_TRACKS = ("microbatches", "forward", "backward", "optimizer", "stalls", "to the host", "to the device")
_TRACK_OF = {
    "forward": 1,
    "backward": 2,
    "optimizer": 3,
    "stall": 4,
    "spill": 5,
    "restore": 6,
}
_PID = 10_000_000  # and the rank: above every process of the system, which a profiler's events have


class Trace:
    """Recording, to be read once its `with` block has ended."""

    def __init__(self) -> None:
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        """Spans of the lanes and samples of memory. Raises RuntimeError inside the `with` block."""
        if self._timeline is None:
            raise RuntimeError(
                "the trace is still being recorded, or was cut off by an exception; read it "
                "after the `with offload.tracing()` block"
            )
        return self._timeline

    def save(self, path: str | Path, profile: str | Path | None = None) -> None:
        """Write a Chrome trace (JSON) for ui.perfetto.dev; compressed where `path` ends in ".gz".

        profile: a file of torch.profiler's `export_chrome_trace`, of the same steps in this process; the
            written file has its events, too. A file of its own stays as it is.
        Raises RuntimeError inside the `with` block, ValueError where nothing was recorded, and for a profile
        of another time or a file that is none. Blocks the host: while it writes.
        """
        timeline = self.timeline
        timeline.check_recorded()
        found: dict[str, Any] = {"traceEvents": [], "displayTimeUnit": "ms"}
        found["baseTimeNanoseconds"] = timeline.began_ns
        if profile is not None:
            found = _profile(profile)
            _check_same_time(found, timeline, profile)
        offset_us = (timeline.began_ns - found.get("baseTimeNanoseconds", 0)) / 1e3
        found["traceEvents"] += _events(timeline, offset_us)
        with _open(path, "w") as file:
            file.write(json.dumps(found, separators=(",", ":")))


def _open(path: str | Path, mode: str) -> Any:
    opens: Any = gzip.open if str(path).endswith(".gz") else open
    return opens(path, f"{mode}t", encoding="utf-8")


def _profile(path: str | Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(_open(path, "r").read())
        if any(event.get("ph") == "X" for event in found["traceEvents"]):
            return found
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no Chrome trace of torch.profiler: {error!r}") from error
    raise ValueError(f"{path} has no timed event: profile the steps that are traced")


def _check_same_time(found: dict[str, Any], timeline: Timeline, profile: str | Path) -> None:
    base_ns = found.get("baseTimeNanoseconds", 0)
    times = [each["ts"] for each in found["traceEvents"] if each.get("ph") == "X"]
    begin_ms, end_ms = ((us * 1e3 + base_ns - timeline.began_ns) / 1e6 for us in (min(times), max(times)))
    if end_ms < 0 or begin_ms > timeline.duration_ms:
        raise ValueError(
            f"{profile} has events from {begin_ms:,.0f} to {end_ms:,.0f} ms after this trace began, which is "
            f"{timeline.duration_ms:,.0f} ms long: they are of other steps. Profile the steps that are traced"
        )


def _events(timeline: Timeline, offset_us: float) -> Iterator[dict[str, Any]]:
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    pid = _PID + rank

    def named(what: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": what, "args": args}

    def at(ms: float) -> float:
        return round(ms * 1e3 + offset_us, 3)

    yield named("process_name", 0, name=f"offload, rank {rank}" + " (simulated link)" * timeline.simulated)
    yield named("process_sort_index", 0, sort_index=_PID + rank)
    for tid, track in enumerate(_TRACKS):
        yield named("thread_name", tid, name=track)
        yield named("thread_sort_index", tid, sort_index=tid)
    common: dict[str, Any] = {"ph": "X", "pid": pid}
    for start_ms, end_ms, label in microbatches(timeline.spans):
        duration_us = round((end_ms - start_ms) * 1e3, 3)
        yield common | {"tid": 0, "ts": at(start_ms), "dur": duration_us, "name": label}
    for span in timeline.spans:
        yield common | {
            "tid": _TRACK_OF[span.kind],
            "ts": at(span.start_ms),
            "dur": round((span.end_ms - span.start_ms) * 1e3, 3),
            "name": span.name or "compute waits for a copy",
            "cat": span.kind,
            "args": {"owner": span.owner} | ({"bytes": span.nbytes} if span.nbytes else {}),
        }
    before: tuple[dict[str, int], dict[str, int]] = {}, {}
    for sample in timeline.memory:
        now = sample.by_kind, {"pinned": sample.pinned_bytes, "in use": sample.host_bytes}
        for name, args, last in zip(("device bytes", "host bytes"), now, before, strict=True):
            if args != last:
                yield {"ph": "C", "pid": pid, "tid": 0, "ts": at(sample.ms), "name": name, "args": args}
        before = now


def microbatches(spans: list[Span] | Any) -> Iterator[tuple[float, float, str]]:
    """Start, end and name, such as "F s0m1", of runs of neighbouring groups of one forward or backward."""
    run: tuple[float, float, str] | None = None
    for span in spans:
        if span.kind not in ("forward", "backward"):
            continue
        label = f"{'F' if span.kind == 'forward' else 'B'} {span.owner.partition('/')[0]}"
        if run is not None and run[2] == label:
            run = run[0], max(run[1], span.end_ms), label
            continue
        if run is not None:
            yield run
        run = span.start_ms, span.end_ms, label
    if run is not None:
        yield run
