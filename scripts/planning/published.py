"""The dry run's model beside what docs/benchmarks.md has measured of real pipelines.

    python scripts/planning/published.py

Only layers, as scripts/bench_pipeline.py runs them: an embedding and a loss that take next to nothing. One
invariant: a row is predicted from the same figures of a GPU as any job.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from offload.policy.actions import Rates
from offload.policy.mixture import choose_keeps
from parallel.dry_run.job import Job, Stage, stages_of_job
from parallel.dry_run.models import ModelShape
from parallel.dry_run.rank_step import RankPlan, RankStep
from parallel.dry_run.rates import GPUS
from parallel.dry_run.reference import Cut
from parallel.dry_run.together import play_together
from parallel.orders import messages_of, orders_of

GB = 1e9
_BLOCK = ModelShape(
    name="benchmark", layers=24, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocabulary=256,
    rotary=False,
)  # fmt: skip
_TRIALS = 30
"""Simulated steps for a rank's plan."""


class Row(NamedTuple):
    """One row of "Real pipelines". layers: of a rank. saved_gb: the limit of saved bytes; None for nothing
    offloaded. within, gb_within: how near the predicted step and peaks are. active_gb, stall_ms: by rank,
    where they are published. a_parameter: bytes of its weight, its gradient, and what an optimizer would
    hold."""

    gpu: str
    ranks: int
    schedule: str
    layers: int
    microbatches: int
    saved_gb: float | None
    step_ms: float
    within: float = 0.03
    active_gb: Sequence[float] = ()
    stall_ms: Sequence[float] = ()
    a_parameter: int = 2 + 2 + 12
    gb_within: float = 0.01


_NO_STATE = 2 + 2
ROWS = (
    Row("h200", 2, "1f1b", 6, 4, None, 629),
    Row("h200", 2, "interleaved1f1b", 6, 4, None, 601, 0.04),
    Row("h200", 2, "zbv", 6, 4, None, 561, 0.055),
    Row("h200", 2, "dualpipev", 6, 4, None, 568),
    Row("h200", 2, "1f1b", 22, 4, None, 2373, 0.04, (138.43, 107.87)),
    Row("h200", 2, "1f1b", 22, 4, 20, 3139, 0.03, (98.53, 97.64), (1197, 184)),
    Row("h200", 2, "interleaved1f1b", 22, 4, 20, 2969, 0.03, (98.85, 98.49), (1091, 123)),
    Row("h100", 2, "1f1b", 8, 8, None, 1587, 0.03, (30.02, 18.93), (), _NO_STATE),
    Row("h100", 4, "1f1b", 8, 8, None, 1926, 0.03, (73.3,)),
    Row("h100", 4, "1f1b", 8, 8, 22, 2095, 0.05, (51.5,)),
    Row("h100", 4, "1f1b", 6, 8, None, 1423, 0.03, (39.55, 31.56, 23.23, 14.44), (), _NO_STATE),
    Row("h100", 4, "zbv", 6, 8, None, 1238, 0.03, (42.3, 42.9, 44.5, 52.9), (), _NO_STATE, 0.02),
    Row("h100", 4, "interleaved1f1b", 6, 8, None, 1503, 0.05, (53.29, 44.89, 36.5, 28.1), (), _NO_STATE),
    Row("h100", 4, "dualpipev", 6, 8, None, 1502, 0.08, (44.29, 44.89, 44.89, 44.02), (), _NO_STATE),
)
"""Without the rows that were measured before the plan knew what each half of a split backward reads, and
before parts of groups could stay."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Of a row, by rank but for the step."""

    step_ms: float
    active_gb: tuple[float, ...]
    stall_ms: tuple[float, ...]


def predicted(row: Row) -> Predicted:
    """The row's step as the dry run plays it, with the limit that its engine had."""
    counts = {"ranks": row.ranks, "virtual_stages": None, "microbatches": row.microbatches}
    job = Job(
        model=_BLOCK,
        gpu=GPUS[row.gpu],
        cut=Cut(sequence=8192),
        orders=orders_of(row.schedule, **counts),
        messages=messages_of(row.schedule, **counts),
        one_line=True,  # measured with torch 2.11
        gpus_per_host=row.ranks,
    )
    layer = stages_of_job(job)[0].pieces[1]
    each = row.layers * row.ranks // job.num_stages
    stages = {
        index: Stage(index=index, pieces=(layer,) * each, layers=each, is_last=index == job.num_stages - 1)
        for index in range(job.num_stages)
    }
    mode = "off" if row.saved_gb is None else "groups"

    def planned(rank: int, rates: Rates) -> tuple[RankStep, RankPlan]:
        step = RankStep(job.orders[rank], stages, rates, mode)
        return step, step.keep_all(0) if row.saved_gb is None else _plan(step, row.saved_gb)

    _, plays, times = play_together(job, planned, moves=row.saved_gb is not None)
    held = row.layers * layer.parameters * row.a_parameter
    return Predicted(
        step_ms=times[0].step_s * 1e3,
        active_gb=tuple((held + max(play.peaks_bytes)) / GB for play in plays),
        stall_ms=tuple(play.result.stall_s * 1e3 for play in plays),
    )


def _plan(step: RankStep, saved_gb: float) -> RankPlan:
    levels = step.uniform(0)
    limit_bytes = round(saved_gb * GB)
    chosen = choose_keeps(
        step.order, step.sizes(levels), step.compute_s(levels), step.rates, limit_bytes, max_trials=_TRIALS
    )
    return RankPlan(
        levels=levels,
        keeps=chosen.keeps,
        saved_limit_bytes=limit_bytes,
        restoring_room_bytes=chosen.restoring_room_bytes,
        half_room_bytes=chosen.half_room_bytes,
    )


def line(row: Row) -> str:
    """Of the table in docs/planning.md."""
    answer = predicted(row)
    saved = "" if row.saved_gb is None else f"{row.saved_gb:g} GB"
    cells = [
        f"{row.ranks} {row.gpu.upper()}",
        row.schedule,
        f"{row.layers}",
        saved,
        f"{answer.step_ms:.0f}",
        f"{row.step_ms:.0f}",
        f"{answer.step_ms / row.step_ms - 1:+.1%}",
        _each(answer.active_gb, row.active_gb, ".1f"),
        ", ".join(f"{gb:.1f}" for gb in row.active_gb),
        _each(answer.stall_ms, row.stall_ms, ".0f"),
        ", ".join(f"{ms:.0f}" for ms in row.stall_ms),
    ]
    return f"| {' | '.join(cells)} |"


def _each(found: Sequence[float], measured: Sequence[float], form: str) -> str:
    """Of the ranks that have a published figure."""
    return ", ".join(format(value, form) for value, _ in zip(found, measured, strict=False))


if __name__ == "__main__":
    print("\n".join(map(line, ROWS)))
