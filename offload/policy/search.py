"""The plan after warm-up, under a cap on device bytes: how much of each chunk's end stays, the window of
reads that is brought back early, and what stays between the halves of a split backward.

The best amounts differ by chunk: the first chunk is read as soon as the last warm-up forward ends; the chunks
in the middle have the whole steady phase to travel; the last chunks meet an emptying device. So the search
starts from equal amounts and changes one chunk at a time while the simulated step gets shorter. One
invariant: a plan is a pure function of its numbers, and it fits the cap wherever any of the tried ones does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from offload.policy.actions import Action, ChunkKey, ChunkSizes, Keeps, Rates, require_sizes
from offload.policy.keeps import kept_peak_bytes, limit_keeps, short_lives_bytes, tail_keeps
from offload.policy.simulate import Simulation, simulate

__all__ = ["Amounts", "Plan", "choose_keeps"]

_KEEP_STARTS = (1.0, 0.8, 0.3)
"""Equal starts, of the most that fits beside nothing else. More of them cost more trials than they find."""
_SHORT_LIVES_STARTS = (3 / 4, 1 / 2, 1 / 4)
"""Of the limit, what is kept of the chunks with the shortest lives. On four ranks under a V-shaped schedule
the planned step is up to 9% shorter than from equal starts alone."""
_WINDOW_STARTS = (3 / 8, 1 / 5)
"""Restoring windows to start from, of the limit."""
_STEPS = (1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""Changes tried around the best, of a chunk's bytes, of half the limit, and of what a W reads, coarse to
fine."""


class Amounts(NamedTuple):
    """What a plan is made from. kept_bytes: that stay of the end of each chunk. window_bytes: of reads that
    are brought back early. half_room_bytes: that stay between the halves of a split backward."""

    kept_bytes: Mapping[ChunkKey, float]
    window_bytes: float
    half_room_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What stays, how far ahead restores go, and what that is predicted to cost."""

    keeps: Keeps
    """Groups that never leave; all others leave as soon as they are made."""
    restoring_room_bytes: int
    """Restores are issued for what is read within so many bytes of reads, groups that are on the device
    counted."""
    half_room_bytes: int
    """Of each chunk, so many bytes that its I brought back stay for its W; 0 where no backward is split."""
    fits: bool
    """False where a single group, or the half-read chunk of a split backward, is larger than the limit: no
    plan can fit then."""
    predicted: Simulation
    num_trials: int
    """Simulated steps that the choice took."""

    @property
    def predicted_step_s(self) -> float:
        return self.predicted.step_s

    @property
    def predicted_peak_bytes(self) -> int:
        return self.predicted.peak_bytes


def choose_keeps(
    actions: Sequence[Action],
    sizes: ChunkSizes,
    compute_s: Sequence[float],
    rates: Rates,
    device_limit_bytes: int,
    *,
    max_trials: int = 100,
    start: Amounts | None = None,
) -> Plan:
    """The plan with the shortest simulated step that fits the limit; of equal ones, that which moves fewest
    bytes.

    device_limit_bytes: what saved bytes may take on the device in any state: kept, on their way out, brought
        back and not yet read.
    max_trials: steps to simulate at most; the time grows with groups x trials. 100 are about 0.4 s for 8
        chunks of 64 groups, and come to 1.00 to 1.03 of the bound on the first rank of four under 1F1B with
        41 to 13 of the 88 GB that it would hold.
    start: tried first. Chunks that it does not name keep nothing of their own.
    """
    if device_limit_bytes < 0:
        raise ValueError(
            f"device_limit_bytes is {device_limit_bytes:,}; give 0 or more, or no limit and no plan"
        )
    if max_trials < 1:
        raise ValueError(f"max_trials is {max_trials}; give 1 or more")
    require_sizes(actions, sizes)
    search = _Search(actions, sizes, compute_s, rates, device_limit_bytes, max_trials)
    search.try_starts(start)
    # a plan that keeps everything is the best there is
    for step in _STEPS if search.best.result.moved_bytes > 0 else ():
        while search.improve(step):
            pass
    return Plan(
        keeps=search.best.keeps,
        restoring_room_bytes=round(search.best.amounts.window_bytes),
        half_room_bytes=round(search.best.amounts.half_room_bytes),
        fits=search.best.result.peak_bytes <= device_limit_bytes,
        predicted=search.best.result,
        num_trials=len(search.tried),
    )


class _Trial(NamedTuple):
    """A simulated plan."""

    score: tuple[int, float, int]
    """(bytes above the limit, seconds, bytes moved): smaller is better, in this order."""
    amounts: Amounts
    keeps: Keeps
    result: Simulation


class _Search:
    """The best plan so far, and everything that was tried."""

    best: _Trial

    def __init__(
        self,
        actions: Sequence[Action],
        sizes: ChunkSizes,
        compute_s: Sequence[float],
        rates: Rates,
        limit_bytes: int,
        max_trials: int,
    ) -> None:
        self.tried: set[tuple[Keeps, int, int]] = set()
        self._actions, self._sizes, self._compute_s, self._rates = actions, sizes, compute_s, rates
        self._limit_bytes = limit_bytes
        self._max_trials = max_trials
        self._total_bytes = {
            action.chunk: sum(group.nbytes for group in sizes[action.chunk])
            for action in actions
            if action.kind == "F"
        }
        self._half_bytes = max(
            (sum(group.w_bytes for group in sizes[action.chunk]) for action in actions if action.kind == "I"),
            default=0,
        )

    def try_starts(self, start: Amounts | None) -> None:
        """The given one, and equal parts of every chunk. Where backwards are split, what lives shortest as
        well, both with half of what a W reads left for it."""
        if start is not None:
            kept = {chunk: start.kept_bytes.get(chunk, 0.0) for chunk in self._total_bytes}
            window_bytes = min(start.window_bytes, float(self._limit_bytes))
            self._try(start._replace(kept_bytes=kept, window_bytes=window_bytes))
        most_bytes = dict.fromkeys(self._total_bytes, 0)
        for key in limit_keeps(self._actions, self._sizes, self._limit_bytes, 0, 0):
            most_bytes[key.chunk] += self._sizes[key.chunk][key.position].nbytes
        starts: list[Mapping[ChunkKey, float]] = [
            {chunk: part * most for chunk, most in most_bytes.items()} for part in _KEEP_STARTS
        ]
        if self._half_bytes:
            starts += [
                short_lives_bytes(self._actions, self._sizes, part * self._limit_bytes)
                for part in _SHORT_LIVES_STARTS
            ]
        for kept_bytes in starts:
            for window in _WINDOW_STARTS:
                self._try(Amounts(kept_bytes, window * self._limit_bytes, self._half_bytes / 2))
        if self.best.score[0] > 0:
            # the least that any plan needs: all leaves, nothing is fetched early
            self._try(Amounts(dict.fromkeys(most_bytes, 0), 0, 0))

    def improve(self, step: float) -> bool:
        """One round over the window, what stays between halves, all chunks together and each chunk alone;
        True if anything got better."""
        improved = False
        chunks = list(self._total_bytes)
        changes: list[Callable[[float], Amounts]] = [self._window, self._half_room]
        changes += [partial(self._kept, changed) for changed in (chunks, *([chunk] for chunk in chunks))]
        for changed in changes:
            for change in (step, -step):
                while self._try(changed(change)):
                    improved = True
        return improved

    def _window(self, change: float) -> Amounts:
        """The best amounts with a window wider by `change` of half the limit."""
        best, most = self.best.amounts, float(self._limit_bytes)
        return best._replace(window_bytes=min(max(best.window_bytes + change * most / 2, 0.0), most))

    def _half_room(self, change: float) -> Amounts:
        """The best amounts with `change` of what a W reads more kept for it."""
        best, most = self.best.amounts, float(self._half_bytes)
        return best._replace(half_room_bytes=min(max(best.half_room_bytes + change * most, 0.0), most))

    def _kept(self, chunks: Sequence[ChunkKey], change: float) -> Amounts:
        """The best amounts with `change` of their bytes more kept of these chunks."""
        kept_bytes = dict(self.best.amounts.kept_bytes)
        for chunk in chunks:
            total_bytes = self._total_bytes[chunk]
            kept_bytes[chunk] = min(max(kept_bytes[chunk] + change * total_bytes, 0.0), float(total_bytes))
        return self.best.amounts._replace(kept_bytes=kept_bytes)

    def _try(self, amounts: Amounts) -> bool:
        """Simulate this plan unless it was before, cannot fit, or the trials are used up; True if it is the
        best so far."""
        keeps = tail_keeps(self._sizes, amounts.kept_bytes)
        trial = (keeps, round(amounts.window_bytes), round(amounts.half_room_bytes))
        if len(self.tried) >= self._max_trials or trial in self.tried:
            return False
        if kept_peak_bytes(self._actions, self._sizes, keeps) > self._limit_bytes:
            return False
        self.tried.add(trial)
        result = simulate(
            self._actions,
            self._sizes,
            self._compute_s,
            self._rates,
            limit_bytes=self._limit_bytes,
            keeps=keeps,
            restoring_room_bytes=trial[1],
            half_room_bytes=trial[2],
        )
        assert result is not None  # it may take any time
        over_bytes = max(0, result.peak_bytes - self._limit_bytes)
        # what differs by rounding alone is equal
        score = (over_bytes, float(f"{result.step_s:.7g}"), result.moved_bytes)
        if len(self.tried) > 1 and score >= self.best.score:
            return False
        self.best = _Trial(score, amounts, keeps, result)
        return True
