"""The linear program of a mixture: its rows and columns, built once and solved.

    slice       a part of one action: an F slice makes its share, which the mirror slice of the B reads
    t[s]        how long slice s takes
    part        neighbouring blocks of a chunk; an action has a slice for each part of its chunk
    x[b, l]     the share of block b that runs at level l of its menu; what is left of 1 runs plain
    given[b]    bytes of block b that are given up: what its levels save less than the plain one
    moved       flows are of a whole chunk: out[c, s], in[c, s], away[c, s]

    minimise    sum t
    such that   t[s] >= compute of s, and of what is recomputed in s
                out, in and away within what the link carries; away only of what is made, not given up, unread
                made - read - given - away <= cap at the end of each slice
                away of all chunks <= host limit

A chunk's backward reads last what its forward made first. So of a chunk the bytes that are away can always be
those made first, and one flow says as much as one for each block. Shares of a block may run at several
levels, so a menu need not be convex.

What only engines need is left out: room for what a recompute makes again, and what the I of a split backward
leaves of that for its W. One invariant: every simplification lets the program do more than an engine can,
never less.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

from bench.linear import Ranges, Rows, minimise
from offload.policy.actions import Action, ChunkKey, Life, Rates, lives_of
from offload.policy.menu import Block, ChunkBlocks, Level, block_seconds

__all__ = ["MixedBound", "MixedProgram", "num_flows"]

_MOST_FLOWS = 1500
"""Chunks times slices of their lives: the time to solve grows faster than they do, and is about 0.3 s for so
many. In a longer step neighbouring actions are one slice, of which less is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedBound:
    """The answer of the program."""

    step_s: float
    """Least time of the step."""
    compute_s: float
    """Compute alone: the step with nothing given up or moved."""
    moved_bytes: int
    """Bytes that leave the device, the fewest of a step of that time."""
    recomputed_bytes: int
    """Bytes that were never made in a forward."""


def num_flows(actions: Sequence[Action]) -> int:
    """How large the program is with a slice for each action: chunks times actions of their lives."""
    return sum(life.last_read - life.forward + 1 for life in lives_of(actions).values())


class _Kind(NamedTuple):
    """`num` equal blocks of one part. column: of the first level after the plain one; the others follow."""

    block: Block
    num: int
    column: int

    def levels(self) -> Iterator[tuple[int, Level]]:
        """Each level but the plain one, with its column."""
        return enumerate(self.block.menu[1:], self.column)


@dataclass(slots=True)
class _Prefixes:
    """Of the parts of a chunk up to each: what they save if they run plain, in units of bytes, and the column
    of what they give up."""

    saved: list[float] = field(default_factory=list)
    given: list[int] = field(default_factory=list)

    def upto(self, place: int) -> tuple[float, list[tuple[int, float]]]:
        """Bytes and columns of the parts up to this one; of none for -1."""
        return (0.0, []) if place < 0 else (self.saved[place], [(self.given[place], 1.0)])


class MixedProgram:
    """The rows and columns, in units of the largest chunk's bytes and of the seconds in which they leave.

    The first columns are the slices' durations.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        blocks: ChunkBlocks,
        rates: Rates,
        rest_s: Mapping[Action, float],
        slices: int,
    ) -> None:
        self._lives = lives_of(actions)
        self._blocks = {chunk: blocks[chunk] for chunk in self._lives}
        plain = {
            chunk: sum(block.menu[0].saved_bytes for block in own) for chunk, own in self._blocks.items()
        }
        self._byte_unit = max(1, *plain.values()) if plain else 1
        self._time_unit = self._byte_unit / rates.d2h_bytes_per_s
        self._ranges: Ranges = []
        self._at_most, self._equal = Rows(), Rows()
        flows = num_flows(actions)
        slices = max(1, min(slices, _MOST_FLOWS // max(1, flows)))
        self._cuts = {chunk: _cut(own, slices) for chunk, own in self._blocks.items()}
        counts = [max(1, len(self._cuts[action.chunk])) for action in actions]
        merged = math.ceil(flows / _MOST_FLOWS) or 1
        self._first = [at // merged for at in range(len(actions))] if merged > 1 else [0, *accumulate(counts)]
        self._num_slices = num_slices = self._first[-1] + (merged > 1)
        compute_s = [0.0] * num_slices
        for action, first, count in zip(actions, self._first, counts, strict=False):
            cut = self._slices_of(action)
            for place in range(count):
                own = cut[place] if cut else []
                seconds = sum(block_seconds(block, action, self._lives[action.chunk]) for block in own)
                compute_s[first + place] += seconds + rest_s.get(action, 0.0) / count
        self._ranges += [(seconds / self._time_unit, None) for seconds in compute_s]
        # recompute seconds of each slice, by column
        self._seconds: list[list[tuple[int, float]]] = [[] for _ in range(num_slices)]
        self._outs: list[list[int]] = [[] for _ in range(num_slices)]
        self._ins: list[list[int]] = [[] for _ in range(num_slices)]
        self._aways: list[list[int]] = [[] for _ in range(num_slices)]
        self._used: list[list[tuple[int, float]]] = [[] for _ in range(num_slices)]  # beside plain bytes
        self._plain = [0.0] * num_slices
        self._parts: dict[ChunkKey, list[list[_Kind]]] = {}
        for chunk in self._lives:
            self._add_chunk(chunk)
        for at, recomputed in enumerate(self._seconds):
            if recomputed:
                # the duration's own least is for what is computed anyway
                self._at_most.add([(at, -1.0), *recomputed], -(self._ranges[at][0] or 0.0))
        h2d = rates.h2d_bytes_per_s / rates.d2h_bytes_per_s
        both = rates.together_bytes_per_s / rates.d2h_bytes_per_s
        for at in range(num_slices):
            outs, ins = self._outs[at], self._ins[at]
            for columns, rate in ((outs, 1.0), (ins, h2d), ([*outs, *ins], both)):
                if columns:
                    self._at_most.add([*((moved, 1.0) for moved in columns), (at, -rate)], 0.0)

    def limit(self, cap_bytes: int, host_limit_bytes: int | None) -> None:
        """The rows of the device and of host memory."""
        cap = cap_bytes / self._byte_unit
        for at, plain in enumerate(self._plain):
            if plain > cap:
                self._at_most.add(self._used[at], cap - plain)
        if host_limit_bytes is not None:
            for aways in self._aways:
                if aways:
                    limit = host_limit_bytes / self._byte_unit
                    self._at_most.add([(away, 1.0) for away in aways], limit)

    def solve(self, compute_s: float) -> MixedBound | None:
        durations = range(self._num_slices)
        costs = dict.fromkeys(durations, 1.0)
        leaving = [out for outs in self._outs for out in outs]
        least = minimise(costs, self._ranges, self._at_most, self._equal)
        if least is None:
            return None
        step = sum(least[at] for at in durations)
        # more than the least by less than can be measured, or rounding leaves the second no solution
        self._at_most.add([(at, 1.0) for at in durations], step * (1 + 1e-7) + 1e-7)
        fewest = dict.fromkeys(leaving, 1.0)
        least = minimise(fewest, self._ranges, self._at_most, self._equal) or least
        recomputed_bytes = sum(
            least[at] * (kind.block.menu[0].saved_bytes - level.saved_bytes)
            for parts in self._parts.values()
            for kind in chain(*parts)
            for at, level in kind.levels()
        )
        return MixedBound(
            # the solver's tolerance may leave the sum a hair under the compute
            step_s=max(step * self._time_unit, compute_s),
            compute_s=compute_s,
            moved_bytes=round(sum(least[out] for out in leaving) * self._byte_unit),
            recomputed_bytes=round(recomputed_bytes),
        )

    def _slices_of(self, action: Action) -> list[Sequence[Block]]:
        """The parts of the action's chunk in the order in which it computes them."""
        cut = self._cuts[action.chunk]
        forward = action.kind == "F" or (
            action.kind == "W" and self._lives[action.chunk].half_read is not None
        )
        return cut if forward else cut[::-1]

    def _column(self, most: float | None) -> int:
        self._ranges.append((0.0, most))
        return len(self._ranges) - 1

    def _add_chunk(self, chunk: ChunkKey) -> None:
        life, cut = self._lives[chunk], self._cuts[chunk]
        parts: list[list[_Kind]] = []
        whole, half = _Prefixes(), _Prefixes()
        for own in cut:
            kinds = [self._kind(block, count) for block, count in Counter(own).items()]
            parts.append(kinds)
            self._add_prefix(whole, kinds, after_half=False)
            if life.half_read is not None:
                self._add_prefix(half, kinds, after_half=True)
        self._parts[chunk] = parts
        self._add_recompute(life, parts)
        away_before: list[tuple[int, float]] = []
        last = len(cut) - 1
        first, end = self._first[life.forward], self._first[life.last_read] + last
        for at in range(first, end + 1 if parts else first):
            live, given = self._live(at, life, last, whole, half)
            out, back = self._column(None), self._column(None)
            self._outs[at].append(out)
            self._ins[at].append(back)
            row = [(out, -1.0), (back, 1.0), *away_before]
            if at < end:
                away = self._column(None)
                self._at_most.add([(away, 1.0), *given], live)
                self._aways[at].append(away)
                self._used[at] += [(away, -1.0), *((column, -value) for column, value in given)]
                self._plain[at] += live
                row.append((away, 1.0))
                away_before = [(away, -1.0)]
            self._equal.add(row, 0.0)

    def _add_prefix(self, prefixes: _Prefixes, kinds: Sequence[_Kind], *, after_half: bool) -> None:
        """One part more: what it and those before it save if they run plain, and the column of what they give
        up of that. after_half: of what is read again after the I of a split backward."""
        saved, row = 0.0, []
        for kind in kinds:
            every = kind.block.w_bytes if after_half else kind.block.menu[0].saved_bytes
            saved += kind.num * every / self._byte_unit
            for column, level in kind.levels():
                left = min(level.saved_bytes, every) if after_half else level.saved_bytes
                row.append((column, (left - every) / self._byte_unit))
        column = self._column(None)
        self._ranges[column] = (None, None)
        self._equal.add([(column, 1.0), *((before, -1.0) for before in prefixes.given[-1:]), *row], 0.0)
        prefixes.given.append(column)
        prefixes.saved.append(saved + (prefixes.saved[-1] if prefixes.saved else 0.0))

    def _live(
        self, at: int, life: Life, last: int, whole: _Prefixes, half: _Prefixes
    ) -> tuple[float, list[tuple[int, float]]]:
        """Of a chunk, what is made and will be read when the slice ends: bytes if its parts run plain, and
        the columns of what they give up."""
        made, read = at - self._first[life.forward], at - self._first[life.last_read]
        if life.half_read is None or at < self._first[life.half_read]:
            return whole.upto(min(made, last) if read < 0 else last - 1 - read)
        unread = last - 1 - (at - self._first[life.half_read])
        ranges = [
            (1.0, whole.upto(unread)),
            (1.0, half.upto(last)),
            (-1.0, half.upto(max(unread, read, -1))),
        ]
        given = [(column, sign * value) for sign, (_, own) in ranges for column, value in own]
        return sum(sign * nbytes for sign, (nbytes, _) in ranges), given

    def _add_recompute(self, life: Life, parts: Sequence[Sequence[_Kind]]) -> None:
        """The seconds of recomputing in the slices that read."""
        first = self._first[life.last_read if life.half_read is None else life.half_read]
        for at, part in enumerate(reversed(parts), first):
            for kind in part:
                for column, level in kind.levels():
                    self._seconds[at].append((column, level.recompute_s / self._time_unit))

    def _kind(self, block: Block, count: int) -> _Kind:
        columns = [self._column(float(count)) for _ in block.menu[1:]]
        if len(columns) > 1:
            self._at_most.add([(column, 1.0) for column in columns], float(count))
        return _Kind(block, count, columns[0] if columns else 0)


def _cut(blocks: Sequence[Block], slices: int) -> list[Sequence[Block]]:
    """The blocks in at most so many parts of about as many each."""
    count = min(slices, len(blocks))
    return [blocks[len(blocks) * at // count : len(blocks) * (at + 1) // count] for at in range(count)]
