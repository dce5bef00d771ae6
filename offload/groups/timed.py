"""Plans for a step whose times are known: two from simulation, and a trial of both.

One plan takes a chunk by units finer than its groups, so that of one group a part may stay: a group of 1.5 GB
is a coarse step under a limit of 10 GB, and with units of 0.3 GB the simulated step of a pipeline stage is 3
to 4% shorter (workload W2, November 2026). Units follow the chunk's saves: what a plan keeps of the chunk's
end is whole groups and the last tensors of at most one more.

The simulation is within a few percent of a real step, and so are its best plans of each other: on one H200
the plan by parts of groups was predicted 4% shorter than the plan by whole groups and was 1% longer (workload
W2 at 22 GB, November 2026). So each runs for one step, and the one that was seen to stall less stays. One
invariant: a trial changes what stays and how far ahead to fetch, never a result.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.groups.chunk import ChunkGroups
from offload.groups.group import Cost, Group
from offload.groups.seen import half_bytes_of, passed_bytes_of
from offload.policy.actions import Action, ChunkKey, GroupKey, GroupSize, Keeps, Rates
from offload.policy.keeps import kept_peak_bytes, tail_keeps
from offload.policy.lengths import nearest
from offload.policy.search import Amounts, Plan, choose_keeps
from offload.sizes import bytes_text
from offload.telemetry.speaker import speaker

__all__ = [
    "NO_PART",
    "KnownPlan",
    "Stays",
    "TimedPlan",
    "Trial",
    "Unit",
    "cut_into_units",
    "plan_by",
    "timed_plan",
    "timed_plans",
]

logger = speaker(__name__)

_MOST_TRIALS, _FEWEST_TRIALS = 100, 12
_UNIT_TRIALS = 50_000
"""Units times simulated steps of one search: about 1 s of host time, once, on whatever pipeline."""

_UNITS_A_CHUNK = 64
"""About so many at most, whatever the number of tensors: the host time of a plan grows with them."""


class Unit(NamedTuple):
    """Tensors of one group that lie together. position: of the group in its chunk. first_slot: of the first
    tensor in the group."""

    position: int
    first_slot: int
    size: GroupSize


class Stays(NamedTuple):
    """What a plan keeps of one chunk: positions of whole groups, and of others the slot from which on their
    tensors stay."""

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


class KnownPlan(NamedTuple):
    """What another search has found for the steps that come, before any of them was seen. actions: of such a
    step. peak_bytes: that it takes. most_kept_bytes: that may stay at once until one was seen. saved_bytes:
    of each chunk, all that it will save."""

    actions: Sequence[Action]
    amounts: Amounts
    peak_bytes: int
    most_kept_bytes: int
    saved_bytes: Mapping[ChunkKey, int]

    def first_leave_bytes(self, chunk: ChunkKey) -> float | None:
        """What leaves of the begin of a chunk; None where its stage is not named."""
        like = nearest(chunk, self.saved_bytes)
        if like is None:
            return None
        return max(0.0, self.saved_bytes[like] - self.amounts.kept_bytes.get(like, 0.0))


class Trial:
    """Runs each plan for one step; the one with the least stall is final. With a single plan there is nothing
    to try.

    A stall is known when the next step ends, because reading it sooner would block the host. That step may be
    any: an evaluation, one that an exception cut short, one in which nothing could leave. So
    `stall_of_step_before` is told at the end of each, and then `whole_step_ended` where the step was one that
    the plans are for.
    """

    def __init__(self, plans: Sequence[TimedPlan]) -> None:
        self._plans = plans
        self._stalls_ms: list[float] = []
        self._ran = False  # the step before was the first whole one under the plan whose stall comes next
        self._over = len(plans) == 1

    @property
    def settled(self) -> bool:
        return len(self._plans) == 1 or len(self._stalls_ms) == len(self._plans)

    @property
    def plan(self) -> TimedPlan:
        """What the next step is to follow."""
        if self.settled:
            return self._plans[self._stalls_ms.index(min(self._stalls_ms)) if self._stalls_ms else 0]
        return self._plans[min(len(self._stalls_ms) + self._ran, len(self._plans) - 1)]

    def stall_of_step_before(self, stall_ms: float | None) -> None:
        """stall_ms: of the step BEFORE the one that ends; None if not even now known: its plan is not chosen,
        unless none is known."""
        if self._ran and not self.settled:
            self._ran = False
            self._stalls_ms.append(float("inf") if stall_ms is None else stall_ms)
            if self.settled:
                stalls = ", ".join(f"{stall:.1f}" for stall in self._stalls_ms)
                logger.info("plans tried: stalls of %s ms", stalls)

    def whole_step_ended(self) -> TimedPlan | None:
        """The plan to follow from here on; None if the trial is over and its plan is followed already."""
        if self._over:
            return None
        self._over = self.settled
        self._ran = not self.settled
        return self.plan


def trials_for(num_units: int) -> int:
    """Steps to simulate in one search: their cost grows with the units of all chunks."""
    return max(_FEWEST_TRIALS, min(_MOST_TRIALS, _UNIT_TRIALS // max(1, num_units)))


def timed_plans(
    chunks: Sequence[ChunkGroups],
    actions: Sequence[Action],
    compute_s: Sequence[float],
    rates: Rates,
    limit_bytes: int,
    piece_bytes: int,
    start: Amounts | None = None,
) -> list[TimedPlan]:
    """The plans with the shortest simulated step by parts of groups and by whole groups, the shorter first;
    one if they are the same.

    chunks: that a backward read. actions, compute_s: the schedule and how long each action computes.
        piece_bytes: the smallest part. start: as of `choose_keeps`.
    """
    found: list[tuple[Plan, TimedPlan]] = []
    whole_bytes = max(sum(group.total_offload_bytes for group in chunk.groups) for chunk in chunks) + 1
    cuts: list[dict[ChunkKey, list[Unit]]] = [
        {chunk.id: cut_into_units(chunk.groups, least_bytes) for chunk in chunks}
        for least_bytes in (piece_bytes, whole_bytes)
    ]
    for units in cuts if cuts[0] != cuts[1] else cuts[:1]:
        chosen, plan = timed_plan(units, actions, compute_s, rates, limit_bytes, start)
        if all(plan != other for _, other in found):
            found.append((chosen, plan))
    fitting = [pair for pair in found if pair[0].fits]
    if not fitting:
        least, plan = min(found, key=lambda pair: pair[0].predicted_peak_bytes)
        logger.warning(
            "no plan keeps saved tensors within device_limit (device_limit_bytes in OffloadConfig), %s: the "
            "best one peaks at %s; raise the limit",
            bytes_text(limit_bytes),
            bytes_text(least.predicted_peak_bytes),
        )
        return [plan]
    return [plan for _, plan in sorted(fitting, key=lambda pair: pair[0].predicted_step_s)]


def timed_plan(
    units: Mapping[ChunkKey, Sequence[Unit]],
    actions: Sequence[Action],
    compute_s: Sequence[float],
    rates: Rates,
    limit_bytes: int,
    start: Amounts | None = None,
) -> tuple[Plan, TimedPlan]:
    """The plan with the shortest simulated step by these units; the one with the lowest peak where none keeps
    within the limit. start: as of `choose_keeps`."""
    sizes = {chunk: [unit.size for unit in own] for chunk, own in units.items()}
    num_units = sum(map(len, sizes.values()))
    most = trials_for(num_units)
    chosen = choose_keeps(actions, sizes, compute_s, rates, limit_bytes, max_trials=most, start=start)
    logger.info(
        "plan: %d of %d units stay, %s bytes ahead, step predicted %.1f ms of which %.1f compute",
        len(chosen.keeps),
        num_units,
        f"{chosen.restoring_room_bytes:,}",
        chosen.predicted_step_s * 1000,
        sum(compute_s) * 1000,
    )
    return chosen, _plan_of(units, chosen.keeps, chosen.restoring_room_bytes, chosen.half_room_bytes)


def plan_by(
    amounts: Amounts, actions: Sequence[Action], units: Mapping[ChunkKey, Sequence[Unit]]
) -> tuple[TimedPlan, int]:
    """The plan that these amounts make of these units, and the most that it keeps at once. Chunks that they
    do not name keep nothing."""
    sizes = {chunk: [unit.size for unit in own] for chunk, own in units.items()}
    keeps = tail_keeps(sizes, amounts.kept_bytes)
    plan = _plan_of(units, keeps, round(amounts.window_bytes), round(amounts.half_room_bytes))
    return plan, kept_peak_bytes(actions, sizes, keeps)


def _plan_of(
    units: Mapping[ChunkKey, Sequence[Unit]], keeps: Keeps, restoring_room_bytes: int, half_room_bytes: int
) -> TimedPlan:
    """keeps: by places of units."""
    kept: dict[ChunkKey, set[int]] = {chunk: set() for chunk in units}
    for key in keeps:
        kept[key.chunk].add(key.position)
    parts = {chunk: stays_of(own, kept[chunk]) for chunk, own in units.items()}
    return TimedPlan(
        keeps=frozenset(GroupKey(chunk, at) for chunk, stays in parts.items() for at in stays.whole),
        parts=parts,
        restoring_room_bytes=restoring_room_bytes,
        half_room_bytes=half_room_bytes,
    )


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
    """Of the group of an input that a recompute starts from: the region of what that keeps, else one of its
    own; 0 for any other group."""
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
            )
        )
        for at, unit in enumerate(units)
    ]


def stays_of(units: Sequence[Unit], kept: Collection[int]) -> Stays:
    """What it means for the groups that the units at the places `kept` stay."""
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
