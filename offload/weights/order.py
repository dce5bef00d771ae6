"""Which blocks are used next: as in one of the last steps, while this one goes as that did; else as after the
last two uses, the time before.

One invariant: a prediction changes time, never results. A use that was not foretold is loaded when it comes,
and is foretold the next time.

Two uses are looked at, not one, because a block is used in the forward and in the backward, and the pass is
part of a use. So the order of the backward, of its recomputes, of an evaluation in between and of
microbatches is learned as it is seen, and none has to be the mirror of another. They do not tell whether a
pipeline's next microbatch goes forward or backward, which its place in the step does. Of the steps that went
alike so far the one that came after a step such as the last is believed first, so kinds of steps in turn are
foretold, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

_LONGEST = 1 << 14
"""Uses: a step of more, such as a generation that no step ends, is not known by its places."""

_STEPS = 4
"""That are remembered: two of each of two kinds in turn, or three kinds."""


class Pass(Enum):
    FORWARD = "forward"
    INFERENCE = "inference"  # a forward without gradients
    BACKWARD = "backward"
    OUTSIDE = "outside"  # an optimizer's step, a read of the loop's own


class Use(NamedTuple):
    block: int
    during: Pass


class Order:
    """The uses of one model's blocks, as they come."""

    def __init__(self) -> None:
        self._after: dict[tuple[Use | None, Use], Use] = {}
        self._before: Use | None = None
        self.now: Use | None = None
        self._steps: list[list[Use]] = []  # the last one first
        self._step: list[Use] = []  # this one
        self._alike: list[list[Use]] = []  # those that it goes as; the first foretells it

    def note(self, use: Use) -> bool:
        """A block is used. False where that goes on from the use before."""
        if use == self.now:
            return False
        if self.now is not None:
            self._after[self._before, self.now] = use
        self._before, self.now = self.now, use
        place = len(self._step)
        self._alike = [step for step in self._alike if step[place : place + 1] == [use]]
        if place < _LONGEST:
            self._step.append(use)
        return True

    def step_ends(self) -> None:
        """What is used from here on is of the next step."""
        if not self._step:
            return
        if len(self._step) < _LONGEST:
            self._steps = [self._step, *self._steps[: _STEPS - 1]]
        self._step = []
        after = [step for step, before in pairwise(self._steps) if before == self._steps[0]]
        self._alike = [*after, *self._steps]

    def expect(self, uses: Iterable[Use]) -> None:
        """The guess before anything is seen; what is seen is believed."""
        for use in uses:
            self.note(use)
        self._before = self.now = None
        self._step = []

    def coming(self) -> Iterator[int]:
        """Blocks in the order of their coming uses, as far as it is known; one may come twice."""
        if self._alike:
            step, place = self._alike[0], len(self._step)
            for ahead in range(min(len(self._after), len(step))):
                yield step[(place + ahead) % len(step)].block
            return
        before, now = self._before, self.now
        for _ in range(len(self._after)):
            if now is None or (use := self._after.get((before, now))) is None:
                return
            yield use.block
            before, now = now, use
