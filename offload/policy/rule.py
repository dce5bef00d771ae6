"""Mode "auto": the rule. As many whole blocks as fit run plain and without a hook, the last ones of a chunk
first; the others are recomputed.

What a step takes is known from one that was measured, in which every block was recomputed. At each block's
backward so many bytes were active; a block that runs plain adds what it saves from its forward to its
backward, and a recomputed one its input, if that stays.

    K plain   peak = the most, over backwards of blocks, of what was active there and what plain blocks whose
              backward comes later hold; and over heads, of theirs and what all live plain blocks hold

So the last block is plain for nothing: its backward holds as much either way. One invariant: numbers only,
and a rule that fits with fewer bytes has no more plain blocks."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import sub
from typing import NamedTuple

from offload.policy.actions import ChunkKey


class Rule(NamedTuple):
    """plain: places of the blocks of a chunk that run plain, by stage. moves: inputs of the others leave.
    only: chunks, if those of no others do."""

    plain: Mapping[int, frozenset[int]] = {}
    moves: bool = True
    only: frozenset[ChunkKey] | None = None

    def is_plain(self, chunk: ChunkKey, place: int) -> bool:
        return (self.only is None or chunk in self.only) and place in self.plain.get(chunk[0], ())

    @property
    def num_plain(self) -> int:
        """Number of plain blocks of one chunk of each stage."""
        return sum(map(len, self.plain.values()))


class Cost(NamedTuple):
    """Cost of one kind of block. plain_bytes: that it saves beside its input. input_bytes: of that. again_s:
    of its recompute, or, where it may not be recomputed, of moving what it saves. given_bytes: of its first
    argument, the measure of its tokens."""

    plain_bytes: int
    input_bytes: int
    again_s: float
    given_bytes: int = 1


class _Seen(NamedTuple):
    """is_forward: the forward of a block has ended, else all that its backward reads is there. rest_bytes: of
    what is active, what the engine does not count."""

    is_forward: bool
    chunk: ChunkKey
    place: int
    active_bytes: int
    rest_bytes: int = 0


class Growth(NamedTuple):
    """Bytes of a step beside saved tensors. by_call: that it has made by the backward of a block, at most
    from there to the next one, beyond what there was before; come: of these, since the backward before that
    one; most: of all. head: what a head and its loss have, without what was made before. resident: what was
    active at the step's begin."""

    by_call: Mapping[tuple[ChunkKey, int], int] = {}
    come: Mapping[tuple[ChunkKey, int], int] = {}
    most: int = 0
    head: int = 0
    resident: int = 0


NO_GROWTH = Growth()


@dataclass(slots=True)
class Trace:
    """A step in which no block ran plain. moves: inputs left. kinds: of the blocks of each chunk, in order.
    peak_bytes: active at most in blocks; head_bytes: between a chunk's last block and its backward.
    resident_bytes: active at its begin. input_bytes: of all blocks, the measure of its tokens."""

    moves: bool
    resident_bytes: int = 0
    input_bytes: int = 0
    peak_bytes: int = 0
    head_bytes: int = 0
    seen: list[_Seen] = field(default_factory=list)
    heads: list[tuple[int, int]] = field(default_factory=list)
    """Of each head and loss, how many were seen before it, and what the engine did not count meanwhile."""
    kinds: dict[ChunkKey, list[Hashable]] = field(default_factory=dict)

    def forward_ended(self, chunk: ChunkKey, place: int, rest_bytes: int = 0) -> None:
        self.seen.append(_Seen(True, chunk, place, 0, rest_bytes))

    def backward_reads(self, chunk: ChunkKey, place: int, active_bytes: int, rest_bytes: int = 0) -> None:
        self.seen.append(_Seen(False, chunk, place, active_bytes, rest_bytes))

    def head_ended(self, rest_bytes: int) -> None:
        self.heads.append((len(self.seen), rest_bytes))

    def growth(self, rest_bytes: int) -> Growth:
        """Bytes that the step comes to have beside saved tensors, and keeps: gradients. rest_bytes: that
        there are at most. What a backward takes beyond what it reads may come at any of them, so it is there
        from the begin on, and so much less comes. None where a backward reads again what it has read: that
        is not freed for what it makes."""
        reads = [(seen.chunk, seen.place) for seen in self.seen if not seen.is_forward]
        if len(set(reads)) < len(reads):
            return NO_GROWTH
        first = next((at for at, seen in enumerate(self.seen) if not seen.is_forward), len(self.seen))
        most = begun = max((seen.rest_bytes for seen in self.seen[: first + 1]), default=0)
        room = max(0, rest_bytes - begun - self._beside_bytes)
        by_call: dict[tuple[ChunkKey, int], int] = {}
        last: tuple[ChunkKey, int] | None = None
        grown = [0] * (first + 1)
        for seen in self.seen[first:]:
            most = max(most, seen.rest_bytes)
            last = last if seen.is_forward else (seen.chunk, seen.place)
            assert last is not None
            by_call[last] = min(most - begun, room)
            grown.append(by_call[last])
        come = dict(zip(by_call, map(sub, by_call.values(), (0, *by_call.values())), strict=False))
        heads = [nbytes - grown[min(at, len(grown) - 1)] for at, nbytes in self.heads]
        return Growth(by_call, come, grown[-1], max(heads, default=0), self.resident_bytes)

    @property
    def _beside_bytes(self) -> int:
        """That a backward takes beyond what it reads."""
        return max(0, self.peak_bytes - max((seen.active_bytes for seen in self.seen), default=0))

    def shift(self, nbytes: int) -> None:
        """So many bytes more are active in all of the step."""
        self.resident_bytes += nbytes
        self.peak_bytes += nbytes
        self.head_bytes += nbytes
        self.seen[:] = [seen._replace(active_bytes=seen.active_bytes + nbytes) for seen in self.seen]

    @property
    def most_bytes(self) -> int:
        return max(self.peak_bytes, self.head_bytes)


def peak_bytes(trace: Trace, costs: Mapping[Hashable, Cost], rule: Rule, factor: float = 1.0) -> float:
    """Active bytes at most of a step under this rule. factor: as many times as many tokens."""
    beside_bytes = trace._beside_bytes
    live: dict[tuple[ChunkKey, int], float] = {}
    held, most, open_chunk = 0.0, 0.0, None

    def grown(nbytes: float) -> float:
        return trace.resident_bytes + factor * max(0.0, nbytes - trace.resident_bytes)

    for is_forward, chunk, place, active_bytes, _ in trace.seen:
        if is_forward:
            cost = costs[trace.kinds[chunk][place]]
            before = 0 if trace.moves else cost.input_bytes
            if rule.is_plain(chunk, place):
                now = cost.plain_bytes + cost.input_bytes
            else:
                now = 0 if rule.moves else cost.input_bytes
            live[chunk, place] = factor * (now - before)
            held += live[chunk, place]
            open_chunk = chunk
            continue
        if chunk == open_chunk:
            most, open_chunk = max(most, grown(trace.head_bytes) + held), None
        held -= live.pop((chunk, place), 0.0)
        most = max(most, grown(active_bytes + beside_bytes) + held)
    return max(most, grown(trace.most_bytes) if not trace.seen else 0.0)


def moved_bytes(trace: Trace, costs: Mapping[Hashable, Cost], rule: Rule) -> tuple[int, int]:
    """Bytes that leave in a step under this rule, whose inputs leave, and the most of them on the host at
    once."""
    held, moved, most = 0, 0, 0
    for is_forward, chunk, place, _, _ in trace.seen:
        if not rule.is_plain(chunk, place):
            nbytes = costs[trace.kinds[chunk][place]].input_bytes
            held += nbytes if is_forward else -nbytes
            moved += nbytes if is_forward else 0
            most = max(most, held)
    return moved, most


def fitting(
    trace: Trace,
    costs: Mapping[Hashable, Cost],
    total_bytes: float,
    *,
    moves: bool,
    by_kind: bool = True,
    factor: float = 1.0,
) -> Rule:
    """The rule that spares most seconds within the total: kinds by the seconds that a byte of them spares,
    of each the last ones of a chunk that fit. by_kind: else all kinds are one, and as many of the last blocks
    run plain as fit."""
    rule = Rule({}, moves)
    stages: dict[int, Sequence[Hashable]] = {}
    for (stage, _), kinds in trace.kinds.items():
        stages[stage] = max(stages.get(stage, ()), kinds, key=len)
    runs = [
        (stage, kind)
        for stage, kinds in stages.items()
        for kind in (dict.fromkeys(kinds) if by_kind else (None,))
    ]
    if by_kind:
        runs.sort(key=lambda run: _worth(costs[run[1]], moves), reverse=True)
    for stage, kind in runs:
        places = [place for place, of in enumerate(stages[stage]) if kind in (None, of)][::-1]
        fits, too_many = 0, len(places) + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            tried = _with(rule, stage, places[:middle])
            if peak_bytes(trace, costs, tried, factor) <= total_bytes:
                fits = middle
            else:
                too_many = middle
        rule = _with(rule, stage, places[:fits])
    return rule


def _worth(cost: Cost, moves: bool) -> float:
    """Seconds a byte."""
    nbytes = cost.plain_bytes + (cost.input_bytes if moves else 0)
    return cost.again_s / nbytes if nbytes > 0 else inf


def _with(rule: Rule, stage: int, places: Collection[int]) -> Rule:
    return rule._replace(plain={**rule.plain, stage: rule.plain.get(stage, frozenset()).union(places)})


def probes(trace: Trace, costs: Mapping[Hashable, Cost], total_bytes: float) -> Rule:
    """The last block of each kind, in the last chunk of its stage, but for those that do not fit. costs: as
    they are known before any ran plain."""
    chunks = list(trace.kinds)
    last = {chunk[0]: chunk for chunk in chunks}
    places = {
        (chunk, kind): max(place for place, of in enumerate(trace.kinds[chunk]) if of == kind)
        for chunk in last.values()
        for kind in dict.fromkeys(trace.kinds[chunk])
    }
    for chunk, kind in sorted(places, key=lambda of: costs[of[1]].plain_bytes, reverse=True):
        rule = _probing(places, trace.moves)
        if peak_bytes(trace, costs, rule) <= total_bytes:
            break
        del places[chunk, kind]
    return _probing(places, trace.moves)


def _probing(places: Mapping[tuple[ChunkKey, Hashable], int], moves: bool) -> Rule:
    plain: dict[int, frozenset[int]] = {}
    for (chunk, _), place in places.items():
        plain[chunk[0]] = plain.get(chunk[0], frozenset()) | {place}
    return Rule(plain, moves, frozenset(chunk for chunk, _ in places))
