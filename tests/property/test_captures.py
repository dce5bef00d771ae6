"""Captured transfers of the engine, replayed: the right bytes each time under every executor, and a hazard
for each edge left out.

A forward's graph computes f(x) into a tensor and spills it; a backward's graph restores it and reads it.
Compute is launched as kernels, which a replay calls again, so the bytes that cross are new ones each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

from offload import CapturedRegion, HazardError, OffloadConfig, OffloadEngine
from offload.device.sim import ExecutorName, SimDevice, SimGraph
from offload.ids import ChunkId, GroupId
from offload.memory.arena import HostArena
from offload.saved.handles import Handle, SavedChunk, SavedGroup
from offload.transfer.block import bytes_of
from offload.transfer.copier import Priority
from tests.property.edges import devices

NUMBERS = 1024  # of one saved tensor, float32
NBYTES = 4 * NUMBERS
EXECUTORS = get_args(ExecutorName)


class Layer:
    """Its saved tensors stay alive in the kernels that compute them, as the addresses of a graph's pool
    do."""

    def __init__(
        self,
        device: SimDevice,
        *,
        tensors: int = 3,
        host_bytes: int = 64 * NBYTES,
        reserve: int = 32 * NBYTES,
    ) -> None:
        self.device = device
        self.engine = OffloadEngine(
            OffloadConfig(min_offloaded_tensor_size=0, piece_bytes=1, host_limit_bytes=host_bytes),
            device=device,
        )
        self.engine.reserve_host(reserve)
        self.transfers = self.engine.transfers
        self.x = torch.zeros(NUMBERS)
        self.out = torch.zeros(tensors, NUMBERS)
        self._saved = [torch.zeros(NUMBERS) for _ in range(tensors)]
        self._chunk = SavedChunk(ChunkId(0, 0))
        self._group = SavedGroup(GroupId(ChunkId(0, 0), 0, "core_attn"), leaves=True)
        self.handles: list[Handle] = []

    def forward(self) -> None:
        for factor, saved in enumerate(self._saved, 1):
            self.device.launch(lambda saved=saved, factor=factor: saved.copy_(self.x * factor))
            self.handles.append(self.engine.store.save(saved, self._chunk, self._group))

    def backward(self) -> None:
        for index in reversed(range(len(self.handles))):
            record = self.handles.pop().record
            block = record.block
            if block.transfer is not None:
                self.transfers.settle_spill(block.transfer)
            self.transfers.restore([block], Priority.REQUIRED)
            storage = self.transfers.ready(block)
            found = bytes_of(storage, 0, block.nbytes).view(torch.float32)
            self.device.launch(lambda index=index, found=found: self.out[index].copy_(found))
            self.transfers.drop(block)

    def eager(self, value: float) -> Handle:
        """A tensor of an eager forward, on its way out."""
        return self.engine.store.save(torch.full((NUMBERS,), value), self._chunk, self._group)

    def settle(self, handle: Handle) -> None:
        assert handle.record.block.transfer is not None
        self.transfers.settle_spill(handle.record.block.transfer)

    def read(self, handle: Handle) -> float:
        (value,) = self.engine.store.read(handle).unique().tolist()
        return float(value)

    def capture(self, *, one_graph: bool) -> tuple[CapturedRegion, list[SimGraph]]:
        with self.engine.capturing() as region:
            with self.device.capture() as first:
                self.forward()
                if one_graph:
                    self.backward()
            graphs = [first]
            if not one_graph:
                with self.device.capture() as second:
                    self.backward()
                graphs.append(second)
        return region, graphs

    def check_replays(self, graphs: list[SimGraph], count: int = 4) -> None:
        for value in range(1, count + 1):
            self.x.fill_(value)
            for graph in graphs:
                graph.replay()
            expected = torch.arange(1.0, len(self.out) + 1).unsqueeze(1) * value
            assert torch.equal(self.out, expected.expand_as(self.out))


@pytest.mark.req("S2-101")
@pytest.mark.parametrize("one_graph", [True, False], ids=["one graph", "a graph each"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_replays_carry_the_bytes_of_their_own_forward(executor: ExecutorName, one_graph: bool) -> None:
    for device in devices(executor, 10):
        layer = Layer(device)
        region, graphs = layer.capture(one_graph=one_graph)
        layer.check_replays(graphs)
        assert region.spill_bytes == region.restore_bytes == region.host_bytes == 3 * NBYTES
        assert region.replays == 4 * len(graphs)


@pytest.mark.parametrize("one_graph", [True, False], ids=["one graph", "a graph each"])
@pytest.mark.parametrize("title", ["spill", "settle", "allocate", "read", "join"])
def test_capture_without_one_of_its_edges_has_a_hazard(title: str, one_graph: bool) -> None:
    """Not with `restore`: the lane orders two graphs, and in one `settle` and `allocate` do."""
    layer = Layer(SimDevice(without={title}))
    if (title, one_graph) in {("settle", False), ("join", True)}:  # either is enough at the end of a forward
        layer.check_replays(layer.capture(one_graph=one_graph)[1])
        return
    # a copy lane that waited for nothing is no part of the capture: its copy would be no part of a replay
    with pytest.raises(
        HazardError,
        match=rf"edges left out of .*'{title}'|no part of the capture|recorded outside of the capture",
    ):
        layer.capture(one_graph=one_graph)


def test_replays_without_an_edge_give_wrong_bytes_and_have_a_hazard_of_their_own() -> None:
    """Captured while nobody looks, and replayed on branches that know nothing of the order of issue at the
    capture."""
    device = SimDevice(check=False, without={"read"})
    layer = Layer(device)
    _, graphs = layer.capture(one_graph=False)
    with pytest.raises(AssertionError):
        layer.check_replays(graphs)
    device._checker.strict = True
    with pytest.raises(
        HazardError, match=r"RAW hazard .* of compute\) reads them while .* of a graph's h2d\)"
    ):
        layer.check_replays(graphs)


# -- [Order: capture] ----------------------------------------------------------------------------------------


def busy(layer: Layer) -> tuple[Handle, Handle]:
    """A spill in flight, a restore in flight, and free host bytes that somebody may still read. Returns the
    first two."""
    leaving = layer.eager(1.0)
    fetched = layer.eager(2.0)
    layer.settle(fetched)
    layer.transfers.restore([fetched.record.block], Priority.SPECULATIVE)
    free = layer.eager(3.0)
    layer.settle(free)
    layer.transfers.restore([free.record.block], Priority.SPECULATIVE)
    return leaving, fetched


@pytest.mark.req("S2-91")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_work_of_before_a_capture_has_passed_when_it_begins(executor: ExecutorName) -> None:
    """Host memory is just what all of it needs, so that the capture reuses what was given back."""
    for device in devices(executor, 10):
        layer = Layer(device, host_bytes=5 * NBYTES, reserve=5 * NBYTES)
        leaving, fetched = busy(layer)
        region, graphs = layer.capture(one_graph=False)
        assert region.kept_bytes == 0
        layer.check_replays(graphs)
        assert layer.read(leaving) == 1.0
        assert layer.read(fetched) == 2.0
        layer.check_replays(graphs)


def test_without_it_a_capture_waits_for_what_is_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostArena, "begin_capture", HostArena.end_capture)
    layer = Layer(SimDevice(executor="clock"), host_bytes=5 * NBYTES, reserve=5 * NBYTES)
    monkeypatch.setattr(layer.device, "synchronize", lambda event: None)
    monkeypatch.setattr(type(layer.engine.arena._growth), "resume", lambda growth: None)
    handles = busy(layer)
    with pytest.raises(HazardError, match=r"capture: (a poll|.*recorded outside of the capture)"):
        layer.capture(one_graph=False)
    assert handles


# -- [Order: graphs] -----------------------------------------------------------------------------------------


def replay_on_two_lanes(ordered: bool) -> None:
    device = SimDevice()
    layer = Layer(device)
    _, (forward, backward) = layer.capture(one_graph=False)
    side = device.new_compute_lane("side")
    for value in (1.0, 2.0):
        layer.x.fill_(value)
        if ordered:
            device.wait(device.compute, device.record(side), "caller")
        forward.replay()
        if ordered:
            device.wait(side, device.record(device.compute), "caller")
        with device.use_lane(side):
            backward.replay()
        assert bool((layer.out[0] == value).all())


def test_graphs_replayed_on_two_lanes_that_their_caller_orders_carry_the_right_bytes() -> None:
    replay_on_two_lanes(ordered=True)


@pytest.mark.xfail(strict=True, raises=HazardError, reason="nobody orders the lanes")
def test_graphs_replayed_on_lanes_that_nothing_orders_have_a_hazard() -> None:
    replay_on_two_lanes(ordered=False)


# -- host blocks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", EXECUTORS)
def test_eager_traffic_between_replays_never_touches_a_regions_blocks(executor: ExecutorName) -> None:
    """Host memory has room for the region and one tensor more, so every eager spill reuses what is not the
    region's."""
    for device in devices(executor, 10):
        layer = Layer(device, host_bytes=4 * NBYTES, reserve=4 * NBYTES)
        _, (forward, backward) = layer.capture(one_graph=False)
        for value in (1.0, 2.0, 3.0, 4.0):
            layer.x.fill_(value)
            forward.replay()
            handle = layer.eager(-value)
            layer.settle(handle)
            backward.replay()
            assert bool((layer.out[1] == 2 * value).all())
            assert layer.read(handle) == -value
            assert layer.transfers.counts.refused == 0
            del handle


def lend_what_the_region_holds(layer: Layer, region: CapturedRegion) -> None:
    for graph in region.graphs:
        for block in graph.blocks:
            layer.engine.arena.give_back(block, None)


@pytest.mark.parametrize(
    "lend",
    [
        pytest.param(lambda layer, region: None, id="held"),
        pytest.param(
            lend_what_the_region_holds,
            id="lent",
            marks=pytest.mark.xfail(strict=True, reason="the block is lent twice"),
        ),
    ],
)
def test_block_that_replays_write_is_not_an_eager_tensors(
    lend: Callable[[Layer, CapturedRegion], Any],
) -> None:
    layer = Layer(SimDevice(), host_bytes=4 * NBYTES, reserve=4 * NBYTES)
    region, (forward, backward) = layer.capture(one_graph=False)
    lend(layer, region)
    handle = layer.eager(7.0)
    layer.settle(handle)
    forward.replay()
    backward.replay()
    assert layer.read(handle) == 7.0


@pytest.mark.parametrize("inside", [True, False], ids=["in the region", "after it"])
def test_records_that_die_give_no_block_of_a_region_back(inside: bool) -> None:
    layer = Layer(SimDevice())
    with layer.engine.capturing() as region:
        with layer.device.capture():
            layer.forward()
        if inside:
            layer.handles.clear()
            layer.transfers.reclaim_freed()
    layer.handles.clear()
    layer.transfers.reclaim_freed()
    assert layer.engine.arena.lent_bytes == region.host_bytes == 3 * NBYTES
    region.release()
    assert layer.engine.arena.lent_bytes == 0


@pytest.mark.parametrize("by", ["join", "body"])
def test_capture_that_fails_is_undone(by: str) -> None:
    """And the next capture in the same region works."""
    device = SimDevice(without={"join"} if by == "join" else ())
    layer = Layer(device)
    stale: list[Handle] = []

    def fail() -> None:
        with device.capture():
            layer.forward()
            stale.extend(layer.handles)
            layer.handles.clear()
            if by == "body":
                device.copy(device.h2d, [])
                device.poll(device.record(device.compute))

    with layer.engine.capturing() as region:
        with pytest.raises(HazardError):
            fail()
        device._without = frozenset()
        if by == "join":
            assert layer.engine.arena.lent_bytes == 0
            assert layer.transfers.in_flight() == (0, 0)
            assert layer.transfers.spilling_bytes == 0
            assert all(handle.record.block.state.name == "RELEASED" for handle in stale)
        with device.capture() as forward:
            layer.forward()
        with device.capture() as backward:
            layer.backward()
    layer.check_replays([forward, backward])
    region.release()


@pytest.mark.parametrize("by", ["join", "body"])
def test_backward_capture_that_fails_leaves_on_the_host_what_it_had_fetched(by: str) -> None:
    """One read, one still on its way: the next capture fetches both again, into memory of its own."""
    layer = Layer(SimDevice())
    device, transfers = layer.device, layer.transfers

    def fail() -> None:
        with device.capture():
            for block in blocks[:2]:
                transfers.restore([block], Priority.REQUIRED)
            transfers.ready(blocks[0])
            assert [block.state.name for block in blocks] == ["RESTORED", "RESTORING", "SPILLED"]
            if by == "join":
                device._without = frozenset({"join"})
            else:
                device.poll(device.record(device.compute))

    with layer.engine.capturing() as region:
        with device.capture() as forward:
            layer.forward()
        blocks = [handle.record.block for handle in layer.handles]
        with pytest.raises(HazardError):
            fail()
        device._without = frozenset()
        assert [block.state.name for block in blocks] == ["SPILLED"] * 3
        assert (transfers.restoring_bytes, transfers.device_bytes) == (0, 0)
        with device.capture() as backward:
            layer.backward()
    layer.check_replays([forward, backward])
    region.release()
