"""The two clocks of a simulated lane: what its next work comes after (a vector clock), and when (virtual
seconds).

One invariant: an operation happens before everything that a lane is given next if and only if that lane's
vector clock counts it.

    operation   anything a lane does, numbered from 1 in the order of issue; number n of lane a happened
                before lane b's next one iff b.clock[a.index] >= n
    issued      number of the last operation given to a lane
    ran         number of the last operation that the lane has finished
    eager       a lane whose work is done when the call returns: torch on the CPU (`compute`), and the host
                itself
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from offload.device.base import Event, Lane
from offload.errors import HazardError

__all__ = ["QueueItem", "SimEvent", "SimLane", "SimLanes", "order_after"]


class QueueItem(Protocol):
    """Work of a lane that is not eager, from issue until it ran."""

    number: int
    end_s: float

    @property
    def after(self) -> SimEvent | None:
        """The event that must have passed before the item can run."""

    def run(self) -> None: ...


class SimLane:
    """One queue of simulated work. Only the device that made it moves its clocks."""

    __slots__ = (
        "busy_s",
        "clock",
        "copied_bytes",
        "copies",
        "eager",
        "edges",
        "host_version",
        "index",
        "left_out",
        "name",
        "owner",
        "queue",
        "ran",
        "time_s",
    )

    def __init__(self, name: str, index: int, owner: object, *, eager: bool, lags: bool) -> None:
        self.name = name
        self.index = index
        self.owner = owner
        self.eager = eager
        self.clock = [0] * (index + 1)
        # an eager lane that does not lag has finished whatever it was given
        self.ran: float = math.inf if eager and not lags else 0
        self.queue: deque[QueueItem] = deque()
        self.time_s = 0.0
        self.busy_s = 0.0
        self.copies = 0
        self.copied_bytes = 0
        self.host_version = 0
        # for errors: lane index -> the order title of the last edge from that lane
        self.edges: dict[int, str] = {}
        self.left_out: dict[str, None] = {}  # for errors: titles of the edges that `without` removed here

    def __repr__(self) -> str:
        return f"SimLane({self.name})"

    @property
    def issued(self) -> int:
        return self.clock[self.index]

    def next_number(self) -> int:
        self.clock[self.index] += 1
        return self.clock[self.index]


class SimEvent:
    """A point recorded in a simulated lane: everything up to `number` there, and all that this came after."""

    __slots__ = ("clock", "lane", "number", "program", "time_s", "timed")

    def __init__(self, lane: SimLane, *, timed: bool, program: object = None) -> None:
        """program: the capture that it is recorded in."""
        self.program = program
        self.lane = lane
        self.number = lane.issued
        self.clock = tuple(lane.clock)
        self.time_s = lane.time_s
        self.timed = timed

    def __repr__(self) -> str:
        return f"SimEvent(after operation {self.number} of {self.lane.name})"


class SimLanes:
    """The lanes of one device, the host's among them: all host threads are one lane, which every later issue
    comes after."""

    def __init__(self, *, lags: bool) -> None:
        """lags: the host does not see at once how far a compute lane is."""
        self._owner = object()
        self._lags = lags
        self.all: list[SimLane] = []
        self.compute = self.new_compute("compute")
        self.d2h = self._new("d2h", eager=False, lags=False)
        self.h2d = self._new("h2d", eager=False, lags=False)
        self.host = self._new("host", eager=True, lags=False)

    def new_compute(self, name: str) -> SimLane:
        return self._new(name, eager=True, lags=self._lags)

    def new_branch(self, lane: SimLane) -> SimLane:
        """A lane of the same kind, for the branch of a graph that `lane` is in its capture."""
        return self._new(f"a graph's {lane.name}", eager=lane.eager, lags=lane.eager and self._lags)

    def own(self, lane: Lane) -> SimLane:
        if isinstance(lane, SimLane) and lane.owner is self._owner:
            return lane
        raise ValueError(
            f"lane {lane!r} is not of this device; take compute, d2h or h2d of the device itself"
        )

    def reachable(self, event: Event, waiter: str) -> SimEvent:
        """The event, if its lane will get there. waiter: who asks, for the error."""
        if not isinstance(event, SimEvent) or event.lane.owner is not self._owner:
            raise HazardError(
                f"{waiter} waits for {event!r}, which this device never recorded, so it can never be "
                "reached; record it here"
            )
        if event.number > event.lane.issued:
            raise HazardError(
                f"deadlock: {waiter} waits for operation {event.number} of {event.lane.name}, which was "
                f"given only {event.lane.issued}, "
                "so it can never be reached; record an event after the work is issued"
            )
        return event

    def host_sees(self, event: SimEvent) -> None:
        """The host observed that the event passed: whatever it issues from now on comes after."""
        order_after(self.host, event)
        self.host.host_version += 1

    def catch_up(self, lane: SimLane) -> None:
        """Before work is issued to `lane`: it comes after what the host has seen and done."""
        if lane.host_version != self.host.host_version:
            _merge(lane.clock, self.host.clock)
            lane.host_version = self.host.host_version

    def _new(self, name: str, *, eager: bool, lags: bool) -> SimLane:
        lane = SimLane(name, len(self.all), self._owner, eager=eager, lags=lags)
        for known in self.all:
            known.clock.append(0)
        self.all.append(lane)
        return lane


def order_after(lane: SimLane, event: SimEvent) -> None:
    """What `lane` is given next comes after the event."""
    _merge(lane.clock, event.clock)


def _merge(clock: list[int], other: Sequence[int]) -> None:
    for index, number in enumerate(other):  # an older event knows fewer lanes
        if clock[index] < number:
            clock[index] = number
