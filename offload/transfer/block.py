"""A range of bytes of one device storage that may leave for the host and come back: where its bytes are, and
the event of their last copy.

One invariant: a block's state changes only as `LEGAL_MOVES` lists. `move_to` checks that. The transfer engine
writes the usual moves itself, without the call, after it has compared the state.

    RESIDENT --spill--> SPILLING --settle--> SPILLED --restore--> RESTORING --wait--> RESTORED
       ^                   |                    ^                                        |
       +------ reclaim ----+                    +------- drop: the host copy is clean ---+

reclaim: its reader comes before its spill has been settled, so the block stays on the device. Without a host
block it stays RESIDENT. Every state may end in RELEASED, which `reclaim_freed` writes: its readers are gone,
or the step has ended.

A block holds the device bytes strongly only while RESIDENT, RESTORING or RESTORED. Bytes that leave are held
by the transfer that moves them. A record that dies frees its block, as `free` does, on whichever thread that
happens. Freeing takes no lock. It drops the device bytes and appends the block to a deque of its engine,
which reclaims the counts and the host bytes at its next call.

A CapturedGraph is one capture of a program that copies, and the graph that it became. It names the host
blocks that its replays touch, so that nobody else borrows them before its region is released.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import torch

from offload.device import Event, Lane
from offload.disk.worker import Stored
from offload.errors import RecordStateError
from offload.ids import GroupId, SlotId
from offload.memory.arena import Block
from offload.transfer.layout import WeakStorage


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


class BlockState(Enum):
    # members are compared by identity; Enum's own hash is a Python call, two of them a move
    __hash__ = object.__hash__
    RESIDENT = auto()  # on the device, in the storage that was saved
    SPILLING = auto()  # D2H issued; its transfer keeps the device storage alive
    SPILLED = auto()  # the host block holds the only copy that is ours
    RESTORING = auto()  # H2D issued; readers must wait for its event
    RESTORED = auto()  # on the device again, in a new storage, and the compute lane is ordered after the copy
    RELEASED = auto()  # no more readers: they are gone, or the step has ended


_S = BlockState
LEGAL_MOVES: dict[BlockState, frozenset[BlockState]] = {
    _S.RESIDENT: frozenset({_S.SPILLING, _S.RELEASED}),
    _S.SPILLING: frozenset({_S.SPILLED, _S.RESIDENT, _S.RELEASED}),
    _S.SPILLED: frozenset({_S.RESTORING, _S.RELEASED}),
    _S.RESTORING: frozenset({_S.RESTORED, _S.RELEASED}),
    _S.RESTORED: frozenset({_S.SPILLED, _S.RELEASED}),
    _S.RELEASED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Transfer:
    """A piece in flight. Its bytes stay alive until the event has passed, or until the lane that may reuse
    them waits for the event.

    blocks: what moves. keepalive: device tensors, sources of a spill or destinations of a restore, one a
        block; of both none once it is settled.
    lane: the compute lane whose allocator owns them.
    capture: the graph that its copies are part of, None if they were issued; only the same capture may wait
        for the event.
    """

    blocks: tuple[DeviceBlock, ...]
    keepalive: tuple[torch.Tensor, ...]
    lane: Lane
    event: Event
    nbytes: int
    capture: CapturedGraph | None
    settled: bool = False  # passed, or `lane` waits for it


class Holder(Protocol):
    """Who holds the bytes of a block that stays. probe: an alias of what was saved."""

    probe: torch.Tensor | None


@dataclass(slots=True, eq=False, repr=False)
class DeviceBlock(WeakStorage):
    """Bytes `start` to `stop` of one storage, saved by one chunk: a weak reference to that storage, later to
    the restored one, or to a packed copy.

    It has few objects of its own, because each that lives as long as a saved tensor is one more for Python's
    collector to walk.

    group, slot: the group that saved it, and its number there.
    start, nbytes: the bytes of the saved storage that move. lead: the place of
    the first of them (`place_of`), which it has again after a restore.
    readers: how many times it was saved. unread: how many of these saves have not been read in the current
        pass of a backward. pass_no: the number of that pass.
    touch: the order of its latest save, so of its first read in a backward.
    reread_soon: a second pass follows, for which its restored bytes stay once the first has read them all.
    external: written from outside autograd; that the storage lives does not mean that its bytes are the saved
        ones.
    capture: the graph in which it was saved, and whose replays write its host block; None outside of
        captures.
    holders: for a block that counts what stays by plan, weak references to the handles that hold the bytes;
        the block itself has none to move. storages: how many storages it counts.
    """

    group: GroupId
    slot: int
    start: int
    nbytes: int
    device_bytes: torch.UntypedStorage | None
    freed_blocks: deque[DeviceBlock]  # its engine's
    # byte of the saved storage that is the first of the one referred to: 0, after a restore `start - lead`
    base: int = 0
    lead: int = 0
    is_freed: bool = False
    state: BlockState = BlockState.RESIDENT
    lane: Lane | None = None  # the compute lane that saved it, and so comes after its writer
    capture: CapturedGraph | None = None
    host: Block | None = None
    event: Event | None = None  # last use of the host block: its spill, then each restore
    transfer: Transfer | None = None  # the one under way, or the last
    external: bool = False
    copies: int = 0  # 1: it was copied out, 2: and back
    readers: int = 0
    unread: int = 0
    pass_no: int = 0
    touch: int = 0
    reread_soon: bool = False
    holders: list[Callable[[], Holder | None]] | None = None
    storages: int = 1
    checksum: int | None = None
    refused: bool = False  # it should have left, and found no room on the host
    stored: Stored | None = None  # with a disk, which may have the bytes instead of `host`

    def __post_init__(self) -> None:
        assert self.device_bytes is not None  # the storage that was saved
        self.key = self.device_bytes._cdata  # `WeakStorage`, without a call
        self._pointer = self.device_bytes._weak_ref()

    @property
    def label(self) -> SlotId:
        return SlotId(self.group, self.slot)

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    def storage_keys(self) -> set[int]:
        """Keys of the storages whose bytes these are."""
        if self.holders is None:
            return {self.key}
        probes = (holder.probe for holder in self.living_holders())
        return {probe.untyped_storage()._cdata for probe in probes if probe is not None}

    def living_holders(self) -> Iterator[Holder]:
        for reference in self.holders or ():
            holder = reference()
            if holder is not None:
                yield holder

    def move_to(self, state: BlockState) -> None:
        legal = LEGAL_MOVES[self.state]
        if state not in legal:
            names = ", ".join(sorted(move.name for move in legal)) or "none"
            raise RecordStateError(
                f"{self.label} ({self.nbytes:,} bytes) cannot move {self.state.name} -> {state.name}; legal "
                f"from here: {names}"
            )
        self.state = state

    def free(self) -> None:
        """End the block: it can no longer be read. Takes no lock, so a finaliser may call it on any thread,
        also during a call of the engine."""
        if not self.is_freed and self.state is not BlockState.RELEASED:
            self.is_freed = True
            self.device_bytes = None
            self.freed_blocks.append(self)

    def __repr__(self) -> str:
        return f"DeviceBlock({self.label}, {self.nbytes:,} bytes, {self.state.name})"


def living(blocks: Iterable[DeviceBlock]) -> Iterator[DeviceBlock]:
    """Those that somebody can still read."""
    return (block for block in blocks if not block.is_freed)
