"""When queued copies run: as late as something needs them, at once, at random, or by the virtual clock.

One invariant: an item runs after the items before it in its lane and after the event that it waits for, under
every executor. A program whose events order all its accesses cannot tell the executors apart; one that lacks
an edge reads poison, or bytes of another time, under one of them.

A wait cycle cannot be written: an event is a point that was already issued, so a lane only ever waits for the
past. What can happen is that a lane never gets there, because a copy in it cannot run; then whoever needs it
is told of both.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from offload.device._sim_bytes import Span, TrackedBytes
from offload.device._sim_clock import Operation, SimEvent, SimLane
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
