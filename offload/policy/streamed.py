"""Which blocks stay on the device: those with which a step is shortest, by measured compute and the link.

One invariant: a larger limit is never slower, because the plans for a smaller one are among those for it:
which plans are compared does not depend on the limit, only which of them fit. Numbers only, no torch.

A step is played as the stream runs it: a block is loaded when the link is free and what it takes the room of
has computed, it leaves when a block that is used earlier needs its room, and a use waits for its load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import inf
from typing import NamedTuple

from offload.policy.actions import Rates
from offload.policy.play import Item, Need, Op, Player

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


def played_s(
    uses: Sequence[tuple[int, float]], sizes: Sequence[Size], plan: Plan, bytes_per_s: float
) -> float:
    """Seconds of a step. uses: (block, seconds that it computes until the next use), as one step after the
    other repeats them. Kept blocks are there."""
    ops = []
    for block, seconds in uses:
        need = Need(block, sizes[block].arriving, sizes[block].used)
        if block in plan.keep:
            ops.append(Op(seconds))
        else:
            ops.append(Op(seconds, (need,), reads_first=True, frees=(block,)))
    items = [Item(size.used, leaves=False, home=True) for size in sizes]
    rates = Rates(d2h_bytes_per_s=bytes_per_s, h2d_bytes_per_s=bytes_per_s)
    player = Player(items, ops * 2, rates, plan.window_bytes, inf)
    player.play()
    return player.now_s - player.ends_s[len(uses) - 1]


def _chain(
    uses: Sequence[tuple[int, float]], sizes: Sequence[Size], bytes_per_s: float
) -> Iterator[tuple[float, frozenset[int]]]:
    """Sets of blocks that stay, after their step's seconds with the least window. Each is one block more than
    the one before: the block that shortens the step most, and of equal ones the one furthest from those that
    stay."""
    window, keep = least_window(sizes), frozenset[int]()
    compute = sum(seconds for _, seconds in uses)
    took = played_s(uses, sizes, Plan(keep, window), bytes_per_s)
    yield took, keep
    while len(keep) < len(sizes) - 2 and took > compute * (1 + 1e-9):
        rest = [index for index in range(len(sizes)) if index not in keep]
        step = -(-len(rest) // _CANDIDATES)
        took, _, chosen = min(
            (played_s(uses, sizes, Plan(keep | {index}, window), bytes_per_s), -_distance(index, keep), index)
            for index in rest[step // 2 :: step]
        )
        keep = keep | {chosen}
        yield took, keep


def _distance(index: int, keep: Collection[int]) -> int:
    return min((abs(index - other) for other in keep), default=0)


def best_plans(
    uses: Sequence[tuple[int, float]], sizes: Sequence[Size], limits: Sequence[int], bytes_per_s: float
) -> list[tuple[Plan, float]]:
    """For each limit the plan with the shortest step that fits it, and its seconds; of equal ones the one
    that takes fewest bytes."""
    least, most, found = least_window(sizes), max(limits), list[tuple[float, int, Plan]]()

    def note(plan: Plan, took: float | None = None) -> bool:
        """Note a plan, and return True if it fits any limit. took: its step, if it was played."""
        if (nbytes := plan.device_bytes(sizes)) > most:
            return False
        found.append((played_s(uses, sizes, plan, bytes_per_s) if took is None else took, nbytes, plan))
        return True

    for took, keep in _chain(uses, sizes, bytes_per_s):
        if not note(Plan(keep, least), took):
            break
        for more in range(1, _WINDOWS):
            note(Plan(keep, least + more * max(size.used for size in sizes)))
    if (whole := _whole(sizes, most)) is not None:
        note(whole)
    best = [min((each for each in found if each[1] <= limit), key=lambda each: each[:2]) for limit in limits]
    return [(plan, took) for took, _, plan in best]
