"""Draws a timeline: memory over it, as it was and if nothing had left, and what its lanes did.

One invariant: it draws what the timeline says and computes nothing but units. matplotlib, the extra `plot`,
is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.telemetry.timeline import Span, Timeline
from offload.telemetry.trace import microbatches

__all__ = ["byte_unit", "draw", "require_matplotlib", "time_unit"]

_ROWS = {  # middle, height, label
    "chunk": (4.25, 0.5, "microbatch"),
    "compute": (3.5, 0.72, "compute"),
    "stall": (3.0, 0.2, "stalls"),
    "d2h": (2.3, 0.72, "to the host"),
    "h2d": (1.4, 0.72, "to the device"),
}
_COLORS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#999933", "#44AA99")
_STALL = "#BB0000"
_FORWARD, _BACKWARD = 1.0, 0.55  # opacity
_LABEL_SHARE = 0.009  # of the width for a character of a label
_DPI = 150


def require_matplotlib() -> None:
    """Raises ImportError, with the way to install it, where matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "a plot needs matplotlib, which is not installed: pip install matplotlib, or in a checkout "
            "pip install '.[plot]'"
        ) from error


def draw(timeline: Timeline, path: str | Path, *, title: str) -> None:
    """Write the picture; the format is that of the file's suffix. Raises ImportError without matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.6), layout="constrained")
    memory, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    figure.suptitle(title, fontsize=12)
    scale, unit = time_unit(timeline.duration_ms)
    _memory(memory, timeline, scale)
    _lanes(lanes, timeline, scale)
    lanes.set_xlabel(
        f"device time ({unit})" + (", compute on the host, copies on a simulated link" * timeline.simulated)
    )
    lanes.set_xlim(0, timeline.duration_ms * scale or 1.0)
    figure.savefig(path, dpi=_DPI)


def _memory(axes: Any, timeline: Timeline, scale: float) -> None:
    samples = timeline.memory
    most = max((sample.without_bytes + sample.other_bytes for sample in samples), default=0)
    most = max([most, *(sample.host_bytes for sample in samples)], default=0)
    size, unit = byte_unit(most)
    times = [sample.ms * scale for sample in samples]
    other = [sample.other_bytes / size for sample in samples]
    held = [(sample.saved_bytes + sample.other_bytes) / size for sample in samples]
    without = [(sample.without_bytes + sample.other_bytes) / size for sample in samples]
    host = [sample.host_bytes / size for sample in samples]
    if any(other):
        axes.fill_between(times, other, step="post", color="#BBBBBB", label="weights, gradients, work")
    axes.fill_between(
        times, held, other, step="post", color="#4477AA", alpha=0.6, label="saved, with offload"
    )
    axes.step(times, without, where="post", color="#222222", lw=1.4, label="if nothing had left")
    axes.step(times, host, where="post", color="#228833", lw=1.2, ls="--", label="on the host")
    limit = timeline.device_limit_bytes
    if limit is not None and not any(other):
        axes.axhline(limit / size, color=_STALL, lw=1.0, ls=":", label="device_limit")
    axes.set_ylabel(f"{'device' if any(other) else 'saved'} memory ({unit})")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9, frameon=False)


def _lanes(axes: Any, timeline: Timeline, scale: float) -> None:
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(span.name for span in timeline.spans if span.name))
    colors = {name: _COLORS[at % len(_COLORS)] for at, name in enumerate(names)}
    for span in _innermost_last(timeline.spans):
        middle, height, _ = _ROWS["stall" if span.kind == "stall" else span.lane]
        color = colors.get(span.name, _STALL)
        axes.broken_barh(
            [(span.start_ms * scale, (span.end_ms - span.start_ms) * scale)],
            (middle - height / 2, height),
            facecolor=color,
            edgecolor=color,
            lw=0.4,  # so that a copy of a few microseconds is still seen
            alpha=_BACKWARD if span.kind == "backward" else _FORWARD,
        )
    middle, height, _ = _ROWS["chunk"]
    for start_ms, end_ms, label in microbatches(timeline.spans):
        axes.broken_barh(
            [(start_ms * scale, (end_ms - start_ms) * scale)],
            (middle - height / 2, height),
            facecolor="#EEEEEE",
            edgecolor="#888888",
            lw=0.6,
        )
        if (end_ms - start_ms) / (timeline.duration_ms or 1.0) > _LABEL_SHARE * len(label):
            centre = (start_ms + end_ms) / 2 * scale
            axes.text(centre, middle, label, ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_yticks([row[0] for row in _ROWS.values()], [row[2] for row in _ROWS.values()])
    axes.set_ylim(0.9, 4.65)
    axes.grid(axis="x", alpha=0.3)
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    if any(span.kind == "backward" for span in timeline.spans):
        handles.append(Patch(color="#555555", alpha=_BACKWARD, label="paler: backward"))
    if any(span.kind == "stall" for span in timeline.spans):
        handles.append(Patch(color=_STALL, label="stall: compute waits for a copy"))
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9, frameon=False)


def _innermost_last(spans: Sequence[Span]) -> list[Span]:
    """So that a group inside another one is drawn over it, and a stall over both."""
    return sorted(spans, key=lambda span: (span.kind == "stall", span.start_ms - span.end_ms))


def time_unit(duration_ms: float) -> tuple[float, str]:
    """What a time in ms is multiplied with, and its unit."""
    if duration_ms >= 10_000:
        return 1e-3, "s"
    return (1.0, "ms") if duration_ms >= 1 else (1e3, "µs")


def byte_unit(nbytes: int) -> tuple[int, str]:
    """Bytes of the unit, and its name; units of 1000, as wherever this project says MB or GB."""
    for size, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if nbytes >= size:
            return size, name
    return 1, "bytes"
