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
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, get_args

import torch

from offload.device._sim_bytes import HazardChecker, PlainMemory, Span, TrackedBytes
from offload.device._sim_clock import Operation, SimEvent, SimLane, SimLanes
from offload.device._sim_queue import POISON, Copy, Executor, ExecutorName, SimGraph, check_pair
from offload.device.base import CaptureWatcher, CopyPair, Event, Lane, replace_replay
from offload.errors import CaptureError, HazardError

__all__ = ["POISON", "ExecutorName", "SimDevice", "SimEvent", "SimGraph", "SimLane"]

T = TypeVar("T")


class SimDevice(SimLanes):
    """A device of lanes, events and copies without a GPU. One lock: autograd may call from a thread of its
    own."""

    name = "sim"
    torch_device = torch.device("cpu")
    pins = False

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
        super().__init__(lags=executor == "random")
        self._executor = Executor(executor, seed, self.all_lanes)
        self._checker = HazardChecker(self.host, strict=check)
        self._poison = poison
        self._without = frozenset(without)
        self._d2h_bytes_per_s = d2h_gb_s * 1e9
        self._h2d_bytes_per_s = h2d_gb_s * 1e9
        self._graph: SimGraph | None = None  # whose capture is under way
        self._graphs: weakref.WeakSet[SimGraph] = weakref.WeakSet()
        self._watcher: CaptureWatcher | None = None

    @property
    def near_cores(self) -> frozenset[int]:
        return frozenset(os.sched_getaffinity(0))

    # -- order -----------------------------------------------------------------------------------------------
    def record(self, lane: Lane, *, timed: bool = False) -> SimEvent:
        if timed:
            self._forbid_in_capture("a timed event")
        return self._do(lane, self._record, timed)

    def wait(self, lane: Lane, event: Event, order: str) -> None:
        self._do(lane, self._wait, event, order)

    def poll(self, event: Event) -> bool:
        with self._lock:
            point = self._asked_by_host(event, "poll")
            if not self._executor.passed(point, self.now_s):
                return False
            self._host_sees(point)
            return True

    def synchronize(self, event: Event) -> None:
        with self._lock:
            point = self._asked_by_host(event, "synchronize")
            self._executor.reach(point.lane, point.number, "synchronize")
            lane = self.compute  # has nothing to do while the host, which feeds it, is blocked
            self.blocked_s += max(0.0, point.time_s - lane.time_s)
            lane.time_s = max(lane.time_s, point.time_s)
            self._host_sees(point)

    def elapsed_ms(self, start: Event, end: Event) -> float:
        """Virtual time between two timed events that have passed, in milliseconds."""
        with self._lock:
            points = [self._reachable(event, "elapsed_ms") for event in (start, end)]
            for point in points:
                if not point.timed:
                    raise ValueError(f"{point} is not timed; record it with timed=True")
                if not self._executor.passed(point, self.now_s):
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
            tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            tracked = self._checker.track(tensor.untyped_storage(), self.compute)
            tracked.active = True
            self._do(self.compute, self._access, tracked.whole, "empty", True)
            return tensor

    def free(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            self._enter(self.compute)
            self._checker.free(storage, self.compute)
            storage.resize_(0)

    def refill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        with self._lock:
            self._forbid_in_capture(f"an allocation of {nbytes:,} bytes for a storage")
            storage.resize_(nbytes)
            tracked = self._checker.refill(storage, self.compute)
            if self._poison:
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(POISON)
            self._do(self.compute, self._access, tracked.whole, "empty", True)

    def launch(self, kernel: Callable[[], None]) -> None:
        """Compute: call `kernel` now, and again in each replay of the capture under way."""
        self._do(self.compute, lambda lane: kernel())

    def compute_for(self, seconds: float) -> None:
        """The calling thread's compute lane is busy for `seconds` of virtual time."""
        if not seconds >= 0:
            raise ValueError(f"compute of {seconds} seconds was announced; announce 0 or more")
        with self._lock:
            lane = self.compute
            lane.time_s += seconds
            lane.busy_s += seconds
            self._enter(lane)

    def copy(self, lane: Lane, pairs: Sequence[CopyPair]) -> None:
        with self._lock:
            mine, graph = self._own(lane), self._graph
            if mine is self.host:
                raise ValueError(
                    "the host is not a lane for copies; issue them to d2h, h2d or a compute lane"
                )
            for destination, source in pairs:
                check_pair(destination, source)
                sides = [self._checker.locate(side, self.compute) for side in (destination, source)]
                if graph is not None:
                    graph.copy(mine, sides)
                self._do(mine, self._copy, *sides, {} if graph is None else graph.shadows)

    def host_memory(self, nbytes: int, registration_bytes: int) -> PlainMemory:
        with self._lock:
            self._forbid_in_capture(f"pinning {nbytes:,} bytes")
            memory = PlainMemory(nbytes, registration_bytes, self._release)
            for piece in memory.pieces:
                self._checker.track(piece.untyped_storage(), self.host, host=True)
            return memory

    def active_bytes(self) -> int:
        """Bytes of living storages that came from `empty` or were declared by `note_write`, and not freed
        whole by `note_free`."""
        with self._lock:
            self._enter(self.host)
            return self._checker.active_bytes

    def allocator_bytes(self) -> None:
        """None: nothing is reserved that is not in use."""

    def reset_allocator_peak(self) -> None:
        """Nothing: there is no allocator."""

    def free_bytes(self) -> int | None:
        """None: there is no limit."""
        return None

    def release_cached(self, worth: int, *, of_peak: bool = True) -> int:
        """Nothing: what is let go of here is gone."""
        return 0

    # -- declarations ----------------------------------------------------------------------------------------
    def note_write(self, lane: Lane, tensor: torch.Tensor) -> None:
        self._note(lane, tensor, "note_write", True)

    def note_read(self, lane: Lane, tensor: torch.Tensor) -> None:
        self._note(lane, tensor, "note_read", False)

    def note_free(self, lane: Lane, tensor: torch.Tensor) -> None:
        with self._lock:
            mine = self._enter(lane)
            freed = self._checker.locate(tensor, self.compute)
            self._checker.check_free(mine, freed, f"{mine.name} frees them")
            if freed.end - freed.start >= freed.tracked.nbytes:
                freed.tracked.active = False

    # -- graphs ----------------------------------------------------------------------------------------------
    def is_capturing(self) -> bool:
        return self._graph is not None and self._graph.has(self.compute)

    @contextmanager
    def capture(self) -> Iterator[SimGraph]:
        """Capture into a graph what is issued inside, on the calling thread's compute lane and on lanes that
        come to wait for it.

        Raises HazardError at the end if a lane was not joined; the graph cannot be replayed then.
        """
        self._forbid_in_capture("another capture")
        graph, watcher, complete = SimGraph(self, self._do), self._watcher, False
        if watcher is not None:
            watcher.capture_begins(graph)
        self._graph = graph
        self._graphs.add(graph)
        try:
            try:
                yield graph
            finally:
                if watcher is not None:
                    watcher.capture_ends(graph)
            graph.end()
            complete = True
        finally:
            self._graph = None
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

    watch_replays = staticmethod(replace_replay)

    def has_live_graphs(self) -> bool:
        return bool(self._graphs)

    def _forbid_in_capture(self, what: str) -> None:
        if self._graph is not None:
            raise HazardError(
                f"capture: {what} while a graph is captured, which ends the capture on a GPU; do it before "
                "or after"
            )

    def _check_event_of_capture(self, event: SimEvent, waiter: str) -> None:
        if event.capture is not None and (self._graph is None or event.capture is not self._graph.capture):
            raise HazardError(
                f"capture: {waiter} waits for {event}, which was recorded in a capture that is over: it "
                "never passes"
            )

    # -- inside: called with the lock held -------------------------------------------------------------------
    def _enter(self, lane: Lane) -> SimLane:
        """First in every call: storages that died since the last one, queued copies that run by now, what the
        host has seen by now."""
        mine = self._own(lane)
        self._checker.bury()
        now_s = self.now_s
        self._executor.progress(now_s)
        if not mine.eager and mine.time_s < now_s:  # nothing starts before it is issued
            mine.time_s = now_s
        if mine.host_version != self.host.host_version:  # it comes after what the host has seen and done
            mine.order_after(self.host.clock)
            mine.host_version = self.host.host_version
        return mine

    def _do(self, lane: Lane, issue: Callable[..., T], *arguments: Any) -> T:
        """Issue a step with issue(lane, *arguments), and note it in the capture under way."""
        with self._lock:
            mine = self._enter(lane)
            result = issue(mine, *arguments)
            if self._graph is not None:
                self._graph.add(mine, issue, arguments, result)
            return result

    def _asked_by_host(self, event: Event, verb: str) -> SimEvent:
        self._forbid_in_capture(f"a {verb}")
        self._enter(self.host)
        point = self._reachable(event, verb)
        self._check_event_of_capture(point, verb)
        return point

    def _release(self, pieces: Sequence[torch.Tensor]) -> None:
        with self._lock:
            self._forbid_in_capture("unpinning")
            self._enter(self.host)
            self._checker.release(pieces)

    def _note(self, lane: Lane, tensor: torch.Tensor, verb: str, writing: bool) -> None:
        with self._lock:
            span = self._checker.locate(tensor, self.compute)
            self._do(lane, self._access, span, verb, writing)
            if writing and not span.tracked.host:
                span.tracked.active = True

    # -- inside: steps ---------------------------------------------------------------------------------------
    def _record(self, lane: SimLane, timed: bool) -> SimEvent:
        graph = self._graph
        capture = graph.capture if graph is not None and graph.has(lane) else None
        return SimEvent(lane, lane.issued, tuple(lane.clock), lane.time_s, timed, capture)

    def _wait(self, lane: SimLane, event: Event, order: str) -> None:
        if lane is self.host:
            raise ValueError(
                f"the host does not wait in a queue ({order!r}); call synchronize(event), which may block it"
            )
        waiter = f"{lane.name} ({order!r})"
        point = self._reachable(event, waiter)
        self.waits[order] += 1
        if order in self._without:
            lane.left_out[order] = None
            return
        self._check_event_of_capture(point, waiter)
        if self._graph is not None:
            self._graph.wait(lane, point, order)
        if lane.eager:
            self._executor.reach(point.lane, point.number, waiter)
            if not point.lane.eager:
                self.stall_s += max(0.0, point.time_s - lane.time_s)
        lane.order_after(point.clock)
        lane.edges[point.lane.index] = order
        lane.time_s = max(lane.time_s, point.time_s)
        # what comes later in this lane queues behind the wait
        if point.lane is not lane and point.lane.ran < point.number:
            self._issue(Operation(lane, "wait", 0, after=point))

    def _access(self, lane: SimLane, span: Span, verb: str, writing: bool) -> None:
        operation = Operation(lane, verb, span.end - span.start)
        self._checker.check(operation, span, writing=writing)
        self._checker.stamp(operation, span, writing=writing)
        self._issue(operation)

    def _copy(
        self,
        lane: SimLane,
        destination: Span,
        source: Span,
        shadows: Mapping[TrackedBytes, torch.UntypedStorage],
    ) -> None:
        copy = Copy(lane, destination, source, shadows, strict=self._checker.strict)
        self._checker.check(copy, source, writing=False)
        self._checker.check(copy, destination, writing=True)
        if self._poison:
            self._executor.poison(copy)
        rate = self._d2h_bytes_per_s if destination.tracked.host else self._h2d_bytes_per_s
        lane.time_s += copy.nbytes / rate
        lane.busy_s += copy.nbytes / rate
        lane.copies += 1
        lane.copied_bytes += copy.nbytes
        self._checker.stamp(copy, source, writing=False)
        self._checker.stamp(copy, destination, writing=True)
        self._issue(copy)

    def _issue(self, operation: Operation) -> None:
        lane = operation.lane
        lane.clock[lane.index] = operation.number
        if lane is self.host:
            lane.host_version += 1
        operation.end_s = lane.time_s
        self._executor.submit(operation)
