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

from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.device._sim_bytes import Span, TrackedBytes
from offload.device._sim_clock import SimEvent, SimLane, SimLanes
from offload.errors import HazardError


class SimGraph:
    """A captured program. `replay` issues it again, on the calling thread's compute lane and on branches of
    its own."""

    def __init__(self, device: SimLanes, issue: Callable[..., Any]) -> None:
        """issue: how the device issues a step, now and in a capture: issue(lane, what, *arguments)."""
        self.capture = object()  # names the capture in its events: they must not keep the graph alive
        # by what died: a graph's pool keeps its addresses
        self.shadows: dict[TrackedBytes, torch.UntypedStorage] = {}
        self._device = device
        self._issue = issue
        self._origin = device.compute
        self._lanes = {self._origin: "begin"}  # with the order of the wait that brought each in
        # lane, what issues the step, its arguments, and what that returned: an event if the step records one
        self._steps: list[tuple[SimLane, Callable[..., Any], tuple[Any, ...], Any]] = []
        self._branches: dict[SimLane, SimLane] | None = None  # of a capture that ended well

    def has(self, lane: SimLane) -> bool:
        return lane in self._lanes

    # -- the capture -----------------------------------------------------------------------------------------
    def wait(self, lane: SimLane, event: SimEvent, order: str) -> None:
        """A wait is about to be issued: one for an event of the capture makes `lane` part of it."""
        if event.capture is self.capture:
            self._lanes.setdefault(lane, order)
        elif self.has(lane):
            raise HazardError(
                f"capture: {lane.name} waits ({order!r}) for {event}, which was recorded outside of the "
                f"capture that {lane.name} is part "
                "of; synchronize before the capture begins, and wait for nothing of before in it"
            )

    def copy(self, lane: SimLane, sides: Sequence[Span]) -> None:
        """A copy is about to be issued."""
        if not self.has(lane):
            raise HazardError(
                f"capture: a copy on {lane.name}, which is no part of the capture, would run once and in no "
                f"replay; let {lane.name} wait "
                f"for an event of {self._origin.name} first"
            )
        for tracked, _, _ in sides:
            storage = tracked.storage()
            if not tracked.host and storage is not None:
                self.shadows[tracked] = storage.clone()

    def add(
        self, lane: SimLane, issue: Callable[..., Any], arguments: tuple[Any, ...], result: object
    ) -> None:
        """A step was issued."""
        if self.has(lane):
            self._steps.append((lane, issue, arguments, result))

    def end(self) -> None:
        """The capture ends well, if every lane is joined: the graph can be replayed."""
        for lane, order in self._lanes.items():
            done = self._origin.clock[lane.index]
            if done < lane.issued:
                raise HazardError(
                    f"capture: {lane.name}, part of it since it waited ({order!r}), is not joined: "
                    f"{self._origin.name} comes after "
                    f"operation {done} of {lane.name}, not after {lane.issued}. Record an event on "
                    f"{lane.name} and let {self._origin.name} "
                    f"wait for it{self._origin.say_left_out()}"
                )
        self._branches = {
            lane: self._device.add_lane(f"a graph's {lane.name}", eager=lane.eager)
            for lane in self._lanes
            if lane is not self._origin
        }

    # -- replays ---------------------------------------------------------------------------------------------
    def replay(self) -> None:
        if self._branches is None:
            raise HazardError("a graph is replayed whose capture did not end well; capture it again")
        lanes = {self._origin: self._device.compute, **self._branches}
        events: dict[SimEvent, SimEvent] = {}
        for lane, issue, arguments, result in self._steps:
            now = [events.get(each, each) if isinstance(each, SimEvent) else each for each in arguments]
            again = self._issue(lanes[lane], issue, *now)
            if isinstance(result, SimEvent):
                events[result] = again
