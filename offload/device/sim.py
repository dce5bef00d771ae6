"""The simulated device: every ordering of the engine, proved on a machine without a GPU.

CPU tensors play device tensors and compute runs at once on the host; copies are queued and run as an executor
decides. Three instruments:

    checker     a vector clock a lane; two accesses of the same bytes that no event orders raise HazardError
                when the second is issued
    executor    "late": when something needs the copy. "early": at once. "random": by a seed, at any device
                call, and `compute` lags behind the host too. "clock": when the virtual clock says so.
                Destinations are poisoned until their copy has run
    clock       copies take bytes / rate, compute what the caller announces; what compute waits for a copy
                adds to the stall

One invariant: a program that raises nothing here, under any executor, has an event between any two
conflicting accesses that it declared.

What counts as order: lane order; `wait`; and for everything issued later, an event that the host saw pass
(`poll` returned True, or `synchronize`). Bytes go back to the allocator when `note_free` says so or their
storage dies, to the lane that they were allocated on: what other lanes do with them must be ordered before
that.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

import torch

from offload.device._sim_bytes import Operation, TrackedBytes, byte_range
from offload.device._sim_clock import SimEvent, SimLane, SimLanes, order_after
from offload.device._sim_graph import (
    AccessStep,
    CopyStep,
    LaunchStep,
    RecordStep,
    SimCaptures,
    SimGraph,
    WaitStep,
)
from offload.device._sim_hazards import HazardChecker
from offload.device._sim_memory import PlainMemory
from offload.device._sim_meters import SimMeters
from offload.device._sim_queue import POISON, Copy, Executor, ExecutorName, PendingWait, copied_bytes_of
from offload.device.base import CopyPair, Event, Lane
from offload.errors import HazardError

__all__ = ["POISON", "ExecutorName", "SimDevice", "SimEvent", "SimGraph", "SimLane"]


class SimDevice(SimCaptures, SimMeters):
    """A device of lanes, events and copies without a GPU. One lock: autograd may call from a thread of its
    own."""

    def __init__(
        self,
        *,
        executor: ExecutorName = "late",
        seed: int = 0,
        d2h_gb_s: float = 50.7,
        h2d_gb_s: float = 50.7,
        without: Collection[str] = (),
        poison: bool = True,
        check: bool = True,
    ) -> None:
        """d2h_gb_s, h2d_gb_s: GB of 1e9 bytes a second; an H200's, with both directions busy.

        without: titles of ordering edges to leave out: `wait(lane, event, order)` does nothing for them. A
            test removes an edge with it.
        check: False lets a program that lacks order run on, so that a test can look at the wrong bytes.
        """
        if executor not in get_args(ExecutorName):
            raise ValueError(f"unknown executor {executor!r}; known: {', '.join(get_args(ExecutorName))}")
        for name, rate in (("d2h_gb_s", d2h_gb_s), ("h2d_gb_s", h2d_gb_s)):
            if not rate > 0:
                raise ValueError(f"{name} is {rate}, and a rate must be above 0; leave it out for an H200's")
        if isinstance(without, str):
            raise ValueError(
                f"without is the string {without!r}, and must be a set of order titles; write {{{without!r}}}"
            )
        self._lock = threading.RLock()
        self._lanes = SimLanes(lags=executor == "random")
        self._executor = Executor(executor, seed, self._lanes.all)
        self._checker = HazardChecker(self._lanes.host, strict=check)
        self._poison = poison
        self._without = frozenset(without)
        self._waits: Counter[str] = Counter()
        self._d2h_bytes_per_s = d2h_gb_s * 1e9
        self._h2d_bytes_per_s = h2d_gb_s * 1e9
        self._of_thread = _OfThread()
        self._program = None
        self._watcher = None

    # -- lanes -----------------------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        return "sim"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def compute(self) -> SimLane:
        return self._of_thread.lane or self._lanes.compute

    @property
    def d2h(self) -> SimLane:
        return self._lanes.d2h

    @property
    def h2d(self) -> SimLane:
        return self._lanes.h2d

    @property
    def host(self) -> SimLane:
        """The host as a lane, to declare its own reads and writes of host memory with `note_read` and
        `note_write`."""
        return self._lanes.host

    def new_compute_lane(self, name: str) -> SimLane:
        """A further lane to compute on, unordered with `compute` until events say otherwise."""
        with self._lock:
            return self._lanes.new_compute(name)

    @property
    def near_cores(self) -> frozenset[int]:
        return frozenset(os.sched_getaffinity(0))

    @contextmanager
    def use_lane(self, lane: Lane) -> Iterator[None]:
        """The calling thread computes on `lane` inside."""
        chosen = self._lanes.own(lane)
        if not chosen.eager or chosen is self._lanes.host:
            raise ValueError(f"{chosen.name} is not a compute lane; make one with new_compute_lane(name)")
        before = self._of_thread.lane
        self._of_thread.lane = chosen
        try:
            yield
        finally:
            self._of_thread.lane = before

    # -- order -----------------------------------------------------------------------------------------------
    def record(self, lane: Lane, *, timed: bool = False) -> SimEvent:
        with self._lock:
            mine, program = self._enter(lane), self._program
            if timed:
                self._forbid_in_capture("a timed event")
            event = SimEvent(
                mine, timed=timed, program=program if program is not None and program.has(mine) else None
            )
            if program is not None:
                program.add(RecordStep(mine, event))
            return event

    def wait(self, lane: Lane, event: Event, order: str) -> None:
        with self._lock:
            mine = self._enter(lane)
            if mine is self._lanes.host:
                raise ValueError(
                    f"the host does not wait in a queue ({order!r}); call synchronize(event), which may "
                    "block it"
                )
            waiter = f"{mine.name} ({order!r})"
            point = self._lanes.reachable(event, waiter)
            self._waits[order] += 1
            if order in self._without:
                mine.left_out[order] = None
                return
            self._check_event_of_capture(point, waiter)
            if self._program is not None:
                self._program.wait(mine, point, order)
                self._program.add(WaitStep(mine, point, order))
            if mine.eager:
                self._executor.reach(point.lane, point.number, waiter)
                if not point.lane.eager:
                    self._stall_s += max(0.0, point.time_s - mine.time_s)
            order_after(mine, point)
            mine.edges[point.lane.index] = order
            mine.time_s = max(mine.time_s, point.time_s)
            # what comes later in this lane queues behind the wait
            if point.lane is not mine and point.lane.ran < point.number:
                mine.queue.append(PendingWait(mine.next_number(), point, mine.time_s))

    def poll(self, event: Event) -> bool:
        with self._lock:
            self._forbid_in_capture("a poll")
            self._enter(self._lanes.host)
            point = self._lanes.reachable(event, "poll")
            self._check_event_of_capture(point, "poll")
            if not self._executor.passed(point, self.compute.time_s):
                return False
            self._lanes.host_sees(point)
            return True

    def synchronize(self, event: Event) -> None:
        with self._lock:
            self._forbid_in_capture("a synchronize")
            self._enter(self._lanes.host)
            point = self._lanes.reachable(event, "synchronize")
            self._check_event_of_capture(point, "synchronize")
            self._executor.reach(point.lane, point.number, "synchronize")
            lane = self.compute  # has nothing to do while the host, which feeds it, is blocked
            self._blocked_s += max(0.0, point.time_s - lane.time_s)
            lane.time_s = max(lane.time_s, point.time_s)
            self._lanes.host_sees(point)

    def elapsed_ms(self, start: Event, end: Event) -> float:
        """Virtual time between two timed events that have passed, in milliseconds."""
        with self._lock:
            points = [self._lanes.reachable(event, "elapsed_ms") for event in (start, end)]
            for point in points:
                if not point.timed:
                    raise ValueError(f"{point} is not timed; record it with timed=True")
                if not self._executor.passed(point, self.compute.time_s):
                    raise HazardError(
                        f"{point} was asked for its time before {point.lane.name} got there; poll or "
                        "synchronize it first"
                    )
            return (points[1].time_s - points[0].time_s) * 1e3

    # -- bytes -----------------------------------------------------------------------------------------------
    def owns(self, tensor: torch.Tensor) -> bool:
        if (
            tensor.device.type != "cpu"
            or tensor.layout is not torch.strided
            or torch._is_functional_tensor(tensor)
        ):
            return False
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # functorch's wrappers have none
            return False
        # a fake tensor says cpu, and its storage says meta
        return storage.device.type == "cpu" and not self._checker.is_host(storage)

    def empty(self, nbytes: int) -> torch.Tensor:
        if nbytes < 0:
            raise ValueError(f"{nbytes:,} bytes of device memory were asked for; ask for 0 or more")
        with self._lock:
            lane = self._enter(self.compute)
            tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            tracked = self._checker.track(tensor.untyped_storage(), lane)
            self._checker.count(tracked)
            operation = Operation(lane, "empty", nbytes)
            self._checker.stamp(operation, tracked, 0, nbytes, writing=True)
            self._issue(operation)
            if self._program is not None:
                self._program.add(AccessStep(lane, tracked, 0, nbytes, "empty", True))
            return tensor

    def launch(self, kernel: Callable[[], None]) -> None:
        """Compute: call `kernel` now, and again in each replay of the capture under way."""
        with self._lock:
            lane = self._enter(self.compute)
            if self._program is not None:
                self._program.add(LaunchStep(lane, kernel))
        kernel()

    def copy(self, lane: Lane, pairs: Sequence[CopyPair]) -> None:
        with self._lock:
            mine = self._enter(lane)
            if mine is self._lanes.host:
                raise ValueError(
                    "the host is not a lane for copies; issue them to d2h, h2d or a compute lane"
                )
            if self._program is not None:
                self._program.copy(mine)
            for destination, source in pairs:
                self._copy(mine, destination, source)

    def host_memory(self, nbytes: int, registration_bytes: int) -> PlainMemory:
        with self._lock:
            self._forbid_in_capture(f"pinning {nbytes:,} bytes")
            memory = PlainMemory(nbytes, registration_bytes, self._release)
            for piece in memory.pieces:
                self._checker.track(piece.untyped_storage(), self._lanes.host, host=True)
            return memory

    @property
    def pins(self) -> bool:
        return False

    # -- declarations ----------------------------------------------------------------------------------------
    def note_write(self, lane: Lane, tensor: torch.Tensor) -> None:
        with self._lock:
            tracked = self._note(lane, tensor, "note_write", writing=True)
            if not tracked.host:
                self._checker.count(tracked)

    def note_read(self, lane: Lane, tensor: torch.Tensor) -> None:
        with self._lock:
            self._note(lane, tensor, "note_read", writing=False)

    def note_free(self, lane: Lane, tensor: torch.Tensor) -> None:
        with self._lock:
            mine = self._enter(lane)
            tracked, (start, end) = self._checker.locate(tensor, self.compute), byte_range(tensor)
            self._checker.check_free(mine, tracked, start, end, f"{mine.name} frees them")
            if end - start >= tracked.nbytes:
                self._checker.uncount(tracked)

    def name_bytes(self, tensor: torch.Tensor, label: str) -> None:
        """Errors call the tensor's bytes `label` from now on."""
        with self._lock:
            self._enter(self._lanes.host)
            self._checker.locate(tensor, self.compute).name(*byte_range(tensor), label)

    # -- inside: called with the lock held -------------------------------------------------------------------
    def _enter(self, lane: Lane) -> SimLane:
        """First in every call: storages that died since the last one, queued copies that run by now, what the
        host has seen by now."""
        mine = self._lanes.own(lane)
        self._checker.bury()
        now_s = self.compute.time_s
        self._executor.progress(now_s)
        if not mine.eager and mine.time_s < now_s:  # nothing starts before it is issued
            mine.time_s = now_s
        self._lanes.catch_up(mine)
        return mine

    def _issue(self, operation: Operation) -> None:
        lane = operation.lane
        lane.next_number()
        if lane is self._lanes.host:
            lane.host_version += 1
        operation.end_s = lane.time_s
        self._executor.submit(operation)

    def _release(self, pieces: Sequence[torch.Tensor]) -> None:
        with self._lock:
            self._forbid_in_capture("unpinning")
            self._enter(self._lanes.host)
            self._checker.release(pieces)

    def _note(self, lane: Lane, tensor: torch.Tensor, verb: str, *, writing: bool) -> TrackedBytes:
        mine = self._enter(lane)
        tracked, (start, end) = self._checker.locate(tensor, self.compute), byte_range(tensor)
        self._access(mine, tracked, start, end, verb, writing=writing)
        if self._program is not None:
            self._program.add(AccessStep(mine, tracked, start, end, verb, writing))
        return tracked

    def _access(
        self, lane: SimLane, tracked: TrackedBytes, start: int, end: int, verb: str, *, writing: bool
    ) -> None:
        operation = Operation(lane, verb, end - start)
        self._checker.check(operation, tracked, start, end, writing=writing)
        self._checker.stamp(operation, tracked, start, end, writing=writing)
        self._issue(operation)

    def _copy(self, lane: SimLane, destination: torch.Tensor, source: torch.Tensor) -> None:
        nbytes = copied_bytes_of(destination, source)
        to, at = self._checker.locate(destination, self.compute), int(destination.storage_offset())
        from_, start = self._checker.locate(source, self.compute), int(source.storage_offset())
        if self._program is not None:
            self._program.add(CopyStep(lane, to, at, from_, start, nbytes))
        self._issue_copy(Copy(lane, nbytes, to, at, from_, start, strict=self._checker.strict))

    def _issue_copy(self, copy: Copy) -> None:
        lane, nbytes = copy.lane, copy.nbytes
        sides = [(copy.source, copy.source_start, False), (copy.destination, copy.destination_start, True)]
        for tracked, start, writing in sides:
            self._checker.check(copy, tracked, start, start + nbytes, writing=writing)
        if self._poison:
            self._executor.poison(copy)
        seconds = nbytes / (self._d2h_bytes_per_s if copy.destination.host else self._h2d_bytes_per_s)
        lane.time_s += seconds
        lane.busy_s += seconds
        lane.copies += 1
        lane.copied_bytes += nbytes
        for tracked, start, writing in sides:
            self._checker.stamp(copy, tracked, start, start + nbytes, writing=writing)
        self._issue(copy)


class _OfThread(threading.local):
    """What one host thread has chosen."""

    lane: SimLane | None = None
