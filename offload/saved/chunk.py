"""The saves of one group, and of one forward: which blocks they have, what still waits to leave, and in which
order they will be read.

One invariant: nothing here keeps a saved tensor's bytes. Blocks are held strongly, and freed ones are passed
over; records are held weakly.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from offload.ids import ChunkId, GroupId
from offload.saved.handles import Handle, Record
from offload.transfer.block import DeviceBlock, Transfer, living
from offload.transfer.coming import ComingReads


@dataclass(slots=True, eq=False)
class SavedGroup:
    """The saves of one group in one step.

    pending: blocks that wait for their piece to be full. deferred: records of partial views, which wait for
    the commit.

    leaves: whether anything of it does. stays_from: the slot from which on its blocks stay nevertheless;
    None if all leave. kept_by_plan: nothing else keeps what stays, so it may leave after all. first_kept:
    leaves and stays_from as one number. kept: the record that the next storages that stay join; its handles
    hold it, so that a group that an exception left open holds nothing.
    unwritten_until: autograd's number while an operator runs of whose saves one has no gradient: rrelu saves
    its noise, and then draws it, unseen by any version. Its saves leave with the next one, or at the
    commit. waits: nothing leaves by itself; whoever owns the group spills its blocks.
    """

    id: GroupId
    leaves: bool = field(kw_only=True)
    waits: bool = field(default=False, kw_only=True)
    stays_from: int | None = field(default=None, kw_only=True)
    kept_by_plan: bool = field(default=False, kw_only=True)
    first_kept: int = field(init=False)
    blocks: list[DeviceBlock] = field(default_factory=list)
    pending: list[DeviceBlock] = field(default_factory=list)
    pending_bytes: int = 0
    deferred: list[weakref.ref[Record]] = field(default_factory=list)
    kept: weakref.ref[Record] | None = None
    nbytes: int = 0  # eligible bytes, one count a storage: what leaves if the group does
    logical_bytes: int = 0  # the same, one count a saved tensor
    slots: int = 0
    slot_bytes: dict[int, int] = field(default_factory=dict)  # eligible bytes of each storage
    moved_bytes: int = 0  # of its blocks that left, one count a storage
    transfers: list[Transfer] = field(default_factory=list)
    unwritten_until: int = -1
    in_figures: bool = False  # the figures of a step have it

    def __post_init__(self) -> None:
        self.first_kept = (sys.maxsize if self.stays_from is None else self.stays_from) if self.leaves else 0

    def leaves_after_all(self) -> None:
        """From here on no more of it stays: this step is longer than the one that the plan was made for."""
        self.leaves, self.first_kept = True, sys.maxsize

    def keeps(self, slot: int) -> bool:
        """Whether the plan keeps the storage of that slot."""
        return slot >= self.first_kept

    def living(self) -> Iterator[DeviceBlock]:
        return living(self.blocks)


@dataclass(slots=True, eq=False)
class SavedChunk:
    """The saves of one forward.

    readable: its forward is complete, so fetching it back ahead of time makes sense. coming: what a backward
        will read, in order. table: by storage, until the forward is complete, weakly who has saved it last: a
        record, or the handle of a storage that stays.
    noted: blocks of the latest saves, where somebody has begun a list of them, until `take_noted`.
    """

    id: ChunkId
    blocks: list[DeviceBlock] = field(default_factory=list)
    table: dict[int, weakref.ref[Record] | weakref.ref[Handle]] = field(default_factory=dict)
    touches: int = 0
    readable: bool = False
    coming: ComingReads = field(init=False)
    noted: list[DeviceBlock] | None = None

    def __post_init__(self) -> None:
        self.coming = ComingReads(self.id)

    def living(self) -> Iterator[DeviceBlock]:
        return living(self.blocks)

    def complete(self) -> None:
        """The forward is over: nothing joins any more, and the coming reads are the saves in reverse."""
        if not self.readable:
            self.readable = True
            self.table.clear()
            self.noted = None
            self.expect_reverse()

    def take_noted(self) -> list[DeviceBlock]:
        """The blocks of the noted saves, in order."""
        noted, self.noted = self.noted, None
        return list(living(noted or ()))

    def read_together(self, blocks: Sequence[DeviceBlock]) -> None:
        """Where a backward comes to the latest of these saves, it reads them all, first to last: a recompute
        reads what its forward kept in the forward's order. The coming reads are by touch, latest first, so
        the first of them gets the latest one."""
        for block in reversed(blocks):
            self.touches += 1
            block.touch = self.touches

    def ends_here(self) -> None:
        """The last pass over the graph begins: nothing stays for another one."""
        for block in self.blocks:
            block.reread_soon = False

    def expect_reverse(self, passed: Collection[DeviceBlock] = (), after: Sequence[DeviceBlock] = ()) -> None:
        """The coming reads are the saves in reverse of their latest touch: a whole backward, or an input
        half. passed: what that half does not read. after: of these, what is fetched behind its reads."""
        blocks = [block for block in self.living() if block not in passed]
        self.coming.expect(sorted(blocks, key=lambda block: -block.touch), after)

    def expect(self, reads: Iterable[tuple[int, int]]) -> None:
        """The coming reads are these (group, slot) pairs, as an earlier microbatch was seen to read them;
        none for ()."""
        self.coming.expect(self.at(reads))

    def at(self, places: Iterable[tuple[int, int]]) -> list[DeviceBlock]:
        """The living blocks at these (group, slot) pairs, in their order, each once."""
        by_place = {(block.group.place, block.slot): block for block in self.living()}
        return [by_place[place] for place in dict.fromkeys(places) if place in by_place]
