"""The plan of a mixture: at which level each block of each chunk runs, how much of each chunk's end stays,
and how far ahead to fetch.

An engine takes a whole level for each block, groups in their order and a window. Steps with every block at
one level are simulated, and the best of them are changed a little at a time while the simulated step gets
shorter. One invariant: a plan is a pure function of its numbers, and it fits the limit wherever any of the
tried ones does.

The limit is for saved bytes and for what a recompute makes again beside them, which takes room of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from offload.policy.actions import Action, ChunkKey, ChunkSizes, GroupSize, Keeps, Rates, require_times
from offload.policy.keeps import left_peak_bytes, tail_keeps
from offload.policy.lengths import nearest
from offload.policy.menu import ChunkBlocks, Levels, action_seconds, group_blocks, groups_at, num_leaving
from offload.policy.mixed_search import MixedSearch, MixtureProblem, State
from offload.policy.simulate import Simulation

_BISECTIONS = 8
_BISECTION_TRIALS = 30
"""Of a plan that only says whether a limit is too small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPlan:
    """Plan of what each block does, and what that is predicted to cost."""

    levels: Mapping[ChunkKey, Levels]
    """For each block the place of its level in its menu."""
    saved_limit_bytes: int
    """The engine's cap to run the plan with, on saved bytes and what recomputes claim beside them: the limit
    that was asked for, or that of a known plan which is the best."""
    kept_bytes: Mapping[ChunkKey, float]
    """Of the end of each chunk, what never leaves."""
    restoring_room_bytes: int
    """How far ahead to fetch, in bytes of reads."""
    half_room_bytes: int
    """Of a chunk with a split backward, what its I leaves on the device for its W, of what it brought
    back."""
    again_room_bytes: int
    """The same of what it computed again: the W does not compute that once more."""
    fits: bool
    """False where no tried plan keeps within the limits."""
    predicted: Simulation
    num_trials: int
    """Simulated steps that the choice took."""
    problem: MixtureProblem
    """What was asked."""

    @property
    def plain_s(self) -> float:
        """Compute of the step with nothing recomputed or moved."""
        return sum(action_seconds(self.problem.actions, self.problem.blocks, self.problem.rest_s))

    @property
    def predicted_step_s(self) -> float:
        return self.predicted.step_s

    @property
    def keeps(self) -> Keeps:
        """Groups that never leave, of a plan of groups; all others leave as soon as they are made."""
        return tail_keeps({chunk: self._groups_of(chunk) for chunk in self.levels}, self.kept_bytes)

    def kept_of(self, chunks: Iterable[ChunkKey]) -> dict[ChunkKey, float]:
        """Bytes that stay of the end of each of these chunks, or of that which it follows."""
        follows = {chunk: nearest(chunk, self.kept_bytes) for chunk in chunks}
        return {chunk: 0.0 if like is None else self.kept_bytes[like] for chunk, like in follows.items()}

    def first_leave_bytes(self, chunk: ChunkKey) -> float | None:
        """Bytes that leave of the begin of a chunk, or of one that follows its plan; None where its stage is
        not planned."""
        like = nearest(chunk, self.levels)
        if like is None:
            return None
        saved = zip(self.problem.blocks[like], self.levels[like], strict=True)
        saved_bytes = sum(block.menu[level].saved_bytes for block, level in saved)
        return max(0.0, saved_bytes - self.kept_bytes[like])

    @property
    def most_again_bytes(self) -> int:
        """The most that one recompute has on the device: what it reads, and what it makes again."""
        return max(
            (
                block.menu[level].made_again_bytes + block.menu[level].saved_bytes
                for chunk, levels in self.levels.items()
                for block, level in zip(self.problem.blocks[chunk], levels, strict=True)
                if level
            ),
            default=0,
        )

    @property
    def left_peak_bytes(self) -> int:
        """The most that the Is of split backwards leave for their Ws at once, of what they computed again."""
        split = self._split
        sizes = {chunk: self._groups_of(chunk) for chunk in split}
        return left_peak_bytes([action for action in self.problem.actions if action.chunk in split], sizes)

    def recompute_s(self, chunk: ChunkKey) -> list[float]:
        """Device seconds that the backward of this chunk computes once more, by block. The W of a split one
        does so again, for what its I did not leave."""
        is_split = chunk in self._split
        return [group.again_s * (2 if is_split and group.w_bytes else 1) for group in self._groups_of(chunk)]

    @property
    def _split(self) -> set[ChunkKey]:
        """Chunks whose backward is an I and a W."""
        return {action.chunk for action in self.problem.actions if action.kind == "I"}

    def _groups_of(self, chunk: ChunkKey) -> list[GroupSize]:
        """One for each block."""
        blocks, levels = self.problem.blocks[chunk], self.levels[chunk]
        return groups_at(blocks, levels, 1, num_leaving(blocks, levels, self.again_room_bytes))

    @property
    def predicted_peak_bytes(self) -> int:
        """Saved bytes and what is made again beside them."""
        return self.predicted.peak_bytes


def choose_mixture(
    actions: Sequence[Action],
    blocks: ChunkBlocks,
    rates: Rates,
    limit_bytes: int,
    *,
    rest_s: Mapping[Action, float] = {},
    host_limit_bytes: int | None = None,
    max_trials: int | None = None,
    patience: int = 1,
    known: Sequence[MixedPlan] = (),
    rest: Callable[[], object] = int,
    most_s: float = math.inf,
) -> MixedPlan:
    """The plan with the shortest simulated step that fits; of equal ones, that which moves fewest bytes.

    limit_bytes: the device's memory less weights, gradients and the working set of plain blocks. rest_s:
        device seconds of each action outside the blocks. host_limit_bytes: what may be away at once.
    max_trials: steps to simulate at most; None for as many as about 0.5 s of host time allow, `patience`
        times.
    known: plans of the same step for other limits. What fits less fits more, so with them a larger limit
        never gives a longer predicted step.
    rest: called between parts of the choice, of some ms each: for one that is made beside other work.
    most_s: slower plans are of no use, so one that fits may be missed.

    Raises ValueError for numbers that cannot be.
    """
    if max_trials is not None and max_trials < 1:
        raise ValueError(f"max_trials is {max_trials}; give 1 or more, or None")
    if limit_bytes < 0:
        raise ValueError(
            f"limit_bytes is {limit_bytes:,}, less than 0: weights and working set alone do not fit; raise "
            "the device limit"
        )
    problem = MixtureProblem(
        actions=tuple(actions),
        blocks=blocks,
        rates=rates,
        limit_bytes=limit_bytes,
        rest_s=rest_s,
        host_limit_bytes=host_limit_bytes,
    )
    search = MixedSearch(problem, max_trials, rest, patience, most_s)
    for plan in known:
        search.try_state(_state_of(plan, search.chunks, min(plan.saved_limit_bytes, limit_bytes)))
    search.try_ends()
    if not search.is_over:
        for levels in search.uniform():
            search.try_amounts(levels)
        search.climb()
    return _plan_of(search)


def choose_keeps(
    actions: Sequence[Action],
    sizes: ChunkSizes,
    compute_s: Sequence[float],
    rates: Rates,
    limit_bytes: int,
    *,
    max_trials: int | None = None,
    start: MixedPlan | None = None,
) -> MixedPlan:
    """The plan of what stays of groups that run as they are: each is a block with one level. compute_s: of
    each action. start: a plan of blocks for such steps, whose amounts are tried first. The rest, and what it
    raises, as `choose_mixture`."""
    require_times(actions, compute_s)
    known = []
    if start is not None:
        levels = {chunk: (0,) * len(own) for chunk, own in sizes.items()}
        kept = start.kept_of(sizes)
        known = [replace(start, levels=levels, kept_bytes=kept, saved_limit_bytes=limit_bytes)]
    return choose_mixture(
        actions,
        group_blocks(sizes),
        rates,
        limit_bytes,
        rest_s=dict(zip(actions, compute_s, strict=True)),
        max_trials=max_trials,
        known=known,
    )


def cheapest_mixture(
    actions: Sequence[Action],
    blocks: ChunkBlocks,
    rates: Rates,
    *,
    rest_s: Mapping[Action, float] = {},
    most_slower: float = 0.01,
    max_trials: int | None = None,
    patience: int = 1,
    rest: Callable[[], object] = int,
) -> MixedPlan:
    """Without a limit: the plan of the least limit, within 1/256 of what all saves, whose predicted step is
    at most `most_slower` above that which gives up nothing. Raises as `choose_mixture`."""
    if most_slower < 0:
        raise ValueError(f"most_slower is {most_slower}; give 0 or more")
    choose = partial(choose_mixture, actions, blocks, rates, rest_s=rest_s, rest=rest)
    saved = [block.menu[0].saved_bytes for own in blocks.values() for block in own]
    enough, too_little = sum(saved), max(saved, default=0) - 1  # one block's are there at once
    found = choose(enough, max_trials=1)
    # 1e-9: the same seconds, summed in another order, are a little more or less
    most_s = found.predicted_step_s * (1 + max(most_slower, 1e-9))
    for _ in range(_BISECTIONS):
        middle = (too_little + enough) // 2
        if enough - too_little <= 1:
            break
        plan = choose(middle, max_trials=_BISECTION_TRIALS, known=[found], most_s=most_s)
        if plan.fits and plan.predicted_step_s <= most_s:
            enough, found = middle, plan
        else:
            too_little = middle
    return choose(enough, max_trials=max_trials, patience=patience, known=[found])


def scaled(plan: MixedPlan, factors: Mapping[ChunkKey, float], max_trials: int = 30) -> MixedPlan:
    """The plan for a step whose chunks have `factors` times as many tokens (1 where none is named), chosen
    with few trials: in the time between two steps."""
    problem = plan.problem
    blocks = {
        chunk: [block.scaled(factors[chunk]) for block in own] if chunk in factors else own
        for chunk, own in problem.blocks.items()
    }
    search = MixedSearch(replace(problem, blocks=blocks), max_trials)
    kept = {chunk: nbytes * factors.get(chunk, 1.0) for chunk, nbytes in plan.kept_bytes.items()}
    search.try_state(_state_of(replace(plan, kept_bytes=kept), search.chunks, problem.limit_bytes))
    search.try_ends()
    search.climb()
    return _plan_of(search)


def _state_of(plan: MixedPlan, chunks: Sequence[ChunkKey], limit_bytes: int) -> State:
    """Search state of the plan, to start from."""
    return State(
        tuple(plan.levels[chunk] for chunk in chunks),
        tuple(plan.kept_bytes[chunk] for chunk in chunks),
        float(plan.restoring_room_bytes),
        limit_bytes,
        float(plan.half_room_bytes),
        float(plan.again_room_bytes),
    )


def _plan_of(search: MixedSearch) -> MixedPlan:
    trial = search.best
    assert trial is not None
    state = trial.state
    return MixedPlan(
        levels=dict(zip(search.chunks, state.levels, strict=True)),
        saved_limit_bytes=state.limit_bytes,
        kept_bytes=dict(zip(search.chunks, state.kept_bytes, strict=True)),
        restoring_room_bytes=round(state.window_bytes),
        half_room_bytes=round(state.half_room_bytes),
        again_room_bytes=round(state.again_room_bytes),
        fits=trial.score[0] == 0,
        predicted=trial.result,
        num_trials=search.num_trials,
        problem=search.problem,
    )
