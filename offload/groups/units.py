"""A chunk cut finer than its groups, for a plan that knows times: of one group a part may stay.

A group of 1.5 GB is a coarse step under a limit of 10 GB: with units of 0.3 GB the simulated step of a
pipeline stage is 3 to 4% shorter (workload W2, November 2026). One invariant: units follow the chunk's saves,
so that what a plan keeps of the chunk's end is whole groups and the last tensors of at most one more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from offload.groups.group import Group
from offload.policy.actions import GroupSize

__all__ = ["Stays", "Unit", "cut_into_units", "stays_of"]

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


def cut_into_units(groups: Sequence[Group], least_bytes: int) -> list[Unit]:
    """The groups in order, each cut after tensors that reach `least_bytes`, or a 64th of the chunk if that is
    more, and at the ends of checkpoint regions, whose tensors are read together."""
    least_bytes = max(least_bytes, sum(group.total_offload_bytes for group in groups) // _UNITS_A_CHUNK)
    units: list[Unit] = []
    for position, group in enumerate(groups):
        first_slot, nbytes, region = 0, 0, 0
        # counted by hand: in one
        for slot, slot_bytes in group.slot_bytes or ((0, group.total_offload_bytes),):
            if group.regions.get(slot, 0) != region:
                if nbytes:
                    units.append(Unit(position, first_slot, GroupSize(group.name, nbytes, region)))
                    first_slot, nbytes = slot, 0
                region = group.regions.get(slot, 0)
            nbytes += slot_bytes
            if nbytes >= least_bytes:
                units.append(Unit(position, first_slot, GroupSize(group.name, nbytes, region)))
                first_slot, nbytes = slot + 1, 0
        if nbytes or first_slot == 0:  # the rest, or a group without bytes
            units.append(Unit(position, first_slot, GroupSize(group.name, nbytes, region)))
    return units


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
