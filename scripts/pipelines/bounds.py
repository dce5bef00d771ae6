"""What the link's rates mean for a rank: the least step time under a limit, and the engine's plan, with lone
rates and with shared ones.

Only a rank's own actions are counted, one after the other: what it waits for its neighbours is no part of it,
so a measured step is longer than the bound by the pipeline's bubble as well. One invariant: both columns of
rates come from the run that is judged by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload.policy.actions import Action, GroupSize, Rates, work_of
from offload.policy.bound import least_step
from offload.policy.plan import choose_keeps
from offload.policy.simulate import simulate
from pipelines.memory import BlockFacts

__all__ = ["compare_rates", "compute_seconds", "rates_of"]


def rates_of(link: Mapping[str, Any]) -> Rates:
    """bench.links' figures as a plan takes them."""
    return Rates(
        d2h_bytes_per_s=link["d2h"],
        h2d_bytes_per_s=link["h2d"],
        duplex_bytes_per_s=float(link["duplex_d2h"]) + float(link["duplex_h2d"]),
    )


def compute_seconds(
    actions: Sequence[Action], block: BlockFacts, layers_of_chunk: float, measured: Mapping[str, float] | None
) -> list[float]:
    """Seconds of each action: measured without offload where that row ran (by the action's text), else so
    many times one block's."""
    found = []
    for action in actions:
        seconds = None if measured is None else measured.get(str(action))
        if seconds is None:
            block_ms = (
                block.forward_ms
                if action.kind == "F"
                else block.backward_ms * (1.0 if action.kind == "B" else 0.5)
            )
            seconds = layers_of_chunk * block_ms / 1e3
        found.append(seconds)
    return found


def compare_rates(
    actions: Sequence[Action],
    compute_s: Sequence[float],
    block: BlockFacts,
    layers_of_chunk: int,
    limit_bytes: int,
    lone: Rates,
    shared: Rates,
) -> dict[str, Any]:
    """Bound and plan of one rank under one limit, by both rates; and the plan of the lone rates on the shared
    link."""
    groups = [
        GroupSize(name, group["nbytes"])
        for _ in range(layers_of_chunk)
        for name, group in block.groups.items()
    ]
    # an I that reads nothing (stage 0's) costs the bound nothing either: it counts bytes at the W
    sizes = {action.chunk: groups for action in actions if action.kind == "F"}
    work = work_of(actions, sizes, compute_s)
    found: dict[str, Any] = {"compute_ms": sum(compute_s) * 1e3, "limit_bytes": limit_bytes}
    plans = {}
    for name, rates in (("lone", lone), ("shared", shared)):
        found[f"bound_{name}_ms"] = least_step(work, rates, limit_bytes, slices=1).step_s * 1e3
        plans[name] = plan = choose_keeps(actions, sizes, compute_s, rates, limit_bytes)
        found[f"plan_{name}_ms"], found[f"plan_{name}_moved_bytes"] = (
            plan.predicted_step_s * 1e3,
            plan.predicted.moved_bytes,
        )
    run = simulate(
        actions,
        sizes,
        compute_s,
        shared,
        limit_bytes=limit_bytes,
        keeps=plans["lone"].keeps,
        restoring_room_bytes=plans["lone"].restoring_room_bytes,
    )
    return found | {"plan_lone_on_shared_ms": run.step_s * 1e3}
