#!/usr/bin/env python3
"""Draw step time over device memory: every measured row a point, ours a curve.

    python scripts/headline.py                                    docs/headline.png, from the tables of
                                                                  docs/benchmarks.md
    python scripts/headline.py RUN.json [...] --picture FILE.png  from files that bench_stage.py --out wrote;
                                                                  a panel a workload
    python scripts/headline.py --bound                            print the page's table of computed bounds

The picture carries the figures that it was drawn from, as JSON in its PNG text "data", so a test can say that
they are the page's. One invariant: only what was measured is a point; what was computed is the thin line, and
its label says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from bench.points import Panel, Point, Series, panels_of_page, panels_of_runs
from offload.telemetry.drawing import require_matplotlib

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, PICTURE = DOCS / "benchmarks.md", DOCS / "headline.png"
_DPI = 120
_COLORS_OF_FILE = 64
_BELOW = 0.005
"""How far the axis goes below 1, where names have room."""
_WRAP = 26
"""Characters of a line of a point's name."""
_TICKS = (1.0, 1.02, 1.05, 1.1, 1.15, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
# marker, colour, legend; lines for what is a curve
_LOOKS: dict[Series, tuple[str, str, str]] = {
    "auto": ("o", "#004488", "ours, mode auto within a total"),
    "groups": ("s", "#BB5566", "ours, all groups moved under a limit"),
    "ours": ("D", "#DDAA33", "ours, other modes"),
    "peer": ("X", "#777777", "torch and peers"),
}
_OFFSETS = [
    (dx * far, dy * far)
    for far in (1.0, 1.8, 2.8, 4.0, 5.5, 7.0, 9.0)
    for dx, dy in ((8, 0), (6, 8), (6, -8), (-8, 0), (-6, 8), (-6, -8), (0, 10), (0, -10))
]
"""Points from a marker to its name, the nearest first."""
_FAR = 8.0
"""A name that is a point farther away is as bad as one that covers so many more square pixels."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, help="files of bench_stage.py --out; none: the page")
    parser.add_argument("--picture", type=Path, help="PNG to write (without runs: docs/headline.png)")
    parser.add_argument("--bound", action="store_true", help="print the page's table of bounds, and no more")
    args = parser.parse_args(arguments)
    if args.bound:
        from bench.least import bound_lines

        print(*bound_lines(panels_of_page(PAGE.read_text())), sep="\n")
        return 0
    if args.runs and args.picture is None:
        parser.error("give --picture FILE.png: docs/headline.png is drawn from the page alone")
    if args.runs:
        panels = panels_of_runs([json.loads(path.read_text()) for path in args.runs])
    else:
        panels = panels_of_page(PAGE.read_text())
    path = args.picture or PICTURE
    save(panels, path)
    print(f"{path}: {sum(len(panel.points) for panel in panels)} points, {path.stat().st_size:,} bytes")
    return 0


def save(panels: Sequence[Panel], path: Path) -> None:
    figure = draw(panels)
    from PIL import Image, PngImagePlugin  # matplotlib needs it

    figure.set_dpi(_DPI)
    figure.canvas.draw()
    about = PngImagePlugin.PngInfo()
    about.add_text("data", json.dumps([panel.as_dict() for panel in panels]))
    picture = Image.fromarray(numpy.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    picture.quantize(_COLORS_OF_FILE).save(path, pnginfo=about, optimize=True)


def draw(panels: Sequence[Panel]) -> Any:
    """The figure, with axes for each panel. Raises ImportError without matplotlib."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(panels), 5.2), layout="constrained")
    FigureCanvasAgg(figure)  # labels are placed by their size
    rows = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(rows, panels, strict=True):
        _panel(axes, panel)
    rows[0].set_ylabel("step time over nothing offloaded (stretched near 1)")
    named = {
        label: handle
        for axes in rows
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        named.values(), named.keys(), loc="outside lower center", ncols=5, fontsize=9, frameon=False
    )
    figure.canvas.draw()
    figure.set_layout_engine("none")  # labels stand where the final axes are
    for axes, panel in zip(rows, panels, strict=True):
        _labels(axes, panel.points)
    return figure


def _panel(axes: Any, panel: Panel) -> None:
    most = max(point.over_nothing for point in panel.points)
    axes.set_yscale("function", functions=(_stretch, _shrink))
    axes.set_ylim(1 - _BELOW, 1 + (most - 1) * 1.25)
    ticks = [tick for tick in _TICKS if tick <= most * 1.05]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    widest = max(point.active_gb for point in panel.points)
    axes.set_xlim(0, widest * 1.16)
    axes.set_xlabel("active device memory at the peak (GB)")
    axes.set_title(panel.title, fontsize=11)
    axes.grid(alpha=0.3)
    for series, (marker, color, label) in _LOOKS.items():
        own = sorted(
            (point.active_gb, point.over_nothing) for point in panel.points if point.series == series
        )
        if not own:
            continue
        is_curve = series in ("auto", "groups")
        axes.plot(
            [active for active, _ in own],
            [over for _, over in own],
            ls=("-" if series == "auto" else "--") if is_curve else "",
            lw=2.4 if series == "auto" else 1.2,
            marker=marker,
            ms=9 if series == "auto" else 7,
            color=color,
            mec="#222222",
            mew=0.6,
            label=label,
            zorder=4 if series == "auto" else 3,
            clip_on=False,
        )
    if panel.bound:
        totals, least = zip(*panel.bound, strict=True)
        axes.plot(totals, least, color="#222222", lw=0.9, ls=":", label="bound of any mixture (computed)")


def _stretch(over: Any) -> Any:
    return numpy.sqrt(numpy.clip(numpy.asarray(over, float) - 1 + _BELOW, 0, None))


def _shrink(height: Any) -> Any:
    return numpy.square(numpy.asarray(height, float)) + 1 - _BELOW


def _labels(axes: Any, points: Sequence[Point]) -> None:
    """A name beside each point, as near as it can be without covering a point, a line or another name."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    canvas = axes.figure.canvas.get_renderer()
    middles = [axes.transData.transform((point.active_gb, point.over_nothing)) for point in points]
    taken = [Bbox.from_bounds(x - 8, y - 8, 16, 16) for x, y in middles]
    for line in axes.lines:
        if line.get_linestyle() != "None":
            ends = axes.transData.transform(line.get_xydata())
            steps = numpy.linspace(0, 1, 20)[:, None]
            for start, end in itertools.pairwise(ends):
                taken += [Bbox.from_bounds(x - 2, y - 2, 4, 4) for x, y in start + steps * (end - start)]
    inside = axes.get_window_extent(canvas)
    for point in sorted(points, key=lambda point: (point.series != "auto", -point.over_nothing)):
        best: tuple[float, Any, Any] | None = None
        for offset in _OFFSETS:
            dx, dy = offset
            away = _FAR * math.hypot(dx, dy)
            if best is not None and best[0] <= away:
                break
            text = axes.annotate(
                textwrap.fill(point.name, _WRAP, break_long_words=False),
                (point.active_gb, point.over_nothing),
                offset,
                textcoords="offset points",
                ha="left" if dx > 0 else "right" if dx < 0 else "center",
                va="center" if dx and not dy else "bottom" if dy > 0 else "top",
                fontsize=8,
                fontweight="bold" if point.series == "auto" else "normal",
                arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "#999999", "shrinkA": 0, "shrinkB": 4},
                zorder=5,
            )
            text.update_positions(canvas)
            box = Text.get_window_extent(text, canvas)  # an annotation's own has its arrow in it
            cost = away + sum(_shared(box, other) for other in taken) + _outside(box, inside)
            if best is not None and best[0] <= cost:
                text.remove()
                continue
            if best is not None:
                best[1].remove()
            best = cost, text, box
        assert best is not None
        taken.append(best[2])


def _shared(box: Any, other: Any) -> float:
    """Square pixels that both cover."""
    width = min(box.x1, other.x1) - max(box.x0, other.x0)
    height = min(box.y1, other.y1) - max(box.y0, other.y0)
    return max(0.0, width) * max(0.0, height)


def _outside(box: Any, inside: Any) -> float:
    """Square pixels of a label that lie outside the axes."""
    return float(box.width * box.height - _shared(box, inside))


if __name__ == "__main__":
    sys.exit(main())
