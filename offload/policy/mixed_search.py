"""The search of a mixture: states of a plan, each simulated once, changed a little at a time.

The simulated step is a rough landscape: a group more that moves may cost a window that fits nowhere. So a
climb starts from several states.

One invariant: a state is numbers, so two equal ones are tried once, and the best so far is the best of all
that were tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from offload.policy.actions import Action, ChunkKey, GroupSize, Keeps, Rates
from offload.policy.keeps import kept_peak_bytes, limit_keeps, short_lives_bytes, tail_keeps
from offload.policy.menu import (
    Block,
    ChunkBlocks,
    Levels,
    action_seconds,
    alike,
    groups_at,
    most_steps,
    moved,
    num_leaving,
    path_of,
    units_a_chunk,
)
from offload.policy.simulate import Simulation, simulate

_MOST_RUNS = 8
"""Of chunks that a climb changes together."""
_MOST_TRIALS, _FEWEST_TRIALS, _UNIT_TRIALS = 330, 40, 85_000
"""Simulated steps, and units times them: about 0.5 s of host time."""
_CLIMBS, _MOST_CLIMBS = 2, 6
"""Starts that share the trials, and those that use what the first ones leave."""
_KEEP_STARTS = (1.0, 0.6, 0.2)
"""Equal starts, of the most that fits beside nothing else."""
_SHORT_LIVES_STARTS = (0.75, 0.4)
"""Of the limit, what is kept of the chunks with the shortest lives."""
_WINDOW_STARTS = (0.18, 0.32)
"""Restoring windows to start from, of the limit."""
_WINDOW_REGIONS = 1.25
"""Another one, of what the largest recompute reads: less would fetch the next one's while it waits."""
_LEFT_PART = 0.75
"""Of the limit, what input halves leave at most in a plan to start from."""
_STEPS = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""Changes tried around the best: of a chunk's bytes and blocks, of half the limit; coarse to fine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureProblem:
    """Arguments of `choose_mixture`, in one value."""

    actions: tuple[Action, ...]
    blocks: ChunkBlocks
    rates: Rates
    limit_bytes: int
    rest_s: Mapping[Action, float]
    host_limit_bytes: int | None

    @property
    def grown_bytes(self) -> int:
        """That the step makes and keeps beside its blocks."""
        return sum(block.grown_bytes for own in self.blocks.values() for block in own)


class State(NamedTuple):
    """A plan to try. The tuples go by the chunks of the problem, in the order of their forwards.

    kept_bytes: what stays of each chunk's end. window_bytes: how far ahead to fetch. limit_bytes: the cap
    to run with, no more than the problem's. half_room_bytes: of a chunk, what an I leaves on the device for
    its W, of what it brought back. again_room_bytes: the same of what it computed again.
    """

    levels: tuple[Levels, ...]
    kept_bytes: tuple[float, ...]
    window_bytes: float
    limit_bytes: int
    half_room_bytes: float = 0.0
    again_room_bytes: float = 0.0


class Trial(NamedTuple):
    """A simulated state."""

    score: tuple[int, float, float]
    """(bytes above the limits, seconds, bytes moved): smaller is better, in this order."""
    state: State
    result: Simulation


class MixedSearch:
    """The best state so far, and the best of each choice of levels."""

    def __init__(
        self,
        problem: MixtureProblem,
        max_trials: int | None,
        rest: Callable[[], object] = int,
        patience: int = 1,
        most_s: float = math.inf,
    ) -> None:
        """rest: called before each simulated step. patience: without `max_trials`, so many times as many.
        most_s: a step that takes longer is of no use."""
        self.best: Trial | None = None
        self._here: Trial | None = None  # where a climb is
        self._starts: list[Trial] = []
        self.num_trials = 0
        self._most_s = most_s
        self.problem = problem
        self._rest = rest
        self._compute_s = action_seconds(problem.actions, problem.blocks, problem.rest_s)
        self.chunks = [action.chunk for action in problem.actions if action.kind == "F"]
        self._blocks = [tuple(problem.blocks[chunk]) for chunk in self.chunks]
        self._plain_s = sum(self._compute_s)
        self._halves = {action.chunk for action in problem.actions if action.kind == "I"}
        self._num_units = units_a_chunk(len(self.chunks))
        path = {block: path_of(block) for own in self._blocks for block in set(own)}
        self._paths = [[path[block] for block in own] for own in self._blocks]
        # that the W of a split backward reads of a chunk
        self._most_half_bytes = float(
            max((sum(block.w_bytes for block in problem.blocks[chunk]) for chunk in self._halves), default=0)
        )
        self._most_between = _most_between(problem.actions)
        # of each chunk the first one with the same blocks, which has the same groups
        firsts: dict[tuple[Block, ...], int] = {}
        self._alike = [firsts.setdefault(own, at) for at, own in enumerate(self._blocks)]
        self._groups: dict[tuple[int, Levels, int], list[GroupSize]] = {}
        self._tried: set[tuple[tuple[Levels, ...], tuple[int, ...], Keeps, int, int, int]] = set()
        units = sum(len(self._groups_of(at, (0,) * len(own), 0)) for at, own in enumerate(self._blocks))
        most = patience * max(_FEWEST_TRIALS, min(_MOST_TRIALS, _UNIT_TRIALS // max(1, units)))
        self._most_trials = self._stop_at = most if max_trials is None else max_trials

    @property
    def is_over(self) -> bool:
        """Predicate: nothing can be better: everything stays, nothing is recomputed."""
        best = self.best
        if best is None or best.score[0] > 0:
            return False
        return best.result.moved_bytes == 0 and best.result.recompute_s == 0.0

    def uniform(self) -> Iterator[tuple[Levels, ...]]:
        """All chunks alike, from the last level to plain: every block at one level, and between two levels a
        part of the blocks at the further one."""
        for step in range(most_steps(chain.from_iterable(self._paths)), -1, -1):
            yield tuple(alike(own, step) for own in self._paths)

    def try_amounts(self, levels: tuple[Levels, ...]) -> None:
        """Keep equal parts of all chunks, or most of those that are read soonest."""
        sizes = self._sizes(levels, (0,) * len(levels))
        saved_limit = max(0, self.problem.limit_bytes - self._again_room(levels))
        most = dict.fromkeys(self.chunks, 0)
        for key in limit_keeps(self.problem.actions, sizes, saved_limit, 0, 0):
            most[key.chunk] += sizes[key.chunk][key.position].nbytes
        windows = self._windows(levels)
        total = [self._saved(at, own) for at, own in enumerate(levels)]
        if sum(total) == sum(most.values()):  # all stays: nothing to choose
            self.try_state(self._start(levels, tuple(map(float, total)), windows[0]))
            return
        for part in _KEEP_STARTS:
            for window in windows:
                kept = tuple(part * most[chunk] for chunk in self.chunks)
                self.try_state(self._start(levels, kept, window))
        for part in _SHORT_LIVES_STARTS:
            short = short_lives_bytes(self.problem.actions, sizes, part * saved_limit)
            kept = tuple(float(short[chunk]) for chunk in self.chunks)
            self.try_state(self._start(levels, kept, windows[1]))

    def _start(self, levels: tuple[Levels, ...], kept: tuple[float, ...], window: float) -> State:
        """To start from, with little computed again twice: as much is left as has room where most chunks are
        between their halves."""
        limit_bytes = self.problem.limit_bytes
        room = min(self._most_half_bytes, _LEFT_PART * limit_bytes / max(1, self._most_between))
        return State(levels, kept, window, limit_bytes, again_room_bytes=room)

    def _windows(self, levels: tuple[Levels, ...]) -> list[float]:
        """Windows to start from: parts of the limit, and about what one recompute and one unit after it
        read."""
        region_bytes = max(
            (block.menu[level].saved_bytes for block, level in self._pairs(levels) if level), default=0
        )
        return [
            _WINDOW_REGIONS * region_bytes,
            *(part * self.problem.limit_bytes for part in _WINDOW_STARTS),
        ]

    def _pairs(self, levels: tuple[Levels, ...]) -> Iterator[tuple[Block, int]]:
        return zip(chain.from_iterable(self._blocks), chain.from_iterable(levels), strict=True)

    def try_ends(self) -> None:
        """The most that a plan can have, all blocks plain and everything kept; and if that does not fit, the
        least that it needs: nothing kept, nothing fetched early."""
        last, *_, plain = [*self.uniform()] * 2
        everything = tuple(float(self._saved(at, own)) for at, own in enumerate(plain))
        nothing = (0.0,) * len(self.chunks)
        for levels, kept in ((plain, everything), (last, nothing), (plain, nothing)):
            if self.best is None or self.best.score[0] > 0:
                self.try_state(State(levels, kept, 0.0, self.problem.limit_bytes))

    def climb(self) -> None:
        """Change the best states of different levels while that helps, all chunks alike and then each run of
        them; with few levels other states of the same ones, too."""
        every = range(len(self.chunks))
        # a long step's chunks in runs: one alone changes little
        run = math.ceil(len(every) / _MOST_RUNS) or 1
        every_start = sorted(self._starts, key=lambda trial: trial.score)
        by_levels: dict[tuple[Levels, ...], Trial] = {}
        for trial in every_start:
            by_levels.setdefault(trial.state.levels, trial)
        found = [*by_levels.values()]
        one_level = [trial for trial in found if len({at for own in trial.state.levels for at in own}) < 2]
        # a mixture is to be no worse than any plan that has all blocks at one level
        starts = dict.fromkeys([*found[: _CLIMBS - 1], *one_level[:1], *found[_CLIMBS - 1 :], *every_start])
        for number, start in enumerate([*starts][:_MOST_CLIMBS]):
            self._here = start
            left = self._most_trials - self.num_trials
            self._stop_at = self.num_trials + left // max(1, _CLIMBS - number)
            for runs, steps in (
                ([every], _STEPS),
                ([every[at : at + run] for at in every[::run]], _STEPS[1:]),
            ):
                for step in steps:
                    while self.num_trials < self._stop_at and self._improve(runs, step):
                        pass

    def try_state(self, state: State) -> bool:
        """Simulate the state unless it was before, cannot be better, or the trials are used up; True if it is
        better than where the climb is."""
        problem = self.problem
        if self.num_trials >= self._stop_at:
            return False
        leaving = self._leaving(state)
        best = self._here or self.best
        least_s = self._plain_s + self._recompute_s(state.levels, leaving)
        if least_s > self._most_s or (best is not None and best.score[0] == 0 and least_s > best.score[1]):
            return False
        sizes = self._sizes(state.levels, leaving)
        room = round(min(max(state.window_bytes, 0.0), state.limit_bytes))
        kept = dict(zip(self.chunks, state.kept_bytes, strict=True))
        keeps = tail_keeps(sizes, kept)
        half_room = round(state.half_room_bytes)
        key = (state.levels, leaving, keeps, room, half_room, state.limit_bytes)
        if key in self._tried:
            return False
        self._tried.add(key)
        if best is not None and kept_peak_bytes(problem.actions, sizes, keeps) > state.limit_bytes:
            return False
        self.num_trials += 1
        self._rest()
        here = self._here
        result = simulate(
            problem.actions,
            sizes,
            self._compute_s,
            problem.rates,
            limit_bytes=state.limit_bytes,
            keeps=keeps,
            restoring_room_bytes=room,
            half_room_bytes=half_room,
            # what differs by rounding alone is equal
            most_s=here.score[1] * (1 + 1e-6) if here is not None and here.score[0] == 0 else self._most_s,
        )
        if result is None:
            return False
        over_bytes = max(0, result.peak_bytes - problem.limit_bytes)
        if problem.host_limit_bytes is not None:
            over_bytes += max(0, result.host_peak_bytes - problem.host_limit_bytes)
        score = (over_bytes, float(f"{result.step_s:.7g}"), float(result.moved_bytes))
        trial = Trial(score, state._replace(window_bytes=float(room)), result)
        if here is None:
            self._starts.append(trial)
        if self.best is None or score < self.best.score:
            self.best = trial
        if self._here is None or score >= self._here.score:
            return False
        self._here = trial
        return True

    def _improve(self, runs: Sequence[Sequence[int]], step: float) -> bool:
        """One round over everything that may change, the chunks of a run alike; True if anything got
        better."""
        improved = False
        for change in (step, -step):
            while self._try_window(change):
                improved = True
            while self._halves and self._try_half_room(change):
                improved = True
            while self._halves and self._try_again_room(change):
                improved = True
            for chunks in runs:
                while self._try_levels(chunks, change):
                    improved = True
                while self._try_kept(chunks, change):
                    improved = True
        return improved

    def _try_window(self, change: float) -> bool:
        state = self._state
        window = state.window_bytes + change * self.problem.limit_bytes / 2
        return self.try_state(state._replace(window_bytes=window))

    def _try_half_room(self, change: float) -> bool:
        state = self._state
        most = max(self._saved(at, levels) for at, levels in enumerate(state.levels))
        room = min(max(state.half_room_bytes + change * most, 0.0), float(most))
        return self.try_state(state._replace(half_room_bytes=room))

    def _try_again_room(self, change: float) -> bool:
        state = self._state
        room = state.again_room_bytes + change * self._most_half_bytes
        return self.try_state(state._replace(again_room_bytes=min(max(room, 0.0), self._most_half_bytes)))

    def _try_kept(self, chunks: Sequence[int], change: float) -> bool:
        state, kept = self._state, list(self._state.kept_bytes)
        for at in chunks:
            total = self._saved(at, state.levels[at])
            kept[at] = min(max(min(kept[at], total) + change * total, 0.0), float(total))
        return self.try_state(state._replace(kept_bytes=tuple(kept)))

    def _try_levels(self, chunks: Sequence[int], change: float) -> bool:
        """Part of the blocks of these chunks one level further from plain (change > 0), the least far ones
        first, or one level nearer."""
        state, levels = self._state, list(self._state.levels)
        for at in chunks:
            levels[at] = moved(self._paths[at], levels[at], change)
        changed = tuple(levels)
        if changed == state.levels:
            return False
        if self.try_state(state._replace(levels=changed)):
            return True
        # what is saved more or less stays, or did
        kept = list(state.kept_bytes)
        for at in chunks:
            kept[at] = max(0.0, kept[at] + self._saved(at, changed[at]) - self._saved(at, state.levels[at]))
        return self.try_state(state._replace(levels=changed, kept_bytes=tuple(kept)))

    @property
    def _state(self) -> State:
        assert self._here is not None, "only a climb changes a state"
        return self._here.state

    def _leaving(self, state: State) -> tuple[int, ...]:
        """Number of recomputed blocks of each chunk that leave something for its W."""
        return tuple(
            num_leaving(own, levels, state.again_room_bytes) if chunk in self._halves else 0
            for chunk, own, levels in zip(self.chunks, self._blocks, state.levels, strict=True)
        )

    def _sizes(self, levels: tuple[Levels, ...], leaving: tuple[int, ...]) -> dict[ChunkKey, list[GroupSize]]:
        return {chunk: self._groups_of(at, levels[at], leaving[at]) for at, chunk in enumerate(self.chunks)}

    def _groups_of(self, at: int, levels: Levels, leaving: int) -> list[GroupSize]:
        key = self._alike[at], levels, leaving
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = groups_at(self._blocks[at], levels, self._num_units, leaving)
        return found

    def _saved(self, at: int, levels: Levels) -> int:
        return sum(
            block.menu[level].saved_bytes for block, level in zip(self._blocks[at], levels, strict=True)
        )

    def _recompute_s(self, levels: tuple[Levels, ...], leaving: tuple[int, ...]) -> float:
        total_s = 0.0
        for chunk, own, chosen, left in zip(self.chunks, self._blocks, levels, leaving, strict=True):
            again_s = [block.menu[at].recompute_s for block, at in zip(own, chosen, strict=True) if at]
            total_s += sum(again_s) + (sum(again_s[left:]) if chunk in self._halves else 0.0)
        return total_s

    def _again_room(self, levels: tuple[Levels, ...]) -> int:
        """The most that one recompute has on the device: what it reads, and what it makes again."""
        return max(
            (
                block.menu[level].made_again_bytes + block.menu[level].saved_bytes
                for block, level in self._pairs(levels)
                if block.menu[level].made_again_bytes
            ),
            default=0,
        )


def _most_between(actions: Sequence[Action]) -> int:
    """The most chunks that are between the I and the W of their backward at once."""
    between, most = set[ChunkKey](), 0
    for action in actions:
        if action.kind == "I":
            between.add(action.chunk)
        elif action.kind == "W":
            most = max(most, len(between))
            between.discard(action.chunk)
    return most
