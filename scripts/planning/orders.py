"""What each rank of a pipeline computes, as torch's own schedules list it, from numbers alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from offload.policy.actions import Action
from parallel.order import actions_of
from parallel.schedules import check_counts, schedule_named, stages_of

__all__ = ["orders_of"]


def orders_of(
    name: str, *, ranks: int, virtual_stages: int | None, microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """By rank. virtual_stages: of a rank; None for what the schedule usually has. Raises ValueError for
    counts that the schedule does not take."""
    spec = schedule_named(name)
    each = spec.default_virtual_stages if virtual_stages is None else virtual_stages
    check_counts(spec, ranks=ranks, virtual_stages=each, microbatches=microbatches)
    orders = []
    schedule: Any = None
    for rank in range(ranks):
        if schedule is None or spec.placement == "one":
            # torch asks a stage for its numbers, and for its module to see whether FSDP cuts it
            stages = [
                SimpleNamespace(
                    group_size=ranks, group_rank=rank, num_stages=ranks * each, stage_index=stage, submod=None
                )
                for stage in stages_of(spec, rank=rank, ranks=ranks, virtual_stages=each)
            ]
            schedule = spec.torch_class(stages[0] if spec.placement == "one" else stages, microbatches)
        # a schedule of several stages lists the orders of all ranks
        orders.append(actions_of(schedule, rank))
    return tuple(orders)
