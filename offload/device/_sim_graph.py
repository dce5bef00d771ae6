"""Graphs of the simulated device: what a capture may do, and the replay of what it did.

Compute on the CPU cannot be held back, so a captured program also runs once while it is captured, under the
checker like any other. Its steps are kept, and `replay` issues them again: copies and declarations to the
same bytes, kernels given to `launch` called again. What else compute did at the capture is not repeated:
sources whose storage is gone give the bytes that they had then.

One invariant: a rule of CUDA's captures that is broken here raises HazardError at the call that breaks it.
The rules: nothing is polled, synchronized, timed or pinned; a lane of the capture waits for events of the
capture only, and nobody else waits for those; lanes that waited for one are part of it, and joined before it
ends. A copy on a lane that is not part of it would run once, now: that is refused too.

A graph's branches run on lanes of its own, ordered with nothing but by the events of the program: what holds
on the device's own copy lanes by the order of issue does not hold between a replay and anything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from offload.device._replays import replace_replay
from offload.device._sim_bytes import TrackedBytes
from offload.device._sim_clock import SimEvent, SimLane, SimLanes
from offload.device._sim_hazards import HazardChecker
from offload.device._sim_queue import Copy
from offload.device.base import CaptureWatcher, Event, Graph, Lane
from offload.errors import CaptureError, HazardError

__all__ = ["AccessStep", "CopyStep", "LaunchStep", "RecordStep", "SimCaptures", "SimGraph", "WaitStep"]


class RecordStep(NamedTuple):
    lane: SimLane
    event: SimEvent


class WaitStep(NamedTuple):
    lane: SimLane
    event: SimEvent
    order: str


class AccessStep(NamedTuple):
    lane: SimLane
    tracked: TrackedBytes
    start: int
    end: int
    verb: str
    writing: bool


class CopyStep(NamedTuple):
    lane: SimLane
    destination: TrackedBytes
    at: int
    source: TrackedBytes
    start: int
    nbytes: int


class LaunchStep(NamedTuple):
    lane: SimLane
    kernel: Callable[[], None]


Step = RecordStep | WaitStep | AccessStep | CopyStep | LaunchStep


class Program:
    """The steps of one capture, and the lanes that are part of it."""

    def __init__(self, origin: SimLane) -> None:
        self.origin = origin
        self.steps: list[Step] = []
        # a graph's pool keeps its addresses, whatever dies
        self.shadows: dict[TrackedBytes, torch.Tensor] = {}
        self._lanes: dict[SimLane, str] = {origin: "begin"}  # with the order of the wait that brought it in

    def has(self, lane: SimLane) -> bool:
        return lane in self._lanes

    # -- rules -----------------------------------------------------------------------------------------------
    def wait(self, lane: SimLane, event: SimEvent, order: str) -> None:
        """A wait is about to be issued: one for an event of the capture makes `lane` part of it."""
        if event.program is self:
            self._lanes.setdefault(lane, order)
        elif self.has(lane):
            raise HazardError(
                f"capture: {lane.name} waits ({order!r}) for {event}, which was recorded outside of the "
                f"capture that {lane.name} is part "
                "of; synchronize before the capture begins, and wait for nothing of before in it"
            )

    def copy(self, lane: SimLane) -> None:
        if not self.has(lane):
            raise HazardError(
                f"capture: a copy on {lane.name}, which is no part of the capture, would run once and in no "
                f"replay; let {lane.name} wait "
                f"for an event of {self.origin.name} first"
            )

    def check_joined(self) -> None:
        for lane, order in self._lanes.items():
            done = self.origin.clock[lane.index]
            if done < lane.issued:
                raise HazardError(
                    f"capture: {lane.name}, part of it since it waited ({order!r}), is not joined: "
                    f"{self.origin.name} comes after "
                    f"operation {done} of {lane.name}, not after {lane.issued}. Record an event on "
                    f"{lane.name} and let {self.origin.name} "
                    f"wait for it{_left_out(self.origin)}"
                )

    # -- steps -----------------------------------------------------------------------------------------------
    def add(self, step: Step) -> None:
        if self.has(step.lane):
            self.steps.append(step)
            if isinstance(step, CopyStep):
                self._keep(step.source)
                self._keep(step.destination)

    def _keep(self, tracked: TrackedBytes) -> None:
        storage = tracked.storage()
        if not tracked.host and storage is not None:
            self.shadows[tracked] = torch.empty(0, dtype=torch.uint8).set_(storage.clone())

    def branches(self) -> list[SimLane]:
        return [lane for lane in self._lanes if lane is not self.origin]


def _left_out(lane: SimLane) -> str:
    return (
        f"; edges left out of {lane.name}: {', '.join(repr(title) for title in lane.left_out)}"
        if lane.left_out
        else ""
    )


class ReplayedCopy(Copy):
    """A copy of a graph: bytes whose storage is dead are in the graph's own memory."""

    __slots__ = ("shadows",)
    shadows: dict[TrackedBytes, torch.Tensor]

    def storage_of(self, side: TrackedBytes) -> torch.UntypedStorage | None:
        found = side.storage()
        if found is None and side in self.shadows:
            return self.shadows[side].untyped_storage()
        return found


class SimGraph:
    """A captured program. `replay` issues it again, on the calling thread's compute lane and on branches of
    its own."""

    def __init__(self, device: SimCaptures) -> None:
        self._device = device
        self._program: Program | None = None
        self._branches: dict[SimLane, SimLane] = {}

    def complete(self, program: Program, branches: dict[SimLane, SimLane]) -> None:
        self._program = program
        self._branches = branches

    def replay(self) -> None:
        program = self._program
        if program is None:
            raise HazardError("a graph is replayed whose capture did not end well; capture it again")
        device = self._device
        lanes = {program.origin: device.compute, **self._branches}
        events: dict[SimEvent, SimEvent] = {}
        for step in program.steps:
            lane = lanes[step.lane]
            if isinstance(step, RecordStep):
                events[step.event] = device.record(lane)
            elif isinstance(step, WaitStep):
                device.wait(lane, events[step.event], step.order)
            elif isinstance(step, AccessStep):
                device.replay_access(step, lane)
            elif isinstance(step, CopyStep):
                copy = ReplayedCopy(
                    lane,
                    step.nbytes,
                    step.destination,
                    step.at,
                    step.source,
                    step.start,
                    strict=device.strict,
                )
                copy.shadows = program.shadows
                device.replay_copy(copy)
            else:
                step.kernel()


class SimCaptures(ABC):
    """The simulated device's part in captures."""

    _lock: AbstractContextManager[Any]
    _checker: HazardChecker
    _lanes: SimLanes
    _program: Program | None  # of the capture under way
    _watcher: CaptureWatcher | None

    @property
    @abstractmethod
    def name(self) -> str: ...
    @property
    @abstractmethod
    def compute(self) -> SimLane: ...
    @abstractmethod
    def record(self, lane: Lane, *, timed: bool = False) -> SimEvent: ...
    @abstractmethod
    def wait(self, lane: Lane, event: Event, order: str) -> None: ...
    @abstractmethod
    def _enter(self, lane: Lane) -> SimLane: ...
    @abstractmethod
    def _access(
        self, lane: SimLane, tracked: TrackedBytes, start: int, end: int, verb: str, *, writing: bool
    ) -> None: ...
    @abstractmethod
    def _issue_copy(self, copy: Copy) -> None: ...

    @property
    def strict(self) -> bool:
        return self._checker.strict

    def is_capturing(self) -> bool:
        return self._program is not None and self._program.has(self.compute)

    @contextmanager
    def capture(self) -> Iterator[SimGraph]:
        """What is issued inside, on the calling thread's compute lane and on lanes that come to wait for it,
        becomes the graph.

        Raises HazardError at the end if a lane was not joined; the graph cannot be replayed then.
        """
        self._forbid_in_capture("another capture")
        graph, watcher, complete = SimGraph(self), self._watcher, False
        if watcher is not None:
            watcher.capture_begins(graph)
        program = self._program = Program(self.compute)
        try:
            try:
                yield graph
            finally:
                if watcher is not None:
                    watcher.capture_ends(graph)
            program.check_joined()
            graph.complete(program, {lane: self._lanes.new_branch(lane) for lane in program.branches()})
            complete = True
        finally:
            self._program = None
            if watcher is not None:
                watcher.capture_over(graph, complete)

    @contextmanager
    def watch_captures(self, watcher: CaptureWatcher) -> Iterator[None]:
        if self._watcher is not None:
            raise CaptureError(
                f"captures on {self.name} are watched already; close the open region before another is opened"
            )
        self._watcher = watcher
        try:
            yield
        finally:
            self._watcher = None

    def watch_replays(self, graph: Graph, before: Callable[[], None], after: Callable[[], None]) -> None:
        replace_replay(graph, before, after)

    def replay_access(self, step: AccessStep, lane: SimLane) -> None:
        with self._lock:
            self._access(
                self._enter(lane), step.tracked, step.start, step.end, step.verb, writing=step.writing
            )

    def replay_copy(self, copy: Copy) -> None:
        with self._lock:
            self._enter(copy.lane)
            copy.number = copy.lane.issued + 1
            self._issue_copy(copy)

    def _forbid_in_capture(self, what: str) -> None:
        if self._program is not None:
            raise HazardError(
                f"capture: {what} while a graph is captured, which ends the capture on a GPU; do it before "
                "or after"
            )

    def _check_event_of_capture(self, event: SimEvent, waiter: str) -> None:
        if event.program is not None and event.program is not self._program:
            raise HazardError(
                f"capture: {waiter} waits for {event}, which was recorded in a capture that is over: it "
                "never passes"
            )
