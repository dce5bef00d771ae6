"""The saves of one group, and of one forward: which records there are, what still waits to leave, and in
which order they will be read.

One invariant: records are held weakly here; one whose graph is gone is passed over.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from offload.ids import ChunkId, GroupId
from offload.saved.coming import ComingReads
from offload.transfer.record import Record, Transfer, living

if TYPE_CHECKING:
    from offload.saved.staying import StayingSaves

__all__ = ["SavedChunk", "SavedGroup"]


class SavedGroup:
    """The saves of one group. pending: records that wait for their piece to be full. deferred: partial views
    that wait for the commit; of either None, where there are none.

    leaves: whether anything of it does. stays_from: the slot from which on its records stay nevertheless;
    None if all leave. staying: the pack hook of a group that stays; None for the normal one. unwritten_until:
    autograd's number while an operator runs of whose saves one has no gradient: rrelu saves its noise, and
    then draws it, unseen by any version. Its saves leave with the next one, or at the commit.
    """

    __slots__ = (
        "deferred",
        "id",
        "leaves",
        "logical_bytes",
        "nbytes",
        "pending",
        "pending_bytes",
        "records",
        "slot_bytes",
        "slots",
        "staying",
        "stays_from",
        "transfers",
        "unwritten_until",
    )

    def __init__(self, group_id: GroupId, *, leaves: bool, stays_from: int | None = None) -> None:
        self.id = group_id
        self.leaves = leaves
        self.stays_from = stays_from
        self.records: list[weakref.ref[Record]] = []
        self.pending: list[weakref.ref[Record]] | None = None
        self.deferred: list[weakref.ref[Record]] | None = None
        self.pending_bytes = 0
        self.nbytes = 0  # eligible bytes, one count a storage: what leaves if the group does
        self.logical_bytes = 0  # the same, one count a saved tensor
        self.slots = 0
        self.slot_bytes: dict[int, int] = {}  # eligible bytes of each record
        self.transfers: list[Transfer] = []
        self.staying: StayingSaves | None = None
        self.unwritten_until = -1

    def keeps(self, slot: int) -> bool:
        """Whether the plan keeps the record of that slot."""
        return not self.leaves or (self.stays_from is not None and slot >= self.stays_from)

    def living(self) -> Iterator[Record]:
        return living(self.records)


class SavedChunk:
    """The saves of one forward.

    readable: its forward is complete, so fetching it back ahead of time makes sense. coming: what a backward
        will read, in order.
    noted: records of the latest saves, from `note_saves` to `take_noted`.
    """

    __slots__ = ("coming", "id", "noted", "readable", "records", "table", "touches")

    def __init__(self, chunk_id: ChunkId) -> None:
        self.id = chunk_id
        self.records: list[weakref.ref[Record]] = []
        self.table: dict[int, weakref.ref[Record]] = {}
        self.touches = 0
        self.readable = False
        self.coming = ComingReads([])
        self.noted: list[weakref.ref[Record]] | None = None

    def living(self) -> Iterator[Record]:
        return living(self.records)

    def complete(self) -> None:
        """The forward is over: nothing joins any more, and the coming reads are the saves in reverse."""
        if not self.readable:
            self.readable = True
            self.table.clear()
            self.noted = None
            self.expect_reverse()

    def note_saves(self) -> None:
        """Note the saves from here on, until `take_noted`."""
        self.noted = []

    def take_noted(self) -> list[Record]:
        """The records of the noted saves, in order."""
        noted, self.noted = self.noted, None
        return [] if noted is None else list(living(noted))

    def read_together(self, records: Sequence[Record]) -> None:
        """Where a backward comes to the latest of these saves, it reads them all, first to last: a recompute
        reads what its forward kept in the forward's order. The coming reads are by touch, latest first, so
        the first of them gets the latest one."""
        for record in reversed(records):
            self.touches += 1
            record.touch = self.touches

    def expect_reverse(self) -> None:
        """The coming reads are the saves in reverse of their latest touch: a whole backward, or an input
        half."""
        self.coming = ComingReads(sorted(self.living(), key=lambda record: -record.touch))

    def expect(self, reads: Sequence[tuple[int, int]]) -> None:
        """The coming reads are these (group, slot) pairs, as an earlier microbatch was seen to read them;
        none for ()."""
        by_place = {(record.group.place, record.slot): record for record in self.living()}
        self.coming = ComingReads([by_place[place] for place in dict.fromkeys(reads) if place in by_place])
