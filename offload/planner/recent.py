"""The step to plan for, from what the last steps were seen to do.

One invariant: where a step comes again as it was, it is that step; where lengths vary it is the typical one
(policy/lengths.py), with the blocks and seconds of a step that was timed, scaled to its lengths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple

from offload.planner.work import Ran, ReadParts, StepWork, read_parts_of
from offload.policy.actions import Action, ChunkKey
from offload.policy.lengths import STEPS, Lengths


class _Seen(NamedTuple):
    """A step that has ended. amounts: bytes of its blocks' inputs, by chunk."""

    actions: Sequence[Action]
    ran: Mapping[ChunkKey, Sequence[Ran]]
    amounts: Mapping[ChunkKey, float]


class _Timed:
    """A step whose times are known. work: made when it is first asked for; None where a chunk's blocks are
    not known."""

    def __init__(self, amounts: Mapping[ChunkKey, float], make: Callable[[], StepWork | None]) -> None:
        self.amounts = amounts
        self._make = make

    @cached_property
    def work(self) -> StepWork | None:
        return self._make()


class RecentSteps:
    """Of one rank."""

    def __init__(self) -> None:
        self.lengths = Lengths()
        self._before: _Seen | None = None
        self._read_parts: dict[tuple[int, int], ReadParts] = {}
        self._timed: deque[_Timed] = deque(maxlen=STEPS)

    def ended(
        self,
        actions: Sequence[Action],
        ran: Mapping[ChunkKey, Sequence[Ran]],
        seconds_before: Mapping[Action, float] | None,
        head_bytes: int = 0,
    ) -> None:
        """A step has ended. actions, ran: that it did. seconds_before: of the actions of the step before it,
        None where they are not known. head_bytes: as of `StepWork.of`."""
        before = self._before
        amounts = {
            chunk: float(max(1, sum(call.input_bytes for call in ran.get(chunk, ()))))
            for chunk in dict.fromkeys(action.chunk for action in actions)
        }
        self._before = _Seen(tuple(actions), ran, amounts)
        self.lengths.note(amounts)
        if before is None or seconds_before is None or any(of not in seconds_before for of in before.actions):
            return
        parts = self._read_parts = self._read_parts | read_parts_of(before.ran)
        make = partial(StepWork.of, before.actions, seconds_before, before.ran, head_bytes, parts)
        self._timed.append(_Timed(before.amounts, make))

    def step(self) -> StepWork | None:
        """To plan for; None where too little is known."""
        if not self.lengths.vary:
            work, amounts = next(self._known(), (None, None))
            return work if amounts == self.lengths.last else None
        may_come = [timed for timed in self._known() if self.lengths.may_come_again(timed[1])]
        if not may_come:
            return None
        work, amounts = max(may_come, key=lambda timed: len(timed[0].actions))
        return work.scaled(self.lengths.factors(amounts))

    def _known(self) -> Iterator[tuple[StepWork, Mapping[ChunkKey, float]]]:
        """The last one first."""
        for timed in reversed(self._timed):
            if timed.work is not None:
                yield timed.work, timed.amounts
