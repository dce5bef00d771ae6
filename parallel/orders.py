"""What each rank of a pipeline computes, and when it comes to which message, as torch's own schedules list
it, from numbers alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal

from torch.distributed.pipelining import schedules

from offload.pipelining import Action

from .dry_run.simulate import Message
from .order import actions_of
from .schedules import check_counts, schedule_named, stages_of


def orders_of(
    name: str, *, ranks: int, virtual_stages: int | None, microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """By rank, without the I of stage 0, which runs nothing. virtual_stages: of a rank; None for what the
    schedule usually has. Raises ValueError for counts that the schedule does not take."""
    schedules = _schedules(name, ranks, virtual_stages, microbatches)
    return tuple(
        tuple(action for action in actions_of(schedule, rank) if _runs(action.kind, action.stage))
        for rank, schedule in enumerate(schedules)
    )


def messages_of(
    name: str, *, ranks: int, virtual_stages: int | None, microbatches: int
) -> tuple[dict[int, list[Message]], ...] | None:
    """By rank, before which action of `orders_of` it comes to which messages. None for a schedule that lists
    none: it runs a loop of its own."""
    schedule = _schedules(name, ranks, virtual_stages, microbatches)[0]
    orders = getattr(schedule, "pipeline_order_with_comms", None)
    if not orders:
        return None
    found: list[dict[int, list[Message]]] = []
    for rank in range(ranks):
        own: dict[int, list[Message]] = {}
        place = 0
        for action in _flat(orders[rank]):
            what, stage = action.computation_type.value, action.stage_index
            if what in ("F", "B", "I", "W"):
                place += _runs(what, stage)
            elif what.startswith(("SEND", "RECV")):
                kind: Literal["F", "B"] = "F" if what.endswith("F") else "B"
                # of the stage that makes it
                maker = stage if what.startswith("SEND") else stage + (-1 if kind == "F" else 1)
                own.setdefault(place, []).append(Message(kind, maker, action.microbatch_index))
        found.append(own)
    return tuple(found)


def has_one_line() -> bool:
    """Whether this torch sends each message of a schedule as a batch, and so all of a rank on one stream of
    NCCL. 2.11 does, 2.12 does not any more (pytorch/pytorch#175225)."""
    return "isend" not in schedules._batch_p2p.__code__.co_names


def _runs(kind: str, stage: int) -> bool:
    return kind != "I" or stage > 0


def _flat(actions: Any) -> Iterator[Any]:
    for action in actions:
        if action is not None and action.sub_actions is not None:
            yield from _flat(action.sub_actions)
        elif action is not None:
            yield action


def _schedules(name: str, ranks: int, virtual_stages: int | None, microbatches: int) -> list[Any]:
    """Of each rank; one for all where it lists the orders of all ranks."""
    spec = schedule_named(name)
    each = spec.default_virtual_stages if virtual_stages is None else virtual_stages
    check_counts(spec, ranks=ranks, virtual_stages=each, microbatches=microbatches)
    found: list[Any] = []
    for rank in range(ranks):
        if found and spec.placement != "one":
            found.append(found[0])
            continue
        # torch asks a stage for its numbers, and for its module to see whether FSDP cuts it
        stages = [
            SimpleNamespace(
                group_size=ranks, group_rank=rank, num_stages=ranks * each, stage_index=stage, submod=None
            )
            for stage in stages_of(spec, rank=rank, ranks=ranks, virtual_stages=each)
        ]
        found.append(spec.torch_class(stages[0] if spec.placement == "one" else stages, microbatches))
    return found
