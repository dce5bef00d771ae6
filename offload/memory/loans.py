"""What the arena lends and takes back: blocks, by size, and who must pass before a block may be written.

A steady step asks for the sizes of the step before, so a block that comes back is kept whole and lent again
as it was: cutting each out of the ranges and joining it again was a large part of what a moved tensor costs
the host (`scripts/bench_stage.py --micro`). Where no block of a size is left, one is cut from the free
ranges. `take` and `give_back` run for every tensor that moves, so what is usual there is written in place.
One invariant: a free byte lies in one whole block or in one range, and a lent one in one block.

    piece    one registration of host memory, the longest thing that one copy may touch
    extent   a byte range inside one piece
    block    a list of extents; a list, so that free bytes are never too scattered to be lent

Saved tensors that found no host memory are warned of once for an engine, as soon as host memory cannot grow;
else after a few steps, when what is pinned beside them has had its time.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch

from offload.device.base import Device, Event
from offload.errors import PoolError
from offload.memory.free_ranges import (
    EQUALS_LOOKED_AT,
    FreeRanges,
    PendingEvent,
    PendingEvents,
    Range,
    join_pending,
    round_up,
)
from offload.memory.growth import PAGE_BYTES, Growth
from offload.sizes import bytes_text, enough_text
from offload.telemetry.records import StepStats
from offload.telemetry.speaker import speaker

logger = speaker(__name__)

ALIGN_BYTES = 512
"""Where extents start, as torch's device allocator does."""

POLLS_PER_LOAN = 2
"""Events of one new block that are asked about. The other events are returned without being polled: a wait
for them costs the borrower no more than a poll."""


# not frozen, which would set each field by a call: one is made for every tensor that moves
@dataclass(slots=True, eq=False)
class Block:
    """Host bytes on loan, until `give_back`. Its borrower changes nothing of it."""

    nbytes: int
    extents: tuple[torch.Tensor, ...]
    """1-D uint8 views, each inside one registration; their lengths sum to `nbytes`."""
    after: tuple[Event, ...]
    """What the lane that writes next must wait for: the last users of these bytes."""
    ranges: tuple[Range, ...] = field(repr=False)
    """The arena's own bookkeeping, as is the next."""
    pending: tuple[PendingEvent, ...] = field(repr=False)
    lender: HostLender | None = field(default=None, repr=False)
    """Who gets it back, if not the arena."""


class HostLender(Protocol):
    """Lends host bytes that copies go to, as the arena does, from memory of its own."""

    def take(self, nbytes: int) -> Block | None: ...

    def give_back(self, block: Block, after: Event | None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaStats:
    """Counters at one moment. `missing` runs since the arena was made, `lent_peak_bytes` since `reset_peak`.
    `free_ranges` counts whole blocks by the ranges that they were lent as, not joined."""

    missing: int
    lent: int
    lent_bytes: int
    lent_peak_bytes: int
    free_bytes: int
    free_ranges: int
    held_bytes: int


class Lender:
    """Lends the memory that `Growth` holds, cut to the byte. Thread-safe; one lock, which finalisers never
    take."""

    _growth: Growth

    def __init__(self, device: Device) -> None:
        self.device = device
        # growth waits on a condition over it; entering a condition is two calls more
        self._lock = threading.Lock()
        self._ranges = FreeRanges()
        self._whole: defaultdict[int, deque[Block]] = defaultdict(deque)  # of one size the longest free first
        self._events = PendingEvents(device)
        self._lent: dict[int, Block] = {}
        # appended to by finalisers, without the lock
        self._returned: deque[tuple[Block, Event | None]] = deque()
        self._align_bytes = ALIGN_BYTES
        self._all_passed = False  # every event that was ever recorded outside of the capture under way
        self._missing = 0
        self.lent_bytes = self._lent_peak_bytes = 0

    # [Order: reuse of a pinned block]
    # hazard  WAR: `h2d` still reads a block for a restore while `d2h` writes the same bytes for the next
    # spill.
    # edge    give_back(block, after=read_event) keeps the event with the bytes while ranges split and join;
    #         take returns it in Block.after, and the writer's lane waits for it. The event replaces those
    #         that the block came with, for which its user waited; a block given back unwritten keeps them.
    # alive   the arena owns the bytes; `clear` and `trim` synchronize the events kept with them before they
    #         free them.
    # proof   tests/property/test_arena.py, and its strict-xfail twin without the edge.

    def take(self, nbytes: int) -> Block | None:
        """Lend exactly `nbytes`, or None: not pinned yet, or the budget is spent. A None is counted, and asks
        for growth.

        Blocks the host: never with background growth, for the pinning with inline growth.
        """
        with self._lock:
            if self._returned:
                self._accept_returned()
            same = self._whole.get(nbytes)
            if not same:
                return self._take_ranges(nbytes)
            # of the oldest ones the first that nobody reads any more, else the oldest
            for at, free in enumerate(islice(same, EQUALS_LOOKED_AT)):
                for pending in free.pending:
                    if pending.event is not None:
                        break
                else:
                    del same[at]
                    free.pending = ()
                    break
            else:
                free = same.popleft()
            block = Block(nbytes, free.extents, (), free.ranges, free.pending)
            if block.pending:
                self._ask(block)
            self._lent[id(block)] = block
            self.lent_bytes += nbytes
            if self.lent_bytes > self._lent_peak_bytes:
                self._lent_peak_bytes = self.lent_bytes
            return block

    def contiguous(self, nbytes: int) -> Block:
        """Lend a block of one extent, for pools that make a tensor of it. More than a registration gets a
        registration of its own.

        The block may be written at once, its `after` is empty. Blocks the host for the last users of its
        bytes, and for the pinning if no free range is long enough. Raises HostBudgetError if it may not be
        pinned.
        """
        needed = _needed(nbytes, self._align_bytes)
        with self._lock:
            self._accept_returned()
            self._split_whole()
            while (free := self._ranges.best_fit(needed)) is None:
                self._growth.pin_or_wait(needed, one_piece=True)
                self._split_whole()  # as in `take`
            part = self._ranges.cut(free, needed)
        for pending in part.pending:  # without the lock: this may block
            if (event := pending.event) is not None:
                self.device.synchronize(event)
        with self._lock:
            for pending in part.pending:  # every range learns that it has passed
                self._events.poll(pending)
            return self._cut(nbytes, [part])

    def give_back(self, block: Block, after: Event | None) -> None:
        """End the loan. after: the last use of the bytes that was issued, on a lane that has waited for all
        of `block.after`, so that whoever waits for it need not ask about those; None if nothing was issued,
        or every use is known to have ended.

        Raises PoolError if the block is not on loan from this arena. Blocks the host: never.
        """
        with self._lock:
            self._returned.append((block, after))
            self._accept_returned()

    def give_back_later(self, block: Block, after: Event | None) -> None:
        """End the loan from a finaliser, on any thread: takes no lock. The next call of the arena does what
        `give_back` would, and raises the error."""
        self._returned.append((block, after))

    def align(self, nbytes: int) -> None:
        """New blocks start on multiples of `nbytes` from here on, where what is lent leaves the bytes
        between: O_DIRECT moves only such memory without a copy. nbytes: divides PAGE_BYTES."""
        with self._lock:
            self._accept_returned()
            self._split_whole()
            self._align_bytes = nbytes

    # -- counters --------------------------------------------------------------------------------------------
    def stats(self) -> ArenaStats:
        with self._lock:
            self._accept_returned()
            parts = [part for same in self._whole.values() for block in same for part in block.ranges]
            return ArenaStats(
                missing=self._missing,
                lent=len(self._lent),
                lent_bytes=self.lent_bytes,
                lent_peak_bytes=self._lent_peak_bytes,
                free_bytes=self._ranges.nbytes + sum(part.nbytes for part in parts),
                free_ranges=len(self._ranges) + len(parts),
                held_bytes=self._growth.held_bytes,
            )

    def reset_peak(self) -> None:
        """Start a new peak from what is lent now, once a step. A growth that was refused may be tried again
        from here on."""
        with self._lock:
            self._accept_returned()
            self._lent_peak_bytes = self.lent_bytes
            self._growth.allow_retry()

    # -- inside, with the lock held --------------------------------------------------------------------------
    def _accept_returned(self) -> None:
        """End the loans of what was returned."""
        while self._returned:
            block, after = self._returned.popleft()
            if self._lent.pop(id(block), None) is None:
                raise PoolError(
                    f"a block of {block.nbytes:,} bytes in {len(block.extents)} extents is not on loan from "
                    f"this arena, which has {len(self._lent)} blocks of {self.lent_bytes:,} bytes lent; "
                    "give each block back once, where it was taken"
                )
            self.lent_bytes -= block.nbytes
            if after is not None and not self._all_passed:
                pending: tuple[PendingEvent, ...] = (self._events.of(after),)
            else:
                pending = tuple([each for each in block.pending if each.event is not None])
            block.after, block.pending = (), pending
            self._whole[block.nbytes].append(block)

    def _split_whole(self) -> None:
        """Every whole block goes back to the ranges, to be joined and cut anew."""
        for same in self._whole.values():
            for block in same:
                for part in block.ranges:
                    self._ranges.put(part.piece, part.start, part.end, block.pending)
        self._whole.clear()

    def _take_ranges(self, nbytes: int) -> Block | None:
        """`take` where no whole block has that size."""
        needed = _needed(nbytes, self._align_bytes)
        self._events.poll_oldest()
        # else the blocks of a steady step stay whole beside a size that changes
        if self._ranges.best_fit(needed) is None:
            self._split_whole()
        while needed > self._ranges.nbytes:
            # deficits of several misses are not added up: the blocks that were missed may never be lent
            # together
            grown = self._growth.want(self._growth.held_bytes + needed - self._ranges.nbytes)
            self._split_whole()  # blocks may have come back while another thread pinned
            if not grown and needed > self._ranges.nbytes:
                self._missing += 1
                return None
        return self._cut(nbytes, self._ranges.gather(needed))

    def _cut(self, nbytes: int, ranges: Sequence[Range]) -> Block:
        """Lend a new block out of ranges that were free."""
        extents, left = [], nbytes
        for part in ranges:  # only the last is padded, by less than the alignment
            length = min(part.nbytes, left)
            slab, index = self._growth.pieces[part.piece]
            extents.append(slab.pieces[index].narrow(0, part.start, length))
            left -= length
        pending = join_pending(each for part in ranges for each in part.pending)
        block = Block(nbytes, tuple(extents), (), tuple(ranges), pending)
        self._ask(block)
        self._lent[id(block)] = block
        self.lent_bytes += nbytes
        self._lent_peak_bytes = max(self._lent_peak_bytes, self.lent_bytes)
        return block

    def _ask(self, block: Block) -> None:
        """Ask about the first events of a block that is about to be lent, and tell those left."""
        unpassed: list[PendingEvent] = []
        after: list[Event] = []
        for place, each in enumerate(block.pending):
            event = each.event
            if event is not None and place < POLLS_PER_LOAN and self.device.poll(event):
                self._events.passed(event, each)  # `PendingEvents.poll`, without a call
            elif event is not None:
                unpassed.append(each)
                after.append(event)
        block.pending, block.after = tuple(unpassed), tuple(after)


def _needed(nbytes: int, align_bytes: int) -> int:
    """Bytes that a block takes of the free ones."""
    if nbytes <= 0:
        raise ValueError(f"a block of {nbytes:,} bytes was asked for; tensors without bytes need none")
    return round_up(nbytes, align_bytes)


_STEPS_TO_PIN = 3  # after the first such step


class HostShortage:
    """Steps of one engine that lacked host memory."""

    def __init__(self) -> None:
        self._first: StepStats | None = None  # step that lacked host memory
        self._steps = 0  # from it on; -1: it was said

    def step_ended(self, stats: StepStats, refusal: str) -> None:
        """refusal: why host memory cannot grow, and the way out; "" where it can."""
        if self._first is None and stats.lacked_host:
            self._first = stats
        if self._first is None or self._steps < 0:
            return
        self._steps += 1
        if not refusal and self._steps <= _STEPS_TO_PIN:
            return
        lacking, self._steps = stats if stats.lacked_host else self._first, -1
        padded = lacking.host_bytes_wanted_peak + lacking.saved * ALIGN_BYTES
        needed = enough_text(round_up(padded, PAGE_BYTES))
        logger.warning(
            "%s of step %d found no host memory and stayed on the device, beside any device_limit: of %s "
            "that it needed there, %s were pinned. %s",
            bytes_text(lacking.refused_bytes),
            lacking.step,
            needed,
            bytes_text(lacking.host_bytes_held),
            refusal
            or f"More is pinned beside later steps; host_reserve='{needed}' of apply (host_reserve_bytes in "
            "OffloadConfig) has it before the first",
        )
