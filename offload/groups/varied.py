"""The plan for steps whose lengths vary: made for the typical step (policy/lengths.py), followed by position.

A chunk's groups and slots are the same whatever its length, so what stays is the same places in every step.
One invariant: as long as chunks are made of the groups that were planned; where they are not, what was seen
is forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from offload.groups.chunk import ChunkGroups
from offload.groups.seen import SeenStep
from offload.groups.timed import NO_PART, Stays, TimedPlan, Unit, cut_into_units, timed_plan
from offload.policy.actions import Action, ChunkKey, Rates
from offload.policy.lengths import STEPS, Lengths, nearest
from offload.policy.mixture import MixedPlan

Units = Mapping[ChunkKey, list[Unit]]


class _Step(NamedTuple):
    """One that has ended. compute_s: by action; () where it is not known."""

    actions: Sequence[Action]
    units: Units
    amounts: Mapping[ChunkKey, float]
    compute_s: Sequence[float] = ()


class _Planned(NamedTuple):
    """lengths: by stage. num_actions: of the step that was planned."""

    plan: TimedPlan
    limit_bytes: int
    lengths: Mapping[int, float]
    num_actions: int


class VariedSteps:
    """Of one planner. piece_bytes: the smallest part of a group that stays by itself."""

    def __init__(self, piece_bytes: int) -> None:
        self.lengths = Lengths()
        self._piece_bytes = piece_bytes
        self._chunks: dict[ChunkKey, ChunkGroups] = {}  # all that were ever seen
        self._names: dict[ChunkKey, tuple[str, ...]] = {}  # of their groups
        self._before: _Step | None = None
        self._timed: deque[_Step] = deque(maxlen=STEPS)
        self._planned: _Planned | None = None

    def _forget(self) -> None:
        self.lengths = Lengths()
        self._names, self._before, self._planned = {}, None, None
        self._timed.clear()

    def ended(self, seen: SeenStep) -> None:
        """A step has ended."""
        actions, sizes = seen.schedule()
        amounts = {chunk: float(max(1, sum(one.nbytes for one in own))) for chunk, own in sizes.items()}
        chunks: dict[ChunkKey, ChunkGroups] = {
            chunk.id: chunk for chunk in seen.backward_order if chunk.id in amounts
        }
        names: dict[ChunkKey, tuple[str, ...]] = {
            chunk: tuple(group.name for group in own.groups) for chunk, own in chunks.items()
        }
        if any(own != self._names[chunk] for chunk, own in names.items() if chunk in self._names):
            self._forget()
        self._names |= names
        self._chunks |= chunks
        self.lengths.note(amounts)
        before, self._before = self._before, None
        seconds = seen.seconds
        if before is not None and seconds is not None and all(of in seconds for of in before.actions):
            self._timed.append(before._replace(compute_s=[seconds[of] for of in before.actions]))
        if self.lengths.vary or len(self._timed) == 0:
            units: Units = {
                chunk: cut_into_units(own.groups, self._piece_bytes) for chunk, own in chunks.items()
            }
            self._before = _Step(actions, units, amounts)

    def passed_over(self) -> None:
        """A step has ended that is not like those that come: the next times are its own."""
        self._before = None

    def plan(self, rates: Rates, limit_bytes: int, start: MixedPlan | None = None) -> TimedPlan | None:
        """For the steps that come; None where too little is known, or they do not vary. Where the one before
        is too old, a search, which begins with `start`, of about 1 s of host time."""
        if not self.lengths.vary:
            return None
        may_come = [step for step in reversed(self._timed) if self.lengths.may_come_again(step.amounts)]
        longest = max(may_come, key=lambda step: len(step.actions), default=None)
        planned = self._planned
        is_old = (
            planned is None
            or planned.limit_bytes != limit_bytes
            or self.lengths.drifted(planned.lengths)
            or (longest is not None and len(longest.actions) > planned.num_actions)
        )
        if is_old and longest is not None and sum(longest.compute_s) > 0:
            factors = self.lengths.factors(longest.amounts)
            units = {
                chunk: [_scaled(unit, factors[chunk]) for unit in own] for chunk, own in longest.units.items()
            }
            compute_s = [
                seconds * factors[action.chunk]
                for action, seconds in zip(longest.actions, longest.compute_s, strict=True)
            ]
            actions, typical = longest.actions, self.lengths.typical()
            plan = timed_plan(units, actions, compute_s, rates, limit_bytes, start)
            planned = self._planned = _Planned(plan, limit_bytes, typical, len(actions))
        return None if planned is None else planned.plan

    def stays(self, plan: TimedPlan) -> dict[ChunkKey, Stays]:
        """What stays of each chunk that was ever seen, by its own bytes."""
        found: dict[ChunkKey, Stays] = {}
        for chunk, handler in self._chunks.items():
            place = nearest(chunk, plan.parts)
            is_like = place is not None and self._names.get(chunk) == self._names.get(place)
            stays = plan.parts[place] if place is not None and is_like else NO_PART
            part_bytes = {
                at: sum(nbytes for slot, nbytes in handler.groups[at].slot_bytes if slot >= first)
                for at, first in stays.from_slot.items()
            }
            found[chunk] = stays._replace(part_bytes=part_bytes)
            handler.stays, handler.stays_from = stays.whole, dict(stays.from_slot)
        return found

    def window_bytes(self, plan: TimedPlan, limit_bytes: int) -> int:
        """How far ahead to fetch: what the plan says, for the longest chunk."""
        return min(round(plan.restoring_room_bytes * self.lengths.window_factor()), limit_bytes)


def _scaled(unit: Unit, factor: float) -> Unit:
    size = unit.size
    return unit._replace(
        size=size._replace(
            nbytes=round(size.nbytes * factor),
            again_bytes=round(size.again_bytes * factor),
            left_bytes=round(size.left_bytes * factor),
            passed_bytes=round(size.passed_bytes * factor),
            half_bytes=None if size.half_bytes is None else round(size.half_bytes * factor),
        )
    )
