"""HostArena owns all pinned host memory of a process and lends it in blocks.

torch's pinned allocator rounds every request up to a power of two and pins at a tenth of the speed, inside
whichever hook asked. Here memory is pinned before step 1 (`reserve`) or during the steps on another thread
(growth.py); `take` returns None for a block that is not pinned yet. One invariant: the arena holds no more
than the host budget granted, lends bytes to one borrower at a time, tells the borrower which events must pass
before the bytes may be written, and releases only bytes that nobody has on loan.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from offload.device.base import Device, Event
from offload.errors import HostBudgetError, PoolError
from offload.memory.budget import HostBudget
from offload.memory.free_blocks import (
    Block,
    FreeBlocks,
    PendingEvent,
    PendingEvents,
    Range,
    join_pending,
    round_up,
)
from offload.memory.growth import PAGE_BYTES, Growth

__all__ = ["ArenaStats", "Block", "HostArena"]

logger = logging.getLogger(__name__)

ALIGN_BYTES = 512
"""Where extents start, as torch's device allocator does."""

POLLS_PER_LOAN = 2
"""Events of one new block that are asked about. The other events are returned without being polled: a wait
for them costs the borrower no more than a poll."""

CLOSE_PATIENCE_S = 5.0
"""What the end of the process waits for copies: a step's worth of them takes less, and a rank that is gone
never answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaStats:
    """Counters at one moment. `asked`, `missing` and `missing_bytes` run since the arena was made;
    `lent_peak_bytes` since `reset_peak`. `free_ranges` counts whole blocks by the ranges that they were lent
    as, not joined."""

    asked: int
    missing: int
    missing_bytes: int
    lent: int
    lent_bytes: int
    lent_peak_bytes: int
    free_bytes: int
    free_ranges: int
    held_bytes: int


class HostArena:
    """Lends pinned host memory, cut to the byte. Thread-safe; one lock, which finalisers never take.

    budget: asked before every growth.
    slab_bytes: what one call of `device.host_memory` pins at most, and so what growth pins before a taker
        sees any of it.
    registration_bytes: one piece. 64 MiB: pinning a larger one stops every kernel launch for tens of ms
        (docs/design.md, decision 12).
    growth: who pins when bytes are missing. "background": a thread, and the taker gets None now; "inline":
        the taker, at once.
        None: background where pinning costs time (`device.pins`).
    """

    def __init__(
        self,
        device: Device,
        *,
        budget: HostBudget,
        slab_bytes: int = 1 << 30,
        registration_bytes: int = 64 << 20,
        growth: Literal["inline", "background"] | None = None,
    ) -> None:
        if registration_bytes <= 0 or registration_bytes % PAGE_BYTES:
            raise ValueError(
                f"registration_bytes={registration_bytes:,} must be a positive multiple of {PAGE_BYTES:,}"
            )
        if slab_bytes < registration_bytes:
            raise ValueError(
                f"slab_bytes={slab_bytes:,} is less than registration_bytes={registration_bytes:,}; raise it "
                "to at least that"
            )
        self.device = device
        self.budget = budget
        self.registration_bytes = registration_bytes
        # growth waits on a condition over it; entering a condition is two calls more
        self._lock = threading.Lock()
        self._free = FreeBlocks()
        self._events = PendingEvents(device)
        self._growth = Growth(
            device,
            budget,
            self._free,
            threading.Condition(self._lock),
            slab_bytes=slab_bytes,
            registration_bytes=registration_bytes,
            inline=not device.pins if growth is None else growth == "inline",
        )
        self._lent: dict[int, Block] = {}
        # appended to by finalisers, without the lock
        self._returned: deque[tuple[Block, Event | None]] = deque()
        self._all_passed = False  # every event that was ever recorded outside of the capture under way
        self._asked = self._missing = self._missing_bytes = 0
        self._lent_bytes = self._lent_peak_bytes = 0
        self._at_exit = functools.partial(_close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)

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
        with self._lock:
            self._asked += 1
            if self._returned:
                self._accept_returned()
            self._events.poll_oldest()
            whole = self._free.take_whole(nbytes)
            if whole is not None:
                return self._lend(nbytes, whole.extents, whole.ranges, whole.pending)
            needed = _needed(nbytes)
            # else the blocks of a steady step stay whole beside a size that changes
            if self._free.best_fit(needed) is None:
                self._free.split_whole()
            while needed > self._free.range_bytes:
                # deficits of several misses are not added up: the blocks that were missed may never be lent
                # together
                target_bytes = self._growth.held_bytes + needed - self._free.range_bytes
                grown = self._growth.inline and self._growth.try_hold(target_bytes)
                self._free.split_whole()  # blocks may have come back while another thread pinned
                if not grown and needed > self._free.range_bytes:
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
        needed = _needed(nbytes)
        with self._lock:
            self._asked += 1
            self._update()
            self._free.split_whole()
            while (free := self._free.best_fit(needed)) is None:
                self._growth.hold_piece(needed)
                self._free.split_whole()  # as in `take`
            part = self._free.cut(free, needed)
        for pending in part.pending:  # without the lock: this may block
            if (event := pending.event) is not None:
                self.device.synchronize(event)
        with self._lock:
            for pending in part.pending:  # every range learns that it has passed
                self._events.poll(pending)
            return self._cut(nbytes, [part])

    def give_back(self, block: Block, after: Event | None) -> None:
        """End the loan. after: the last use of the bytes that was issued; None if every use is known to have
        ended.

        Raises PoolError if the block is not on loan from this arena. Blocks the host: never.
        """
        with self._lock:
            if self._returned:
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
            self._update()
            free_bytes, free_ranges = self._free.count()
            return ArenaStats(
                asked=self._asked,
                missing=self._missing,
                missing_bytes=self._missing_bytes,
                lent=len(self._lent),
                lent_bytes=self._lent_bytes,
                lent_peak_bytes=self._lent_peak_bytes,
                free_bytes=free_bytes,
                free_ranges=free_ranges,
                held_bytes=self._growth.held_bytes,
            )

    def reset_peak(self) -> None:
        """Start a new peak from what is lent now, once a step. A growth that was refused may be tried again
        from here on."""
        with self._lock:
            self._update()
            self._lent_peak_bytes = self._lent_bytes
            self._growth.allow_retry()

    # -- growing and shrinking -------------------------------------------------------------------------------
    def reserve(self, nbytes: int) -> None:
        """Pin until at least `nbytes` are held, lent or free. For before step 1: blocks the host for nbytes /
        17 GB/s. Raises HostBudgetError if the budget or the system refuses."""
        with self._lock:
            self._growth.allow_retry()
            self._growth.hold(nbytes)

    def reserve_later(self, nbytes: int) -> None:
        """As `reserve`, but during the steps and without an error: for what a step was seen to lack.

        Blocks the host: never with background growth, for the pinning with inline growth.
        """
        with self._lock:
            self._growth.allow_retry()
            if self._growth.inline:
                self._growth.try_hold(nbytes)
            else:
                self._growth.hold_later(nbytes)

    def change_budget(self, budget: HostBudget) -> None:
        """Count in `budget` from here on, not in the one before; what is free beyond its limit goes back to
        the system. Blocks the host for that.

        Raises HostBudgetError, and changes nothing, if what is lent does not fit in it.
        """
        shared = budget.counts_with(self.budget)
        room = budget.limit_bytes - budget.used_bytes + shared * self.held_bytes
        if self.lent_bytes <= room < self.held_bytes:
            self.trim(room)
        with self._lock:
            self._growth.synchronize()
            held_bytes = self._growth.held_bytes
            if not (held_bytes <= room if shared else budget.reserve(held_bytes)):
                raise HostBudgetError(
                    f"{held_bytes:,} bytes of host memory are held, {self._lent_bytes:,} of them lent, and "
                    f"the new limit leaves room for {max(0, room):,}; close the optimizers that use them, or "
                    "raise host_limit_bytes"
                )
            if not shared:
                self.budget.release(held_bytes)
            self.budget = self._growth.budget = budget
            self._growth.allow_retry()

    def synchronize_growth(self) -> None:
        """Block the host until the growth asked for so far is done or refused."""
        with self._lock:
            self._growth.synchronize()

    def begin_capture(self) -> None:
        """A graph is captured from here to `end_capture`: nothing may be pinned or polled. Blocks the host
        until the growth asked for so far is done and the last users of every free byte have ended: no event
        is kept with bytes that are lent in the capture."""
        with self._lock:
            self._growth.pause()
            self._update()
            self._events.synchronize_all()
            self._all_passed = True

    def end_capture(self) -> None:
        with self._lock:
            self._all_passed = False
            self._growth.resume()

    def trim(self, target_bytes: int) -> int:
        """Give memory back to the system, one whole free piece at a time, until at most `target_bytes` are
        held or no such piece is left.

        Returns the bytes given back: less than one piece too many, as pieces go whole; nothing while a graph
        is captured. Growth past `target_bytes` that is still under way is given up; what is missing later is
        pinned again as before. For between steps, once it is known what a step needs. Blocks the host for the
        last users of the pieces it releases, for their unpinning, and for the slab under way.
        """
        with self._lock:
            self._growth.lower(target_bytes)
            self._accept_returned()
            self._free.split_whole()
            self._events.poll_all()  # what has passed need not be waited for, and goes first
            return self._growth.trim(target_bytes, self._events)

    # -- the end ---------------------------------------------------------------------------------------------
    def clear(self) -> None:
        """Unpin and free everything, and give the budget back. The arena can grow again afterwards.

        Blocks the host until growth has stopped and the last users of every free range have ended. Raises
        PoolError, and frees nothing, while blocks are lent.
        """
        with self._lock:
            self._growth.stop()
            self._accept_returned()
            if self._lent:
                raise PoolError(
                    f"host arena has {len(self._lent)} blocks of {self._lent_bytes:,} bytes lent, of "
                    f"{self._growth.held_bytes:,} held; give them back before clear"
                )
            self._events.synchronize_all()
            self._growth.release()

    def close(self) -> None:
        """`clear` for the end of the process: never raises, and nothing grows afterwards. Memory still lent
        is left to the system, and so is memory whose last copies have not ended in CLOSE_PATIENCE_S: they may
        wait for a message of a rank that is gone."""
        self._growth.close()
        atexit.unregister(self._at_exit)
        try:
            if self.device.pins and not self._idle_within(CLOSE_PATIENCE_S):
                logger.warning(
                    "closing: the last copies of %s host bytes have not ended after %.0f s; the memory is "
                    "left to the system. If a rank is "
                    "gone, this one is waiting for it: set a timeout on the process group",
                    f"{self.held_bytes:,}",
                    CLOSE_PATIENCE_S,
                )
                return
            self.clear()
        except PoolError as error:
            logger.info("closing: %s", error)
        except Exception:
            logger.warning("closing the host arena failed; the system frees its memory", exc_info=True)

    def __del__(self) -> None:
        # frees nothing: a finaliser takes no lock, and the budget has one
        if hasattr(self, "_at_exit"):
            atexit.unregister(self._at_exit)
            if self.device.pins and self.held_bytes:
                warnings.warn(
                    f"host arena dropped with {self.held_bytes:,} bytes pinned; call clear first",
                    ResourceWarning,
                    stacklevel=2,
                )

    def _idle_within(self, seconds: float) -> bool:
        """Whether the last users of every free range have ended by then. Blocks the host until they have, or
        so long."""
        end = time.monotonic() + seconds
        while True:
            with self._lock:
                self._accept_returned()
                if self._events.poll_all():
                    return True
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)

    # -- inside, with the lock held --------------------------------------------------------------------------
    def _update(self) -> None:
        """Accept what finalisers returned, and ask about the few events that were asked about longest ago."""
        self._accept_returned()
        self._events.poll_oldest()

    def _accept_returned(self) -> None:
        while self._returned:
            self._accept(*self._returned.popleft())

    def _accept(self, block: Block, after: Event | None) -> None:
        if self._lent.pop(id(block), None) is None:
            raise PoolError(
                f"a block of {block.nbytes:,} bytes in {len(block.extents)} extents is not on loan from this "
                f"arena, which has {len(self._lent)} blocks of {self._lent_bytes:,} bytes lent; give each "
                "block back once, where it was taken"
            )
        self._lent_bytes -= block.nbytes
        pending = block.pending and tuple([each for each in block.pending if each.event is not None])
        if after is not None and not self._all_passed:
            last_use = self._events.of(after)
            if last_use not in pending:
                pending = (*pending, last_use)
        block.after, block.pending = (), pending
        self._free.put_whole(block)

    def _cut(self, nbytes: int, ranges: Sequence[Range]) -> Block:
        """A new block out of ranges that were free."""
        extents, left = [], nbytes
        for part in ranges:  # only the last is padded, by less than ALIGN_BYTES
            length = min(part.nbytes, left)
            extents.append(self._growth.pieces[part.piece].narrow(0, part.start, length))
            left -= length
        pending = join_pending(each for part in ranges for each in part.pending)
        return self._lend(nbytes, tuple(extents), tuple(ranges), pending)

    def _lend(
        self,
        nbytes: int,
        extents: tuple[torch.Tensor, ...],
        ranges: tuple[Range, ...],
        pending: tuple[PendingEvent, ...],
    ) -> Block:
        unpassed: list[PendingEvent] = []
        after: list[Event] = []
        for place, each in enumerate(pending):
            if each.event is not None and place < POLLS_PER_LOAN:
                self._events.poll(each)
            if each.event is not None:
                unpassed.append(each)
                after.append(each.event)
        block = Block(nbytes, extents, tuple(after), ranges, tuple(unpassed))
        self._lent[id(block)] = block
        self._lent_bytes += nbytes
        if self._lent_bytes > self._lent_peak_bytes:
            self._lent_peak_bytes = self._lent_bytes
        return block


def _needed(nbytes: int) -> int:
    """What a block takes of the free bytes."""
    if nbytes <= 0:
        raise ValueError(f"a block of {nbytes:,} bytes was asked for; tensors without bytes need none")
    return round_up(nbytes, ALIGN_BYTES)


def _close_if_alive(reference: weakref.ref[HostArena]) -> None:
    arena = reference()
    if arena is not None:
        arena.close()
