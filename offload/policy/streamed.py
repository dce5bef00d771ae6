"""Which blocks stay on the device: those with which a step is shortest, by measured compute and the link.

One invariant: a larger limit is never slower, because the plans for a smaller one are among those for it:
which plans are compared does not depend on the limit, only which of them fit. Numbers only, no torch.

A step is played as the stream runs it: a block is loaded when the link is free and what it takes the room of
has computed, it leaves when a block that is used earlier needs its room, and a use waits for its load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

_WINDOWS = 4
"""Windows that are compared: of two blocks, and of one, two and three more."""

_CANDIDATES = 8
"""Blocks that are looked at for each further one that stays, at equal distances: 80 blocks take a second."""


class Size(NamedTuple):
    """Bytes of a block on the device: once it is used, and before, which are those that cross the link. Fewer
    of INT8 weights."""

    used: int
    arriving: int


class Plan(NamedTuple):
    """keep: blocks that stay. window_bytes: for all others, on the device at once."""

    keep: frozenset[int]
    window_bytes: int

    def device_bytes(self, sizes: Sequence[Size]) -> int:
        return self.window_bytes + sum(sizes[index].used for index in self.keep)


def least_window(sizes: Sequence[Size]) -> int:
    """Bytes of a block that computes and one that arrives, or of INT8 weights beside their elements."""
    largest = sorted(range(len(sizes)), key=lambda at: -sizes[at].arriving)[:2]
    return max(
        used + max(arriving if arriving < used else 0, *(sizes[to].arriving for to in largest if to != at), 0)
        for at, (used, arriving) in enumerate(sizes)
    )


def first_plan(sizes: Sequence[Size], limit_bytes: int) -> Plan:
    """Before anything is measured: the window has all of the limit."""
    return _whole(sizes, limit_bytes) or Plan(frozenset(), limit_bytes)


def _whole(sizes: Sequence[Size], limit_bytes: int) -> Plan | None:
    """All blocks, where they fit, with INT8 weights of one beside their elements."""
    window = max((size.arriving for size in sizes if size.arriving < size.used), default=0)
    fits = sum(size.used for size in sizes) + window <= limit_bytes
    return Plan(frozenset(range(len(sizes))), window) if fits else None


def play(uses: Sequence[tuple[int, float]], sizes: Sequence[Size], plan: Plan, bytes_per_s: float) -> float:
    """Seconds of a step. uses: (block, seconds that it computes until the next use), as one step after the
    other repeats them. Kept blocks are there."""
    keep, number = plan.keep, len(uses)
    order = [block for block, _ in uses] * 3
    present: dict[int, float] = {}  # when its load ends
    holds: dict[int, int] = {}  # bytes
    free, link, now, begun = plan.window_bytes, 0.0, 0.0, 0.0

    def load(block: int) -> None:
        nonlocal free, link
        holds[block] = sizes[block].arriving
        free -= holds[block]
        link = max(link, now) + holds[block] / bytes_per_s
        present[block] = link

    def make_room(nbytes: int, able: list[int], at: int) -> bool:
        """Of the blocks that may go, the one that comes last goes first."""
        nonlocal free
        if free + sum(holds[other] for other in able) < nbytes:
            return False
        if free < nbytes and len(able) > 1:
            able.sort(key=lambda other: -order.index(other, at))
        for other in able:
            if free < nbytes:
                del present[other]
                free += holds.pop(other)
        return True

    def expanding(block: int) -> int:
        """Bytes that a use of it takes beside its INT8."""
        used, arriving = sizes[block]
        return used if holds.get(block, arriving) < used else 0

    def expand(block: int, at: int) -> None:
        nonlocal free
        if room := expanding(block):
            make_room(room, [other for other in present if other != block], at)
            free -= sizes[block].used - holds[block]
            holds[block] = sizes[block].used

    def fetch(at: int, stay: int | None) -> None:
        """What the stream does after a use: `at` is the next one."""
        seen, before, room = {stay}, 0, 0
        for each in range(at, at + number):
            block = order[each]
            if block in keep or block in seen:
                continue
            room = max(room, expanding(block))
            if block not in present:
                able = [other for other in present if other not in seen]
                if before and before + sizes[block].arriving + room > plan.window_bytes:
                    return
                if not make_room(sizes[block].arriving, able, at):
                    return
                load(block)
            before += holds[block]
            seen.add(block)

    for at in range(2 * number):
        block, seconds = uses[at % number]
        if at == number:
            begun = now
        if block not in keep:
            if block not in present:
                make_room(sizes[block].arriving, [*present], at)
                load(block)
            now = max(now, present[block])
            expand(block, at)
        fetch(at + 1, block)
        now += seconds
        fetch(at + 1, None)
    return now - begun


def _chain(
    uses: Sequence[tuple[int, float]], sizes: Sequence[Size], bytes_per_s: float
) -> Iterator[frozenset[int]]:
    """Sets of blocks that stay, each one block more than the one before: the block that shortens the step
    most, and of equal ones the one furthest from those that stay."""
    window, keep = least_window(sizes), frozenset[int]()
    compute = sum(seconds for _, seconds in uses)
    took = play(uses, sizes, Plan(keep, window), bytes_per_s)
    yield keep
    while len(keep) < len(sizes) - 2 and took > compute * (1 + 1e-9):
        rest = [index for index in range(len(sizes)) if index not in keep]
        step = -(-len(rest) // _CANDIDATES)
        found = [
            (play(uses, sizes, Plan(keep | {index}, window), bytes_per_s), -_distance(index, keep), index)
            for index in rest[step // 2 :: step]
        ]
        took, _, chosen = min(found)
        keep = keep | {chosen}
        yield keep


def _distance(index: int, keep: Collection[int]) -> int:
    return min((abs(index - other) for other in keep), default=0)


def best_plans(
    uses: Sequence[tuple[int, float]], sizes: Sequence[Size], limits: Sequence[int], bytes_per_s: float
) -> list[tuple[Plan, float]]:
    """For each limit the plan with the shortest step that fits it, and its seconds; of equal ones the one
    that takes fewest bytes."""
    least, largest = least_window(sizes), max(size.used for size in sizes)
    found: list[tuple[float, int, Plan]] = []
    for keep in _chain(uses, sizes, bytes_per_s):
        plans = [Plan(keep, least + more * largest) for more in range(_WINDOWS)]
        if plans[0].device_bytes(sizes) > max(limits):
            break
        for plan in plans:
            if (nbytes := plan.device_bytes(sizes)) <= max(limits):
                found.append((play(uses, sizes, plan, bytes_per_s), nbytes, plan))
    whole = _whole(sizes, max(limits))
    if whole is not None:
        found.append((play(uses, sizes, whole, bytes_per_s), whole.device_bytes(sizes), whole))
    best = []
    for limit in limits:
        took, _, plan = min((each for each in found if each[1] <= limit), key=lambda each: each[:2])
        best.append((plan, took))
    return best
