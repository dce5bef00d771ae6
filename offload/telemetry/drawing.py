"""Draws a timeline: memory over it by kind, as it was and if nothing had left, and what its lanes did.

One invariant: it draws what the timeline says and computes nothing but units. matplotlib, the extra `plot`,
is imported when something is drawn.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.telemetry.timeline import MemorySample, Timeline, microbatches

_ROWS = {  # middle, height, label
    "chunk": (4.25, 0.5, "microbatch"),
    "compute": (3.5, 0.72, "compute"),
    "stall": (3.0, 0.2, "stalls"),
    "d2h": (2.3, 0.72, "to the host"),
    "h2d": (1.4, 0.72, "to the device"),
}
_COLORS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#999933", "#44AA99")
_STALL = "#DD4444"
KIND_COLORS = {
    "weights": "#999933",
    "gradients": "#CCBB44",
    "optimizer": "#AA3377",
    "others": "#999999",
    "activations": "#4477AA",
}
_WITHOUT, _HOST, _LIMIT = "if nothing had left", "on the host", "the limit of saved tensors"
_HOST_COLOR = "#228833"
MEMORY_LINES = {
    f"line: {_WITHOUT}": "currentColor",
    f"broken line: {_HOST}": _HOST_COLOR,
    f"dotted line, where it is near: {_LIMIT}": _STALL,
}
_BACKWARD = 0.55  # opacity
_LABEL_SHARE = 0.009  # of the width for a character of a label
_DPI = 150
_INK = "#010203"  # drawn in the color of the page's text


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
    """Write the picture; the format is that of the file's suffix. Raises ImportError without matplotlib, and
    ValueError where nothing was recorded."""
    timeline.check_recorded()
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 6.6), layout="constrained")
    memory, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    figure.suptitle(title, fontsize=12)
    _memory(memory, timeline)
    place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)}
    beside = {**place, "frameon": False, "fontsize": 9}
    memory.legend(**beside)
    _lanes(lanes, timeline, 2000)
    handles = [Patch(color=color, label=name) for name, color in group_colors(timeline).items()]
    if any(span.kind == "backward" for span in timeline.spans):
        handles.append(Patch(color="#555555", alpha=_BACKWARD, label="paler: backward"))
    if any(span.kind == "stall" for span in timeline.spans):
        handles.append(Patch(color=_STALL, label="stall: compute waits for a copy"))
    lanes.legend(handles=handles, **beside)
    memory.set_xlabel("")
    figure.savefig(path, dpi=_DPI)


def svg_of_memory(timeline: Timeline, inches: tuple[float, float]) -> str:
    """The memory of a step, for a page of HTML; width and height are of the text's size."""
    return _svg("memory", lambda axes: _memory(axes, timeline, round(20 * inches[0])), inches)


def svg_of_lanes(timeline: Timeline, inches: tuple[float, float]) -> str:
    """The lanes of a step, likewise."""
    return _svg("lanes", lambda axes: _lanes(axes, timeline, round(32 * inches[0])), inches)


def _svg(name: str, drawn: Any, inches: tuple[float, float]) -> str:
    """An element in the colors of the text around it, whose ids are its own."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    parts = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings: Any = dict.fromkeys(parts, _INK)
    settings |= {"svg.fonttype": "none", "svg.hashsalt": f"{name} {inches}"}
    settings |= {"text.usetex": False, "text.parse_math": False}
    with mpl.rc_context(settings):
        figure = Figure(figsize=inches, layout="constrained")
        drawn(figure.subplots())
        file = io.StringIO()
        none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=none)
    text = re.sub(r'<g id="[^"]*"', "<g", file.getvalue()).replace(_INK, "currentColor")
    return re.sub(r"(\.\d\d)\d+", r"\1", text[text.index("<svg") :])  # a 100th of a point is enough


def _memory(axes: Any, timeline: Timeline, finest: int | None = None) -> None:
    """finest: points of time at most."""
    samples = timeline.memory if finest is None else _thinned(timeline, finest)
    scale, _ = time_unit(timeline.duration_ms)
    most = max((sample.without_bytes + _beside(sample) for sample in samples), default=0)
    most = max([most, *(max(_beside(s) + s.saved_bytes, s.host_bytes) for s in samples)])
    size, unit = byte_unit(most)
    times = [sample.ms * scale for sample in samples]
    below = [0.0] * len(samples)
    for kind, color in KIND_COLORS.items():
        above = [under + sample.by_kind[kind] / size for under, sample in zip(below, samples, strict=True)]
        if kind == "activations" or above != below:
            label = "saved, with offload" if kind == "activations" else kind
            axes.fill_between(times, above, below, step="post", color=color, lw=0, alpha=0.7, label=label)
        below = above
    beside = [_beside(sample) / size for sample in samples]
    without = [sample.without_bytes / size + under for under, sample in zip(beside, samples, strict=True)]
    axes.step(times, without, where="post", color=_INK, lw=1.4, label=_WITHOUT)
    host = [sample.host_bytes / size for sample in samples]
    axes.step(times, host, where="post", color=_HOST_COLOR, lw=1.2, ls="--", label=_HOST)
    limit = timeline.device_limit_bytes
    if limit is not None and limit <= most:
        limits = [limit / size + under for under in beside]
        axes.step(times, limits, where="post", color=_STALL, lw=1.0, ls=":", label=_LIMIT)
    axes.set_ylabel(f"{'device' if any(beside) else 'saved'} memory ({unit})")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    _time_axis(axes, timeline)


def _beside(sample: MemorySample) -> int:
    """Bytes on the device that are not saved tensors."""
    return sum(sample.by_kind.values()) - sample.saved_bytes


def _thinned(timeline: Timeline, finest: int) -> list[MemorySample]:
    """Samples with most on the device, one of each stretch of time, and the last of all."""
    found: dict[int, MemorySample] = {}
    duration_ms = timeline.duration_ms or 1.0
    for sample in timeline.memory:
        stretch = int(sample.ms / duration_ms * finest)
        before = found.get(stretch)
        if before is None or sum(sample.by_kind.values()) > sum(before.by_kind.values()):
            found[stretch] = sample
    return [*found.values(), *timeline.memory[-1:]]


def _time_axis(axes: Any, timeline: Timeline) -> None:
    scale, unit = time_unit(timeline.duration_ms)
    simulated = f",{' ' if axes.figure.get_figwidth() > 6 else chr(10)}compute on the host, copies simulated"
    axes.set_xlabel(f"device time ({unit})" + simulated * timeline.simulated)
    axes.set_xlim(0, timeline.duration_ms * scale or 1.0)


def group_colors(timeline: Timeline) -> dict[str, str]:
    """By group, and optimizer; there are fewer colors than a model may have groups."""
    names = dict.fromkeys(span.name for span in timeline.spans if span.name)
    return {name: _COLORS[at % len(_COLORS)] for at, name in enumerate(names)}


def _lanes(axes: Any, timeline: Timeline, finest: int) -> None:
    """finest: parts of the width, of which each shows one short span of a lane at most."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    colors = group_colors(timeline)
    duration_ms = timeline.duration_ms or 1.0
    scale, _ = time_unit(duration_ms)
    chunks = [*microbatches(timeline.spans)]
    spans = [("chunk", "", "", start_ms, end_ms) for start_ms, end_ms, _ in chunks]
    for span in timeline.spans:
        row = "stall" if span.kind == "stall" else span.lane
        spans.append((row, span.kind, span.name, span.start_ms, span.end_ms))
    for (row, kind, name), bars in _merged(spans, duration_ms / finest).items():
        middle, height, _ = _ROWS[row]
        low, high = middle - height / 2, middle + height / 2
        outlines = [
            Outline([(s, low), (e, low), (e, high), (s, high), (s, low)], closed=True)
            for s, e in ((start_ms * scale, end_ms * scale) for start_ms, end_ms in bars)
        ]
        color = colors.get(name, _STALL)
        style: dict[str, Any] = {"facecolor": color, "edgecolor": color, "lw": 0.4}
        if row == "chunk":
            style = {"facecolor": "#88888830", "edgecolor": "#888888", "lw": 0.6}
        elif kind == "backward":
            style["alpha"] = _BACKWARD
        axes.add_artist(PathPatch(Outline.make_compound_path(*outlines), **style))
    middle, *_ = _ROWS["chunk"]
    width = axes.figure.get_figwidth() / 11 / _LABEL_SHARE
    for start_ms, end_ms, label in chunks:
        if (end_ms - start_ms) / duration_ms * width > len(label):
            centre = (start_ms + end_ms) / 2 * scale
            axes.text(centre, middle, label, ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_yticks([row[0] for row in _ROWS.values()], [row[2] for row in _ROWS.values()])
    axes.set_ylim(0.9, 4.65)
    axes.grid(axis="x", alpha=0.3)
    _time_axis(axes, timeline)


_Bars = dict[tuple[str, str, str], list[tuple[float, float]]]


def _merged(spans: Sequence[tuple[str, str, str, float, float]], least_ms: float) -> _Bars:
    """Start and end of the spans by row, kind and name; what lies inside others comes later, and is drawn
    over them. A span shorter than `least_ms` is drawn as long as that, if no other one is drawn there."""
    found: _Bars = {}
    longest: dict[tuple[str, str, str], float] = {}
    filled: set[tuple[str, int]] = set()
    for *key, start_ms, end_ms in spans:
        row, kind, name = key
        if end_ms - start_ms < least_ms:
            cell = row, int(start_ms / least_ms)
            if cell in filled:
                continue
            filled.add(cell)
            start_ms, end_ms = cell[1] * least_ms, (cell[1] + 1) * least_ms
        bars = found.setdefault((row, kind, name), [])
        longest[row, kind, name] = max(longest.get((row, kind, name), 0.0), end_ms - start_ms)
        bars.append((start_ms, end_ms))
    return {key: found[key] for key in sorted(found, key=lambda key: -longest[key])}


def time_unit(duration_ms: float) -> tuple[float, str]:
    """Factor that a time in ms is multiplied with, and its unit."""
    if duration_ms >= 10_000:
        return 1e-3, "s"
    return (1.0, "ms") if duration_ms >= 1 else (1e3, "µs")


def byte_unit(nbytes: int) -> tuple[int, str]:
    """Bytes of the unit, and its name; units of 1000, as wherever this project says MB or GB."""
    for size, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if nbytes >= size:
            return size, name
    return 1, "bytes"
