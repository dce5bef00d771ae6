"""The pipeline schedules by name: which torch class runs one, which stages a rank gets, which microbatch
counts it takes.

One invariant: everything that torch would refuse in a schedule's constructor is refused here first, from
numbers alone, before a process group or a GPU is touched, and with the numbers that would do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.stage import _PipelineStageBase


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """What is to be known of a schedule before one exists."""

    name: str
    """Name on the command line."""
    torch_class: type[Any]
    placement: Literal["one", "loop", "v"]
    """Stages of a rank: one; every p-th, in a loop; or one from each arm of a V, which must be two."""
    needs: Literal["any", "as many as stages", "whole rounds"]
    """Microbatch counts that it takes."""

    @property
    def default_virtual_stages(self) -> int:
        """Stages a rank has unless told otherwise."""
        return 1 if self.placement == "one" else 2


SCHEDULES: dict[str, ScheduleSpec] = {
    spec.name: spec
    for spec in (
        ScheduleSpec("gpipe", ScheduleGPipe, "one", "any"),
        ScheduleSpec("1f1b", Schedule1F1B, "one", "as many as stages"),
        ScheduleSpec("interleaved1f1b", ScheduleInterleaved1F1B, "loop", "whole rounds"),
        ScheduleSpec("loopedbfs", ScheduleLoopedBFS, "loop", "any"),
        ScheduleSpec("interleavedzerobubble", ScheduleInterleavedZeroBubble, "loop", "whole rounds"),
        ScheduleSpec("zbv", ScheduleZBVZeroBubble, "v", "any"),
        ScheduleSpec("dualpipev", ScheduleDualPipeV, "v", "as many as stages"),
    )
}
_ALSO_KNOWN_AS = {"zbvzerobubble": "zbv"}


def schedule_named(name: str) -> ScheduleSpec:
    """Find a schedule by its name, in any spelling of upper and lower case."""
    lowered = name.lower()
    spec = SCHEDULES.get(_ALSO_KNOWN_AS.get(lowered, lowered))
    if spec is None:
        raise ValueError(f"no schedule is called {name!r}; there are {', '.join(SCHEDULES)}")
    return spec


def check_counts(spec: ScheduleSpec, *, ranks: int, virtual_stages: int, microbatches: int) -> None:
    """Refuse what the schedule cannot run, naming the counts that it can."""
    if microbatches < 1 or virtual_stages < 1:
        raise ValueError(
            f"{spec.name}: {microbatches} microbatches on {virtual_stages} virtual stages a rank; both must "
            "be at least 1"
        )
    if spec.placement == "one" and virtual_stages != 1:
        raise ValueError(
            f"{spec.name} gives a rank one stage, not {virtual_stages}; take --virtual-stages 1, or "
            "--schedule interleaved1f1b"
        )
    if spec.placement == "v" and virtual_stages != 2:
        raise ValueError(
            f"{spec.name} gives a rank two stages, one from each arm of its V, not {virtual_stages}; take "
            "--virtual-stages 2"
        )
    stages = ranks * virtual_stages
    if spec.needs == "as many as stages" and microbatches < stages:
        raise ValueError(
            f"{spec.name} needs a microbatch for every stage: {microbatches} for {stages} stages; take "
            f"--microbatches {stages}"
        )
    rounds = max(1, microbatches // ranks)
    if spec.needs == "whole rounds" and microbatches % rounds:
        low = microbatches - microbatches % ranks
        raise ValueError(
            f"{spec.name} runs its microbatches in equal rounds: {microbatches} on {ranks} ranks would be "
            f"{rounds} unequal ones; "
            f"take --microbatches {low} or {low + ranks}"
        )


def stages_of(spec: ScheduleSpec, *, rank: int, ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """The virtual stages of a rank, in ascending order: rank 0 of 2 has 0 and 2 in a loop, 0 and 3 in a V."""
    if spec.placement == "v":
        return (rank, 2 * ranks - 1 - rank)
    return tuple(rank + ranks * local for local in range(virtual_stages))


def build_schedule(
    spec: ScheduleSpec,
    stages: Sequence[_PipelineStageBase],
    *,
    microbatches: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None,
    scale_grads: bool = True,
) -> Any:
    """torch's schedule over this rank's stages."""
    first = stages[0]
    check_counts(spec, ranks=first.group_size, virtual_stages=len(stages), microbatches=microbatches)
    over = stages[0] if spec.placement == "one" else list(stages)
    return spec.torch_class(over, n_microbatches=microbatches, loss_fn=loss_fn, scale_grads=scale_grads)
