"""The least step time of any engine that may keep, move or recompute every byte.

What is given up is never made in the forward, and costs seconds where the backward reads it. The program is
in `mixed_program`. One invariant: each of its simplifications lets it do more than an engine can, so the
answer is a lower bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload.policy.actions import Action, Rates, lives_of
from offload.policy.menu import Host
from offload.policy.mixed_program import ChunkBlocks, MixedBound, MixedProgram, block_seconds

__all__ = ["action_seconds", "host_seconds", "least_mixed_step"]

_MOST_SLICES = 16
"""Of one action: with a slice for each block the program sees where in a chunk it gives up what."""


def action_seconds(
    actions: Sequence[Action], blocks: ChunkBlocks, rest_s: Mapping[Action, float]
) -> list[float]:
    """What each action computes with every block plain. rest_s: seconds of an action outside the blocks."""
    lives = lives_of(actions)
    for action in actions:
        if action.chunk not in blocks:
            raise ValueError(
                f"{action} has no blocks; blocks has {len(blocks)} chunks, add {action.chunk}, with an empty "
                "list if it has none"
            )
    return [
        sum(block_seconds(block, action, lives[action.chunk]) for block in blocks[action.chunk])
        + rest_s.get(action, 0.0)
        for action in actions
    ]


def host_seconds(actions: Sequence[Action], blocks: ChunkBlocks, host: Host) -> float:
    """What the host takes for a step of plain blocks that moves nothing."""
    chunks = (action.chunk for action in actions if action.kind == "F")
    return host.rest_s + sum(block.host_s for chunk in chunks for block in blocks[chunk])


def least_mixed_step(
    actions: Sequence[Action],
    blocks: ChunkBlocks,
    rates: Rates,
    cap_bytes: int,
    *,
    rest_s: Mapping[Action, float] = {},
    host: Host | None = None,
    host_limit_bytes: int | None = None,
    slices: int | None = None,
) -> MixedBound:
    """Solve the program for one rank.

    cap_bytes: what saved activations may take on the device. rest_s: device seconds of each action outside
        the blocks. host: None for a host that is never late. host_limit_bytes: what may be away at once.
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
    if host is not None:
        program.limit_host(host, host_seconds(actions, blocks, host))
    bound = program.solve(sum(action_s), host, host_seconds(actions, blocks, host or Host()))
    if bound is None:
        raise ValueError(
            f"no step fits cap_bytes {cap_bytes:,} and host_limit_bytes {host_limit_bytes or 0:,}, whatever "
            "it recomputes; raise one of them"
        )
    return bound
