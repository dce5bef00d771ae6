"""The search of a mixture: states of a plan, each simulated once, changed a little at a time.

One invariant: a state is numbers, so two equal ones are tried once, and the best so far is the best of all
that were tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

from offload.policy.actions import Action, ChunkKey, GroupSize, Keeps, Rates
from offload.policy.keeps import kept_peak_bytes, limit_keeps, tail_keeps
from offload.policy.menu import Block, Host
from offload.policy.mixed_bound import ChunkBlocks, MixedBound, action_seconds, host_seconds
from offload.policy.simulate import Simulation, simulate

__all__ = ["Levels", "MixedSearch", "MixtureProblem", "State", "Trial", "groups_at"]

Levels = tuple[int, ...]
"""Of one chunk: for each block the place of its level in its menu."""

_UNITS_A_CHUNK = 32
"""What a plain block saves can stay in part: in units of about so many to a chunk of plain blocks."""
_MOST_TRIALS, _FEWEST_TRIALS, _UNIT_TRIALS = 300, 30, 60_000
"""Simulated steps, and units times them: about 0.5 s of host time."""
_KEEP_STARTS = (1.0, 0.7, 0.3)
"""Equal starts, of the most that fits beside nothing else."""
_WINDOW_STARTS = (3 / 8, 1 / 5)
"""Restoring windows to start from, of the limit."""
_STEPS = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""Changes tried around the best: of a chunk's bytes and blocks, of the room for recomputes, of half the
limit; coarse to fine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureProblem:
    """What `choose_mixture` is asked, in one value."""

    actions: tuple[Action, ...]
    blocks: ChunkBlocks
    rates: Rates
    limit_bytes: int
    rest_s: Mapping[Action, float]
    host: Host | None
    host_limit_bytes: int | None


class State(NamedTuple):
    """A plan to try. The tuples go by the chunks of the problem, in the order of their forwards.

    kept_bytes: what stays of each chunk's end. window_bytes: how far ahead to fetch. again_room_bytes: what
    the cap on saved bytes leaves of the limit, for recomputes.
    """

    levels: tuple[Levels, ...]
    kept_bytes: tuple[float, ...]
    window_bytes: float
    again_room_bytes: float


class Trial(NamedTuple):
    """A simulated state."""

    score: tuple[int, float, float]
    """(bytes above the limits, seconds, bytes moved): smaller is better, in this order."""
    state: State
    result: Simulation
    host_s: float


def groups_at(blocks: Sequence[Block], levels: Levels) -> list[GroupSize]:
    """One chunk's groups with each block at its level: a plain block in units, the others in one each, whose
    region is computed again."""
    unit_bytes = max(1, sum(block.menu[0].saved_bytes for block in blocks) // _UNITS_A_CHUNK)
    groups: list[GroupSize] = []
    for place, (block, at) in enumerate(zip(blocks, levels, strict=True)):
        level = block.menu[at]
        weight = block.forward_s + block.backward_s
        if at:
            groups.append(
                GroupSize(
                    level.name,
                    level.saved_bytes,
                    region=place + 1,
                    weight=weight,
                    again_s=level.recompute_s,
                    again_bytes=level.made_again_bytes,
                )
            )
            continue
        count = max(1, round(level.saved_bytes / unit_bytes))
        ends = [level.saved_bytes * part // count for part in range(count + 1)]
        groups += [GroupSize(level.name, end - start, weight=weight / count) for start, end in pairwise(ends)]
    return groups


class MixedSearch:
    """The best state so far, and the best of each choice of levels."""

    def __init__(self, problem: MixtureProblem, max_trials: int | None) -> None:
        self.best: Trial | None = None
        self.by_levels: dict[tuple[Levels, ...], Trial] = {}
        self.num_trials = 0
        self._problem = problem
        self._chunks = [action.chunk for action in problem.actions if action.kind == "F"]
        self._blocks = [tuple(problem.blocks[chunk]) for chunk in self._chunks]
        self._compute_s = action_seconds(problem.actions, problem.blocks, problem.rest_s)
        self._host = problem.host or Host()
        self._plain_host_s = host_seconds(problem.actions, problem.blocks, self._host)
        self._halves = {action.chunk for action in problem.actions if action.kind == "I"}
        self._groups: dict[tuple[int, Levels], list[GroupSize]] = {}
        self._tried: set[tuple[tuple[Levels, ...], Keeps, int, int]] = set()
        units = sum(len(self._groups_of(at, (0,) * len(own))) for at, own in enumerate(self._blocks))
        most = max(_FEWEST_TRIALS, min(_MOST_TRIALS, _UNIT_TRIALS // max(1, units)))
        self._most_trials = most if max_trials is None else max_trials

    @property
    def chunks(self) -> Sequence[ChunkKey]:
        return self._chunks

    def rounded(self, bound: MixedBound) -> tuple[Levels, ...]:
        """Each block's level that gives up about what the bound does; what it gives up more or less is for
        the next block of the chunk to make good."""
        return tuple(
            _rounded(own, bound.given_bytes[chunk])
            for chunk, own in zip(self._chunks, self._blocks, strict=True)
        )

    def uniform(self) -> Iterator[tuple[Levels, ...]]:
        """All blocks at one level, from plain to the last; a block with fewer levels at its last."""
        most = max((len(block.menu) for own in self._blocks for block in own), default=1)
        for level in range(most):
            yield tuple(tuple(min(level, len(block.menu) - 1) for block in own) for own in self._blocks)

    def try_bound(self, levels: tuple[Levels, ...], bound: MixedBound) -> None:
        """The bound's levels, keeping what it keeps."""
        kept = tuple(bound.kept_bytes[chunk] for chunk in self._chunks)
        for part in (1.0, 0.8):
            for window in _WINDOW_STARTS:
                scaled = tuple(part * nbytes for nbytes in kept)
                self._try_rooms(levels, scaled, window * self._problem.limit_bytes)

    def try_equal_amounts(self, levels: tuple[Levels, ...]) -> None:
        """Keep equal parts of all chunks."""
        sizes = self._sizes(levels)
        room = self._again_room(levels)
        saved_limit = max(0, self._problem.limit_bytes - room)
        most = dict.fromkeys(self._chunks, 0)
        for key in limit_keeps(self._problem.actions, sizes, saved_limit, 0, 0):
            most[key.chunk] += sizes[key.chunk][key.position].nbytes
        total = [sum(group.nbytes for group in sizes[chunk]) for chunk in self._chunks]
        if sum(total) == sum(most.values()):  # all stays: nothing to choose
            self.try_state(State(levels, tuple(map(float, total)), 0.0, room))
            return
        for part in _KEEP_STARTS:
            for window in _WINDOW_STARTS:
                kept = tuple(part * most[chunk] for chunk in self._chunks)
                self.try_state(State(levels, kept, window * saved_limit, room))
        self.try_state(State(levels, (0.0,) * len(kept), 0.0, room))

    def try_least(self) -> None:
        """The least that a plan needs: all blocks plain or all at the last level, nothing kept, nothing
        fetched early."""
        plain, *_, last = [*self.uniform()] * 2
        for levels in (last, plain):
            if self.best is None or self.best.score[0] > 0:
                nothing = (0.0,) * len(self._chunks)
                self.try_state(State(levels, nothing, 0.0, self._again_room(levels)))

    def climb(self) -> None:
        """Change the best state while that helps."""
        for step in _STEPS:
            while self.num_trials < self._most_trials and self._improve(step):
                pass

    def try_state(self, state: State) -> bool:
        """Simulate the state unless it was before, cannot be the best, or the trials are used up; True if it
        is the best so far."""
        problem = self._problem
        if self.num_trials >= self._most_trials:
            return False
        sizes = self._sizes(state.levels)
        saved_limit = round(problem.limit_bytes - state.again_room_bytes)
        room = round(min(max(state.window_bytes, 0.0), saved_limit))
        kept = dict(zip(self._chunks, state.kept_bytes, strict=True))
        keeps = tail_keeps(sizes, kept)
        key = (state.levels, keeps, room, saved_limit)
        if key in self._tried:
            return False
        self._tried.add(key)
        best = self.best
        least_s = sum(self._compute_s) + self._recompute_s(state.levels)
        if best is not None and best.score[0] == 0 and least_s > best.score[1]:
            return False
        if best is not None and kept_peak_bytes(problem.actions, sizes, keeps) > saved_limit:
            return False
        self.num_trials += 1
        result = simulate(
            problem.actions,
            sizes,
            self._compute_s,
            problem.rates,
            limit_bytes=saved_limit,
            keeps=keeps,
            restoring_room_bytes=room,
        )
        over_bytes = max(0, result.peak_bytes - problem.limit_bytes)
        if problem.host_limit_bytes is not None:
            over_bytes += max(0, result.host_peak_bytes - problem.host_limit_bytes)
        host_s = self._host_s(state.levels, result.moved_bytes) if problem.host is not None else 0.0
        # what differs by rounding alone is equal
        score = (over_bytes, float(f"{max(result.step_s, host_s):.7g}"), float(result.moved_bytes))
        trial = Trial(score, state._replace(window_bytes=float(room)), result, host_s)
        known = self.by_levels.get(state.levels)
        if known is None or score < known.score:
            self.by_levels[state.levels] = trial
        if best is not None and score >= best.score:
            return False
        self.best = trial
        return True

    def _try_rooms(self, levels: tuple[Levels, ...], kept: tuple[float, ...], window_bytes: float) -> None:
        room = self._again_room(levels)
        self.try_state(State(levels, kept, window_bytes, room))
        if room:
            self.try_state(State(levels, kept, window_bytes, 0.0))

    def _improve(self, step: float) -> bool:
        """One round over everything that may change; True if anything got better."""
        improved = False
        every = range(len(self._chunks))
        groups_of_chunks: list[Sequence[int]] = [every, *([at] for at in every)]
        for change in (step, -step):
            while self._try_window(change):
                improved = True
            while self._try_again_room(change):
                improved = True
            for chunks in groups_of_chunks:
                while self._try_levels(chunks, change):
                    improved = True
                while self._try_kept(chunks, change):
                    improved = True
        return improved

    def _try_window(self, change: float) -> bool:
        state = self._state
        window = state.window_bytes + change * self._problem.limit_bytes / 2
        return self.try_state(state._replace(window_bytes=window))

    def _try_again_room(self, change: float) -> bool:
        state = self._state
        most = self._again_room(state.levels)
        room = min(max(state.again_room_bytes + change * most, 0.0), float(most))
        return self.try_state(state._replace(again_room_bytes=room))

    def _try_kept(self, chunks: Sequence[int], change: float) -> bool:
        state, kept = self._state, list(self._state.kept_bytes)
        for at in chunks:
            total = sum(group.nbytes for group in self._groups_of(at, state.levels[at]))
            kept[at] = min(max(min(kept[at], total) + change * total, 0.0), float(total))
        return self.try_state(state._replace(kept_bytes=tuple(kept)))

    def _try_levels(self, chunks: Sequence[int], change: float) -> bool:
        """Part of the blocks of these chunks one level further from plain (change > 0), the least far ones
        first, or one level nearer."""
        levels = list(self._state.levels)
        for at in chunks:
            levels[at] = _moved(self._blocks[at], levels[at], change)
        changed = tuple(levels)
        if changed == self._state.levels:
            return False
        return self.try_state(self._state._replace(levels=changed))

    @property
    def _state(self) -> State:
        assert self.best is not None, "climb follows a try"
        return self.best.state

    def _sizes(self, levels: tuple[Levels, ...]) -> dict[ChunkKey, list[GroupSize]]:
        return {chunk: self._groups_of(at, levels[at]) for at, chunk in enumerate(self._chunks)}

    def _groups_of(self, at: int, levels: Levels) -> list[GroupSize]:
        found = self._groups.get((at, levels))
        if found is None:
            found = self._groups[at, levels] = groups_at(self._blocks[at], levels)
        return found

    def _recompute_s(self, levels: tuple[Levels, ...]) -> float:
        return sum(
            block.menu[level].recompute_s * (2 if chunk in self._halves else 1)
            for chunk, own, chosen in zip(self._chunks, self._blocks, levels, strict=True)
            for block, level in zip(own, chosen, strict=True)
        )

    def _host_s(self, levels: tuple[Levels, ...], moved_bytes: int) -> float:
        chosen_s = sum(
            block.menu[level].host_s
            for block, level in zip(
                chain.from_iterable(self._blocks), chain.from_iterable(levels), strict=True
            )
        )
        return self._plain_host_s + chosen_s + moved_bytes * self._host.seconds_per_moved_byte

    def _again_room(self, levels: tuple[Levels, ...]) -> int:
        """The most that one recompute makes again."""
        return max(
            (
                block.menu[level].made_again_bytes
                for block, level in zip(
                    chain.from_iterable(self._blocks), chain.from_iterable(levels), strict=True
                )
            ),
            default=0,
        )


def _rounded(blocks: Sequence[Block], given_bytes: Sequence[float]) -> Levels:
    levels: list[int] = []
    carried = 0.0
    for block, wanted in zip(blocks, given_bytes, strict=True):
        wanted += carried
        plain_bytes = block.menu[0].saved_bytes
        off = [abs(wanted - (plain_bytes - level.saved_bytes)) for level in block.menu]
        level = off.index(min(off))
        carried = wanted - (plain_bytes - block.menu[level].saved_bytes)
        levels.append(level)
    return tuple(levels)


def _moved(blocks: Sequence[Block], levels: Levels, change: float) -> Levels:
    """`abs(change)` of the blocks, one at least, a level further from plain or nearer to it."""
    step = 1 if change > 0 else -1
    can = [at for at, block in enumerate(blocks) if 0 <= levels[at] + step < len(block.menu)]
    # those that have given up least, and among them the first: their bytes wait longest
    can.sort(key=lambda at: (levels[at] * step, at * step))
    moved = list(levels)
    for at in can[: max(1, round(abs(change) * len(blocks)))]:
        moved[at] += step
    return tuple(moved)
