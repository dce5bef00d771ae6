"""The arena around a graph's capture: what must be over before it, and what may not be asked in it."""

from __future__ import annotations

import pytest

from offload.errors import OffloadError
from tests.unit.memory.fakes import PIECE, FakeDevice, FakeEvent, arena_on, taken


def test_capture_waits_for_the_last_users_of_every_free_byte() -> None:
    """So a block that is lent in it has nothing to wait for, although nobody had seen its events pass."""
    device = FakeDevice()
    arena = arena_on(device)
    arena.reserve(4 * PIECE)
    events = [FakeEvent(str(number)) for number in range(3)]
    blocks = [taken(arena, PIECE) for _ in events]
    for block, event in zip(blocks[:2], events, strict=False):
        arena.give_back(block, event)
    arena.give_back_later(blocks[2], events[2])
    arena.begin_capture()
    assert {id(event) for event in device.synchronized} == {id(event) for event in events}
    assert taken(arena, 4 * PIECE).after == ()
    arena.end_capture()


def test_nothing_is_polled_in_a_capture_whatever_is_given_back_in_it() -> None:
    """A finaliser may return an eager block there: its event has passed, or the capture would not have
    begun."""
    device = FakeDevice()
    arena = arena_on(device)
    arena.reserve(3 * PIECE)
    blocks = [taken(arena, PIECE) for _ in range(3)]
    arena.begin_capture()
    device.polls = 0
    arena.give_back_later(blocks[0], FakeEvent())
    arena.give_back(blocks[1], FakeEvent())
    assert taken(arena, 2 * PIECE).after == ()
    arena.stats()
    assert device.polls == 0
    arena.end_capture()
    arena.give_back(blocks[2], FakeEvent())
    assert len(taken(arena, PIECE).after) == 1
    assert device.polls > 0


def test_growth_that_was_asked_for_is_done_before_a_capture_and_none_happens_in_it() -> None:
    device = FakeDevice(pins=True)
    arena = arena_on(device, slab_bytes=PIECE)
    assert arena.take(3 * PIECE) is None
    arena.begin_capture()
    assert arena.held_bytes == 3 * PIECE
    assert arena.take(5 * PIECE) is None
    with pytest.raises(OffloadError, match="cannot pin"):
        arena.reserve(5 * PIECE)
    assert arena.held_bytes == 3 * PIECE
    arena.end_capture()
    arena.synchronize_growth()
    assert arena.held_bytes == 5 * PIECE
