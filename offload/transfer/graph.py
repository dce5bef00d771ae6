"""One capture of a program that copies, and the graph that it became.

One invariant: it names the host blocks that its replays touch, so that nobody else borrows them before its
region is released.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.device import Event, Lane
    from offload.memory.arena import Block


@dataclass(slots=True, eq=False)
class CapturedGraph:
    """One capture, and the graph that it became.

    spill_bytes, restore_bytes: copied by each replay. kept_bytes: should have left at the capture, and stay
        in the graph's memory.
    host_blocks: that its spills write. sources: graphs whose spills its restores read.
    borrowed: host buffers that its copies read, held until the region is released.
    before_replay: what features do before each replay, whether it copies or not.
    """

    name: str
    before_replay: list[Callable[[], None]] = field(default_factory=list)
    host_blocks: list[Block] = field(default_factory=list)
    borrowed: list[object] = field(default_factory=list)
    # copy lanes that are part of the capture: they must be joined
    forked: dict[Lane, None] = field(default_factory=dict)
    sources: dict[CapturedGraph, None] = field(default_factory=dict)
    read_elsewhere: bool = False  # another graph restores what this one spills
    unread: bool = False  # ... and has not done so since the last replay
    spill_bytes: int = 0
    restore_bytes: int = 0
    kept_bytes: int = 0
    replays: int = 0
    last_use: Event | None = None

    @property
    def copies(self) -> bool:
        return bool(self.spill_bytes or self.restore_bytes)

    def reads(self, other: CapturedGraph) -> None:
        """A restore captured here reads what `other` spills."""
        self.sources[other] = None
        if other is not self:
            other.read_elsewhere = True
