"""What one rank does with what it saves, under a mode and the device's limit.

One invariant: a plan fits the limit as its own play of the step counts it, wherever any that was tried does.
The room of the engine's planner is corrected by what the step was seen to need, as the engine does it from
step to step.
"""

from __future__ import annotations

from offload.policy.keeps import tail_keeps
from offload.policy.mixture import choose_keeps, choose_mixture

from .job import Job
from .rank_step import Mode, RankPlan, RankStep

MOVING: frozenset[Mode] = frozenset({"selective", "groups", "auto"})
"""Modes in which bytes leave."""
LAST_LEVEL = 1 << 16
"""Past the last level of every menu."""
_CORRECTIONS, _NEAR = 3, 0.015
"""Choices for one position, each with its room corrected by what the last one was over the limit, or under it
by more than this part of it."""
_MOST_TRIALS, _FEWEST_TRIALS, _UNIT_TRIALS = 100, 12, 60_000
"""Simulated steps of one position's choice; and groups times steps of all positions, about 1 s of host
time."""


def plan_rank(job: Job, mode: Mode, step: RankStep, held_bytes: int) -> RankPlan:
    """The plan of one position. held_bytes: what it holds from step to step. Where nothing fits, what needs
    least."""
    last = 0 if mode in ("off", "groups") else LAST_LEVEL
    # a mixture has plain layers too
    room_bytes = step.room_bytes(job.limit_bytes - held_bytes, 0 if mode == "auto" else last)
    all_here = step.keep_all(0 if mode == "auto" else last)
    if mode not in MOVING or held_bytes + max(step.play(all_here).peaks_bytes) <= job.limit_bytes:
        return all_here
    units = sum(map(len, step.sizes(step.uniform(0)).values()))
    max_trials = max(_FEWEST_TRIALS, min(_MOST_TRIALS, _UNIT_TRIALS // job.pp // max(1, units)))
    chosen, best = step.move_all(last), (float("inf"), 0.0)
    for _ in range(_CORRECTIONS):
        if room_bytes < 0:
            break
        plan = (
            _mixed(job, step, room_bytes, max_trials)
            if mode == "auto"
            else _moved(step, last, room_bytes, max_trials)
        )
        play = step.play(plan)
        over_bytes = held_bytes + max(play.peaks_bytes) - job.limit_bytes
        score = (max(0.0, over_bytes), play.result.step_s)
        if score < best:
            chosen, best = plan, score
        if -_NEAR * job.limit_bytes <= over_bytes <= 0:
            break
        # as an engine's own loop does it: by what a step was seen to need
        room_bytes -= over_bytes
    return chosen


def _moved(step: RankStep, level: int, room_bytes: int, max_trials: int) -> RankPlan:
    levels = step.uniform(level)
    sizes, compute_s = step.sizes(levels), step.compute_s(levels)
    chosen = choose_keeps(step.order, sizes, compute_s, step.rates, room_bytes, max_trials=max_trials)
    return RankPlan(
        levels=levels,
        keeps=chosen.keeps,
        saved_limit_bytes=room_bytes,
        restoring_room_bytes=chosen.restoring_room_bytes,
        half_room_bytes=chosen.half_room_bytes,
    )


def _mixed(job: Job, step: RankStep, room_bytes: int, max_trials: int) -> RankPlan:
    share = None if job.host_bytes is None else job.host_bytes // job.ranks_of_host
    plan = choose_mixture(
        step.order,
        step.blocks,
        step.rates,
        room_bytes,
        rest_s=step.rest_s,
        host_limit_bytes=share,
        max_trials=max_trials,
    )
    return RankPlan(
        levels=plan.levels,
        keeps=tail_keeps(step.sizes(plan.levels, plan.again_room_bytes), plan.kept_bytes),
        saved_limit_bytes=plan.saved_limit_bytes,
        restoring_room_bytes=plan.restoring_room_bytes,
        half_room_bytes=plan.half_room_bytes,
        again_room_bytes=plan.again_room_bytes,
    )
