"""One capture of a program that copies, and the graph that it became.

One invariant: it names the host blocks that its replays touch, so that nobody else borrows them before its
region is released.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.device import Event, Lane
    from offload.memory.arena import Block

__all__ = ["CapturedGraph"]


class CapturedGraph:
    """One capture, and the graph that it became.

    spill_bytes, restore_bytes: copied by each replay. kept_bytes: should have left at the capture, and stay
        in the graph's memory.
    host_blocks: that its spills write. sources: graphs whose spills its restores read.
    before_replay: what features do before each replay, whether it copies or not.
    """

    __slots__ = (
        "before_replay",
        "forked",
        "host_blocks",
        "kept_bytes",
        "last_use",
        "name",
        "read_elsewhere",
        "replays",
        "restore_bytes",
        "sources",
        "spill_bytes",
        "unread",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.before_replay: list[Callable[[], None]] = []
        self.host_blocks: list[Block] = []
        self.forked: dict[Lane, None] = {}  # copy lanes that are part of the capture: they must be joined
        self.sources: dict[CapturedGraph, None] = {}
        self.read_elsewhere = False  # another graph restores what this one spills
        self.unread = False  # ... and has not done so since the last replay
        self.spill_bytes = self.restore_bytes = self.kept_bytes = 0
        self.replays = 0
        self.last_use: Event | None = None

    @property
    def copies(self) -> bool:
        return bool(self.spill_bytes or self.restore_bytes)

    def reads(self, other: CapturedGraph) -> None:
        """A restore captured here reads what `other` spills."""
        self.sources[other] = None
        if other is not self:
            other.read_elsewhere = True

    def has_read(self, other: CapturedGraph | None) -> bool:
        return other in self.sources
