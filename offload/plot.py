"""A picture of a step: what it held on the device, what it would hold had nothing left, and what lanes did;
or of the plan of mode "auto".

    with offload.tracing() as trace:
        train_one_step()
    offload.plot("step.png", trace)
    offload.plot("plan.png", handle.explain())

One invariant: nothing is recorded unless it is asked for, and an asked-for picture is drawn or an error says
why not.

Of a plan each bar is a figure that the explanation has, and nothing but units is computed here. matplotlib,
the extra `plot`, is imported when something is drawn.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offload.groups.recorder import Recorder
from offload.marks import default_manager
from offload.planner.explained import BlockShare, Explanation
from offload.policy.actions import ChunkKey
from offload.policy.mixture import MixedPlan
from offload.telemetry.drawing import byte_unit, draw, require_matplotlib, time_unit
from offload.telemetry.figures import saved_text, stall_text
from offload.telemetry.records import can_be_written
from offload.telemetry.timeline import Timeline, Trace

__all__ = ["Trace", "plot", "tracing"]


@contextmanager
def tracing(path: str | Path | None = None) -> Iterator[Trace]:
    """Record what is run inside: one step, usually one after the third, when the plan stands.

    path: where a Chrome trace of it goes, which ui.perfetto.dev opens: lanes with their groups, microbatches,
        and bytes by kind. None writes none; `trace.save()` does, also into one file with torch.profiler's.
    Each group and copy costs some timed events meanwhile, and no wait. At the end the host is blocked until
    the device has done what was recorded. Raises RuntimeError inside another `tracing()`, ValueError for a
    path that cannot be written, and at the end where nothing was recorded for it.
    """
    if path is not None and not can_be_written(Path(path)):
        raise ValueError(f"tracing({str(path)!r}) cannot write that: give a file in a folder that is there")
    recorder, trace = Recorder(default_manager().tracker), Trace()
    recorder.start()
    try:
        yield trace
        trace._timeline = recorder.finish()
    finally:
        recorder.stop()
    if path is not None:
        trace.save(path)


def plot(path: str | Path, shown: Trace | Explanation, *, title: str | None = None) -> None:
    """Draw a recorded step, or what mode "auto" chose, into the file `path`.

    shown: a trace. Above, saved bytes on the device with offload and without; below, the lanes with the names
        of the groups. On a GPU the rest of the device's memory lies beneath.
        Or what `handle.explain()` returns. Above, a step's memory under its total, and its predicted time
        beside that of plain blocks and the least possible; below, what is kept, moved and recomputed of each
        block in each microbatch.
    title: None says what a report's first line says, of the traced step, or the state of the plan.
    Raises ImportError without matplotlib (the extra `plot`), ValueError for a trace in which nothing was
    saved or copied, or before there is a plan, and TypeError for anything else. Blocks the host: while it
    draws.
    """
    if isinstance(shown, Explanation):
        figure_of(shown, title=title).savefig(path, dpi=_DPI)
        return
    if not isinstance(shown, Trace):
        raise TypeError(
            f"plot() was given a {type(shown).__name__} to draw, must be what offload.tracing() yields or "
            "what handle.explain() returns: plot('step.png', trace)"
        )
    timeline = shown.timeline
    draw(timeline, path, title=_title(timeline) if title is None else title)


def _title(timeline: Timeline) -> str:
    saved = saved_text(
        max(sample.saved_bytes for sample in timeline.memory),
        max(sample.without_bytes for sample in timeline.memory),
        sum(span.nbytes for span in timeline.spans if span.kind == "spill"),
    )
    stall_ms = sum(span.end_ms - span.start_ms for span in timeline.spans if span.kind == "stall")
    return f"{saved}; {stall_text(stall_ms, timeline.duration_ms)}"


_KEPT, _MOVED, _RECOMPUTED = "#004488", "#DDAA33", "#BB5566"  # told apart in grey as well
_REST, _FREE = "#BBBBBB", "#F2F2F2"
_WAITS, _PEAK = "#222222", "#7799BB"
_DPI = 150
_ROW, _MOST_HEIGHT = 0.24, 11.0  # inches, of a block and of the picture
_MOST_LABELS = 40
_CELL = 0.92  # of a column, where the call that saves most fills it


def figure_of(explained: Explanation, *, title: str | None = None) -> Any:
    """The matplotlib figure. title: None for the state of the plan.

    Above: the device's memory, and the step's time beside that of plain blocks. Below: a row a
    block; a cell is its call in one microbatch, and the bars beside them are all calls together.
    Raises ImportError without matplotlib, ValueError before there is a plan. Blocks the host: as `str` of the
    explanation does, about 0.1 s.
    """
    if explained.plan is None:
        why = explained.state.partition("\n")[0]
        makes_one = (
            "" if explained.mode == "auto" else f"; that is mode {explained.mode}, and 'auto' makes one"
        )
        raise ValueError(f"there is no plan to draw: {why}{makes_one}")
    require_matplotlib()
    from matplotlib.figure import Figure

    shares, calls = explained.shares, explained.calls
    microbatches = sorted({chunk[1] for chunk, _ in calls})
    height = min(_MOST_HEIGHT, 3.6 + _ROW * len(shares))
    figure: Any = Figure(figsize=(12, height), layout="constrained")
    figure.suptitle(f"auto: {explained.state}" if title is None else title, fontsize=12)
    above, below = figure.subfigures(2, 1, height_ratios=(1.75, height - 1.75))
    memory, times = above.subplots(1, 2)
    _memory(memory, explained, explained.plan)
    _times(times, explained.plan)
    cells, sums = below.subplots(1, 2, sharey=True, width_ratios=(max(1, min(4, len(microbatches) / 2)), 1))
    rows = {share.name: row for row, share in enumerate(shares)}
    _cells(cells, calls, rows, microbatches)
    _sums(sums, shares)
    every = -(-len(rows) // _MOST_LABELS)
    cells.set_yticks(list(rows.values())[::every], list(rows)[::every], fontsize=8)
    cells.set_ylabel("block", fontsize=9)
    cells.set_ylim(len(rows) - 0.4, -0.6)
    below.legend(
        *sums.get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=9, frameon=False
    )
    below.supxlabel(textwrap.fill(" ".join(explained.margins()), 150), fontsize=9)
    return figure


def _memory(axes: Any, explained: Explanation, plan: MixedPlan) -> None:
    """One bar: what the rest takes, then the plan's peak, then what is free below the total."""
    rest, limit, total = explained.rest_bytes or 0, explained.limit_bytes, explained.total_bytes
    peak = plan.predicted_peak_bytes
    most = max(rest + peak, rest + (limit or 0), total or 0)
    size, unit = byte_unit(most)
    parts = [
        ("weights, gradients, working set", rest, _REST),
        ("saved or made again, at the peak", peak, _PEAK),
        ("free", max(0, (total or 0) - rest - peak), _FREE),
    ]
    left, handles = 0.0, []
    for name, nbytes, color in parts:
        if nbytes:
            label = f"{name}: {nbytes / size:.2f}"
            width = nbytes / size
            handles.append(axes.barh(0, width, 0.5, left=left, color=color, edgecolor="#555555", label=label))
            left += width
    if limit is not None:
        label = f"limit of what is saved or made again: {limit / size:.2f}"
        handles.append(axes.axvline((rest + limit) / size, color=_WAITS, lw=1.4, ls=":", label=label))
    if total is not None:
        handles.append(
            axes.axvline(total / size, color=_RECOMPUTED, lw=2, label=f"total: {total / size:.2f}")
        )
    axes.set_xlim(0, most / size * 1.03)
    axes.set_ylim(-0.4, 0.4)
    axes.set_yticks([])
    axes.set_title(f"device memory of a step ({unit})", fontsize=10, loc="left")
    axes.tick_params(labelsize=8)
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, -0.25), ncols=2, fontsize=8, frameon=False
    )


def _times(axes: Any, plan: MixedPlan) -> None:
    """The plan's step beside that of plain blocks."""
    plain_ms, planned_ms = plan.plain_s * 1e3, plan.predicted_step_s * 1e3
    scale, unit = time_unit(planned_ms)
    again_ms, waits_ms = plan.predicted.recompute_s * 1e3, plan.predicted.stall_s * 1e3
    parts = [
        ("computed once", plain_ms, _REST),
        ("recomputed", again_ms, _RECOMPUTED),
        ("waits for copies", waits_ms, _WAITS),
    ]
    left = 0.0
    for name, ms, color in parts:
        if ms * scale >= 0.05:  # 0.1 as it is written
            label = f"{name}: {ms * scale:.1f}"
            axes.barh(1, ms * scale, 0.62, left=left, color=color, label=label)
            left += ms * scale
    rows = [("plain", plain_ms), ("planned", planned_ms)]
    for row, (_, ms) in enumerate(rows):
        if row != 1:
            axes.barh(row, ms * scale, 0.62, color="none", edgecolor="#333333", lw=1)
        text = f" {ms * scale:.1f}" + (f", {ms / plain_ms:.3f} of plain" if row else "")
        axes.text(ms * scale, row, text, va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, max(ms for _, ms in rows) * scale * 1.45)
    axes.set_title(f"time of a step ({unit}), predicted", fontsize=10, loc="left")
    axes.tick_params(labelsize=8)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.25), ncols=2, fontsize=8, frameon=False)


def _parts(share: BlockShare) -> list[tuple[str, int, str]]:
    return [
        ("kept", share.kept_bytes, _KEPT),
        ("moved to the host and back", share.moved_bytes, _MOVED),
        ("recomputed", share.recomputed_bytes, _RECOMPUTED),
    ]


def _cells(
    axes: Any,
    calls: Sequence[tuple[ChunkKey, BlockShare]],
    rows: dict[str, int],
    microbatches: Sequence[int],
) -> None:
    columns = {microbatch: column for column, microbatch in enumerate(microbatches)}
    shown: dict[tuple[int, int], BlockShare] = {}
    for (_, microbatch), share in calls:
        cell = rows[share.name], columns[microbatch]
        shown[cell] = shown[cell].with_call(share) if cell in shown else share  # a block may be called twice
    most = max(share.saved_bytes for share in shown.values())
    for (row, column), share in shown.items():
        left = column - _CELL / 2
        for _, nbytes, color in _parts(share):
            if nbytes:
                width = _CELL * nbytes / most
                axes.broken_barh([(left, width)], (row - 0.38, 0.76), facecolor=color)
                left += width
    axes.set_xticks(range(len(columns)), [str(microbatch) for microbatch in columns], fontsize=8)
    axes.set_xlim(-0.6, len(columns) - 0.4)
    size, unit = byte_unit(most)
    axes.set_xlabel(f"microbatch; a full cell is {most / size:.2f} {unit}", fontsize=9)


def _sums(axes: Any, shares: Sequence[BlockShare]) -> None:
    size, unit = byte_unit(max(share.saved_bytes for share in shares))
    named: set[str] = set()
    for row, share in enumerate(shares):
        left = 0.0
        for name, nbytes, color in _parts(share):
            label = None if name in named else name
            named.add(name)
            axes.barh(row, nbytes / size, 0.76, left=left, color=color, label=label)
            left += nbytes / size
    axes.tick_params(left=False, labelleft=False, labelsize=8)
    axes.set_xlabel(f"all microbatches ({unit})", fontsize=9)
