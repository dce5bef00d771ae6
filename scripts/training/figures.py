"""The figures of a run: what each rank said about each step, by arm.

One invariant: plain values that rank 0 has gathered; nothing here measures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from training.options import Options

__all__ = ["MIB", "Arm", "EndCheck", "RankFigures", "known", "mib", "mib_or_dash", "why_nothing_left"]

MIB = 1 << 20  # every figure of bytes of a job that is not in the engine's report


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """What one rank says about one step."""

    loss: float
    """Mean over the microbatches; nan on ranks without the last stage."""
    seconds: float
    active_bytes: int | None
    """Peak of the device's allocated memory since the start; None on a CPU."""
    reserved_bytes: int | None
    engine: dict[str, Any]
    """The engine's StepStats."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Where the optimizer's state is, if some of it is on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCheck:
    """What one rank says about the last step's forward and backward, made again without offload and with it,
    by turns. All gradients were equal, or the job would have ended."""

    gradients: int
    """Tensors compared in each pair."""
    off_seconds: list[float]
    on_seconds: list[float]


@dataclass(slots=True)
class Arm:
    """One run of one arm, with offload or without: its steps, with every rank's figures of each."""

    name: str
    offloads: bool = True
    run: int = 0
    """Which run of this arm, where a comparison makes several. 0 is made alone."""
    steps: list[list[RankFigures]] = field(default_factory=list)

    def loss(self, step: int) -> float:
        """The loss of a step, from whichever rank has it."""
        return known([figures.loss for figures in self.steps[step]])

    def seconds(self, step: int) -> float:
        """A step takes as long as its slowest rank."""
        return max(figures.seconds for figures in self.steps[step])

    @property
    def typical_seconds(self) -> float:
        """The median step of the slowest rank of each, without the first, which also builds things."""
        steps = range(len(self.steps))
        return statistics.median(self.seconds(step) for step in steps[1:] or steps)

    def most(self, rank: int, name: str) -> int:
        """The largest of one of the engine's figures over the steps."""
        return int(max(step[rank].engine[name] for step in self.steps))


def known(losses: Sequence[float]) -> float:
    """The mean of the losses of all ranks, most of which have none: only the last stages do."""
    found = [loss for loss in losses if not math.isnan(loss)]
    return statistics.fmean(found) if found else math.nan


def why_nothing_left(options: Options, arm: Arm) -> str:
    """Why the last step moved nothing; empty if it moved something."""
    if not options.offloads:
        return "--offload-modules none asks for that"
    last = [figures.engine for figures in arm.steps[-1]]
    if options.weights or any(engine["spill_bytes"] for engine in last):
        return ""
    saved = any(engine["saved"] for engine in last)
    return (
        f"{'all of them stayed' if saved else 'no saved tensor has that many elements'} "
        f"(--min-offloaded-tensor-size {options.min_elements:,})"
    )


def mib(nbytes: int | None) -> str:
    """With its unit."""
    return f"{(nbytes or 0) / MIB:,.1f} MiB"


def mib_or_dash(nbytes: int | None) -> str:
    """Without a unit."""
    return "-" if nbytes is None else f"{nbytes / MIB:,.1f}"
