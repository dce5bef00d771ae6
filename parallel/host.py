"""Host memory for all ranks together: each pins its own, then the link is measured by all at once.

A rank that measures alone is told what an idle host gives it; during a step every rank of the host copies,
through the same memory and perhaps the same switch, and a plan made of the lone rate moves more than the link
then carries. One invariant: a rank that cannot pin is heard by all others before anybody waits for it, and
every rank raises.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from offload import HostBudgetError, PipelineOffloadManager

__all__ = ["line_up", "reserve_host_together"]

logger = logging.getLogger(__name__)


def reserve_host_together(manager: PipelineOffloadManager, nbytes: int, group: dist.ProcessGroup) -> None:
    """Pin until at least `nbytes` are held here, then measure the link while the other ranks of `group` do.

    nbytes: this rank's own number. Every rank of the group must call, and the group must carry CPU tensors
    (gloo). The link is measured again even where a rate is known: a lone rate is what this is to replace.
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
    manager.engine.measure_link(None if unable else partial(line_up, group))


def line_up(group: dist.ProcessGroup) -> None:
    """Block the host until every rank of the group is here. On a CPU tensor: no device work is waited for."""
    dist.all_reduce(torch.zeros(1), group=group)
