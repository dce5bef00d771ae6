"""Steps whose lengths vary: which step to plan for, and whether a plan is still for steps like those that
come.

    amount    of a chunk: bytes or tokens, whatever grows with its length
    typical   the step that a plan is made for: the longest order of actions among the last steps, each chunk
              of the mean amount of its stage and one standard deviation

A plan of the typical step is followed by position: each chunk does what its place in the plan says, whatever
its length, and a chunk beyond the plan what the one before it does. Steps of six to eight microbatches of
8192 to 16384 tokens then take 1.00 to 1.02 of what plans made with hindsight take, at four limits, and a
chunk that gives up more where it is longer takes no less. A plan for the mean alone took up to 1.08: what a
long chunk cannot keep beside the others stalls, and what a short one leaves free costs little.

One invariant: numbers only, and a step that comes again as it was is its own typical step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping

from offload.policy.actions import ChunkKey

STEPS = 8
"""That count as the last ones."""

_DRIFT = 0.1
"""A plan is for chunks of so much more or less than the typical one at most."""

Amounts = Mapping[ChunkKey, float]


class Lengths:
    """Lengths of the last steps."""

    def __init__(self) -> None:
        self._steps: deque[Amounts] = deque(maxlen=STEPS)
        self._longest: dict[int, float] = {}

    def note(self, amounts: Amounts) -> None:
        """A step has ended. amounts: of each of its chunks, above 0."""
        self._steps.append(dict(amounts))
        for (stage, _), amount in amounts.items():
            self._longest[stage] = max(self._longest.get(stage, 0.0), amount)

    @property
    def vary(self) -> bool:
        """Predicate: the next step is expected to be another one than the last. A run that goes on with
        another step has changed once; one whose steps vary changes again and again."""
        steps = self._steps
        changes = sum(steps[at] != steps[at - 1] for at in range(1, len(steps)))
        return changes > 1 or (changes == 1 and len(steps) == 2)

    @property
    def last(self) -> Amounts:
        """Amounts of the last step; {} before the first."""
        return self._steps[-1] if self._steps else {}

    def typical(self) -> dict[int, float]:
        """By stage, the amount of a chunk of the typical step."""
        found: dict[int, list[float]] = {}
        for step in self._steps:
            for (stage, _), amount in step.items():
                found.setdefault(stage, []).append(amount)
        return {stage: _mean_and_deviation(amounts) for stage, amounts in found.items()}

    def may_come_again(self, amounts: Amounts) -> bool:
        """Return True if the last steps ran every stage of a step with these amounts."""
        return {stage for stage, _ in amounts} <= self.typical().keys()

    def factors(self, amounts: Amounts) -> dict[ChunkKey, float]:
        """Factors that make a step with these amounts, which may come again, the typical one, by chunk; 1
        where steps do not vary."""
        if not self.vary:
            return dict.fromkeys(amounts, 1.0)
        typical = self.typical()
        return {chunk: typical[chunk[0]] / amount for chunk, amount in amounts.items()}

    def window_factor(self) -> float:
        """The longest chunk over the typical one, of the stage where that is most; at least 1."""
        typical = self.typical()
        return max((self._longest[stage] / amount for stage, amount in typical.items()), default=1.0)

    def drifted(self, planned: Mapping[int, float]) -> bool:
        """Return True if a plan for these typical amounts is too old."""
        typical = self.typical()
        return typical.keys() != planned.keys() or any(
            abs(amount - planned[stage]) > _DRIFT * planned[stage] for stage, amount in typical.items()
        )


def nearest(chunk: ChunkKey, planned: Collection[ChunkKey]) -> ChunkKey | None:
    """The chunk whose part of a plan this one follows: its own, else that of the last one before it of its
    stage, else of the first after it; None for a stage that is not planned."""
    if chunk in planned:
        return chunk
    own = sorted(other for other in planned if other[0] == chunk[0])
    before = [other for other in own if other < chunk]
    return before[-1] if before else own[0] if own else None


def _mean_and_deviation(amounts: list[float]) -> float:
    mean = math.fsum(amounts) / len(amounts)
    return mean + math.sqrt(math.fsum((amount - mean) ** 2 for amount in amounts) / len(amounts))
