"""The line of the headline picture: the least step of any engine that may keep, move or recompute every byte,
over the step with nothing offloaded, at each total.

Blocks are traced on the meta device and take the rates of the table (parallel/dry_run), so this needs no GPU.
One invariant: the line goes through the bound of a measured row of mode auto, the one that makes it lowest.
What a step takes beside saved tensors is what makes it do so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from bench.mixed_bound import least_mixed_step
from bench.points import BOUND, GB, Panel
from bench.workload import live_peak_chunks, workload
from offload.policy.actions import one_f_one_b
from parallel.dry_run.job import Job, stages_of_job
from parallel.dry_run.models import ModelShape
from parallel.dry_run.rank_step import RankStep
from parallel.dry_run.rates import GPUS
from parallel.dry_run.reference import Cut

__all__ = ["bound_lines"]

_GPU = GPUS["h200"]
_BISECTIONS = 10
_NOTHING = 1.001
"""Below it the line is of no use: nothing needs to be given up. A measured row may come out below it, since
its bound rests on steps that differ by 2%."""
_TOTALS_GB = (16, 17, 18, 20, 22, 24, 26, 28, 32, 36, 40, 50, 60)


def bound_lines(panels: Sequence[Panel]) -> Iterator[str]:
    """The page's table. Raises ImportError without scipy (extra `plan`)."""
    yield f"| {BOUND} | " + " | ".join(f"{total} GB" for total in _TOTALS_GB) + " |"
    yield "|---" * (len(_TOTALS_GB) + 1) + "|"
    for panel in panels:
        work = panel.title.partition(":")[0]
        rest_gb = min(
            _number(point.name) - _cap_gb(work, point.least)
            for point in panel.points
            if point.least is not None and point.least >= _NOTHING
        )
        cells = [_least(work, total - rest_gb) for total in _TOTALS_GB]
        shown = [f"{cell:.3f}" if cell and cell >= _NOTHING else "" for cell in cells]
        yield f"| {work} | " + " | ".join(shown) + " |"


def _number(name: str) -> float:
    """The total of a row such as "auto, 22 GB in all"."""
    return float(name.split()[1])


def _cap_gb(work: str, least: float) -> float:
    """Of saved tensors, with which the bound is `least`."""
    low, high = 0.0, _saved_gb(work)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if (_least(work, middle) or 0.0) > least else (low, middle)
    return high


def _saved_gb(work: str) -> float:
    step = _step(work)
    chunk_bytes = sum(block.menu[0].saved_bytes for block in next(iter(step.blocks.values())))
    return live_peak_chunks(step.order) * chunk_bytes / GB


def _least(work: str, cap_gb: float) -> float | None:
    """None where there is no room at all."""
    if cap_gb < 0:
        return None
    step = _step(work)
    bound = least_mixed_step(step.order, step.blocks, step.rates, round(cap_gb * GB), rest_s=step.rest_s)
    return bound.step_s / bound.compute_s


@cache
def _step(work: str) -> RankStep:
    """The workload's stack as the middle stage of three, which has neither an embedding nor a head."""
    found = workload(work)
    shape = found.shape
    model = ModelShape(
        name=work, layers=3 * shape.layers, hidden=shape.hidden, heads=shape.heads, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, ffn=shape.ffn, vocabulary=256, rotary=False,
    )  # fmt: skip
    job = Job(
        model=model,
        gpu=_GPU,
        cut=Cut(sequence=shape.sequence),
        orders=tuple(one_f_one_b(rank, 3, 8) for rank in range(3)),
    )
    order = [action._replace(stage=1) for action in found.actions]
    return RankStep(order, {1: stages_of_job(job)[1]}, _GPU.links[1], "auto", receives=False)
