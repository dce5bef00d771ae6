"""Marks: an event is asked about through one mark, and all that share it know at once."""

from __future__ import annotations

import pytest

from offload.memory.marks import Mark, Marks, join_marks
from tests.unit.memory.fakes import FakeDevice, FakeEvent


@pytest.fixture
def marks(device: FakeDevice) -> Marks:
    return Marks(device.protocol)


def test_an_event_has_one_mark_until_it_has_passed(marks: Marks) -> None:
    event = FakeEvent("restore")
    mark = marks.of(event)
    assert marks.of(event) is mark
    assert not marks.poll(mark)
    assert mark.event is event
    event.passed = True
    assert marks.poll(mark)
    assert mark.event is None
    assert marks.of(event) is not mark


def test_marks_are_asked_about_in_turn(device: FakeDevice, marks: Marks) -> None:
    events = [FakeEvent(str(index)) for index in range(5)]
    of_events = [marks.of(event) for event in events]
    marks.poll_some(3)
    for event in events:
        event.passed = True
    marks.poll_some(2)
    assert [mark.event for mark in of_events] == [*events[:3], None, None]
    marks.poll_some(99)
    assert [mark.event for mark in of_events] == [None] * 5
    asked = device.polls
    marks.poll_all()
    assert device.polls == asked == 8, "what has passed is not asked about again"


def test_synchronize_waits_for_what_has_not_passed(device: FakeDevice, marks: Marks) -> None:
    events = [FakeEvent(str(index)) for index in range(3)]
    first, second, third = (marks.of(event) for event in events)
    events[1].passed = True
    marks.poll(second)
    marks.synchronize([first, second])
    assert device.synchronized == [events[0]]
    assert first.event is second.event is None
    assert third.event is events[2]
    marks.synchronize_all()
    assert device.synchronized == [events[0], events[2]]
    assert third.event is None


def test_joined_marks_are_those_still_ahead_each_once_in_order() -> None:
    ahead, passed, last = (Mark(FakeEvent(name)) for name in ("ahead", "passed", "last"))
    passed.event = None
    assert join_marks([last, passed, ahead, last]) == (last, ahead)
