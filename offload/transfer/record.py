"""One saved storage and where its bytes are.

One invariant: `move_to` is the only writer of a record's state, and it allows what `LEGAL_MOVES` lists.

    RESIDENT --spill--> SPILLING --retire--> SPILLED --restore--> RESTORING --wait--> RESTORED
       ^                                        ^                                        |
       +-- (no block, no room: it stays)        +------- drop: the host copy is clean ---+
    every state may end in RELEASED: the graph was freed, or the step ended.

Who holds what: a handle in autograd's graph holds its record strongly; everything else holds records weakly.
The record holds the device bytes only while RESIDENT, RESTORING or RESTORED. Bytes that leave are held by the
transfer that moves them. When the last handle dies the record dies with it, on whichever thread that happens:
its finaliser takes no lock, it only appends to a deque.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from offload.errors import RecordStateError
from offload.ids import GroupId, SlotId
from offload.transfer.layout import ViewLayout, WeakStorage

if TYPE_CHECKING:
    from offload.device import Event, Lane
    from offload.memory.arena import Block
    from offload.transfer.captures import CapturedGraph

__all__ = ["LEGAL_MOVES", "Record", "RecordState", "Remains", "Transfer", "living"]


class RecordState(Enum):
    # members are compared by identity; Enum's own hash is a Python call, two of them a move
    __hash__ = object.__hash__
    RESIDENT = auto()  # on the device, in the storage that autograd saved
    SPILLING = auto()  # D2H issued; its transfer keeps the device storage alive
    SPILLED = auto()  # the host block holds the only copy that is ours
    RESTORING = auto()  # H2D issued; readers must wait for its event
    RESTORED = auto()  # on the device again, in a new storage, and the compute lane is ordered after the copy
    RELEASED = auto()  # no more readers: the graph is gone or the step has ended


_S = RecordState
LEGAL_MOVES: dict[RecordState, frozenset[RecordState]] = {
    _S.RESIDENT: frozenset({_S.SPILLING, _S.RELEASED}),
    _S.SPILLING: frozenset({_S.SPILLED, _S.RESIDENT, _S.RELEASED}),
    _S.SPILLED: frozenset({_S.RESTORING, _S.RELEASED}),
    _S.RESTORING: frozenset({_S.RESTORED, _S.RELEASED}),
    _S.RESTORED: frozenset({_S.SPILLED, _S.RELEASED}),
    _S.RELEASED: frozenset(),
}


class Transfer:
    """A piece in flight: its bytes stay alive until the event has passed, or until a lane that reuses them is
    ordered after it.

    keepalive: device tensors, sources of a spill or destinations of a restore, one a record; of both none
        once it is settled.
    lane: the compute lane whose allocator owns them.
    capture: the graph that its copies are part of, None if they were issued; only the same capture may wait
        for the event.
    """

    __slots__ = ("capture", "event", "keepalive", "lane", "nbytes", "records", "settled")

    def __init__(
        self,
        records: tuple[weakref.ref[Record], ...],
        keepalive: tuple[torch.Tensor, ...],
        lane: Lane,
        event: Event,
        nbytes: int,
        capture: CapturedGraph | None = None,
    ) -> None:
        self.records = records
        self.keepalive = keepalive
        self.lane = lane
        self.event = event
        self.nbytes = nbytes
        self.capture = capture
        self.settled = False  # passed, or `lane` waits for it

    def let_go(self) -> None:
        """Of its bytes: it is settled."""
        self.records = self.keepalive = ()


class Keeper(Protocol):
    """A handle of a record that stays. probe: an alias of what was saved."""

    probe: torch.Tensor | None


class Remains(NamedTuple):
    """What a dead record leaves to its engine. event: the last use of the block. capture: whose region holds
    the block."""

    state: RecordState
    nbytes: int
    block: Block | None
    event: Event | None
    transfer: Transfer | None
    refused: bool
    capture: CapturedGraph | None


class Record(WeakStorage):
    """One storage, at one version, saved by one chunk: a weak reference to it, later to the restored one, or
    to a packed copy.

    It has few objects of its own, because each that lives as long as a saved tensor is one more for Python's
    collector to walk.

    group, slot: whose it is. start, nbytes: the bytes of the saved storage that move. handles: how many times
    autograd saved it; unread: how many of them have not been read in the pass under way. touch: the order of
    its latest save, so of its first read in a backward.
    capture: the graph in which it was saved, and whose replays write its block; None outside of captures.
    stays: for good; `keepers` are its handles, each with an alias that holds its bytes. storages: more than
    one where it is a piece of what stays (saved/staying.py), which has no bytes to move, version or probe.
    """

    __slots__ = (
        "__weakref__",
        "base",
        "block",
        "capture",
        "checksum",
        "device_bytes",
        "estate",
        "event",
        "external",
        "gathered",
        "group",
        "handles",
        "keepers",
        "lane",
        "lone_layout",
        "nbytes",
        "pass_no",
        "probe",
        "refused",
        "slot",
        "start",
        "state",
        "stays",
        "storages",
        "touch",
        "transfer",
        "unread",
        "version",
    )

    def __init__(
        self,
        group: GroupId,
        slot: int,
        start: int,
        stop: int,
        storage: torch.UntypedStorage,
        estate: deque[Remains],
    ) -> None:
        """start, stop: the bytes of `storage` that move."""
        super().__init__(storage)
        self.group = group
        self.slot = slot
        self.start = start
        self.nbytes = stop - start
        # first byte of the saved storage that the one referred to has: 0, after a restore `start`
        self.base = 0
        self.estate = estate
        self.state = RecordState.RESIDENT
        self.device_bytes: torch.UntypedStorage | None = None
        self.lane: Lane | None = None  # the compute lane that saved it, and so comes after its writer
        self.capture: CapturedGraph | None = None
        self.block: Block | None = None
        self.event: Event | None = None  # last use of the block: its spill, then each restore
        self.transfer: Transfer | None = None  # the one under way, or the last
        self.lone_layout: ViewLayout | None = None  # of every save so far, None once two differ
        self.gathered: ViewLayout | None = None  # the block holds this sparse view, packed
        self.probe: torch.Tensor | None = None
        self.version = 0
        self.stays = False
        self.keepers: Sequence[Callable[[], Keeper | None] | None] = ()  # weak references
        self.storages = 1
        self.external = False
        self.handles = 0
        self.unread = 0
        self.pass_no = 0
        self.touch = 0
        self.checksum: int | None = None
        self.refused = False  # it should have left, and found no room on the host

    @property
    def label(self) -> SlotId:
        return SlotId(self.group, self.slot)

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    def storage_keys(self) -> set[int]:
        """Of the storages whose bytes these are."""
        if not self.stays:
            return {self.key}
        return {
            keeper.probe.untyped_storage()._cdata
            for keeper in self.living_keepers()
            if keeper.probe is not None
        }

    def living_keepers(self) -> Iterator[Keeper]:
        for reference in self.keepers:
            keeper = None if reference is None else reference()
            if keeper is not None:
                yield keeper

    def cover(self, start: int, stop: int) -> None:
        """Move these bytes of the storage, and no others."""
        self.start = start
        self.nbytes = stop - start

    def move_to(self, state: RecordState) -> None:
        legal = LEGAL_MOVES[self.state]
        if state not in legal:
            names = ", ".join(sorted(move.name for move in legal)) or "none"
            raise RecordStateError(
                f"{self.label} ({self.nbytes:,} bytes) cannot move {self.state.name} -> {state.name}; legal "
                f"from here: {names}"
            )
        self.state = state

    def remains(self) -> Remains:
        return Remains(
            self.state, self.nbytes, self.block, self.event, self.transfer, self.refused, self.capture
        )

    def __del__(self) -> None:
        super().__del__()
        if self.state is not RecordState.RELEASED:  # `remains`, without a call: every record dies once
            self.estate.append(
                Remains(
                    self.state, self.nbytes, self.block, self.event, self.transfer, self.refused, self.capture
                )
            )

    def __repr__(self) -> str:
        return f"Record({self.label}, {self.nbytes:,} bytes, {self.state.name})"


def living(references: Iterable[weakref.ref[Record]]) -> Iterator[Record]:
    """The records that a graph still holds."""
    for reference in references:
        record = reference()
        if record is not None:
            yield record
