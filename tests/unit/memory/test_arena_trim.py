"""What an arena gives back to the system: which pieces, when it has to wait for their users, and that growth
does not undo it."""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch

from offload.device.sim import SimDevice
from offload.errors import HazardError, OffloadError
from offload.memory.arena import Block, HostArena
from offload.memory.budget import LocalHostBudget
from tests.unit.memory.fakes import KIB, PIECE, FakeDevice, FakeEvent, arena_on, taken


@pytest.fixture
def arena(device: FakeDevice) -> HostArena:
    """Two slabs of four pieces, all free."""
    arena = arena_on(device)
    arena.reserve(8 * PIECE)
    return arena


def pieces_left(device: FakeDevice) -> list[int]:
    """Of each slab."""
    return [sum(piece.numel() > 0 for piece in memory.pieces) for memory in device.memories]


def check_books(device: FakeDevice, arena: HostArena) -> None:
    stats = arena.stats()
    assert stats.held_bytes == arena.held_bytes == arena.budget.used_bytes == device.host_bytes
    assert stats.held_bytes == sum(piece.numel() for memory in device.memories for piece in memory.pieces)


def lend_pieces(arena: HostArena, count: int) -> list[Block]:
    """Whole pieces of the fixture's arena, the first ones first."""
    return [taken(arena, PIECE) for _ in range(count)]


# -- how much ------------------------------------------------------------------------------------------------
def test_everything_free_goes(device: FakeDevice, arena: HostArena) -> None:
    assert arena.trim(0) == 8 * PIECE
    assert arena.held_bytes == arena.stats().free_bytes == arena.stats().free_ranges == 0
    assert all(memory.released for memory in device.memories)
    check_books(device, arena)
    slabs = [weakref.ref(memory) for memory in device.memories]
    device.memories.clear()
    assert [slab() for slab in slabs] == [None, None], "a slab that has gone is not kept by anybody"


@pytest.mark.parametrize(
    ("target_bytes", "held_bytes"),
    [
        (99 * PIECE, 8 * PIECE),
        (8 * PIECE, 8 * PIECE),
        (7 * PIECE, 7 * PIECE),
        (7 * PIECE - 1, 6 * PIECE),
        (1, 0),
    ],
)
def test_held_bytes_come_to_the_target_or_less_than_a_piece_below(
    device: FakeDevice, arena: HostArena, target_bytes: int, held_bytes: int
) -> None:
    assert arena.trim(target_bytes) == 8 * PIECE - held_bytes
    assert arena.held_bytes == held_bytes
    check_books(device, arena)
    assert arena.trim(target_bytes) == 0


def test_a_piece_that_is_partly_lent_is_not_touched(device: FakeDevice, arena: HostArena) -> None:
    blocks = [taken(arena, PIECE + 1 * KIB), taken(arena, 100), taken(arena, 3 * PIECE)]
    for block in blocks:
        for extent in block.extents:
            extent.fill_(7)
    touched = {
        piece.data_ptr()
        for memory in device.memories
        for piece in memory.pieces
        for block in blocks
        for extent in block.extents
        if piece.data_ptr() <= extent.data_ptr() < piece.data_ptr() + PIECE
    }
    assert arena.trim(0) == (8 - len(touched)) * PIECE
    assert {
        piece.data_ptr() for memory in device.memories for piece in memory.pieces if piece.numel()
    } == touched
    assert arena.held_bytes >= arena.lent_bytes
    assert all(bool((extent == 7).all()) for block in blocks for extent in block.extents)
    check_books(device, arena)
    for block in blocks:
        arena.give_back(block, None)
    assert arena.trim(0) == len(touched) * PIECE


def test_blocks_that_finalisers_returned_are_free_for_a_trim(device: FakeDevice, arena: HostArena) -> None:
    arena.give_back_later(taken(arena, 8 * PIECE), None)
    assert arena.trim(0) == 8 * PIECE


def test_a_piece_of_a_tight_budget_counts_as_long_as_it_is(device: FakeDevice) -> None:
    arena = arena_on(device, limit_bytes=PIECE + 8 * KIB)
    arena.reserve(PIECE + 8 * KIB)
    arena.give_back(arena.contiguous(100), None)
    assert arena.trim(PIECE) == PIECE, "the first piece, so that less is held than asked"
    assert arena.trim(0) == 8 * KIB
    check_books(device, arena)


def test_the_budget_is_told_once() -> None:
    class CountingBudget(LocalHostBudget):
        releases = 0

        def release(self, nbytes: int) -> None:
            self.releases += 1
            super().release(nbytes)

    budget = CountingBudget(100 * PIECE)
    arena = arena_on(FakeDevice(), budget=budget)
    arena.reserve(8 * PIECE)
    arena.trim(PIECE)
    assert (budget.releases, budget.used_bytes) == (1, PIECE)
    arena.trim(PIECE)
    assert budget.releases == 1, "nothing to tell"


# -- which, and who must be waited for -----------------------------------------------------------------------
def test_last_users_of_released_pieces_have_ended_and_no_others_are_waited_for(
    device: FakeDevice, arena: HostArena
) -> None:
    events = [FakeEvent(str(index)) for index in range(8)]
    for block, event in zip(lend_pieces(arena, 8), events, strict=True):
        arena.give_back(block, event)
    arena.trim(6 * PIECE)
    assert device.synchronized == events[:2]
    assert pieces_left(device) == [2, 4]
    block = taken(arena, 6 * PIECE)
    assert set(block.after) == set(events[2:]), "those of the others are still kept"


def test_pieces_that_nobody_reads_go_first(device: FakeDevice, arena: HostArena) -> None:
    blocks = lend_pieces(arena, 8)
    for index, block in enumerate(blocks):
        arena.give_back(block, None if index in (3, 6) else FakeEvent(str(index)))
    arena.trim(6 * PIECE)
    assert device.synchronized == []
    assert pieces_left(device) == [3, 3]


def test_an_event_that_has_passed_is_not_waited_for(device: FakeDevice, arena: HostArena) -> None:
    events = [FakeEvent(str(index)) for index in range(8)]
    for block, event in zip(lend_pieces(arena, 8), events, strict=True):
        arena.give_back(block, event)
    for index in (2, 5):
        events[index].passed = True
    assert arena.trim(6 * PIECE) == 2 * PIECE
    assert device.synchronized == []


def test_a_piece_that_cannot_be_unpinned_is_kept_and_lent_again(device: FakeDevice, arena: HostArena) -> None:
    device.keeps = True
    with pytest.raises(OffloadError, match="stays pinned"):
        arena.trim(0)
    check_books(device, arena)
    arena.give_back(taken(arena, 8 * PIECE), None)
    device.keeps = False
    assert arena.trim(0) == 8 * PIECE


def test_what_went_before_an_error_is_counted(device: FakeDevice, arena: HostArena) -> None:
    class Stuck(FakeDevice):
        def synchronize(self, event: object) -> None:
            raise RuntimeError("CUDA error")

    blocks = lend_pieces(arena, 8)
    for index, block in enumerate(blocks):
        arena.give_back(block, None if index < 3 else FakeEvent(str(index)))
    device.__class__ = Stuck
    with pytest.raises(RuntimeError, match="CUDA error"):
        arena.trim(0)
    assert arena.held_bytes == 5 * PIECE
    check_books(device, arena)


# -- afterwards ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("target_bytes", [0, 3 * PIECE])
def test_an_arena_grows_again_after_a_trim(device: FakeDevice, arena: HostArena, target_bytes: int) -> None:
    arena.trim(target_bytes)
    block = taken(arena, 8 * PIECE)
    for number, extent in enumerate(block.extents):
        extent.fill_(number)
    assert all(bool((extent == number).all()) for number, extent in enumerate(block.extents))
    assert arena.held_bytes == 8 * PIECE
    check_books(device, arena)
    arena.give_back(block, None)
    assert arena.trim(0) == 8 * PIECE


def test_memory_that_comes_and_goes_leaves_nothing_of_the_pieces_before_it(
    device: FakeDevice, arena: HostArena
) -> None:
    """The table of pieces was longer after each trim: a training whose sequences change in length let it grow
    for ever."""
    block = taken(arena, PIECE // 2)
    for _ in range(5):
        assert arena.trim(PIECE) == 7 * PIECE
        arena.reserve(8 * PIECE)
    assert len(arena._growth.pieces) == 8
    arena.give_back(block, None)
    blocks = lend_pieces(arena, 8)
    assert len({extent.data_ptr() for block in blocks for extent in block.extents}) == 8
    for block in blocks:
        arena.give_back(block, None)
    assert arena.trim(0) == 8 * PIECE
    arena.reserve(3 * PIECE)
    arena.clear()
    arena.reserve(2 * PIECE)
    assert len(arena._growth.pieces) == 2
    check_books(device, arena)


def test_a_refused_growth_may_be_tried_again_after_a_trim() -> None:
    device = FakeDevice(pins=True)
    arena = arena_on(device, limit_bytes=4 * PIECE)
    arena.reserve(4 * PIECE)
    assert arena.take(5 * PIECE) is None  # one piece more than may be held is refused, and remembered
    arena.synchronize_growth()
    arena.trim(2 * PIECE)
    assert arena.take(3 * PIECE) is None
    arena.synchronize_growth()
    assert taken(arena, 3 * PIECE).nbytes == 3 * PIECE


def test_clear_after_a_trim_releases_nothing_twice(device: FakeDevice, arena: HostArena) -> None:
    arena.trim(3 * PIECE)
    released = list(device.released_alone)
    arena.clear()
    assert len(device.released_alone) == len(released)
    assert all(memory.released for memory in device.memories)
    assert device.host_bytes == arena.budget.used_bytes == arena.held_bytes == 0
    assert arena.trim(0) == 0
    slabs = [weakref.ref(memory) for memory in device.memories]
    device.memories.clear()
    assert [slab() for slab in slabs] == [None, None], "the arena keeps nothing of them"
    assert taken(arena, PIECE).nbytes == PIECE


# -- beside growth -------------------------------------------------------------------------------------------
def growing_to(nbytes: int) -> tuple[FakeDevice, HostArena]:
    """An arena of two pieces, whose thread stands at the closed gate with a slab of one more."""
    device = FakeDevice(pins=True)
    arena = arena_on(device, slab_bytes=PIECE)
    arena.reserve(2 * PIECE)
    for _ in range(2):
        device.wait_at_gate()
    device.gate.clear()
    arena.reserve_later(nbytes)
    device.wait_at_gate()
    return device, arena


def trim_past_the_gate(device: FakeDevice, arena: HostArena, target_bytes: int) -> int:
    """A trim that has to wait for the slab under way, which gets through the gate once the trim waits."""
    released: list[int] = []
    trimming = threading.Thread(target=lambda: released.append(arena.trim(target_bytes)))
    trimming.start()
    while trimming.is_alive() and not arena._growth._stopping:
        time.sleep(0)
    device.gate.set()
    trimming.join()
    return released[0]


def test_growth_past_the_target_is_given_up() -> None:
    device, arena = growing_to(50 * PIECE)
    assert trim_past_the_gate(device, arena, PIECE) == 2 * PIECE, "two held, and the slab under way"
    assert arena.held_bytes == PIECE
    for _ in range(2):
        arena.synchronize_growth()
        check_books(device, arena)
        assert len(device.memories) == 3
        arena.begin_capture()
        arena.end_capture()  # what was wanted once must not come back


def test_growth_up_to_the_target_goes_on() -> None:
    device, arena = growing_to(50 * PIECE)
    assert trim_past_the_gate(device, arena, 6 * PIECE) == 0
    arena.synchronize_growth()
    assert arena.held_bytes == 6 * PIECE
    check_books(device, arena)


def test_a_target_reached_long_ago_is_forgotten_too() -> None:
    device = FakeDevice(pins=True)
    arena = arena_on(device)
    arena.reserve_later(8 * PIECE)
    arena.synchronize_growth()
    arena.trim(2 * PIECE)
    block = taken(arena, 2 * PIECE)
    assert arena.take(PIECE) is None
    arena.synchronize_growth()
    assert arena.held_bytes == 3 * PIECE, "what was missing, not what was held before"
    arena.give_back(block, None)


def test_nothing_is_released_while_a_graph_is_captured(device: FakeDevice, arena: HostArena) -> None:
    with device.capture():
        assert arena.trim(0) == 0
    arena.begin_capture()
    assert arena.trim(0) == 0
    arena.end_capture()
    assert arena.trim(0) == 8 * PIECE


# -- on the simulated device ---------------------------------------------------------------------------------
def spilled_and_read_back(device: SimDevice, arena: HostArena) -> None:
    """Every piece is written by d2h and read by h2d; given back with the read."""
    source, home = torch.full((4 * PIECE,), 3, dtype=torch.uint8), device.empty(4 * PIECE)
    block = taken(arena, 4 * PIECE)
    starts = range(0, 4 * PIECE, PIECE)
    device.note_write(device.compute, source)
    device.wait(device.d2h, device.record(device.compute), "spill")
    device.copy(
        device.d2h,
        [(extent, source[at : at + PIECE]) for extent, at in zip(block.extents, starts, strict=True)],
    )
    device.wait(device.h2d, device.record(device.compute), "allocate")
    device.wait(device.h2d, device.record(device.d2h), "restore")
    device.copy(
        device.h2d,
        [(home[at : at + PIECE], extent) for extent, at in zip(block.extents, starts, strict=True)],
    )
    read = device.record(device.h2d)
    device.wait(device.compute, read, "read")
    device.wait(device.compute, device.record(device.d2h), "settle")
    arena.give_back(block, read)
    device.note_read(device.compute, home)
    assert torch.equal(home, source)


@pytest.mark.parametrize("seed", range(4))
def test_no_copy_is_in_flight_when_a_piece_goes(seed: int) -> None:
    device = SimDevice(executor="random", seed=seed)
    arena = HostArena(
        device, budget=LocalHostBudget(4 * PIECE), slab_bytes=4 * PIECE, registration_bytes=PIECE
    )
    spilled_and_read_back(device, arena)
    assert arena.trim(PIECE) == 3 * PIECE
    spilled_and_read_back(device, arena)
    arena.clear()
    assert arena.budget.used_bytes == 0


@pytest.mark.xfail(
    strict=True, raises=HazardError, reason="[Order: reuse of a pinned block] without its edge"
)
def test_without_the_wait_a_piece_goes_while_it_is_read() -> None:
    class NeverWaits(SimDevice):
        def synchronize(self, event: object) -> None:
            """Left out."""

    device = NeverWaits(executor="late")
    arena = HostArena(
        device, budget=LocalHostBudget(4 * PIECE), slab_bytes=4 * PIECE, registration_bytes=PIECE
    )
    block = taken(arena, PIECE)
    home = device.empty(PIECE)
    device.note_write(device.host, block.extents[0])
    device.wait(device.h2d, device.record(device.compute), "allocate")
    device.copy(device.h2d, [(home, block.extents[0])])
    read = device.record(device.h2d)
    arena.give_back(block, read)
    try:
        arena.trim(0)
    finally:
        SimDevice.synchronize(device, read)
