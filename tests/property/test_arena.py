"""Random loans: what the arena promises holds after every call, in whatever order blocks come and go.

A shadow of every byte range says who was lent it last and which events its next writer must wait for; it is
kept at 512-byte granules, without ranges, lists or joining, so that it cannot be wrong in the way that the
arena could be.
"""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.device.base import Event
from offload.memory.arena import Block, HostArena
from offload.memory.budget import LocalHostBudget
from offload.memory.loans import POLLS_PER_LOAN
from tests.unit.memory.fakes import FakeDevice, FakeEvent

GRANULE = 512
PIECE = 16 * GRANULE
LIMIT = 12 * PIECE

SIZES = st.one_of(st.integers(1, 3 * PIECE), st.sampled_from([GRANULE, PIECE, PIECE + 1, 2 * PIECE, LIMIT]))
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), SIZES),
        st.tuples(st.just("contiguous"), st.integers(1, 2 * PIECE)),
        st.tuples(st.sampled_from(["give_back", "give_back_later"]), st.integers(0, 1 << 16)),
        st.tuples(st.just("give_back_read"), st.integers(0, 1 << 16)),
        st.tuples(st.just("pass"), st.integers(0, 1 << 16)),
        st.tuples(st.just("trim"), st.integers(0, LIMIT)),
    ),
    min_size=8,
    max_size=60,
)


def granules(block: Block) -> set[int]:
    """Addresses of the 512-byte granules that the block touches."""
    return {
        address
        for extent in block.extents
        for address in range(
            extent.data_ptr() // GRANULE, -(-(extent.data_ptr() + extent.numel()) // GRANULE)
        )
    }


class Shadow:
    """Drives an arena and checks each answer."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        self.arena = HostArena(
            self.device.protocol,
            budget=LocalHostBudget(LIMIT),
            slab_bytes=4 * PIECE,
            registration_bytes=PIECE,
        )
        self.lent: list[Block] = []
        self.events: list[FakeEvent] = []
        self.readers: dict[int, set[FakeEvent]] = {}  # granule -> events that its next writer must wait for

    def call(self, name: str, number: int) -> None:
        polled = len(self.device.polled)
        if name == "take":
            block = self.arena.take(number)
            if block is None:
                free_bytes = LIMIT - sum(-(-lent.nbytes // GRANULE) * GRANULE for lent in self.lent)
                assert number > free_bytes, (
                    "refused although the budget has room: memory must never be too scattered to be lent"
                )
            else:
                self.borrow(block, number, polled)
        elif name == "contiguous":
            try:
                block = self.arena.contiguous(number)
            except RuntimeError:  # the budget is spent
                return
            assert len(block.extents) == 1
            assert block.after == ()
            self.borrow(block, number, polled)
        elif name == "trim":
            self.trim(number)
        elif name == "pass":
            if self.events:
                self.events.pop(number % len(self.events)).passed = True
        elif self.lent:
            block = self.lent.pop(number % len(self.lent))
            event = None
            if name == "give_back_read":
                event = FakeEvent(str(number))
                self.events.append(event)
                for granule in granules(block):
                    self.readers[granule] = {event}  # it waited for those before it
            if name == "give_back_later":
                self.arena.give_back_later(block, None)
            else:
                self.arena.give_back(block, event)

    def borrow(self, block: Block, nbytes: int, polled: int) -> None:
        """polled: how many events had been asked about before."""
        assert block.nbytes == sum(extent.numel() for extent in block.extents) == nbytes
        mine = granules(block)
        for other in self.lent:
            assert mine.isdisjoint(granules(other)), "bytes lent twice"
        read = {event for granule in mine for event in self.readers.get(granule, ())}
        after = cast(tuple[FakeEvent, ...], block.after)
        assert {event for event in read if not event.passed} <= set(after), (
            "a reader that the writer would overrun"
        )
        # only of the first ones it asks
        asked = self.device.polled[polled:]
        assert not any(event.passed and event in asked for event in after), "a wait for nothing"
        assert len(after) < POLLS_PER_LOAN or len(asked) >= POLLS_PER_LOAN
        self.lent.append(block)

    def trim(self, target_bytes: int) -> None:
        in_use = set().union(*map(granules, self.lent))
        before = {
            piece.data_ptr(): range(
                piece.data_ptr() // GRANULE, (piece.data_ptr() + piece.numel()) // GRANULE
            )
            for memory in self.device.memories
            for piece in memory.pieces
            if piece.numel()
        }
        known = len(self.device.released_alone)
        held_bytes = self.arena.held_bytes
        released_bytes = self.arena.trim(target_bytes)
        released = self.device.released_alone[known:]
        assert self.arena.held_bytes == held_bytes - released_bytes
        assert released_bytes == sum(piece.numel() for piece in released)
        for piece in released:
            went = before.pop(piece.data_ptr())
            assert in_use.isdisjoint(went), "a piece that is partly lent went"
            assert all(event.passed for granule in went for event in self.readers.pop(granule, ())), (
                "a piece went while it is read"
            )
        if released:
            assert self.arena.held_bytes + released[-1].numel() > target_bytes, "more went than was asked for"
        if self.arena.held_bytes > target_bytes:
            assert not any(in_use.isdisjoint(left) for left in before.values()), "a whole free piece was kept"

    def check(self) -> None:
        stats = self.arena.stats()
        assert stats.lent == len(self.lent)
        assert stats.lent_bytes == sum(block.nbytes for block in self.lent) <= stats.lent_peak_bytes
        padding = sum(-block.nbytes % GRANULE for block in self.lent)
        assert stats.free_bytes + stats.lent_bytes + padding == stats.held_bytes
        assert (
            stats.lent_bytes
            <= stats.held_bytes
            == self.arena.budget.used_bytes
            == self.device.host_bytes
            <= LIMIT
        )

    def finish(self) -> None:
        while self.lent:
            self.call("give_back", 0)
        self.arena.trim(self.arena.held_bytes)  # gives nothing back, but joins whole blocks
        stats = self.arena.stats()
        assert stats.free_bytes == stats.held_bytes
        pieces = [piece for memory in self.device.memories for piece in memory.pieces if piece.numel()]
        assert stats.free_ranges == len(pieces), "every piece is whole again"
        self.arena.clear()
        assert self.device.host_bytes == self.arena.budget.used_bytes == 0
        assert all(memory.released for memory in self.device.memories)


@settings(deadline=None, max_examples=300)
@given(CALLS)
def test_blocks_never_overlap_nothing_is_lost_and_writers_learn_their_readers(
    calls: list[tuple[str, int]],
) -> None:
    shadow = Shadow()
    for name, number in calls:
        shadow.call(name, number)
        shadow.check()
    shadow.finish()


REUSE_WHILE_READ = [("take", LIMIT), ("give_back_read", 0), ("take", LIMIT)]


def test_a_block_that_is_still_read_is_lent_with_its_reader() -> None:
    shadow = Shadow()
    for name, number in REUSE_WHILE_READ:
        shadow.call(name, number)


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="[Order: reuse of a pinned block] without its edge"
)
def test_without_the_edge_a_writer_overruns_a_reader() -> None:
    class EdgeLost(HostArena):
        def give_back(self, block: Block, after: Event | None) -> None:
            super().give_back(block, None)

    shadow = Shadow()
    shadow.arena.__class__ = EdgeLost
    for name, number in REUSE_WHILE_READ:
        shadow.call(name, number)
