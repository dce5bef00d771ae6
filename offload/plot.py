"""A picture of a step: what it held on the device, what it would hold had nothing left, and what lanes did;
or of the plan of mode "auto".

    with offload.tracing() as trace:
        train_one_step()
    offload.plot("step.png", trace)
    offload.plot("plan.png", handle.explain())

One invariant: nothing is recorded unless it is asked for, and an asked-for picture is drawn or an error says
why not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offload.groups.recorder import Recorder
from offload.marks import default_manager
from offload.planner.explained import Explanation
from offload.planner.explained_picture import draw_explanation
from offload.telemetry.drawing import draw
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
    recorder, trace = Recorder(default_manager()), Trace()
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
        draw_explanation(shown, path, title=title)
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
