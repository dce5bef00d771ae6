"""The lanes of the simulated device and their two clocks: what the next work of a lane comes after (a vector
clock), and when (virtual seconds).

One invariant: an operation happens before everything that a lane is given next if and only if that lane's
vector clock counts it.

    operation   anything a lane does, numbered from 1 in the order of issue; number n of lane a happened
                before lane b's next one iff b.clock[a.index] >= n
    issued      number of the last operation given to a lane
    ran         number of the last operation that the lane has finished
    eager       a lane whose work is done when the call returns: torch on the CPU (`compute`), and the host
                itself

Virtual time passes where compute is announced and where a copy is issued; no reading makes it pass.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from offload.device.base import Event, Lane
from offload.errors import HazardError


class SimLane:
    """One queue of simulated work. Only the device that made it moves its clocks."""

    def __init__(self, name: str, index: int, *, eager: bool, lags: bool) -> None:
        self.name = name
        self.index = index
        self.eager = eager
        self.clock = [0] * (index + 1)
        # an eager lane that does not lag has finished whatever it was given
        self.ran: float = math.inf if eager and not lags else 0
        self.queue: deque[Operation] = deque()  # from issue until it ran; empty if the lane is eager
        self.time_s = self.busy_s = 0.0
        self.copies = self.copied_bytes = 0
        self.host_version = 0
        # for errors: lane index -> the order title of the last edge from that lane
        self.edges: dict[int, str] = {}
        self.left_out: dict[str, None] = {}  # for errors: titles of the edges that `without` removed here

    def __repr__(self) -> str:
        return f"SimLane({self.name})"

    @property
    def issued(self) -> int:
        return self.clock[self.index]

    def order_after(self, clock: Sequence[int]) -> None:
        """Order what the lane is given next after all that `clock` counts."""
        for index, number in enumerate(clock):  # an older event knows fewer lanes
            if self.clock[index] < number:
                self.clock[index] = number

    def say_left_out(self) -> str:
        """For the end of an error."""
        titles = ", ".join(repr(title) for title in self.left_out)
        return titles and f"; edges left out of {self.name}: {titles}"


@dataclass(slots=True, eq=False)
class SimEvent:
    """A point recorded in a simulated lane: everything up to `number` there, and all that this came after."""

    lane: SimLane
    number: int
    clock: tuple[int, ...]
    time_s: float
    timed: bool
    capture: object  # `SimGraph.capture` of the graph whose capture it is recorded in

    def __repr__(self) -> str:
        return f"SimEvent(after operation {self.number} of {self.lane.name})"


class Operation:
    """One numbered operation of a lane, as errors name it. Never holds a tensor."""

    __slots__ = ("after", "end_s", "lane", "nbytes", "number", "verb")

    def __init__(self, lane: SimLane, verb: str, nbytes: int, after: SimEvent | None = None) -> None:
        """after: the event that must have passed before the operation can run."""
        self.lane = lane
        self.number = lane.issued + 1  # its number if it is issued: a hazard is raised before it is
        self.verb = verb
        self.nbytes = nbytes
        self.after = after
        self.end_s = 0.0

    def __str__(self) -> str:
        return f"{self.verb} of {self.nbytes:,} bytes (operation {self.number} of {self.lane.name})"

    def run(self) -> None:
        """A declaration and a wait move nothing."""


class SimLanes:
    """The lanes of one device and their meters. All host threads are one lane, `host`, which every later
    issue comes after."""

    def __init__(self, *, lags: bool) -> None:
        """lags: the host does not see at once how far a compute lane is."""
        self._lock = threading.RLock()
        self._of_thread = threading.local()
        self._lags = lags
        self.all_lanes: list[SimLane] = []
        self._compute = self.add_lane("compute")
        self.d2h = self.add_lane("d2h", eager=False)
        self.h2d = self.add_lane("h2d", eager=False)
        self.host = self.add_lane("host")
        """The host as a lane, to declare its own reads and writes of host memory with `note_read` and
        `note_write`."""
        self.host.ran = math.inf
        self.waits: Counter[str] = Counter()
        """How often each ordering edge was asked for, by its title, those of `without` included."""
        self.stall_s = 0.0
        """Virtual time that compute lanes waited for copy lanes."""
        self.blocked_s = 0.0
        """Virtual time that the host was blocked in `synchronize`, and compute idle with it; not part of the
        stall."""

    def add_lane(self, name: str, *, eager: bool = True) -> SimLane:
        lane = SimLane(name, len(self.all_lanes), eager=eager, lags=self._lags)
        for known in self.all_lanes:
            known.clock.append(0)
        self.all_lanes.append(lane)
        return lane

    @property
    def compute(self) -> SimLane:
        lane: SimLane = getattr(self._of_thread, "lane", self._compute)
        return lane

    def new_compute_lane(self, name: str) -> SimLane:
        """A further lane to compute on, unordered with `compute` until events say otherwise."""
        with self._lock:
            return self.add_lane(name)

    def new_copy_lane(self, name: str) -> SimLane:
        """A further lane to copy on. Its copies have the link's rate beside those of other lanes."""
        with self._lock:
            return self.add_lane(name, eager=False)

    @contextmanager
    def use_lane(self, lane: Lane) -> Iterator[None]:
        """The calling thread computes on `lane` inside."""
        chosen, before = self._own(lane), self.compute
        if not chosen.eager or chosen is self.host:
            raise ValueError(f"{chosen.name} is not a compute lane; make one with new_compute_lane(name)")
        self._of_thread.lane = chosen
        try:
            yield
        finally:
            self._of_thread.lane = before

    # -- meters ----------------------------------------------------------------------------------------------
    def copies(self, lane: Lane) -> int:
        """Copies issued to `lane` so far, one a pair."""
        return self._own(lane).copies

    def copied_bytes(self, lane: Lane) -> int:
        """Bytes of the copies issued to `lane` so far."""
        return self._own(lane).copied_bytes

    def busy_s(self, lane: Lane) -> float:
        """Virtual time that `lane` worked."""
        return self._own(lane).busy_s

    @property
    def now_s(self) -> float:
        """Virtual time of the calling thread's compute lane, and so of the host, which is not ahead of it."""
        return self.compute.time_s

    # -- inside ----------------------------------------------------------------------------------------------
    def _own(self, lane: Lane) -> SimLane:
        if isinstance(lane, SimLane) and lane in self.all_lanes:
            return lane
        raise ValueError(
            f"lane {lane!r} is not of this device; take compute, d2h or h2d of the device itself"
        )

    def _reachable(self, event: Event, waiter: str) -> SimEvent:
        """The event, if its lane will get there. waiter: who asks, for the error."""
        if not isinstance(event, SimEvent) or event.lane not in self.all_lanes:
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

    def _host_sees(self, event: SimEvent) -> None:
        """The host observed that the event passed: whatever it issues from now on comes after."""
        self.host.order_after(event.clock)
        self.host.host_version += 1
