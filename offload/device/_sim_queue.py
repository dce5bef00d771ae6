"""When work of the simulated device runs: queued copies as late as something needs them, at once, at random,
or by the virtual clock; and the steps of a captured graph once more at each replay.

One invariant: an item runs after the items before it in its lane and after the event that it waits for, under
every executor. A program whose events order all its accesses cannot tell the executors apart; one that lacks
an edge reads poison, or bytes of another time, under one of them.

A wait cycle cannot be written: an event is a point that was already issued, so a lane only ever waits for the
past. What can happen is that a lane never gets there, because a copy in it cannot run; then whoever needs it
is told of both.

Compute on the CPU cannot be held back, so a captured program also runs once while it is captured, under the
checker like any other. Its steps are kept, and `replay` issues them again: copies and declarations to the
same bytes, kernels given to `launch` called again. What else compute did at the capture is not repeated:
sources whose storage is gone give the bytes that they had then.

A rule of CUDA's captures that is broken here raises HazardError at the call that breaks it.
The rules: nothing is polled, synchronized, timed or pinned; a lane of the capture waits for events of the
capture only, and nobody else waits for those; lanes that waited for one are part of it, and joined before it
ends. A copy on a lane that is not part of it would run once, now: that is refused too.

A graph's branches run on lanes of its own, ordered with nothing but by the events of the program: what holds
on the device's own copy lanes by the order of issue does not hold between a replay and anything else.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from offload.device._sim_bytes import Span, TrackedBytes
from offload.device._sim_clock import Operation, SimEvent, SimLane, SimLanes
from offload.errors import HazardError

ExecutorName = Literal["late", "early", "random", "clock"]

POISON = 0xCB
"""Fills a copy's destination until the copy has run: a negative number, around -4e7 in float32 and
bfloat16."""


class Copy(Operation):
    """One copy, from issue until it ran. Holds neither side: keeping them alive is the caller's promise."""

    __slots__ = ("destination", "shadows", "source", "strict")

    def __init__(
        self,
        lane: SimLane,
        destination: Span,
        source: Span,
        shadows: Mapping[TrackedBytes, torch.UntypedStorage],
        *,
        strict: bool,
    ) -> None:
        """shadows: what a graph's own memory has instead of storages that are dead.

        strict: a side that is dead when the copy runs is an error, else the copy is left out."""
        super().__init__(lane, "copy", source.end - source.start)
        self.destination = destination
        self.source = source
        self.shadows = shadows
        self.strict = strict

    def __str__(self) -> str:
        return f"{super().__str__()} from {self.source} to {self.destination}"

    def storage_of(self, side: Span) -> torch.UntypedStorage | None:
        """The storage of one side, if the bytes are still there."""
        storage = side.tracked.storage()
        if storage is None:
            storage = self.shadows.get(side.tracked)
        return None if storage is None or storage.nbytes() < side.end else storage

    def run(self) -> None:
        source, destination = self.storage_of(self.source), self.storage_of(self.destination)
        if source is not None and destination is not None:
            # memmove rather than copy_: what a DMA engine does; no dispatch mode of the calling thread sees
            # it, no version counter moves
            ctypes.memmove(
                destination.data_ptr() + self.destination.start,
                source.data_ptr() + self.source.start,
                self.nbytes,
            )
        elif self.strict:
            side = "source" if source is None else "destination"
            raise HazardError(
                f"{side} freed before the copy ran: {self}. Hold both sides until an event recorded after it "
                "has passed"
            )


class Executor:
    """Runs what the lanes have queued, in an order that the events allow."""

    def __init__(self, name: ExecutorName, seed: int, lanes: Sequence[SimLane]) -> None:
        self.name = name
        self._random = random.Random(seed)
        self._lanes = lanes

    def submit(self, operation: Operation) -> None:
        """Take an operation that its lane has just numbered."""
        lane = operation.lane
        if lane.eager:
            operation.run()
        else:
            lane.queue.append(operation)
        if self.name == "early":
            self.reach(lane, operation.number, lane.name)

    def poison(self, copy: Copy) -> None:
        """Spoil the destination of a copy about to be issued, so that whoever reads it too early gets neither
        old nor new bytes.

        What touched the destination before, and is ordered before the copy, runs first: that is legal now,
        and poison would reach it. Without an event between nothing protects it.
        """
        tracked, start, end = copy.destination
        destination = copy.storage_of(copy.destination)
        if self.name == "early" or copy.lane.eager or destination is None:
            return
        for earlier, _ in tracked.conflicts(start, end, writing=True):
            if earlier.lane.ran < earlier.number <= copy.lane.clock[earlier.lane.index]:
                self.reach(earlier.lane, earlier.number, f"a copy on {copy.lane.name}")
        ctypes.memset(destination.data_ptr() + start, POISON, copy.nbytes)

    def passed(self, event: SimEvent, now_s: float) -> bool:
        return event.lane.ran >= event.number and (self.name != "clock" or event.time_s <= now_s)

    def reach(self, lane: SimLane, number: int, waiter: str) -> None:
        """Run `lane` up to operation `number`, and whatever that waits for. waiter: who needs it, for
        errors."""
        stack = [(lane, number)]
        while stack:
            lane, number = stack[-1]
            if lane.eager:
                lane.ran = max(lane.ran, number)
            if lane.ran >= number:
                stack.pop()
                continue
            item = lane.queue[0]
            if (event := item.after) is not None and event.lane.ran < event.number:
                stack.append((event.lane, event.number))
                continue
            try:
                item.run()
            except HazardError as error:
                raise HazardError(
                    f"{waiter} needs operation {number} of {lane.name}, which can never be reached: {error}"
                ) from error
            lane.queue.popleft()
            lane.ran = item.number

    def progress(self, now_s: float) -> None:
        """Give the lanes a chance to move, as every device call does."""
        if self.name == "clock":
            for lane in self._lanes:
                while lane.queue and lane.queue[0].end_s <= now_s:
                    self.reach(lane, lane.queue[0].number, "the virtual clock")
        elif self.name == "random" and self._random.random() < 0.5:
            lane = self._random.choice(self._lanes)
            if lane.queue:
                self.reach(lane, self._random.choice(lane.queue).number, "a random step")
            elif lane.ran < lane.issued:
                lane.ran = self._random.randint(int(lane.ran), lane.issued)


def check_pair(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Raise ValueError unless the two can be one copy."""
    for side in (destination, source):
        if (
            side.dtype is not torch.uint8
            or side.dim() != 1
            or side.numel() != destination.numel()
            or not side.is_contiguous()
        ):
            raise ValueError(
                f"a copy takes two contiguous 1-D uint8 tensors of equal length, not {destination.dtype} "
                f"{tuple(destination.shape)} "
                f"from {source.dtype} {tuple(source.shape)}; pass views of the bytes"
            )


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
