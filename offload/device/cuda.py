"""The CUDA device: streams as lanes, their events, and copies between them.

One invariant: nothing here can block the host but `synchronize`, `host_memory`, a copy from unpinned memory,
and the end of host memory that was dropped without being released. While a watched capture is under way, the
calls that would end it with a CUDA error raise CaptureError instead, before they reach CUDA.

torch's CUDA sanitizer is told of this engine what it has to be told, and spared what would mislead it. It is
on where its module is loaded (TORCH_CUDA_SANITIZER=1, or torch.cuda._sanitizer.enable_cuda_sanitizer()), and
ends a program at the first pair of accesses that it finds unordered. With it off nothing costs more than a
look-up.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch

from offload.device._cuda_memory import PinnedMemory
from offload.device.base import (
    CaptureWatcher,
    CopyPair,
    Event,
    Graph,
    Lane,
    replace_replay,
    replaced_captures,
)
from offload.errors import CaptureError


def sanitizing() -> bool:
    return "torch.cuda._sanitizer" in sys.modules


def polled(passed: bool, synchronize: Callable[[], None]) -> bool:
    """`passed`, the answer to a poll. The sanitizer sees no query of an event, so that a wait that is left
    out because its event had passed looks like a race to it; it does see a synchronisation, which for an
    event that has passed blocks nobody."""
    if passed and sanitizing():
        synchronize()
    return passed


class CudaLane:
    """A stream and its role. place: (stream id, device index, device type), by which torch makes a stream the
    current one."""

    __slots__ = ("name", "place", "stream")

    def __init__(self, name: str, stream: torch.cuda.Stream) -> None:
        self.name = name
        self.stream = stream
        self.place = (stream.stream_id, stream.device_index, stream.device_type)

    def __repr__(self) -> str:
        return f"CudaLane({self.name}, stream {self.stream.cuda_stream:#x})"


class _HostLane:
    """Only a name: what the host does is not queued."""

    name = "host"


def usable_bytes(device: torch.device | None = None) -> int:
    """Bytes of a GPU's memory that the process has, or may have. device: None for the current one."""
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return min(free + torch.cuda.memory_reserved(device), int(share * total))


class _CudaEvent:
    """A CUDA event on loan: with the last reference to it, it goes back to the events that wait to be
    recorded anew.

    Safe because a wait refers to the record that was current when it was issued, never to a later one
    (CUDA runtime API, cudaStreamWaitEvent), and because nobody is left who could ask for the old point. An
    event may be recorded in a capture, then outside of one, and again: each record replaces the last (run on
    an H200, torch 2.11, CUDA 13.0).
    """

    __slots__ = ("_free", "event")

    def __init__(self, event: torch.cuda.Event, free: list[torch.cuda.Event]) -> None:
        self.event = event
        self._free = free

    def __del__(self) -> None:
        with suppress(AttributeError):  # an interrupt in its constructor
            self._free.append(self.event)


def _make_current(place: tuple[int, ...]) -> None:
    stream_id, device_index, device_type = place
    torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def cores_in(text: str) -> frozenset[int]:
    """The cores of a list as Linux writes it: `0-3,8`. Empty for an empty one."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def pci_address(device: torch.device) -> str:
    """PCI address as /sys writes it: `0000:1a:00.0`."""
    about: Any = torch.cuda.get_device_properties(device)
    return f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"


def _a_graph_is_reached() -> bool:
    return any(torch.cuda.CUDAGraph in kind.__mro__ for kind in set(map(type, gc.get_objects())))


class CudaDevice:
    """One GPU. Lanes: the calling thread's current stream, and one stream for each direction of copies."""

    pins = True

    def __init__(self, device: torch.device | None = None) -> None:
        chosen = device if device is not None else torch.device("cuda")
        index = chosen.index if chosen.index is not None else torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)
        self.name = str(self.torch_device)
        self.d2h = CudaLane("d2h", torch.cuda.Stream(self.torch_device))
        self.h2d = CudaLane("h2d", torch.cuda.Stream(self.torch_device))
        self.host: Lane = _HostLane()
        self._index = index
        self._compute_lanes: dict[int, CudaLane] = {}
        # by whether they are timed
        self._free_events: dict[bool, list[torch.cuda.Event]] = {False: [], True: []}
        self._watched = False
        self._captures: list[Graph] = []  # watched and under way

    @property
    def compute(self) -> CudaLane:
        # asked many times a saved tensor: what torch.cuda.current_stream asks, without building a Stream each
        # time
        stream_id = torch._C._cuda_getCurrentStream(self._index)[0]
        lane = self._compute_lanes.get(stream_id)
        if lane is None:
            lane = self._compute_lanes[stream_id] = CudaLane(
                "compute", torch.cuda.current_stream(self.torch_device)
            )
        return lane

    def new_compute_lane(self, name: str) -> CudaLane:
        lane = CudaLane(name, torch.cuda.Stream(self.torch_device))
        self._compute_lanes[lane.stream.stream_id] = lane
        return lane

    def new_copy_lane(self, name: str) -> CudaLane:
        return CudaLane(name, torch.cuda.Stream(self.torch_device))

    def use_lane(self, lane: Lane) -> AbstractContextManager[None]:
        return torch.cuda.stream(cast(CudaLane, lane).stream)

    @property
    def near_cores(self) -> frozenset[int]:
        allowed = frozenset(os.sched_getaffinity(0))
        with suppress(OSError):  # a container without that part of /sys
            folder = Path("/sys/bus/pci/devices") / pci_address(self.torch_device)
            return cores_in((folder / "local_cpulist").read_text()) & allowed or allowed
        return allowed

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.torch_device

    # -- order -----------------------------------------------------------------------------------------------
    # Asked a dozen times a tensor: lanes and events are taken for this device's own without `cast`, which is
    # a call.
    def record(self, lane: Lane, *, timed: bool = False) -> Event:
        if timed:
            self._refuse_in_capture("a timed event")
        free = self._free_events[timed]
        try:
            event = free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=timed)
        event.record(lane.stream)  # type: ignore[attr-defined]
        return _CudaEvent(event, free)

    def wait(self, lane: Lane, event: Event, order: str) -> None:
        lane.stream.wait_event(event.event)  # type: ignore[attr-defined]

    def poll(self, event: Event) -> bool:
        if self._captures:
            self._refuse_in_capture("a poll")
        asked: torch.cuda.Event = event.event  # type: ignore[attr-defined]
        passed: bool = asked.query()
        return passed and polled(passed, asked.synchronize)

    def synchronize(self, event: Event) -> None:
        self._refuse_in_capture("a synchronize")
        cast(_CudaEvent, event).event.synchronize()

    def elapsed_ms(self, start: Event, end: Event) -> float:
        return float(cast(_CudaEvent, start).event.elapsed_time(cast(_CudaEvent, end).event))

    # -- bytes -----------------------------------------------------------------------------------------------
    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def free(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(0)

    def refill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self._refuse_in_capture(f"an allocation of {nbytes:,} bytes for a storage")
        storage.resize_(nbytes)

    def copy(self, lane: Lane, pairs: Sequence[CopyPair]) -> None:
        # what torch.cuda.set_stream calls: the context manager costs 8.9 microseconds, more than the copy it
        # wraps (H200 host)
        current_device = torch._C._cuda_getDevice()
        before = torch._C._cuda_getCurrentStream(self._index)
        _make_current(cast(CudaLane, lane).place)
        try:
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        finally:
            _make_current(before)
            if current_device != self._index:  # a stream that becomes the current one takes its device along
                torch._C._cuda_setDevice(current_device)

    def host_memory(self, nbytes: int, registration_bytes: int) -> PinnedMemory:
        self._refuse_in_capture(f"pinning {nbytes:,} bytes")
        return PinnedMemory(nbytes, registration_bytes)

    # -- declarations: only the simulated device checks them -------------------------------------------------
    def note_write(self, lane: Lane, tensor: torch.Tensor) -> None:
        return

    note_read = note_free = note_write

    # -- graphs ----------------------------------------------------------------------------------------------
    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def watch_captures(self, watcher: CaptureWatcher) -> Iterator[None]:
        if self._watched:
            raise CaptureError(
                f"captures on {self.name} are watched already; close the open region before another is opened"
            )
        self._watched = True
        try:
            with replaced_captures(
                watcher, self._captures, lambda: torch.cuda.current_device() == self._index
            ):
                yield
        finally:
            self._watched = False

    watch_replays = staticmethod(replace_replay)

    def _refuse_in_capture(self, what: str) -> None:
        if self._captures:
            raise CaptureError(
                f"{what} on {self.name} while a CUDA graph is captured, which would end the capture; do it "
                "before or after"
            )

    def has_live_graphs(self) -> bool:
        if _a_graph_is_reached():
            gc.collect()  # one in a circle that nobody holds is dead
            return _a_graph_is_reached()
        # gc.freeze() hides objects; the pools of graphs are seen
        return gc.get_freeze_count() > 0 and any(
            any(each["segment_pool_id"]) for each in torch.cuda.memory_snapshot()
        )

    # -- state -----------------------------------------------------------------------------------------------
    def active_bytes(self) -> int:
        # what torch.cuda.memory_allocated asks, without making one flat table of all counts first
        counts = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        return int(counts["allocated_bytes"]["all"]["current"]) if counts else 0

    def allocator_bytes(self) -> tuple[int, int]:
        stats = torch.cuda.memory_stats(self.torch_device)
        return int(stats["reserved_bytes.all.current"]), int(stats["active_bytes.all.peak"])

    def reset_allocator_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def free_bytes(self) -> int:
        return usable_bytes(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)

    def release_cached(self, worth: int, *, of_peak: bool = True) -> int:
        self._refuse_in_capture("a release of cached memory")
        reserved, active_peak = self.allocator_bytes()
        live = active_peak if of_peak else self.active_bytes()
        if (reserved - live) * worth < reserved:
            return 0
        torch.cuda.empty_cache()
        return reserved - torch.cuda.memory_reserved(self.torch_device)
