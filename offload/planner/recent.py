"""The step to plan for, from what the last steps were seen to do.

One invariant: where a step comes again as it was, it is that step; where lengths vary it is the typical one
(policy/lengths.py), with the blocks and seconds of a step that was timed, scaled to its lengths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from offload.planner.work import Ran, StepWork, read_parts_of
from offload.policy.actions import Action, ChunkKey
from offload.policy.lengths import STEPS, Lengths

__all__ = ["RecentSteps"]


class _Seen(NamedTuple):
    """A step that has ended. amounts: bytes of its blocks' inputs, by chunk."""

    actions: Sequence[Action]
    ran: Mapping[ChunkKey, Sequence[Ran]]
    amounts: Mapping[ChunkKey, float]


class _Timed(NamedTuple):
    work: StepWork
    amounts: Mapping[ChunkKey, float]


class RecentSteps:
    """Of one rank."""

    def __init__(self) -> None:
        self.lengths = Lengths()
        self._before: _Seen | None = None
        self._read_parts: dict[tuple[int, int], float] = {}
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
        self._read_parts |= read_parts_of(before.ran)
        work = StepWork.of(before.actions, seconds_before, before.ran, head_bytes, self._read_parts)
        if work is not None:
            self._timed.append(_Timed(work, before.amounts))

    @property
    def last_timed(self) -> StepWork | None:
        """Of the last step whose times are known, as it was."""
        return self._timed[-1].work if self._timed else None

    def step(self) -> StepWork | None:
        """To plan for; None where too little is known."""
        if not self.lengths.vary:
            found = self._timed[-1] if self._timed else None
            return found.work if found is not None and found.amounts == self.lengths.last else None
        may_come = [timed for timed in reversed(self._timed) if self.lengths.may_come_again(timed.amounts)]
        longest = max(may_come, key=lambda timed: len(timed.work.actions), default=None)
        return None if longest is None else longest.work.scaled(self.lengths.factors(longest.amounts))
