"""The order in which one rank computes: what the engine needs to know which activations are read next.

Takes a schedule and runs nothing. One invariant: `actions_of` is exactly the order in which the stages will
announce their chunks in one step; it is only a hint to the engine, but a wrong hint costs time.

A schedule with a runtime holds its actions, with communication between them. GPipe and 1F1B run a loop
instead: for them the order of the loop is written here, because the order that torch prints for 1F1B has the
wrong microbatch numbers (it skips microbatch 0 on the last stage).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from offload.policy.actions import Action, Kind, one_f_one_b

_KINDS: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}


def actions_of(schedule: Any, rank: int) -> tuple[Action, ...]:
    """What `rank` (in the pipeline's group) computes in one training step, in order.

    >>> print(*actions_of(schedule_1f1b_of_2_stages_and_3_microbatches, 0))
    0F0 0F1 0B0 0F2 0B1 0B2
    """
    if isinstance(schedule, ScheduleGPipe):
        microbatches = range(schedule._n_microbatches)
        return (*(Action("F", rank, i) for i in microbatches), *(Action("B", rank, i) for i in microbatches))
    if isinstance(schedule, Schedule1F1B):
        return one_f_one_b(rank, schedule._num_stages, schedule._n_microbatches)
    orders = getattr(schedule, "pipeline_order_with_comms", None) or getattr(schedule, "pipeline_order", None)
    if not orders:
        raise ValueError(
            f"{type(schedule).__name__} has no list of actions; give the engine no order (set_order(None))"
        )
    if rank not in orders:
        raise ValueError(
            f"{type(schedule).__name__} has no rank {rank}, only {sorted(orders)}; pass the rank within the "
            "pipeline's group"
        )
    return tuple(_computed(orders[rank]))


def peak_chunks(actions: Sequence[Action]) -> int:
    """The most chunks whose activations exist at once: their forward has run and their last backward has
    not."""
    last_read = {action.chunk: index for index, action in enumerate(actions)}
    alive = peak = 0
    for index, action in enumerate(actions):
        alive += action.kind == "F"
        peak = max(peak, alive)
        alive -= action.kind != "F" and last_read[action.chunk] == index
    return peak


def _computed(actions: Iterable[Any]) -> Iterable[Action]:
    """Only what computes, with an overlapped forward and backward as the two that it is."""
    for action in actions:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _computed(action.sub_actions)
        elif action.computation_type.value in _KINDS:
            yield Action(_KINDS[action.computation_type.value], action.stage_index, action.microbatch_index)
