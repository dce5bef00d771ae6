"""The plan for a step whose times are known, by units; and that for steps whose lengths vary: made for the
typical step (policy/lengths.py), followed by position.

It takes a chunk by units finer than its groups, so that of one group a part may stay: a group of 1.5 GB is a
coarse step under a limit of 10 GB, and with units of 0.3 GB the simulated step of a pipeline stage is 3 to 4%
shorter (workload W2, November 2026). Units follow the chunk's saves: what a plan keeps of the chunk's end is
whole groups and the last tensors of at most one more. A chunk's groups and slots are the same whatever its
length, so what stays is the same places in every step.

One invariant: a plan changes what stays and how far ahead to fetch, never a result. A plan by position holds
as long as chunks are made of the groups that were planned; where they are not, what was seen is forgotten.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.groups.chunk import ChunkGroups
from offload.groups.group import Cost, Group
from offload.groups.seen import SeenStep, half_bytes_of, passed_bytes_of
from offload.policy.actions import Action, ChunkKey, GroupKey, GroupSize, Keeps, Rates
from offload.policy.keeps import kept_peak_bytes, tail_keeps
from offload.policy.lengths import STEPS, Lengths, nearest
from offload.policy.mixture import MixedPlan, choose_keeps
from offload.sizes import bytes_text
from offload.telemetry.speaker import speaker

logger = speaker(__name__)

_UNITS_A_CHUNK = 64
"""About so many at most, whatever the number of tensors: the host time of a plan grows with them."""


_TRIALS = 64
"""Simulated steps of a plan, whose search blocks the host: 0.1 s of W2's step, where 319 trials take 0.5.
By calculation, over the six stages of tests/unit/policy/mixtures.py at two levels and seven limits, plans of
all trials are as long in the mean (1.001) and 1.8% shorter at most (November 2026)."""


class Unit(NamedTuple):
    """Tensors of one group that lie together. position: of the group in its chunk. first_slot: of the first
    tensor in the group."""

    position: int
    first_slot: int
    size: GroupSize


class Stays(NamedTuple):
    """Tensors of one chunk that a plan keeps: positions of whole groups, and of others the slot from which on
    their tensors stay."""

    whole: frozenset[int]
    from_slot: dict[int, int]
    part_bytes: dict[int, int]
    """Of the groups in `from_slot`: what stays of each."""


NO_PART = Stays(frozenset(), {}, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPlan:
    """keeps: whole groups that stay. parts: what stays of the others, by chunk. restoring_room_bytes: how far
    ahead to fetch. half_room_bytes: what stays between the halves of a split backward."""

    keeps: Keeps
    parts: Mapping[ChunkKey, Stays]
    restoring_room_bytes: int
    half_room_bytes: int = 0


def timed_plan(
    units: Mapping[ChunkKey, Sequence[Unit]],
    actions: Sequence[Action],
    compute_s: Sequence[float],
    rates: Rates,
    limit_bytes: int,
    start: MixedPlan | None = None,
) -> TimedPlan:
    """The plan with the shortest simulated step by these units; where none keeps within the limit, the one
    with the lowest peak, and a warning. compute_s: of each action. start: as of `choose_keeps`."""
    sizes = {chunk: [unit.size for unit in own] for chunk, own in units.items()}
    chosen = choose_keeps(actions, sizes, compute_s, rates, limit_bytes, max_trials=_TRIALS, start=start)
    plan, _ = plan_by(chosen, actions, units)
    logger.info(
        f"plan: {len(plan.keeps)} groups stay, {chosen.restoring_room_bytes:,} bytes ahead, step predicted "
        f"{chosen.predicted_step_s * 1000:.1f} ms of which {sum(compute_s) * 1000:.1f} compute"
    )
    if not chosen.fits:
        logger.warning(
            "no plan keeps saved tensors within device_limit (device_limit_bytes in OffloadConfig), "
            f"{bytes_text(limit_bytes)}: the best one peaks at {bytes_text(chosen.predicted_peak_bytes)}; "
            "raise the limit"
        )
    return plan


def plan_by(
    plan: MixedPlan, actions: Sequence[Action], units: Mapping[ChunkKey, Sequence[Unit]]
) -> tuple[TimedPlan, int]:
    """Apply a plan to these units, each chunk by its own place or that which it follows. Returns also the
    most bytes that stay at once."""
    sizes = {chunk: [unit.size for unit in own] for chunk, own in units.items()}
    keeps = tail_keeps(sizes, plan.kept_of(sizes))
    kept: dict[ChunkKey, set[int]] = {chunk: set() for chunk in units}
    for key in keeps:
        kept[key.chunk].add(key.position)
    parts = {chunk: stays_of(own, kept[chunk]) for chunk, own in units.items()}
    timed = TimedPlan(
        keeps=frozenset(GroupKey(chunk, at) for chunk, stays in parts.items() for at in stays.whole),
        parts=parts,
        restoring_room_bytes=plan.restoring_room_bytes,
        half_room_bytes=plan.half_room_bytes,
    )
    return timed, kept_peak_bytes(actions, sizes, keeps)


def cut_into_units(groups: Sequence[Group], least_bytes: int) -> list[Unit]:
    """The groups in order, each cut after tensors that reach `least_bytes`, or a 64th of the chunk if that is
    more, and at the ends of checkpoint regions, whose tensors are read together. A region's input is read
    with the outputs that it kept."""
    least_bytes = max(least_bytes, sum(group.total_offload_bytes for group in groups) // _UNITS_A_CHUNK)
    units: list[Unit] = []
    for position, group in enumerate(groups):
        first_slot, nbytes, region = 0, 0, _region_of_input(groups, position)
        own: list[Unit] = []
        # counted by hand: in one
        for slot, slot_bytes in group.slot_bytes or ((0, group.total_offload_bytes),):
            of_slot = group.regions.get(slot, region if not group.regions else 0)
            if of_slot != region:
                if nbytes:
                    own.append(Unit(position, first_slot, GroupSize(group.name, nbytes, region)))
                    first_slot, nbytes = slot, 0
                region = of_slot
            nbytes += slot_bytes
            if nbytes >= least_bytes:
                own.append(Unit(position, first_slot, GroupSize(group.name, nbytes, region)))
                first_slot, nbytes = slot + 1, 0
        if nbytes or first_slot == 0:  # the rest, or a group without bytes
            own.append(Unit(position, first_slot, GroupSize(group.name, nbytes, region)))
        own = own if group.half_slots is None else _with_halves(own, group)
        units += own if group.cost is None else _with_cost(own, group.cost, group.left_bytes)
    return units


def _with_halves(units: list[Unit], group: Group) -> list[Unit]:
    """The units of one group, each with what a weight half was seen to read of it."""
    starts = [*(unit.first_slot for unit in units), sys.maxsize]
    found: list[Unit] = []
    for unit, start, stop in zip(units, starts[:-1], starts[1:], strict=True):
        own = [(slot, nbytes) for slot, nbytes in group.slot_bytes if start <= slot < stop]
        half_bytes, passed_bytes = half_bytes_of(group, own), passed_bytes_of(group, own)
        found.append(unit._replace(size=unit.size._replace(half_bytes=half_bytes, passed_bytes=passed_bytes)))
    return found


def _region_of_input(groups: Sequence[Group], position: int) -> int:
    """Region of the group of an input that a recompute starts from: that of what the recompute retains, else
    one of its own; 0 for any other group."""
    cost = groups[position].cost
    if cost is None or not cost.again_bytes:
        return 0
    if position + 1 < len(groups) and groups[position + 1].cost is None and groups[position + 1].regions:
        return next(iter(groups[position + 1].regions.values()))
    return -position - 1


def _with_cost(units: list[Unit], cost: Cost, left_bytes: int) -> list[Unit]:
    """The units of one group, each with its part of the compute; what a recompute makes is counted once."""
    total_bytes = sum(unit.size.nbytes for unit in units)
    return [
        unit._replace(
            size=unit.size._replace(
                weight=cost.weight * (unit.size.nbytes / total_bytes if total_bytes else 1 / len(units)),
                again_bytes=0 if at else cost.again_bytes,
                left_bytes=0 if at else left_bytes,
                grown_bytes=0 if at else cost.grown_bytes,
            )
        )
        for at, unit in enumerate(units)
    ]


def stays_of(units: Sequence[Unit], kept: Collection[int]) -> Stays:
    """Parts of the groups that stay where the units at the places `kept` stay."""
    places: dict[int, list[int]] = {}
    for place, unit in enumerate(units):
        places.setdefault(unit.position, []).append(place)
    whole: set[int] = set()
    from_slot: dict[int, int] = {}
    part_bytes: dict[int, int] = {}
    for position, own in places.items():
        staying = [place for place in own if place in kept]
        if len(staying) == len(own):
            whole.add(position)
        elif staying:
            assert staying == own[-len(staying) :], "a plan keeps from the end"
            from_slot[position] = units[staying[0]].first_slot
            part_bytes[position] = sum(units[place].size.nbytes for place in staying)
    return Stays(frozenset(whole), from_slot, part_bytes)


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
    """Steps of one planner. piece_bytes: the smallest part of a group that stays by itself."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._chunks: dict[ChunkKey, ChunkGroups] = {}  # all that were ever seen
        self._forget()

    def _forget(self) -> None:
        self.lengths = Lengths()
        self._names: dict[ChunkKey, tuple[str, ...]] = {}  # of the chunks' groups
        self._before: _Step | None = None
        self._timed: deque[_Step] = deque(maxlen=STEPS)
        self._planned: _Planned | None = None

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
        is too old, a search, which begins with `start`."""
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
        """Parts that stay of each chunk that was ever seen, by its own bytes."""
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
