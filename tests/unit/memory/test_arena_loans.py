"""Blocks on loan: what a borrower gets, who must wait before writing, and what is counted."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from offload.errors import HostBudgetError, PoolError
from offload.memory.arena import Block, HostArena
from offload.memory.loans import POLLS_PER_LOAN
from tests.threads import run_all
from tests.unit.memory.fakes import KIB, PAGE_BYTES, PIECE, FakeDevice, FakeEvent, arena_on, taken


# -- lending -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, PIECE, PIECE + 1, 5 * PIECE + 17])
def test_a_block_has_exactly_the_bytes_asked_for(device: FakeDevice, arena: HostArena, nbytes: int) -> None:
    block = taken(arena, nbytes)
    assert block.nbytes == nbytes
    assert sum(extent.numel() for extent in block.extents) == nbytes
    for extent in block.extents:
        assert extent.dtype == torch.uint8
        assert extent.dim() == 1
        assert extent.data_ptr() % 512 == 0
        first, last = extent.data_ptr(), extent.data_ptr() + extent.numel()
        pieces = [
            (piece.data_ptr(), piece.data_ptr() + piece.numel())
            for memory in device.memories
            for piece in memory.pieces
        ]
        assert any(start <= first < last <= end for start, end in pieces), (
            "an extent crosses two registrations"
        )
    assert arena.stats().lent_bytes == nbytes


def test_scattered_free_bytes_are_lent_as_several_extents(device: FakeDevice) -> None:
    arena = arena_on(device, limit_bytes=4 * PIECE)
    blocks = [taken(arena, PIECE // 2) for _ in range(8)]
    for block in blocks[::2]:  # every other half piece: no two free ranges touch
        arena.give_back(block, None)
    gathered = taken(arena, 2 * PIECE)
    assert [extent.numel() for extent in gathered.extents] == [PIECE // 2] * 4
    assert arena.stats().missing == 0


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_block_without_bytes_is_a_mistake(arena: HostArena, nbytes: int) -> None:
    with pytest.raises(ValueError, match="without bytes"):
        arena.take(nbytes)


def test_giving_back_twice_is_an_error(arena: HostArena) -> None:
    block = taken(arena, 100)
    arena.give_back(block, None)
    with pytest.raises(PoolError, match="not on loan"):
        arena.give_back(block, None)
    assert arena.stats().lent_bytes == 0


def test_a_block_of_another_arena_is_an_error(device: FakeDevice, arena: HostArena) -> None:
    block = taken(arena_on(device), 100)
    with pytest.raises(PoolError, match="not on loan"):
        arena.give_back(block, None)


def test_finalisers_give_back_without_the_lock_and_the_next_call_accepts(arena: HostArena) -> None:
    block = taken(arena, 100)
    with arena._lock:  # a finaliser may run on the thread that holds it
        arena.give_back_later(block, None)
    assert arena.stats().lent == 0


def test_what_a_finaliser_gave_back_is_lent_aligned_once_that_is_wanted(arena: HostArena) -> None:
    for block in [taken(arena, 1000) for _ in range(2)]:
        arena.give_back_later(block, None)
    arena.align(PAGE_BYTES)
    assert [taken(arena, 1000).extents[0].data_ptr() % PAGE_BYTES for _ in range(2)] == [0, 0]


def test_a_finaliser_that_gives_back_twice_is_named_by_the_next_call(arena: HostArena) -> None:
    block = taken(arena, 100)
    arena.give_back_later(block, None)
    arena.give_back_later(block, None)
    with pytest.raises(PoolError, match="not on loan"):
        arena.stats()
    assert arena.stats().lent == 0


# -- order ---------------------------------------------------------------------------------------------------
@pytest.mark.req("S2-22")
def test_next_writer_learns_the_last_reader(device: FakeDevice) -> None:
    arena = arena_on(device, limit_bytes=PIECE)
    event = FakeEvent("restore")
    arena.give_back(taken(arena, PIECE), event)
    block = taken(arena, PIECE)
    assert block.after == (event,)
    arena.give_back(block, None)
    event.passed = True
    assert taken(arena, PIECE).after == ()


def test_a_block_given_back_unwritten_keeps_its_last_reader(device: FakeDevice) -> None:
    arena = arena_on(device, limit_bytes=PIECE)
    event = FakeEvent("restore")
    arena.give_back(taken(arena, PIECE), event)
    arena.give_back(taken(arena, PIECE), None)  # this borrower never waited for the event
    assert taken(arena, PIECE).after == (event,)


def test_events_of_a_block_that_is_lent_again_and_again_do_not_pile_up(device: FakeDevice) -> None:
    """Each user waits for the one before it, so the last event says it all. A device far behind its host made
    a step of 3,800 copies look at millions of events."""
    arena = arena_on(device, limit_bytes=PIECE)
    for number in range(50):
        block = taken(arena, PIECE)
        assert len(block.after) == min(number, 1)
        arena.give_back(block, FakeEvent(str(number)))


def test_a_block_across_freed_blocks_waits_for_the_readers_of_all(device: FakeDevice) -> None:
    arena = arena_on(device, limit_bytes=PIECE)
    events = [FakeEvent(str(index)) for index in range(4)]
    for block, event in zip([taken(arena, PIECE // 4) for _ in events], events, strict=True):
        arena.give_back(block, event)
    events[1].passed = True
    assert set(taken(arena, PIECE).after) == {events[0], events[2], events[3]}


def test_the_number_of_events_asked_about_does_not_grow_with_the_number_pending(device: FakeDevice) -> None:
    arena = arena_on(device, limit_bytes=100 * PIECE)
    blocks = [taken(arena, 1 * KIB) for _ in range(1000)]
    most = 0
    for operation in [
        *(lambda block=block: arena.give_back(block, FakeEvent()) for block in blocks),
        *([lambda: arena.take(90 * KIB)] * 8),
    ]:
        before = device.polls
        operation()
        most = max(most, device.polls - before)
    assert most == 1 + POLLS_PER_LOAN, "of the oldest events one, which has not passed"


# -- one extent ----------------------------------------------------------------------------------------------
def test_a_contiguous_block_lies_in_one_piece_even_beyond_a_registration(arena: HostArena) -> None:
    (extent,) = arena.contiguous(3 * PIECE + 5).extents
    assert extent.numel() == 3 * PIECE + 5
    (small,) = arena.contiguous(100).extents
    assert small.numel() == 100


def test_a_contiguous_block_is_pinned_by_the_caller_and_errors_when_it_may_not_be() -> None:
    device = FakeDevice(pins=True)
    arena = arena_on(device, limit_bytes=PIECE)
    arena.contiguous(PIECE)
    assert device.pinning_threads == [threading.current_thread().name]
    with pytest.raises(HostBudgetError, match=r"raise host_limit \(host_limit_bytes in"):
        arena.contiguous(1)


def test_a_contiguous_block_may_be_written_at_once(device: FakeDevice) -> None:
    arena = arena_on(device, limit_bytes=PIECE)
    event = FakeEvent("restore")
    arena.give_back(taken(arena, PIECE), event)
    assert arena.contiguous(PIECE).after == ()
    assert device.synchronized == [event]


# -- counters and the end ------------------------------------------------------------------------------------
def test_the_peak_is_of_bytes_lent_and_starts_anew(arena: HostArena) -> None:
    block = taken(arena, 3 * PIECE)
    taken(arena, 100)
    arena.give_back(block, None)
    assert arena.stats().lent_peak_bytes == 3 * PIECE + 100
    arena.reset_peak()
    assert arena.stats().lent_peak_bytes == arena.stats().lent_bytes == 100


def test_threads_share_an_arena_without_sharing_bytes(arena: HostArena) -> None:
    failures: list[str] = []

    def work(value: int) -> None:
        for round_number in range(30):
            block = arena.take(PIECE // 3 + 97 * value)
            for extent in block.extents:
                extent.fill_(value)
            if any(not bool((extent == value).all()) for extent in block.extents):
                failures.append(f"thread {value} round {round_number}")
            (arena.give_back_later if round_number % 2 else arena.give_back)(block, None)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
    run_all(threads)
    assert failures == []
    assert arena.stats().lent == 0


# -- whole blocks, lent again --------------------------------------------------------------------------------
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
    assert taken(arena, 1000).after == (second,), "which came after the first"


def test_a_whole_block_is_lent_again_for_its_exact_size_only(arena: HostArena) -> None:
    block = taken(arena, 1000)
    arena.give_back(block, None)
    assert (arena.stats().free_bytes, arena.stats().free_ranges) == (PIECE, 2), "1,024 whole, and the rest"
    assert all(taken(arena, nbytes).extents is not block.extents for nbytes in (1024, 999))
    assert taken(arena, 1000).extents is block.extents
    assert taken(arena, 1000).extents is not block.extents


def test_of_equals_the_one_that_nobody_reads_goes_first_and_else_the_oldest(arena: HostArena) -> None:
    oldest, read, idle = (taken(arena, 512) for _ in range(3))
    for block, event in ((oldest, FakeEvent()), (read, FakeEvent()), (idle, None)):
        arena.give_back(block, event)
    again = [taken(arena, 512) for _ in range(3)]
    assert all(
        block.extents is before.extents for block, before in zip(again, (idle, oldest, read), strict=True)
    )


def test_whole_blocks_go_back_to_the_ranges_once_with_their_events(arena: HostArena) -> None:
    event = FakeEvent("of all")
    blocks = [taken(arena, nbytes) for nbytes in (512, 511, 510, PIECE - 3 * 512)]
    for block in blocks:
        arena.give_back(block, event)
    assert (arena.stats().free_bytes, arena.stats().free_ranges) == (PIECE, 4)
    for _ in range(2):
        arena.trim(arena.held_bytes)  # gives nothing back, but joins whole blocks
        assert (arena.stats().free_bytes, arena.stats().free_ranges) == (PIECE, 1)
    again = taken(arena, 512)
    assert (again.extents is blocks[0].extents, again.after) == (False, (event,))


def test_sizes_that_never_come_again_are_lent_to_those_that_do() -> None:
    arena = arena_on(FakeDevice(), limit_bytes=4 * PIECE)
    for nbytes in (3 * PIECE, PIECE // 2, 512):
        arena.give_back(taken(arena, nbytes), None)
    assert taken(arena, 4 * PIECE - 1).nbytes == 4 * PIECE - 1
    assert arena.stats().missing == 0


def test_a_size_that_changes_splits_no_whole_block_while_another_range_holds_it() -> None:
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
    assert taken(arena, 2 * PIECE).nbytes == 2 * PIECE, "more than any range: now the whole blocks are joined"


def test_a_whole_block_is_free_to_a_trim_to_clear_and_to_a_block_in_one_piece() -> None:
    device = FakeDevice()
    arena = arena_on(device, limit_bytes=4 * PIECE)

    def lend_and_take_back() -> None:
        for block in [taken(arena, PIECE // 4) for _ in range(16)]:
            arena.give_back(block, None)
        assert (arena.stats().free_ranges, arena.stats().free_bytes) == (16, 4 * PIECE)

    lend_and_take_back()
    whole = arena.contiguous(PIECE)
    assert len(whole.extents) == 1
    arena.give_back(whole, None)
    lend_and_take_back()
    assert arena.trim(PIECE) == 3 * PIECE
    arena.give_back(taken(arena, PIECE), None)
    arena.clear()
    assert arena.held_bytes == arena.budget.used_bytes == device.host_bytes == 0


@pytest.mark.parametrize("whole", [True, False], ids=["contiguous", "take"])
def test_a_block_that_comes_back_while_another_thread_pins_is_lent_and_nothing_more_is_pinned(
    whole: bool,
) -> None:
    """It came back whole, and the thread that waited for the pinning looked at ranges only: an error or
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
