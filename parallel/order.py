"""The order in which one rank computes: what the engine needs to know which activations are read next.

Pure: takes a schedule, returns names, runs nothing. One invariant: `actions_of` is exactly the order in which
the stages will announce their chunks in one step; it is only a hint to the engine, but a wrong hint costs
time.

A schedule with a runtime holds its actions, with communication between them. GPipe and 1F1B run a loop
instead: for them the loop is repeated here, because the order that torch prints for 1F1B has the wrong
    microbatch numbers (it skips microbatch 0 on the last stage).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

__all__ = ["Action", "Kind", "actions_of", "peak_chunks"]

Kind: TypeAlias = Literal["F", "B", "I", "W"]
Action: TypeAlias = tuple[Kind, int, int]
"""(kind, virtual stage, microbatch): "F" forward, "B" whole backward, "I" its input half, "W" its weight
half."""

_KINDS: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}


def actions_of(schedule: Any, rank: int) -> tuple[Action, ...]:
    """What `rank` (in the pipeline's group) computes in one training step, in order.

    >>> actions_of(schedule_1f1b_of_2_stages_and_3_microbatches, 0)
    (('F', 0, 0), ('F', 0, 1), ('B', 0, 0), ('F', 0, 2), ('B', 0, 1), ('B', 0, 2))
    """
    if isinstance(schedule, ScheduleGPipe):
        return _gpipe(rank, schedule._n_microbatches)
    if isinstance(schedule, Schedule1F1B):
        return _one_forward_one_backward(rank, schedule._num_stages, schedule._n_microbatches)
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
    last_read = {(stage, microbatch): index for index, (_kind, stage, microbatch) in enumerate(actions)}
    alive = peak = 0
    for index, (kind, stage, microbatch) in enumerate(actions):
        alive += kind == "F"
        peak = max(peak, alive)
        alive -= kind != "F" and last_read[stage, microbatch] == index
    return peak


def _gpipe(stage: int, microbatches: int) -> tuple[Action, ...]:
    forwards: list[Action] = [("F", stage, i) for i in range(microbatches)]
    backwards: list[Action] = [("B", stage, i) for i in range(microbatches)]
    return (*forwards, *backwards)


def _one_forward_one_backward(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """torch's loop: a warm-up that is one forward longer for each later stage, then one backward before each
    further forward."""
    ahead = min(microbatches, stages - stage)
    actions: list[Action] = [("F", stage, i) for i in range(ahead)]
    for i in range(microbatches):
        actions.append(("B", stage, i))
        if ahead + i < microbatches:
            actions.append(("F", stage, ahead + i))
    return tuple(actions)


def _computed(actions: Iterable[Any]) -> Iterable[Action]:
    """Only what computes, with an overlapped forward and backward as the two that it is."""
    for action in actions:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _computed(action.sub_actions)
        elif action.computation_type.value in _KINDS:
            yield (_KINDS[action.computation_type.value], action.stage_index, action.microbatch_index)
