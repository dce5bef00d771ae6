"""The saves of one group, and of one forward: which blocks they have, what still waits to leave, and in which
order they will be read.

One invariant: nothing here keeps a saved tensor's bytes. Blocks are held strongly, and freed ones are passed
over; records are held weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from offload.ids import ChunkId, GroupId
from offload.saved.handles import Handle
from offload.saved.record import Record
from offload.transfer.block import DeviceBlock, Transfer, living
from offload.transfer.coming import ComingReads

__all__ = ["SavedChunk", "SavedGroup"]


class SavedGroup:
    """The saves of one group. pending: blocks that wait for their piece to be full. deferred: records of
    partial views, which wait for the commit; of either None, where there are none.

    leaves: whether anything of it does. stays_from: the slot from which on its blocks stay nevertheless;
    None if all leave. kept: the record that the next storages that stay join. unwritten_until: autograd's
    number while an operator runs of whose saves one has no gradient: rrelu saves its noise, and then draws
    it, unseen by any version. Its saves leave with the next one, or at the commit.
    """

    __slots__ = (
        "blocks",
        "deferred",
        "id",
        "kept",
        "leaves",
        "logical_bytes",
        "nbytes",
        "pending",
        "pending_bytes",
        "slot_bytes",
        "slots",
        "stays_from",
        "transfers",
        "unwritten_until",
    )

    def __init__(self, group_id: GroupId, *, leaves: bool, stays_from: int | None = None) -> None:
        self.id = group_id
        self.leaves = leaves
        self.stays_from = stays_from
        self.blocks: list[DeviceBlock] = []
        self.pending: list[DeviceBlock] | None = None
        self.deferred: list[weakref.ref[Record]] | None = None
        self.kept: Record | None = None
        self.pending_bytes = 0
        self.nbytes = 0  # eligible bytes, one count a storage: what leaves if the group does
        self.logical_bytes = 0  # the same, one count a saved tensor
        self.slots = 0
        self.slot_bytes: dict[int, int] = {}  # eligible bytes of each storage
        self.transfers: list[Transfer] = []
        self.unwritten_until = -1

    def keeps(self, slot: int) -> bool:
        """Whether the plan keeps the storage of that slot."""
        return not self.leaves or (self.stays_from is not None and slot >= self.stays_from)

    def living(self) -> Iterator[DeviceBlock]:
        return living(self.blocks)


class SavedChunk:
    """The saves of one forward.

    readable: its forward is complete, so fetching it back ahead of time makes sense. coming: what a backward
        will read, in order. table: by storage, until the forward is complete, weakly who has saved it last: a
        record, or the handle of a storage that stays.
    noted: blocks of the latest saves, from `note_saves` to `take_noted`.
    """

    __slots__ = ("blocks", "coming", "id", "noted", "readable", "table", "touches")

    def __init__(self, chunk_id: ChunkId) -> None:
        self.id = chunk_id
        self.blocks: list[DeviceBlock] = []
        self.table: dict[int, weakref.ref[Record] | weakref.ref[Handle]] = {}
        self.touches = 0
        self.readable = False
        self.coming = ComingReads(chunk_id)
        self.noted: list[DeviceBlock] | None = None

    def living(self) -> Iterator[DeviceBlock]:
        return living(self.blocks)

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

    def take_noted(self) -> list[DeviceBlock]:
        """The blocks of the noted saves, in order."""
        noted, self.noted = self.noted, None
        return [] if noted is None else list(living(noted))

    def read_together(self, blocks: Sequence[DeviceBlock]) -> None:
        """Where a backward comes to the latest of these saves, it reads them all, first to last: a recompute
        reads what its forward kept in the forward's order. The coming reads are by touch, latest first, so
        the first of them gets the latest one."""
        for block in reversed(blocks):
            self.touches += 1
            block.touch = self.touches

    def expect_reverse(self) -> None:
        """The coming reads are the saves in reverse of their latest touch: a whole backward, or an input
        half."""
        self.coming.expect(sorted(self.living(), key=lambda block: -block.touch))

    def expect(self, reads: Sequence[tuple[int, int]]) -> None:
        """The coming reads are these (group, slot) pairs, as an earlier microbatch was seen to read them;
        none for ()."""
        by_place = {(block.group.place, block.slot): block for block in self.living()}
        self.coming.expect([by_place[place] for place in dict.fromkeys(reads) if place in by_place])
