"""The least step time that any engine could reach under a cap on device bytes: what every measured step is
compared with.

On a pipeline's first rank several forwards come before the first backward, so a cap costs time whatever the
engine does. How much is a linear program over the schedule's actions. One invariant: it is a lower bound.
Each simplification lets the program do more than an engine can, never less, so a plan or a measurement under
it is an error of theirs.

    slice      a part of one action; an F slice makes its share of the chunk's bytes, the mirror slice of the
               B reads that share
    t[s]       how long slice s takes, at least its compute: seconds
    out[c, s]  bytes of share c that leave the device during slice s; in[c, s] those that come back
    away[c, s] bytes of share c on the host when slice s ends

    minimise   sum t
    such that  out[s] <= d2h t[s],   in[s] <= h2d t[s],   out[s] + in[s] <= duplex t[s]         the link
               away[c, s] = away[c, s-1] + out[c, s] - in[c, s],   0 <= away <= bytes of c      conservation
               away[c, s] = 0 where s is the slice that reads c                                  reads
               made - read - away <= cap at the end of each slice                                the device

Of a split backward, what the I reads for the last time is one share, and what its W reads again is another:
it is back when the I ends, and then away once more, without a copy as far as it had left before.

Rates within a slice are constant, so what holds at its ends holds inside it. A byte moves alone, where an
engine moves groups, and takes room as it arrives, where an engine allocates first; slices see the whole
future. A byte that moves twice could have stayed away in between, so "at most once" needs no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.linear import Ranges, Rows, minimise
from offload.policy.actions import Action, ChunkSizes, Rates, lives_of, require_times

__all__ = ["Bound", "Work", "least_step", "single_pass_limit_s", "work_of"]


class Work(NamedTuple):
    """An action with its numbers: seconds of compute, and the bytes that it makes (F) or reads for the last
    time (B, I, W)."""

    action: Action
    compute_s: float
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The answer of the linear program."""

    step_s: float
    """Least time of the step."""
    compute_s: float
    """Compute alone: the step with nothing offloaded."""
    moved_bytes: int
    """Fewest bytes that leave the device in a step of that time (as many come back)."""
    action_s: tuple[float, ...]
    """How long each action takes in one best step; a longer one than its compute is where the cap costs
    time."""


def work_of(actions: Sequence[Action], sizes: ChunkSizes, compute_s: Sequence[float]) -> tuple[Work, ...]:
    """The actions with their numbers, as the bound takes them: bytes at a chunk's F, and again at their last
    reads: all at a B, at an I what its W does not read, and that at the W."""
    require_times(actions, compute_s)
    totals = {chunk: sum(group.nbytes for group in groups) for chunk, groups in sizes.items()}
    halves = {
        action.chunk: sum(group.w_bytes for group in sizes[action.chunk])
        for action in actions
        if action.kind == "I"
    }
    works: list[Work] = []
    for action, seconds in zip(actions, compute_s, strict=True):
        nbytes, half_bytes = totals[action.chunk], halves.get(action.chunk, 0)
        if action.kind == "I":
            nbytes -= half_bytes
        elif action.kind == "W" and action.chunk in halves:
            nbytes = half_bytes
        works.append(Work(action, seconds, nbytes))
    return tuple(works)


def single_pass_limit_s(
    forward_s: float, backward_s: float, moved_bytes: float, d2h_bytes_per_s: float, h2d_bytes_per_s: float
) -> float:
    """The bound of one forward and one backward in closed form: each takes its compute or its copies,
    whichever is longer."""
    return max(forward_s, moved_bytes / d2h_bytes_per_s) + max(backward_s, moved_bytes / h2d_bytes_per_s)


def least_step(work: Sequence[Work], rates: Rates, cap_bytes: int, *, slices: int = 4) -> Bound:
    """Solve the program above for one rank.

    work: every action of the step in order, as `work_of` makes it; a chunk's bytes are named at its F, and
        again at its B, or at its I and its W, whichever reads them last. An I reads all.
    cap_bytes: what saved activations may take on the device: its memory less weights, gradients and working
        set.
    slices: parts of each action; more parts are nearer to the truth, from below. A pipeline stage's figures
    are the same with 1 and 8. Raises ValueError for an order or a cap that cannot be, ImportError without
    scipy (extra `plan`).
    """
    if cap_bytes < 0:
        raise ValueError(
            f"cap_bytes is {cap_bytes:,}, less than 0: weights and working set alone do not fit; raise the "
            "device limit"
        )
    if slices < 1:
        raise ValueError(f"slices is {slices}; give 1 or more")
    shares = _shares(work, slices)
    compute_s = sum(item.compute_s for item in work)
    action_s, moved_bytes = [item.compute_s for item in work], 0.0
    if shares:
        durations_s, moved_bytes = _solve(work, shares, rates, cap_bytes, slices)
        action_s = [sum(durations_s[at * slices : (at + 1) * slices]) for at in range(len(work))]
    # the solver's tolerance may leave the sum a hair under the compute
    return Bound(
        step_s=max(sum(action_s), compute_s),
        compute_s=compute_s,
        moved_bytes=round(moved_bytes),
        action_s=tuple(action_s),
    )


class _Share(NamedTuple):
    """Bytes that are made in one slice and read in a later one; of a split backward, within an action.

    first, last: the slices in which they may move. made, read: from the first to the one before the second
    they are on the device or away. again: their next share, for a W that reads them once more.
    """

    nbytes: float
    first: int
    made: int
    read: int
    last: int
    again: _Share | None = None


def _shares(work: Sequence[Work], slices: int) -> list[_Share]:
    """Cut each chunk that has bytes into as many shares as its actions have slices; the last share made is
    the first read."""
    lives = lives_of([item.action for item in work])
    for at, item in enumerate(work):
        if item.compute_s < 0 or item.nbytes < 0:
            raise ValueError(
                f"action {at}, {item.action}, has {item.compute_s} s and {item.nbytes:,} bytes; neither can "
                "be below 0"
            )
    shares: list[_Share] = []
    for life in lives.values():
        made, read = work[life.forward], work[life.last_read]
        half = None if life.half_read is None else work[life.half_read]
        read_bytes = read.nbytes + (0 if half is None else half.nbytes)
        if made.nbytes != read_bytes:
            raise ValueError(
                f"{read.action} reads {read_bytes:,} bytes of the {made.nbytes:,} that {made.action} made; "
                "give both the same"
            )
        if life.half_read is None or half is None:
            for part in range(slices):
                made_slice = life.forward * slices + part
                read_slice = (life.last_read + 1) * slices - 1 - part
                shares.append(_Share(made.nbytes / slices, made_slice, made_slice, read_slice, read_slice))
        else:
            # where in the chunk each half finds its bytes is not known, so they move all through an action
            first, after = life.forward * slices, life.half_read * slices
            ends = (first, first + slices - 1, after, after + slices - 1)
            read_slice = life.last_read * slices
            again = _Share(
                read.nbytes, after + slices, after + slices - 1, read_slice, read_slice + slices - 1
            )
            shares += [_Share(half.nbytes, *ends), _Share(read.nbytes, *ends, again)]
    return [share for share in shares if share.nbytes]


def _solve(
    work: Sequence[Work], shares: Sequence[_Share], rates: Rates, cap_bytes: int, slices: int
) -> tuple[list[float], float]:
    """Seconds of each slice in a step of the least time, and the fewest bytes that leave in such a step.

    The program is in units of the largest share and of the time that it needs to leave. Its first columns are
    the slices' durations.
    """
    byte_unit = max(share.nbytes for share in shares)
    time_unit = byte_unit / rates.d2h_bytes_per_s
    bounds: Ranges = [(item.compute_s / slices / time_unit, None) for item in work for _ in range(slices)]
    every_slice = range(len(bounds))
    at_most, equal = Rows(), Rows()
    outs: list[list[int]] = [[] for _ in every_slice]
    ins: list[list[int]] = [[] for _ in every_slice]
    aways: list[list[int]] = [[] for _ in every_slice]
    on_device = [0.0 for _ in every_slice]

    def column(most: float | None) -> int:
        bounds.append((0.0, most))
        return len(bounds) - 1

    def move(share: _Share, away_before: list[tuple[int, float]]) -> list[int]:
        """Add the columns of a share. Returns those of what leaves."""
        nbytes = share.nbytes / byte_unit
        leaving: list[int] = []
        for at in range(share.first, share.last + 1):
            out, back = column(None), column(None)
            leaving.append(out)
            outs[at].append(out)
            ins[at].append(back)
            row = [(out, -1.0), (back, 1.0), *away_before]
            if at < share.last:
                away = column(nbytes)
                away_before = [(away, -1.0)]
                row.append((away, 1.0))
                if share.made <= at < share.read:
                    aways[at].append(away)
                    on_device[at] += nbytes
            equal.add(row, 0.0)
        return leaving

    for share in shares:
        left = move(share, [])
        if share.again is not None:
            # what had left before goes without a copy
            dropped = column(share.nbytes / byte_unit)
            at_most.add([(dropped, 1.0), *((out, -1.0) for out in left)], 0.0)
            aways[share.again.made].append(dropped)
            on_device[share.again.made] += share.nbytes / byte_unit
            move(share.again, [(dropped, -1.0)])
    # relative to d2h's rate: in these units it moves one unit of bytes in one of time
    h2d = rates.h2d_bytes_per_s / rates.d2h_bytes_per_s
    both = rates.together_bytes_per_s / rates.d2h_bytes_per_s
    cap = cap_bytes / byte_unit
    for at in every_slice:
        for columns, rate in ((outs[at], 1.0), (ins[at], h2d), ([*outs[at], *ins[at]], both)):
            if columns:
                at_most.add([*((moved, 1.0) for moved in columns), (at, -rate)], 0.0)
        if on_device[at] > cap:
            at_most.add([(away, -1.0) for away in aways[at]], cap - on_device[at])

    least = minimise(dict.fromkeys(every_slice, 1.0), bounds, at_most, equal)
    # a slice may take as long as it likes, so there is always a solution
    assert least is not None
    durations = least.values[: len(every_slice)]
    # more than the least by less than can be measured, or rounding makes the second program infeasible
    at_most.add([(at, 1.0) for at in every_slice], sum(durations) * (1 + 1e-9) + 1e-7)
    leaving = [out for columns in outs for out in columns]
    fewest = minimise(dict.fromkeys(leaving, 1.0), bounds, at_most, equal)
    assert fewest is not None
    moved_bytes = sum(fewest.values[out] for out in leaving) * byte_unit
    return [duration * time_unit for duration in durations], moved_bytes
