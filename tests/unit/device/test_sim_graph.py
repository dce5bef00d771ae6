"""Captures and graphs of the simulated device: CUDA's rules, and replays that move bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

from offload.device import CaptureWatcher, Graph
from offload.device.sim import ExecutorName, SimDevice, SimEvent, SimGraph
from offload.errors import CaptureError, HazardError

NBYTES = 1024


class Bench:
    """A device source and destination, and a host block."""

    def __init__(self, device: SimDevice) -> None:
        self.device = device
        self.source, self.home = device.empty(NBYTES), device.empty(NBYTES)
        self.block = device.host_memory(NBYTES, NBYTES).pieces[0]
        self.out = torch.zeros(NBYTES, dtype=torch.uint8)
        self.value = 0
        device.synchronize(device.record(device.compute))

    def write(self) -> None:
        self.source.fill_(self.value)

    def read(self) -> None:
        self.out.copy_(self.home)

    def out_and_back(self) -> None:
        self.send()
        self.join(self.device.d2h)
        self.fetch()

    def send(self) -> None:
        device = self.device
        device.launch(self.write)
        device.note_write(device.compute, self.source)
        device.wait(device.d2h, device.record(device.compute), "spill")
        device.copy(device.d2h, [(self.block, self.source)])

    def join(self, lane: Any) -> None:
        self.device.wait(self.device.compute, self.device.record(lane), "join")

    def fetch(self) -> None:
        device = self.device
        device.wait(device.h2d, device.record(device.compute), "allocate")
        device.copy(device.h2d, [(self.home, self.block)])
        self.join(device.h2d)
        device.note_read(device.compute, self.home)
        device.launch(self.read)


@pytest.mark.parametrize("executor", get_args(ExecutorName))
def test_replays_compute_and_copy_what_was_captured(executor: ExecutorName) -> None:
    device = SimDevice(executor=executor, seed=3)
    bench = Bench(device)
    with device.capture() as graph:
        bench.out_and_back()
    for value in range(1, 6):
        bench.value = value
        graph.replay()
        device.synchronize(device.record(device.compute))
        assert bool((bench.out == value).all())
        assert bool((bench.block == value).all())


def test_graph_keeps_the_bytes_of_a_source_that_is_gone(device: SimDevice) -> None:
    """As a graph's memory pool does: the address stays, with what compute wrote there at the capture."""
    bench = Bench(device)
    bench.value = 7
    with device.capture() as graph:
        bench.send()
        bench.join(device.d2h)
        device.note_free(device.compute, bench.source)
        bench.source = torch.empty(0, dtype=torch.uint8)
    bench.block.zero_()
    graph.replay()
    device.synchronize(device.record(device.compute))
    assert bool((bench.block == 7).all())


def test_graphs_on_lanes_that_nothing_orders_have_a_hazard(device: SimDevice) -> None:
    bench = Bench(device)
    side = device.new_compute_lane("side")
    with device.capture() as forward:
        bench.send()
        bench.join(device.d2h)
    with device.capture() as backward:
        bench.fetch()
    forward.replay()
    hazard = pytest.raises(
        HazardError, match=r"RAW hazard .* of a graph's h2d\) .* reads them while .* of a graph's d2h\)"
    )
    with device.use_lane(side), hazard:
        backward.replay()
    device.wait(side, device.record(device.compute), "caller")
    with device.use_lane(side):
        backward.replay()


def test_replay_and_an_eager_copy_are_not_ordered_by_the_lane_that_both_were_issued_to() -> None:
    """A graph's branches are not the device's own copy lanes."""
    device = SimDevice()
    bench = Bench(device)
    with device.capture() as graph:
        bench.send()
        bench.join(device.d2h)
    device.wait(device.d2h, device.record(device.compute), "spill")
    device.copy(device.d2h, [(bench.block, bench.source)])
    with pytest.raises(HazardError, match=r"WA[RW] hazard"):
        graph.replay()


# -- rules ---------------------------------------------------------------------------------------------------


def passed(device: SimDevice) -> SimEvent:
    event = device.record(device.compute)
    device.synchronize(event)
    return event


FORBIDDEN: dict[str, Callable[[SimDevice, SimEvent], Any]] = {
    "a poll": lambda device, event: device.poll(event),
    "a synchronize": lambda device, event: device.synchronize(event),
    "a timed event": lambda device, event: device.record(device.compute, timed=True),
    "pinning 4,096 bytes": lambda device, event: device.host_memory(4096, 4096),
    "another capture": lambda device, event: device.capture().__enter__(),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_ends_a_capture_on_a_gpu_is_an_error(device: SimDevice, what: str) -> None:
    event = passed(device)
    with device.capture(), pytest.raises(HazardError, match=f"capture: {what} while a graph is captured"):
        FORBIDDEN[what](device, event)
    assert device.poll(event)


def test_unpinning_in_a_capture_is_an_error(device: SimDevice) -> None:
    memory = device.host_memory(4096, 4096)
    with device.capture(), pytest.raises(HazardError, match="capture: unpinning"):
        memory.release()


def test_wait_in_a_capture_for_an_event_of_before_is_an_error_although_it_has_passed() -> None:
    device = SimDevice()
    event = passed(device)
    with (
        device.capture(),
        pytest.raises(HazardError, match="recorded outside of the capture that compute is part of"),
    ):
        device.wait(device.compute, event, "restore")


@pytest.mark.parametrize("later", ["eager", "another capture"])
def test_event_of_a_capture_is_none_after_it(device: SimDevice, later: str) -> None:
    with device.capture():
        event = device.record(device.compute)
    match = "recorded in a capture that is over"
    if later == "another capture":
        with device.capture(), pytest.raises(HazardError, match=match):
            device.wait(device.compute, event, "read")
        return
    for call in (
        lambda: device.wait(device.d2h, event, "spill"),
        lambda: device.poll(event),
        lambda: device.synchronize(event),
    ):
        with pytest.raises(HazardError, match=match):
            call()


def test_lane_that_is_not_joined_ends_the_capture_with_an_error(device: SimDevice) -> None:
    bench = Bench(device)

    def capture() -> None:
        with device.capture() as graph:
            graphs.append(graph)
            bench.send()

    graphs: list[SimGraph] = []
    with pytest.raises(
        HazardError, match=r"capture: d2h, part of it since it waited \('spill'\), is not joined"
    ):
        capture()
    with pytest.raises(HazardError, match="capture did not end well"):
        graphs[0].replay()
    assert not device.is_capturing()


def test_copy_on_a_lane_outside_of_the_capture_is_an_error(device: SimDevice) -> None:
    bench = Bench(device)
    with (
        device.capture(),
        pytest.raises(HazardError, match="a copy on d2h, which is no part of the capture, would run once"),
    ):
        device.copy(device.d2h, [(bench.block, bench.source)])


def test_capture_is_of_the_lane_it_began_on(device: SimDevice) -> None:
    side = device.new_compute_lane("side")
    with device.capture():
        assert device.is_capturing()
        with device.use_lane(side):
            assert not device.is_capturing()
    assert not device.is_capturing()


# -- watchers ------------------------------------------------------------------------------------------------


class Watcher(CaptureWatcher):
    def __init__(self, device: SimDevice) -> None:
        self.device = device
        self.seen: list[tuple[str, bool]] = []

    def capture_begins(self, graph: Graph) -> None:
        self.seen.append(("begins", self.device.is_capturing()))

    def capture_ends(self, graph: Graph) -> None:
        self.seen.append(("ends", self.device.is_capturing()))

    def capture_over(self, graph: Graph, complete: bool) -> None:
        self.seen.append((f"over, complete {complete}", self.device.is_capturing()))


def test_watcher_is_told_before_the_begin_before_the_end_and_after(device: SimDevice) -> None:
    watcher = Watcher(device)
    with device.watch_captures(watcher):
        with device.capture():
            pass
        with pytest.raises(CaptureError, match="watched already"), device.watch_captures(Watcher(device)):
            pass
    with device.capture():
        pass
    assert watcher.seen == [("begins", False), ("ends", True), ("over, complete True", False)]


def test_replays_are_watched_on_the_graph_itself(device: SimDevice) -> None:
    with device.capture() as graph:
        pass
    calls: list[str] = []
    device.watch_replays(graph, lambda: calls.append("before"), lambda: calls.append("after"))
    graph.replay()
    assert calls == ["before", "after"]
