"""Free bytes: which range is chosen, what joining keeps, and how events are asked about."""

from __future__ import annotations

from typing import cast

import pytest

from offload.memory.free_ranges import (
    POLLS_PER_EVENT,
    FreeRanges,
    PendingEvent,
    PendingEvents,
    Range,
    join_pending,
)
from tests.unit.memory.fakes import FakeDevice, FakeEvent


# -- events --------------------------------------------------------------------------------------------------
@pytest.fixture
def events(device: FakeDevice) -> PendingEvents:
    return PendingEvents(device.protocol)


def test_an_event_is_pending_once_until_it_has_passed(events: PendingEvents) -> None:
    event = FakeEvent("restore")
    pending = events.of(event)
    assert events.of(event) is pending
    assert not events.poll(pending)
    assert pending.event is event
    event.passed = True
    assert events.poll(pending)
    assert pending.event is None
    assert events.of(event) is not pending


def test_oldest_events_are_asked_about_first_and_none_behind_one_that_has_not_passed(
    device: FakeDevice, events: PendingEvents
) -> None:
    for index in range(5):
        events.of(FakeEvent(str(index)))
    first, *rest = asked_in_turn = list(events._unpassed.values())
    for pending in rest:
        cast(FakeEvent, pending.event).passed = True
    device.polls = 0
    events.poll_oldest()
    assert all(pending.event is not None for pending in asked_in_turn)
    assert device.polls == 1, "the first has not passed: it is asked about last from now on"
    events.poll_oldest()
    assert [pending.event is None for pending in asked_in_turn] == [False, True, True, False, False]
    assert device.polls == 1 + POLLS_PER_EVENT
    assert not events.poll_all()
    assert [pending for pending in asked_in_turn if pending.event is not None] == [first]
    cast(FakeEvent, first.event).passed = True
    assert events.poll_all()
    asked = device.polls
    assert events.poll_all()
    assert device.polls == asked, "what has passed is not asked about again"


def test_each_new_event_has_older_ones_asked_about(device: FakeDevice, events: PendingEvents) -> None:
    for _ in range(100):
        event = FakeEvent()
        event.passed = True
        events.of(event)
    assert len(events._unpassed) <= POLLS_PER_EVENT


def test_synchronize_waits_for_what_has_not_passed(device: FakeDevice, events: PendingEvents) -> None:
    made = [FakeEvent(str(index)) for index in range(3)]
    first, second, third = (events.of(event) for event in made)
    made[1].passed = True
    events.poll(second)
    events.synchronize([first, second])
    assert device.synchronized == [made[0]]
    assert first.event is second.event is None
    assert third.event is made[2]
    events.synchronize_all()
    assert device.synchronized == [made[0], made[2]]
    assert third.event is None


def test_joined_events_are_those_still_ahead_each_once_in_order() -> None:
    ahead, passed, last = (PendingEvent(FakeEvent(name)) for name in ("ahead", "passed", "last"))
    passed.event = None
    assert join_pending([last, passed, ahead, last]) == (last, ahead)


# -- ranges --------------------------------------------------------------------------------------------------
def free_ranges(*ranges: tuple[int, int, int]) -> FreeRanges:
    free = FreeRanges()
    for piece, start, end in ranges:
        free.put(piece, start, end)
    return free


def places(ranges: list[Range]) -> list[tuple[int, int, int]]:
    return [(each.piece, each.start, each.end) for each in ranges]


def test_the_smallest_range_that_fits_is_cut() -> None:
    free = free_ranges((0, 0, 100), (1, 0, 30), (2, 0, 20))
    assert places(free.gather(25)) == [(1, 0, 25)]
    assert free.nbytes == 125


def test_without_a_fit_the_largest_ranges_are_gathered_first() -> None:
    free = free_ranges((0, 0, 50), (1, 0, 30), (2, 0, 20), (3, 0, 10))
    # 50, then of the 15 left the smallest range that fits
    assert places(free.gather(65)) == [(0, 0, 50), (2, 0, 15)]
    assert places(free.gather(free.nbytes)) == [(1, 0, 30), (3, 0, 10), (2, 15, 20)]
    assert free.nbytes == len(list(free)) == 0


def test_neighbours_join_and_pieces_do_not() -> None:
    free = free_ranges((0, 0, 10), (0, 20, 30), (1, 0, 10))
    free.put(0, 10, 20)
    assert sorted(places(list(free))) == [(0, 0, 30), (1, 0, 10)]


def test_joining_keeps_the_events_of_both_sides_and_forgets_passed_ones() -> None:
    left, middle, right, passed = (
        PendingEvent(object()),
        PendingEvent(object()),
        PendingEvent(object()),
        PendingEvent(object()),
    )
    passed.event = None
    free = FreeRanges()
    free.put(0, 0, 10, (left, passed))
    free.put(0, 20, 30, (right, left))
    free.put(0, 10, 20, (middle,))
    (joined,) = free
    assert joined.pending == (left, middle, right)


def test_among_equals_one_that_nobody_reads_is_chosen() -> None:
    busy, passed = PendingEvent(object()), PendingEvent(object())
    passed.event = None
    free = FreeRanges()
    free.put(0, 0, 10, (busy,))
    free.put(1, 0, 10, (passed,))
    chosen = free.best_fit(10)
    assert chosen.piece == 1


def test_both_parts_of_a_split_range_keep_its_events() -> None:
    busy = PendingEvent(object())
    free = FreeRanges()
    free.put(0, 0, 10, (busy,))
    (part,) = free.gather(4)
    (rest,) = free
    assert part.pending == rest.pending == (busy,)
