"""The least step time of any engine that may keep, move or recompute every byte.

What is given up is never made in the forward, and costs seconds where the backward reads it. The program is
in `mixed_program`. One invariant: each of its simplifications lets it do more than an engine can, so the
answer is a lower bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.mixed_program import MixedBound, MixedProgram
from offload.planner.explained import Explanation
from offload.policy.actions import Action, Rates
from offload.policy.menu import ChunkBlocks, action_seconds
from offload.policy.mixture import MixedPlan

__all__ = ["explained_bound_ms", "least_mixed_step", "plan_bound"]

_MOST_SLICES = 16
"""Of one action: with a slice for each block the program sees where in a chunk it gives up what."""


def least_mixed_step(
    actions: Sequence[Action],
    blocks: ChunkBlocks,
    rates: Rates,
    cap_bytes: int,
    *,
    rest_s: Mapping[Action, float] = {},
    host_limit_bytes: int | None = None,
    slices: int | None = None,
) -> MixedBound:
    """Solve the program for one rank.

    cap_bytes: what saved activations may take on the device. rest_s: device seconds of each action outside
        the blocks. host_limit_bytes: what may be away at once.
    slices: parts of an action at most, as far as they stay affordable; None for one for each block. More are
        nearer to the truth, from below.

    Raises ValueError for an order, a cap or a host limit that cannot be, ImportError without scipy
    (extra `plan`).
    """
    if cap_bytes < 0:
        raise ValueError(
            f"cap_bytes is {cap_bytes:,}, less than 0: weights and working set alone do not fit; raise the "
            "device limit"
        )
    if slices is not None and slices < 1:
        raise ValueError(f"slices is {slices}; give 1 or more, or None")
    action_s = action_seconds(actions, blocks, rest_s)
    program = MixedProgram(actions, blocks, rates, rest_s, slices or _MOST_SLICES)
    program.limit(cap_bytes, host_limit_bytes)
    bound = program.solve(sum(action_s))
    if bound is None:
        raise ValueError(
            f"no step fits cap_bytes {cap_bytes:,} and host_limit_bytes {host_limit_bytes or 0:,}, whatever "
            "it recomputes; raise one of them"
        )
    return bound


def plan_bound(plan: MixedPlan, limit_bytes: int | None = None) -> MixedBound:
    """Least step of any engine under another limit, or under the plan's. Takes about 0.1 s. Raises as
    `least_mixed_step`."""
    problem = plan.problem
    return least_mixed_step(
        problem.actions,
        problem.blocks,
        problem.rates,
        problem.limit_bytes if limit_bytes is None else limit_bytes,
        rest_s=problem.rest_s,
        host_limit_bytes=problem.host_limit_bytes,
    )


def explained_bound_ms(explained: Explanation, total_bytes: int | None = None) -> float | None:
    """Least step of any plan within the total that mode "auto" was given, or within another one. None before
    there is a plan, without scipy, and for a total that is less than weights, gradients and working set."""
    plan, limit_bytes = explained.plan, None
    if plan is None:
        return None
    if total_bytes is not None:
        assert explained.total_bytes is not None, "no total was given, so none can be compared with it"
        limit_bytes = (explained.limit_bytes or 0) + total_bytes - explained.total_bytes
        if limit_bytes < 0:
            return None
    try:
        return plan_bound(plan, limit_bytes).step_s * 1e3
    except ImportError:
        return None
