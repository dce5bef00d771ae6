"""Names of what is offloaded: which chunk, which group in it, which tensor in that.

One invariant: an id says *whose* bytes these are and never where they are; nothing is looked up by position
in a queue. Printed `s1m4/core_attn#2[0]`: virtual stage 1, microbatch 4, the third group of that chunk, its
first tensor.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ChunkId", "GroupId", "SlotId"]


class ChunkId(NamedTuple):
    """The activations of one forward: one (virtual stage, microbatch) pair."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"s{self.stage}m{self.microbatch}"


class GroupId(NamedTuple):
    """One group of a chunk, by the order in which it was started."""

    chunk: ChunkId
    place: int
    name: str

    def __str__(self) -> str:
        return f"{self.chunk}/{self.name}#{self.place}"


class SlotId(NamedTuple):
    """One saved storage of a group, by the order in which it was saved."""

    group: GroupId
    slot: int

    def __str__(self) -> str:
        return f"{self.group}[{self.slot}]"
