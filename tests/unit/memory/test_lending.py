"""Blocks on loan: what a borrower gets, who must wait before writing, and what is counted."""

from __future__ import annotations

import threading

import pytest
import torch

from offload.errors import HostBudgetError, PoolError
from offload.memory.arena import HostArena
from offload.memory.lending import POLLS_PER_CALL, POLLS_PER_LOAN
from tests.unit.memory.fakes import KIB, PIECE, FakeDevice, FakeEvent, arena_on, taken


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


def test_a_block_across_freed_blocks_waits_for_the_readers_of_all(device: FakeDevice) -> None:
    arena = arena_on(device, limit_bytes=PIECE)
    events = [FakeEvent(str(index)) for index in range(4)]
    for block, event in zip([taken(arena, PIECE // 4) for _ in events], events, strict=True):
        arena.give_back(block, event)
    events[1].passed = True
    assert set(taken(arena, PIECE).after) == {events[0], events[2], events[3]}


def test_one_event_of_many_blocks_is_waited_for_once(device: FakeDevice) -> None:
    arena = arena_on(device, limit_bytes=PIECE)
    event = FakeEvent("one transfer")
    for block in [taken(arena, PIECE // 4) for _ in range(4)]:
        arena.give_back(block, event)
    assert taken(arena, PIECE).after == (event,)


def test_a_range_that_nobody_reads_is_lent_before_one_that_somebody_does(device: FakeDevice) -> None:
    arena = arena_on(device, limit_bytes=2 * PIECE)
    read, unread = taken(arena, PIECE), taken(arena, PIECE)
    arena.give_back(read, FakeEvent("restore"))
    arena.give_back(unread, None)
    assert taken(arena, PIECE).after == ()


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
    assert most <= POLLS_PER_CALL + POLLS_PER_LOAN


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
    with pytest.raises(HostBudgetError, match="raise host_limit_bytes"):
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
            assert block is not None
            for extent in block.extents:
                extent.fill_(value)
            if any(not bool((extent == value).all()) for extent in block.extents):
                failures.append(f"thread {value} round {round_number}")
            (arena.give_back_later if round_number % 2 else arena.give_back)(block, None)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert arena.stats().lent == 0
