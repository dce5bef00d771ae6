"""Draws a dry run: what every rank does when, and what lies on the fullest device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offload.telemetry.drawing import require_matplotlib

from .answer import DryRun

__all__ = ["draw", "require_matplotlib"]

GB = 1e9
_COLORS = {"F": "#4477AA", "B": "#228833", "I": "#66CCEE", "W": "#CCBB44"}
_NAMES = {"F": "forward", "B": "backward", "I": "backward, by input", "W": "backward, by weight"}
_MOST_RANKS = 32
"""Drawn, evenly chosen; more are no more than lines."""
_DPI = 150


def draw(answer: DryRun, path: str | Path) -> None:
    """Raises ImportError without matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    positions = answer.positions
    if len(positions) > _MOST_RANKS:
        steps = range(_MOST_RANKS)
        positions = tuple(positions[at * (len(positions) - 1) // (_MOST_RANKS - 1)] for at in steps)
    figure = Figure(figsize=(12, 3.2 + 0.28 * len(positions)), layout="constrained")
    lanes, memory = figure.subplots(2, 1, sharex=True, height_ratios=(max(2.0, len(positions) / 4), 2))
    job = answer.job
    figure.suptitle(
        f"{job.model.name}, pp {job.pp} x tp {job.cut.tp} x dp {job.dp}, {job.gpu.name}, "
        f"offload {answer.mode}: {answer.pipeline_s:.2f} s",
        fontsize=12,
    )
    _lanes(lanes, positions)
    _memory(memory, answer)
    memory.set_xlabel("seconds of the step; sums over replicas and the optimizer come after")
    memory.set_xlim(0, answer.pipeline_s)
    figure.savefig(path, dpi=_DPI)


def _lanes(axes: Any, positions: Any) -> None:
    seen: set[str] = set()
    for row, position in enumerate(positions):
        for kind, color in _COLORS.items():
            spans = [
                (played.start_s, played.end_s - played.start_s)
                for played in position.played
                if played.action.kind == kind
            ]
            if not spans:
                continue
            name = _NAMES[kind] if kind not in seen else None
            seen.add(kind)
            axes.broken_barh(
                spans, (row - 0.42, 0.84), facecolors=color, edgecolor="white", linewidth=0.3, label=name
            )
    axes.set_yticks(range(len(positions)), [f"rank {position.rank}" for position in positions], fontsize=8)
    axes.invert_yaxis()
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, fontsize=8, frameon=False)


def _memory(axes: Any, answer: DryRun) -> None:
    fullest = max(answer.positions, key=lambda position: position.peak_bytes)
    emptiest = min(answer.positions, key=lambda position: position.peak_bytes)
    for position, color in ((fullest, "#4477AA"), (emptiest, "#AA3377")):
        times = [edge for played in position.played for edge in (played.start_s, played.end_s)]
        levels = [nbytes / GB for nbytes in position.peaks_bytes for _ in range(2)]
        axes.plot(times, levels, color=color, lw=1.2, label=f"rank {position.rank}, most in each action")
        if fullest is emptiest:
            break
    held = fullest.held
    axes.axhline(
        held.total / GB, color="#999999", lw=1, label=f"rank {fullest.rank}: weights, gradients, state"
    )
    axes.axhline(answer.job.limit_bytes / GB, color="#BB0000", lw=1, ls=":", label="the device")
    axes.set_ylabel("device memory (GB)")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right", fontsize=8, ncols=2)
