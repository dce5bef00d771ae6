"""Names of what is offloaded: which chunk, which group in it, which tensor in that.

One invariant: an id says *whose* bytes these are and never where they are; nothing is looked up by position
in a queue. Printed `s1m4/core_attn#2[0]`: virtual stage 1, microbatch 4, the third group of that chunk, its
first tensor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Owner(NamedTuple):
    """Owner of a copy: the client of the engine that asked for it, and that client's own name for the bytes.
    Both are to be printed: ("groups", "s1m4/core_attn"), ("optim", "bucket 12")."""

    client: str
    label: str

    def __str__(self) -> str:
        return f"{self.client}/{self.label}"


class ChunkId(NamedTuple):
    """The activations of one forward: one (virtual stage, microbatch) pair."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"s{self.stage}m{self.microbatch}"


class ForwardId(ChunkId):
    """A forward of a client that knows no stages: its stage is below 0, so it is no chunk of the groups."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"forward {self.microbatch}"


class GroupId(NamedTuple):
    """One group of a chunk, by the order in which it was started. client: whose it is."""

    chunk: ChunkId
    place: int
    name: str
    client: str = "groups"

    def __str__(self) -> str:
        return f"{self.chunk}/{self.name}#{self.place}"


class SlotId(NamedTuple):
    """One saved storage of a group, by the order in which it was saved."""

    group: GroupId
    slot: int

    def __str__(self) -> str:
        return f"{self.group}[{self.slot}]"


@lru_cache(maxsize=4096)
def owner_of(group: GroupId) -> Owner:
    """The owner of a group's copies. One object for each group of a step, since a copy asks for it."""
    return Owner(group.client, f"{group.chunk}/{group.name}")
