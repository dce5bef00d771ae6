"""Host memory for all ranks together: each pins its own, then the link is measured by all at once.

A rank that measures alone is told what an idle host gives it; during a step every rank of the host copies,
through the same memory and perhaps the same switch, and a plan made of the lone rate moves more than the link
then carries. So do collectives that cross it: they run beside the copies that are measured. One invariant: a
rank that cannot pin is heard by all others before anybody waits for it, and every rank raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from offload import HostBudgetError, PipelineOffloadManager

logger = logging.getLogger(__name__)

_NCCL = "cuda:nccl"  # in a group's backends
_SUMMED_BYTES, _COLLECTIVES = 64 << 20, 24  # 0.3 to 0.5 ms each over NVLink; a measurement copies for 7 ms


def reserve_host_together(manager: PipelineOffloadManager, nbytes: int, group: dist.ProcessGroup) -> None:
    """Pin until at least `nbytes` are held here, then measure the link while the other ranks of `group` do.

    nbytes: this rank's own number. Every rank of the group must call, and the group must carry CPU tensors
    (gloo). The link is measured again even where a rate is known: a lone rate is what this is to replace.
    Where the group, or one of all ranks that has as many, carries CUDA tensors over NCCL, it sums some beside
    the copies.
    Where a rank has no link or too little host memory to measure with, the others measure without waiting for
    one another, after one warning. Raises HostBudgetError on every rank if one of them may not pin, naming
    those. Blocks the host until all have pinned.
    """
    refused: HostBudgetError | None = None
    try:
        manager.reserve_host(nbytes, measure=False)
    except HostBudgetError as error:
        refused = error
    able = manager.engine.can_measure_link
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (None if refused is None else str(refused), able), group=group)
    refusals = [f"rank {rank}: {why}" for rank, (why, _) in enumerate(answers) if why is not None]
    if refusals:
        raise HostBudgetError(
            f"{len(refusals)} of {len(answers)} ranks could not pin: {'; '.join(refusals)}"
        ) from refused
    if not able:
        return
    unable = [rank for rank, (_, measures) in enumerate(answers) if not measures]
    if unable:
        logger.warning(
            "ranks %s of %d hold too little host memory to measure the link with: the others measure it each "
            "alone, and may plan with "
            "more than they get in a step; reserve host memory on every rank",
            ", ".join(map(str, unable)),
            len(answers),
        )
    busy = None if unable else _collectives(manager, group)
    manager.engine.measure_link(None if unable else partial(_line_up_beside, group, busy))


def line_up(group: dist.ProcessGroup) -> None:
    """Block the host until every rank of the group is here. On a CPU tensor: no device work is waited for."""
    dist.all_reduce(torch.zeros(1), group=group)


def _line_up_beside(group: dist.ProcessGroup, busy: Callable[[], object] | None) -> None:
    """As `line_up`; then the device has collectives to run for about as long as one measurement takes."""
    line_up(group)
    if busy is not None:
        for _ in range(_COLLECTIVES):
            busy()


def _collectives(manager: PipelineOffloadManager, group: dist.ProcessGroup) -> Callable[[], object] | None:
    """Issues one of all ranks of the group, on a stream of its own; None where no group has such. Every rank
    finds the same, as groups are the same on all."""
    world = dist.group.WORLD
    whole = [world] if world is not None and dist.get_world_size() == dist.get_world_size(group) else []
    for found in (group, *whole):
        if _NCCL in dist.get_backend_config(found) and dist.get_world_size(found) > 1:
            device = manager.engine.device.torch_device
            summed = torch.zeros(_SUMMED_BYTES, dtype=torch.uint8, device=device)
            return partial(dist.all_reduce, summed, group=found, async_op=True)
    return None
