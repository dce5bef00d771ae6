"""The shelf: a block that came back is lent again as it was, and nothing on it is lost."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from offload.errors import HostBudgetError
from offload.memory.arena import Block
from offload.memory.marks import Mark
from offload.memory.ranges import Range
from offload.memory.shelf import Shelf, Shelved
from tests.unit.memory.fakes import PIECE, FakeDevice, FakeEvent, arena_on, taken


def shelved(start: int, nbytes: int, *marks: Mark) -> Shelved:
    return Shelved((torch.empty(nbytes, dtype=torch.uint8),), (Range(0, start, start + nbytes),), marks)


class _Event:
    pass


def test_a_block_is_taken_by_its_exact_size_only() -> None:
    shelf = Shelf()
    block = shelved(0, 1024)
    shelf.put(1000, block)
    assert shelf.take(1024) is None
    assert shelf.take(999) is None
    assert shelf.take(1000) is block
    assert shelf.take(1000) is None
    assert shelf.total_bytes == shelf.num_ranges == 0


def test_of_equals_the_one_that_nobody_reads_goes_first_and_else_the_oldest() -> None:
    shelf = Shelf()
    oldest, read, idle = (
        shelved(0, 512, Mark(_Event())),
        shelved(512, 512, Mark(_Event())),
        shelved(1024, 512),
    )
    for block in (oldest, read, idle):
        shelf.put(512, block)
    assert [shelf.take(512) for _ in range(3)] == [idle, oldest, read]


def test_draining_gives_every_block_back_once_and_counts_nothing_any_more() -> None:
    shelf = Shelf()
    blocks = [shelved(512 * at, 512) for at in range(3)]
    for at, block in enumerate(blocks):
        shelf.put(512 - at, block)
    assert (shelf.total_bytes, shelf.num_ranges) == (3 * 512, 3)
    assert list(shelf.drain()) == blocks
    assert list(shelf.drain()) == []
    assert shelf.total_bytes == shelf.num_ranges == 0


# -- the shelf of an arena -----------------------------------------------------------------------------------
def test_a_block_that_is_lent_again_whole_carries_its_readers() -> None:
    device = FakeDevice()
    arena = arena_on(device)
    first, second = FakeEvent("first"), FakeEvent("second")
    block = taken(arena, 1000)
    arena.give_back(block, first)
    again = taken(arena, 1000)
    assert again.extents is block.extents, "not cut anew"
    assert again.after == (first,)
    arena.give_back(again, second)
    arena.give_back(taken(arena, 1000), None)  # given back unwritten
    assert taken(arena, 1000).after == (first, second)


def test_sizes_that_never_come_again_are_lent_to_those_that_do() -> None:
    arena = arena_on(FakeDevice(), limit_bytes=4 * PIECE)
    for nbytes in (3 * PIECE, PIECE // 2, 512):
        arena.give_back(taken(arena, nbytes), None)
    assert taken(arena, 4 * PIECE - 1).nbytes == 4 * PIECE - 1
    assert arena.stats().missing == 0


def test_a_size_that_changes_does_not_clear_the_shelf_while_another_range_holds_it() -> None:
    """One tensor of a new size in each microbatch, as an expert's: every block was joined and cut anew after
    it, at twice the host time."""
    arena = arena_on(FakeDevice(), limit_bytes=4 * PIECE)
    arena.reserve(4 * PIECE)
    steady = [taken(arena, 1000) for _ in range(4)]
    extents = [block.extents for block in steady]
    for block in steady:
        arena.give_back(block, None)
    for nbytes in range(2000, 6000, 1000):
        arena.give_back(taken(arena, nbytes), None)
    again = [taken(arena, 1000) for _ in range(4)]
    assert all(block.extents is before for block, before in zip(again, extents, strict=True))
    assert taken(arena, 2 * PIECE).nbytes == 2 * PIECE, (
        "more than any range that is not on the shelf: now it is cleared"
    )


def test_what_lies_on_the_shelf_is_free_to_a_trim_to_clear_and_to_a_block_in_one_piece() -> None:
    device = FakeDevice()
    arena = arena_on(device, limit_bytes=4 * PIECE)

    def fill_shelf() -> None:
        for block in [taken(arena, PIECE // 4) for _ in range(16)]:
            arena.give_back(block, None)
        assert (arena.stats().free_ranges, arena.stats().free_bytes) == (16, 4 * PIECE)

    fill_shelf()
    whole = arena.contiguous(PIECE)
    assert len(whole.extents) == 1
    arena.give_back(whole, None)
    fill_shelf()
    assert arena.trim(PIECE) == 3 * PIECE
    arena.give_back(taken(arena, PIECE), None)
    arena.clear()
    assert arena.held_bytes == arena.budget.used_bytes == device.host_bytes == 0


@pytest.mark.parametrize("whole", [True, False], ids=["contiguous", "take"])
def test_a_block_that_comes_back_while_another_thread_pins_is_lent_and_nothing_more_is_pinned(
    whole: bool,
) -> None:
    """It came back to the shelf, where the thread that waited for the pinning did not look again: an error or
    a miss beside free bytes."""
    device = FakeDevice(pins=True)
    arena = arena_on(device, growth="inline", limit_bytes=2 * PIECE)
    block = taken(arena, PIECE)
    device.wait_at_gate()
    lent: list[Block | None] = []
    refused: list[HostBudgetError] = []

    def reserve() -> None:
        try:
            arena.reserve(2 * PIECE)
        except HostBudgetError as error:
            refused.append(error)

    with device.closed_gate():
        pinning = threading.Thread(target=reserve)
        pinning.start()
        device.wait_at_gate()
        waiting = threading.Thread(
            target=lambda: lent.append(arena.contiguous(PIECE) if whole else arena.take(PIECE))
        )
        waiting.start()
        # until it waits for the thread that pins
        while not arena._growth._changed._waiters:  # type: ignore[attr-defined]
            time.sleep(0.001)
        arena.give_back(block, None)
        device.refuses = True
    pinning.join()
    waiting.join()
    assert len(refused) == 1
    assert [given.nbytes for given in lent if given is not None] == [PIECE]
    assert (arena.stats().missing, arena.held_bytes) == (0, PIECE)
