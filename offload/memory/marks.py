"""Which of the events that were kept with free bytes have passed: asked of the device once, known to every
range at once.

A thousand free ranges may wait for one transfer, so they share one `Mark` of its event.
One invariant: a mark's event is None from the moment it is known to have passed, and never before.

Not thread-safe: the arena holds its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from offload.device.base import Device, Event

__all__ = ["Mark", "Marks", "join_marks"]


class Mark:
    """A shared note of one event; `event` is None from the moment it is known to have passed, for every range
    that has the mark."""

    __slots__ = ("event",)

    def __init__(self, event: Event) -> None:
        self.event: Event | None = event


class Marks:
    """One mark an event, and the order in which the device is asked about them: longest unasked first."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._of_event: dict[int, Mark] = {}  # by id of the event, which the mark keeps alive
        self._unpassed: deque[Mark] = deque()  # and some that passed since they were asked about last

    def knows(self, event: Event) -> bool:
        return id(event) in self._of_event

    def of(self, event: Event) -> Mark:
        mark = self._of_event.get(id(event))
        if mark is None:
            mark = self._of_event[id(event)] = Mark(event)
            self._unpassed.append(mark)
        return mark

    def poll(self, mark: Mark) -> bool:
        """Whether the event has passed. Never blocks the host."""
        if mark.event is not None and self._device.poll(mark.event):
            self._pass(mark.event, mark)
        return mark.event is None

    def poll_some(self, count: int) -> None:
        """`poll` the `count` marks that were asked about longest ago."""
        for _ in range(min(count, len(self._unpassed))):
            mark = self._unpassed.popleft()
            if not self.poll(mark):
                self._unpassed.append(mark)

    def poll_until_unpassed(self, most: int) -> None:
        """As `poll_some`, but no further than to one that has not passed: lanes are in order, those behind it
        will hardly have."""
        while most > 0 and self._unpassed:
            most -= 1
            mark = self._unpassed.popleft()
            if mark.event is not None and not self.poll(mark):
                self._unpassed.append(mark)
                return

    def poll_all(self) -> None:
        self.poll_some(len(self._unpassed))

    def all_passed(self) -> bool:
        """Ask about every mark; whether none is left. Never blocks the host."""
        self.poll_all()
        return not self._unpassed

    def synchronize(self, marks: Iterable[Mark]) -> None:
        """Block the host until these events have passed."""
        for mark in marks:
            if (event := mark.event) is not None:
                self._device.synchronize(event)
                self._pass(event, mark)

    def synchronize_all(self) -> None:
        """Block the host until every event has passed."""
        self.synchronize(self._unpassed)
        self._unpassed.clear()

    def _pass(self, event: Event, mark: Mark) -> None:
        del self._of_event[id(event)]
        mark.event = None


def join_marks(marks: Iterable[Mark]) -> tuple[Mark, ...]:
    """The marks whose event may still be ahead, each once, in the order given."""
    return tuple(dict.fromkeys(mark for mark in marks if mark.event is not None))
