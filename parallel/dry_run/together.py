"""All ranks of a job planned and played together, on links that those of a host share.

Each rank is planned and played alone, then all on one clock: a wait for another rank gives copies time, and a
stall delays the ranks that wait for it. So waits and stalls are played in turn until the step's time moves no
more. One invariant: a plan is made for the rates that its rank has beside the ranks that copy under their
plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from offload.policy.actions import Rates

from .job import Job
from .rank_step import RankPlan, RankStep, StepPlay
from .simulate import RankTimes, play_pipeline

_ROUNDS = 4
"""Rounds of waits and stalls in turn, at most."""
_SHARINGS = 2
"""Times that positions are planned again, after it was seen which GPUs of a host copy."""
_STEADY = 1e-3
"""Share of the step: less change than this ends the rounds."""

Planned = Callable[[int, Rates], tuple[RankStep, RankPlan]]
"""What a rank of the pipeline does if its link has these rates."""


class Together(NamedTuple):
    """By rank."""

    pairs: Sequence[tuple[RankStep, RankPlan]]
    plays: Sequence[StepPlay]
    times: Sequence[RankTimes]


def play_together(job: Job, planned: Planned, *, moves: bool) -> Together:
    """moves: whether plans move bytes, so that ranks share a link."""
    send_s, positions = sends_of(job), range(job.pp)
    pairs = [planned(rank, job.gpu.link(job.ranks_of_host)[0]) for rank in positions]
    plays, times = _played(job, pairs, send_s)
    for _ in range(_SHARINGS if moves else 0):
        links = [job.gpu.link(gpus)[0] for gpus in _copying(job, plays)]
        changed = [rank for rank in positions if links[rank] != pairs[rank][0].rates]
        if not changed:
            break
        for rank in changed:
            pairs[rank] = planned(rank, links[rank])
        plays, times = _played(job, pairs, send_s)
    return Together(pairs, plays, times)


def sends_of(job: Job) -> dict[tuple[int, int], float]:
    """Seconds of a message between ranks that have neighbouring stages."""
    rank_of = {action.stage: rank for rank, order in enumerate(job.orders) for action in order}
    pairs = {(rank_of[stage], rank_of[stage + 1]) for stage in range(job.num_stages - 1)}
    both = pairs | {(receiver, sender) for sender, receiver in pairs}
    return {pair: job.send_s(*pair) for pair in both}


def _played(
    job: Job, pairs: Sequence[tuple[RankStep, RankPlan]], send_s: Mapping[tuple[int, int], float]
) -> tuple[list[StepPlay], tuple[RankTimes, ...]]:
    def on_one_clock(plays: Sequence[StepPlay]) -> tuple[RankTimes, ...]:
        seconds = [play.result.durations_s for play in plays]
        return play_pipeline(job.orders, seconds, send_s=send_s, messages=job.messages, one_line=job.one_line)

    plays = [step.play(plan) for step, plan in pairs]
    times = on_one_clock(plays)
    for _ in range(_ROUNDS if any(play.result.moved_bytes for play in plays) else 0):
        before_s = times[0].step_s
        plays = [step.play(plan, own.waits_s) for (step, plan), own in zip(pairs, times, strict=True)]
        times = on_one_clock(plays)
        if abs(times[0].step_s - before_s) < _STEADY * before_s:
            break
    return plays, times


def _copying(job: Job, plays: Sequence[StepPlay]) -> list[float]:
    """For each position, how many GPUs of its host copy as much as the one that copies most."""
    found = []
    for rank in range(job.pp):
        counts = job.positions_of_host(rank)
        moved = {other: plays[other].result.moved_bytes for other in counts}
        most = max(moved.values())
        found.append(sum(moved[other] * count for other, count in counts.items()) / most if most else 1.0)
    return found
