"""The least step time of each rank under a limit, with the rates that the link has when all ranks copy.

Only a rank's own actions are counted, one after the other: what it waits for its neighbours is no part of it,
so a measured step is longer than the bound by the pipeline's bubble as well. One invariant: the rates come
from the run that is judged by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.bound import least_step
from bench.report import rates_of
from offload.policy.actions import Action, GroupSize
from pipelines.memory import BlockFacts


def compute_seconds(
    actions: Sequence[Action], block: BlockFacts, layers_of_chunk: float, measured: Mapping[str, float] | None
) -> list[float]:
    """Seconds of each action: measured without offload where that row ran (by the action's text), else so
    many times one block's."""
    found = []
    for action in actions:
        seconds = None if measured is None else measured.get(str(action))
        if seconds is None:
            backward_ms = block.backward_ms * (1.0 if action.kind == "B" else 0.5)
            seconds = layers_of_chunk * (block.forward_ms if action.kind == "F" else backward_ms) / 1e3
        found.append(seconds)
    return found


def rank_bounds_ms(
    result: Mapping[str, Any], baseline: Mapping[str, Any] | None, links: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Of one limited row. links: what each rank measured of its link.
    Raises ImportError without scipy (extra `plan`)."""
    block = BlockFacts(**links[0]["block"])
    found = []
    for number, rank in enumerate(result["ranks"]):
        # stage 0's I reads nothing, and its W everything
        actions = [Action(*action) for action in rank["actions"] if action[1] or action[0] != "I"]
        virtual = len({action.stage for action in actions})
        measured = None
        if baseline is not None:
            timed = baseline["ranks"][number]
            pairs = zip(timed["actions"], timed["action_ms"], strict=True)
            measured = {str(Action(*action)): ms / 1e3 for action, ms in pairs}
        layers = rank["layers"] // virtual
        # what a W reads again is not measured: counted as nothing, it leaves a bound, but for what the I
        # does not read (offload/saved/handles.py), which the program has back by the end of the I
        groups = [
            GroupSize(name, group["nbytes"], half_bytes=0)
            for _ in range(layers)
            for name, group in block.groups.items()
        ]
        sizes = {action.chunk: groups for action in actions if action.kind == "F"}
        seconds = compute_seconds(actions, block, rank["layers"] / virtual, measured)
        shared, limit_bytes = (
            rates_of(links[number]["rates"][-1]["rates"]),
            result["row"]["saved_limit_bytes"],
        )
        found.append(least_step(actions, sizes, seconds, shared, limit_bytes, slices=1).step_s * 1e3)
    return found
