"""All ranks of a pipeline on one clock: an action starts when its rank is free and what it reads has arrived.

One invariant: numbers only. A rank computes its actions in its own order; a send takes no compute of either
rank, and arrives its time after the action that made it has ended.

    F of stage s    after the F of stage s - 1 of the same microbatch has arrived
    B or I of s     after the B or I of stage s + 1 has arrived; on the last stage after its own F
    W of s          after its own I; without one it is the whole backward, and waits as a B
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from offload.policy.actions import Action, ChunkKey

__all__ = ["Played", "RankTimes", "play_pipeline"]


@dataclass(frozen=True, slots=True)
class Played:
    """One action of one rank, in seconds from the step's begin."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """One rank's step."""

    played: tuple[Played, ...]
    busy_s: float
    step_s: float
    """Of the whole pipeline: the end of its last action."""

    @property
    def bubble_s(self) -> float:
        """What the rank waits for others, before its first action and after its last one included."""
        return self.step_s - self.busy_s

    @property
    def waits_s(self) -> tuple[float, ...]:
        """Before each action."""
        ends = (0.0, *(played.end_s for played in self.played[:-1]))
        return tuple(played.start_s - end for played, end in zip(self.played, ends, strict=True))


def play_pipeline(
    orders: Sequence[Sequence[Action]],
    seconds: Sequence[Sequence[float]],
    *,
    send_s: Mapping[tuple[int, int], float],
) -> tuple[RankTimes, ...]:
    """orders, seconds: by rank, each action with its time. send_s: from rank to rank, where stages of both
    are neighbours; within a rank nothing is sent.

    Raises ValueError where the orders wait for one another for ever, or an action is missing.
    """
    ranks = range(len(orders))
    rank_of = {action.stage: rank for rank in ranks for action in orders[rank]}
    last_stage = max(rank_of, default=0)
    halved = {action.chunk for order in orders for action in order if action.kind == "I"}
    ends: dict[tuple[str, ChunkKey], float] = {}
    played: list[list[Played]] = [[] for _ in ranks]
    free_s = [0.0 for _ in ranks]
    ready = list(ranks)
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while len(played[rank]) < len(order):
            at = len(played[rank])
            action = order[at]
            source = _needs(action, last_stage, halved)
            arrives_s = 0.0
            if source is not None:
                if source not in ends:
                    break
                sender = rank_of[source[1][0]]
                arrives_s = ends[source] + (0.0 if sender == rank else send_s[sender, rank])
            start_s = max(free_s[rank], arrives_s)
            free_s[rank] = start_s + seconds[rank][at]
            played[rank].append(Played(action, start_s, free_s[rank]))
            if action.kind != "W" or action.chunk not in halved:
                ends["F" if action.kind == "F" else "B", action.chunk] = free_s[rank]
            for stage in (action.stage - 1, action.stage + 1):
                if (other := rank_of.get(stage, rank)) != rank and other not in ready:
                    ready.append(other)
    stuck = [rank for rank in ranks if len(played[rank]) < len(orders[rank])]
    if stuck:
        rank = stuck[0]
        action = orders[rank][len(played[rank])]
        raise ValueError(
            f"{len(stuck)} of {len(orders)} ranks wait for ever; rank {rank} for what its action "
            f"{len(played[rank])}, {action}, reads: give every stage its forwards and backwards"
        )
    step_s = max(free_s, default=0.0)
    return tuple(
        RankTimes(
            played=tuple(played[rank]),
            busy_s=sum(seconds[rank]),
            step_s=step_s,
        )
        for rank in ranks
    )


def _needs(action: Action, last_stage: int, halved: Collection[ChunkKey]) -> tuple[str, ChunkKey] | None:
    """Whose end an action waits for."""
    stage, microbatch = action.chunk
    if action.kind == "F":
        return None if stage == 0 else ("F", (stage - 1, microbatch))
    if action.kind == "W" and action.chunk in halved:
        return None
    return ("F", action.chunk) if stage == last_stage else ("B", (stage + 1, microbatch))
