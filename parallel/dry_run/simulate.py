"""All ranks of a pipeline on one clock: an action starts when its rank is free and what it reads has arrived.

One invariant: numbers only. A rank computes its actions in its own order; a message takes no compute of
either rank.

    F of stage s    after the F of stage s - 1 of the same microbatch has arrived
    B or I of s     after the B or I of stage s + 1 has arrived; on the last stage after its own F
    W of s          after its own I; without one it is the whole backward, and waits as a B

A schedule without a runtime (1F1B, GPipe) sends when an action has ended. torch's runtime lists its messages
between the actions: each of the two ranks comes to a message when it has ended the actions before it and the
messages before it on the same line, and it begins when both have. So one that is not ready holds up those
behind it (torch's own note on `_batch_p2p` has it: head of line). A line is a pair of ranks or, where torch
sends each message as a batch, all that a rank sends and receives: NCCL has one stream for batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from offload.policy.actions import Action, ChunkKey


class Message(NamedTuple):
    """What stage `stage` makes in its forward ("F") or backward ("B") of a microbatch, for another rank; the
    sender and the receiver come to the same one."""

    kind: Literal["F", "B"]
    stage: int
    microbatch: int


Messages = Sequence[Mapping[int, Sequence[Message]]]
"""By rank, before which of its actions, by their places, it comes to which messages."""


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
    """Seconds of the whole pipeline: the end of its last action."""

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
    messages: Messages | None = None,
    one_line: bool = False,
) -> tuple[RankTimes, ...]:
    """orders, seconds: by rank, each action with its time. send_s: from rank to rank, where stages of both
    are neighbours; within a rank nothing is sent. messages: None for a schedule without a runtime. one_line:
    for all messages of a rank.

    Raises ValueError where the orders wait for one another for ever, or an action is missing.
    """
    ranks = range(len(orders))
    rank_of = {action.stage: rank for rank in ranks for action in orders[rank]}
    last_stage = max(rank_of, default=0)
    halved = {action.chunk for order in orders for action in order if action.kind == "I"}
    ends: dict[tuple[str, ChunkKey], float] = {}
    played: list[list[Played]] = [[] for _ in ranks]
    free_s = [0.0 for _ in ranks]
    lines = _Lines(rank_of, send_s, messages, one_line)
    ready = list(ranks)
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while len(played[rank]) < len(order):
            at = len(played[rank])
            action = order[at]
            ready += lines.come_to(rank, at, free_s[rank])
            source = _needs(action, last_stage, halved)
            arrives_s: float | None = 0.0
            if source is not None:
                sender = rank_of[source[1][0]]
                arrives_s = ends.get(source) if sender == rank else lines.arrives_s(source, ends, rank)
            if arrives_s is None:
                break
            start_s = max(free_s[rank], arrives_s)
            free_s[rank] = start_s + seconds[rank][at]
            played[rank].append(Played(action, start_s, free_s[rank]))
            if action.kind != "W" or action.chunk not in halved:
                ends["F" if action.kind == "F" else "B", action.chunk] = free_s[rank]
            for stage in (action.stage - 1, action.stage + 1):
                if (other := rank_of.get(stage, rank)) != rank and other not in ready:
                    ready.append(other)
        else:
            ready += lines.come_to(rank, len(order), free_s[rank])
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


class _Lines:
    """The messages between ranks: those of both directions go one after the other in the line of each pair
    of ranks, or of each rank."""

    def __init__(
        self,
        rank_of: Mapping[int, int],
        send_s: Mapping[tuple[int, int], float],
        messages: Messages | None,
        one_line: bool,
    ) -> None:
        self._rank_of, self._send_s, self._messages = rank_of, send_s, messages
        self._one_line = one_line
        self._come_to = [0] * (0 if messages is None else len(messages))  # actions, so far
        # by rank and line, what the rank has come to and since when
        self._waiting: dict[tuple[int, int], deque[tuple[Message, float]]] = {}
        self._free_s: dict[tuple[int, int], float] = {}
        self._arrived: dict[Message, float] = {}

    def come_to(self, rank: int, at: int, now_s: float) -> list[int]:
        """`rank` has ended its actions before the one at this place. Returns the ranks that may go on."""
        if self._messages is None:
            return []
        found: list[int] = []
        for place in range(self._come_to[rank], at + 1):
            for message in self._messages[rank].get(place, ()):
                ends = self._ends_of(message)
                other = ends[0] if ends[1] == rank else ends[1]
                self._waiting.setdefault(self._line(rank, other), deque()).append((message, now_s))
                found += self._match(rank, other)
        self._come_to[rank] = max(self._come_to[rank], at + 1)
        return found

    def arrives_s(
        self, source: tuple[str, ChunkKey], ends: Mapping[tuple[str, ChunkKey], float], rank: int
    ) -> float | None:
        """When `rank` has what another one made; None if that is not known yet."""
        kind, (stage, microbatch) = source
        if self._messages is not None:
            return self._arrived.get(Message("F" if kind == "F" else "B", stage, microbatch))
        end_s = ends.get(source)
        return None if end_s is None else end_s + self._send_s[self._rank_of[stage], rank]

    def _ends_of(self, message: Message) -> tuple[int, int]:
        """(sender, receiver)."""
        to = message.stage + (1 if message.kind == "F" else -1)
        return self._rank_of[message.stage], self._rank_of[to]

    def _line(self, rank: int, other: int) -> tuple[int, int]:
        return rank, rank if self._one_line else other

    def _match(self, rank: int, other: int) -> list[int]:
        """Send what both ranks have come to, and then what waited behind it."""
        found, pairs = list[int](), [(rank, other)]
        while pairs:
            one, two = pairs.pop()
            keys = self._line(one, two), self._line(two, one)
            mine, theirs = (self._waiting.get(key, deque()) for key in keys)
            if not mine or not theirs or mine[0][0] != theirs[0][0]:
                continue
            (message, since_s), (_, also_s) = mine.popleft(), theirs.popleft()
            start_s = max(since_s, also_s, *(self._free_s.get(key, 0.0) for key in keys))
            self._arrived[message] = start_s + self._send_s[self._ends_of(message)]
            self._free_s |= dict.fromkeys(keys, self._arrived[message])
            found += [one, two]
            pairs += [self._ends_of(line[0][0]) for line in (mine, theirs) if line]
        return found


def _needs(action: Action, last_stage: int, halved: Collection[ChunkKey]) -> tuple[str, ChunkKey] | None:
    """Whose end an action waits for."""
    stage, microbatch = action.chunk
    if action.kind == "F":
        return None if stage == 0 else ("F", (stage - 1, microbatch))
    if action.kind == "W" and action.chunk in halved:
        return None
    return ("F", action.chunk) if stage == last_stage else ("B", (stage + 1, microbatch))
