"""Blocks of the memory that an arena holds: lent cut to the byte, and taken back together with their last
reader.

One invariant: bytes are lent to one borrower at a time, who learns which events must pass before the bytes
may be written.

    piece    one registration of host memory, the longest thing that one copy may touch
    extent   a byte range inside one piece
    block    a list of extents on loan; a list, so that free bytes are never too scattered to be lent
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from offload.device.base import Device, Event
from offload.errors import PoolError
from offload.memory.budget import HostBudget
from offload.memory.growth import Growth
from offload.memory.marks import Mark, Marks, join_marks
from offload.memory.ranges import FreeRanges, Range, round_up
from offload.memory.shelf import Shelf, Shelved

__all__ = ["ArenaStats", "Block", "Lending"]

ALIGN_BYTES = 512
"""Where extents start, as torch's device allocator does."""

POLLS_PER_CALL = 2
"""Events asked about by each taker, and for each event that comes with a block, whatever the number pending:
the host cost of a call stays flat."""

POLLS_PER_LOAN = 2
"""Events of one new block that are asked about; the rest go to the borrower unasked, for whom a wait costs no
more than a poll."""


# not frozen, which would set each field by a call: one is made for every tensor that moves
@dataclass(slots=True, eq=False)
class Block:
    """Host bytes on loan, until `give_back`. Nobody changes one."""

    nbytes: int
    extents: tuple[torch.Tensor, ...]
    """1-D uint8 views, each inside one registration; their lengths sum to `nbytes`."""
    after: tuple[Event, ...]
    """What the lane that writes next must wait for: the last users of these bytes."""
    ranges: tuple[Range, ...] = field(repr=False)
    """The arena's own bookkeeping, as is the next."""
    marks: tuple[Mark, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaStats:
    """Counters at one moment. `asked`, `missing` and `missing_bytes` run since the arena was made;
    `lent_peak_bytes` since `reset_peak`. `free_ranges` counts what lies on the shelf as it was lent, not
    joined."""

    asked: int
    missing: int
    missing_bytes: int
    lent: int
    lent_bytes: int
    lent_peak_bytes: int
    free_bytes: int
    free_ranges: int
    held_bytes: int


class Lending:
    """The lending side of an arena. Thread-safe; one lock, which finalisers never take."""

    def __init__(
        self, device: Device, budget: HostBudget, *, slab_bytes: int, registration_bytes: int, inline: bool
    ) -> None:
        """As HostArena. inline: whoever asks for bytes that are missing pins them, at once."""
        self.device = device
        # growth waits on a condition over it; entering a condition is two calls more
        self._lock = threading.Lock()
        self._free = FreeRanges()
        self._shelf = Shelf()
        self._growth = Growth(
            device,
            budget,
            self._free,
            threading.Condition(self._lock),
            slab_bytes=slab_bytes,
            registration_bytes=registration_bytes,
            inline=inline,
        )
        self._lent: dict[int, Block] = {}
        # appended to by finalisers, without the lock
        self._returned: deque[tuple[Block, Event | None]] = deque()
        self._marks = Marks(device)
        self._all_passed = False  # every event that was ever recorded outside of the capture under way
        self._asked = self._missing = self._missing_bytes = 0
        self._lent_bytes = self._lent_peak_bytes = 0

    # -- lending ---------------------------------------------------------------------------------------------
    # [Order: reuse of a pinned block]
    # hazard  WAR: `h2d` still reads a block for a restore while `d2h` writes the same bytes for the next
    # spill.
    # edge    give_back(block, after=read_event) keeps the event with the bytes while ranges split and join;
    #         take returns it in Block.after, and the writer's lane waits for it. A block given back unwritten
    #         keeps the events that it came with.
    # alive   the arena owns the bytes; `clear` and `trim` synchronize the events kept with them before they
    #         free them.
    # proof   tests/property/test_arena.py, and its strict-xfail twin without the edge.

    def take(self, nbytes: int) -> Block | None:
        """Lend exactly `nbytes`, or None: not pinned yet, or the budget is spent. A None is counted, and asks
        for growth.

        Blocks the host: never with background growth, for the pinning with inline growth.
        """
        needed = round_up(_positive(nbytes), ALIGN_BYTES)
        with self._lock:
            self._asked += 1
            self._settle()
            shelved = self._shelf.take(nbytes)
            if shelved is not None:
                return self._lend(nbytes, *shelved)
            # else the sizes of a steady step stay on the shelf beside one that changes
            if self._free.best_fit(needed) is None:
                self._clear_shelf()
            while needed > self._free.total_bytes:
                # deficits of several misses are not added up: the blocks that were missed may never be lent
                # together
                target_bytes = self._growth.held_bytes + needed - self._free.total_bytes
                grown = self._growth.inline and self._growth.try_hold(target_bytes)
                self._clear_shelf()  # blocks may have come back while it waited for another thread that pins
                if not grown and needed > self._free.total_bytes:
                    self._missing += 1
                    self._missing_bytes += nbytes
                    self._growth.hold_later(target_bytes)
                    return None
            return self._cut(nbytes, self._free.gather(needed))

    def contiguous(self, nbytes: int) -> Block:
        """Lend a block of one extent, for pools that make a tensor of it. More than a registration gets a
        registration of its own.

        The block may be written at once, its `after` is empty. Blocks the host for the last users of its
        bytes, and for the pinning if no free range is long enough. Raises HostBudgetError if it may not be
        pinned.
        """
        needed = round_up(_positive(nbytes), ALIGN_BYTES)
        with self._lock:
            self._asked += 1
            self._settle()
            self._clear_shelf()
            while (free := self._free.best_fit(needed)) is None:
                self._growth.hold_piece(needed)
                self._clear_shelf()  # as in `take`
            part = self._free.cut(free, needed)
        for mark in part.marks:  # without the lock: this may block
            if (event := mark.event) is not None:
                self.device.synchronize(event)
        with self._lock:
            for mark in part.marks:
                self._marks.poll(mark)
            return self._cut(nbytes, [part])

    def give_back(self, block: Block, after: Event | None) -> None:
        """End the loan. after: the last use of the bytes that was issued; None if every use is known to have
        ended.

        Raises PoolError if the block is not on loan from this arena. Blocks the host: never.
        """
        with self._lock:
            self._accept_returned()
            self._accept(block, after)

    def give_back_later(self, block: Block, after: Event | None) -> None:
        """As `give_back`, for finalisers on any thread: takes no lock. The next call of the arena does the
        work, and raises the error."""
        self._returned.append((block, after))

    # -- counters --------------------------------------------------------------------------------------------
    @property
    def held_bytes(self) -> int:
        return self._growth.held_bytes

    @property
    def lent_bytes(self) -> int:
        return self._lent_bytes

    def stats(self) -> ArenaStats:
        with self._lock:
            self._settle()
            return ArenaStats(
                asked=self._asked,
                missing=self._missing,
                missing_bytes=self._missing_bytes,
                lent=len(self._lent),
                lent_bytes=self._lent_bytes,
                lent_peak_bytes=self._lent_peak_bytes,
                free_bytes=self._free.total_bytes + self._shelf.total_bytes,
                free_ranges=len(self._free) + self._shelf.num_ranges,
                held_bytes=self._growth.held_bytes,
            )

    def reset_peak(self) -> None:
        """Start a new peak from what is lent now, once a step. A growth that was refused may be tried again
        from here on."""
        with self._lock:
            self._settle()
            self._lent_peak_bytes = self._lent_bytes
            self._growth.allow_retry()

    # -- inside, with the lock held --------------------------------------------------------------------------
    def _cut(self, nbytes: int, ranges: Sequence[Range]) -> Block:
        """A new block out of ranges that were free."""
        extents, left = [], nbytes
        for part in ranges:  # only the last is padded, by less than ALIGN_BYTES
            length = min(part.nbytes, left)
            extents.append(self._growth.pieces[part.piece].narrow(0, part.start, length))
            left -= length
        return self._lend(
            nbytes, tuple(extents), tuple(ranges), join_marks(mark for part in ranges for mark in part.marks)
        )

    def _lend(
        self,
        nbytes: int,
        extents: tuple[torch.Tensor, ...],
        ranges: tuple[Range, ...],
        marks: tuple[Mark, ...],
    ) -> Block:
        unpassed: list[Mark] = []
        after: list[Event] = []
        for place, mark in enumerate(marks):
            if mark.event is not None and place < POLLS_PER_LOAN:
                self._marks.poll(mark)
            if mark.event is not None:
                unpassed.append(mark)
                after.append(mark.event)
        block = Block(nbytes, extents, tuple(after), ranges, tuple(unpassed))
        self._lent[id(block)] = block
        self._lent_bytes += nbytes
        if self._lent_bytes > self._lent_peak_bytes:
            self._lent_peak_bytes = self._lent_bytes
        return block

    def _accept(self, block: Block, after: Event | None) -> None:
        if self._lent.pop(id(block), None) is None:
            raise PoolError(
                f"a block of {block.nbytes:,} bytes in {len(block.extents)} extents is not on loan from this "
                "arena, which has "
                f"{len(self._lent)} blocks of {self._lent_bytes:,} bytes lent; give each block back once, "
                "where it was taken"
            )
        self._lent_bytes -= block.nbytes
        marks = block.marks and tuple([mark for mark in block.marks if mark.event is not None])
        if after is not None and not self._all_passed:
            # for each that comes, some of the older ones are asked about: they do not pile up
            if not self._marks.knows(after):
                self._marks.poll_until_unpassed(POLLS_PER_CALL)
            mark = self._marks.of(after)
            if mark not in marks:
                marks = (*marks, mark)
        self._shelf.put(block.nbytes, Shelved(block.extents, block.ranges, marks))

    def _clear_shelf(self) -> None:
        """What lies on the shelf goes back to the free ranges, to be joined and cut anew."""
        for _, ranges, marks in self._shelf.drain():
            for part in ranges:
                self._free.put(part.piece, part.start, part.end, marks)

    def _accept_returned(self) -> None:
        """What finalisers gave back."""
        while self._returned:
            self._accept(*self._returned.popleft())

    def _settle(self) -> None:
        """Accept what finalisers returned, and ask about the few events that were asked about longest ago,
        until one has not passed."""
        self._accept_returned()
        self._marks.poll_until_unpassed(POLLS_PER_CALL)


def _positive(nbytes: int) -> int:
    if nbytes <= 0:
        raise ValueError(f"a block of {nbytes:,} bytes was asked for; tensors without bytes need none")
    return nbytes
