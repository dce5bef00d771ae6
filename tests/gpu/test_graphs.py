"""Groups inside CUDA graphs: replays give the bits of eager without offload, from less device memory; nobody
else gets their host blocks.

Kernels are deterministic, so a bit that differs is the engine's. Inputs change with each replay. No garbage
is collected in a test: torch's graphs of an earlier one may be in it, and a graph that is destroyed while
another is captured ends that capture (torch 2.11).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import (
    CapturedRegion,
    CaptureError,
    PipelineOffloadManager,
    capturing,
    disable_offload,
    flush_delayed_groups,
    group_commit,
    group_start,
    init_chunk_handler,
    offload_hooks,
    step_end,
)
from offload.device.cuda import CudaDevice
from offload.transfer.block import BlockState
from tests.gpu.captured import SHAPE, ByHand, eager, numbers, parameters_of, pool_bytes, stages
from tests.gpu.widened import WidenedDevice
from tests.gpu.workbench import DEVICE, Program, assert_same_bits, build_manager, installed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_allocator", "deterministic")]

REPLAYS = 10
CAPS: dict[str, dict[str, Any]] = {
    "defaults": {},  # larger than all that is saved: in one graph nothing needs to be fetched
    "tiny": {"max_spilling_bytes": 256 << 10, "max_restoring_bytes": 256 << 10, "piece_bytes": 64 << 10},
    "device limit": {"device_limit_bytes": 1 << 20},
    "wait at each commit": {"max_inflight_offloads": 0},
}


@pytest.fixture
def managed() -> Iterator[Any]:
    """Builds a manager, makes it the process-wide one until the test ends, and announces a forward."""
    with contextlib.ExitStack() as stack:

        def build(device: CudaDevice | None = None, **config: Any) -> PipelineOffloadManager:
            manager = build_manager(device, **config)
            stack.enter_context(installed(manager))
            init_chunk_handler(1, 0, 1)
            return manager

        yield build


@functools.cache
def expected(count: int = 1, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Eager and without offload, of each replay's input: output and gradients."""
    assert PipelineOffloadManager.OFFLOAD_MGR is None
    layers = stages(count, dtype=dtype)
    return [
        eager(torch.nn.Sequential(*layers), *ends(replay, dtype), parameters_of(layers))
        for replay in range(REPLAYS)
    ]


def ends(replay: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return numbers(2 * replay, dtype=dtype), numbers(2 * replay + 1, dtype=dtype)


def assert_moved(region: CapturedRegion, *, restored: bool = True) -> None:
    assert region.spill_bytes > 0
    assert region.kept_bytes == 0
    assert region.restore_bytes > 0 or not restored
    assert region.host_bytes == region.spill_bytes, (
        "two copies of one graph share a block, or a block is held for nothing"
    )


# -- by hand -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_graph", [True, False], ids=["one graph", "a graph each"])
def test_without_offload_replays_have_the_bits_of_eager(one_graph: bool) -> None:
    """Or nothing else in this file says anything."""
    wanted = expected()
    by_hand = ByHand.capture(stages()[0], one_graph=one_graph)
    for replay in range(REPLAYS):
        assert_same_bits(wanted[replay], by_hand.run(*ends(replay)))


@pytest.mark.req("S2-101")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize("one_graph", [True, False], ids=["one graph", "a graph each"])
def test_replays_with_offload_have_the_bits_of_eager_without(
    managed: Any, one_graph: bool, caps: str, dtype: torch.dtype
) -> None:
    wanted = expected(dtype=dtype)
    manager = managed(**CAPS[caps])
    model = stages(dtype=dtype)[0]
    manager.register_parameters(model)
    with capturing() as region:
        by_hand = ByHand.capture(model, dtype=dtype, one_graph=one_graph)
    assert_moved(region, restored=not one_graph or caps not in ("defaults",))
    for replay in range(REPLAYS):
        assert_same_bits(wanted[replay], by_hand.run(*ends(replay, dtype)))
    assert region.replays == REPLAYS * len(by_hand.graphs)
    stats = step_end()
    assert stats is not None
    assert stats.replayed_bytes == REPLAYS * (region.spill_bytes + region.restore_bytes)


@pytest.mark.req("S2-101")
@pytest.mark.parametrize("slow", ["d2h", "h2d"])
@pytest.mark.parametrize("one_graph", [True, False], ids=["one graph", "a graph each"])
def test_replays_have_the_bits_of_eager_however_late_their_copies_are(
    managed: Any, one_graph: bool, slow: str
) -> None:
    """The sleep before each copy is captured with it, so every replay has it."""
    wanted = expected()
    manager = managed(WidenedDevice(slow_ms={slow: 0.5}), **CAPS["tiny"])
    model = stages()[0]
    manager.register_parameters(model)
    with capturing() as region:
        by_hand = ByHand.capture(model, one_graph=one_graph)
    assert_moved(region)
    for replay in range(REPLAYS):
        assert_same_bits(wanted[replay], by_hand.run(*ends(replay)))


# -- make_graphed_callables ----------------------------------------------------------------------------------


@pytest.mark.req("S2-101")
@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize("count", [1, 3])
def test_graphed_callables_have_the_bits_of_eager_without_offload(
    managed: Any, caps: str, count: int
) -> None:
    wanted = expected(count)
    manager = managed(**CAPS[caps])
    layers = stages(count)
    for layer in layers:
        manager.register_parameters(layer)
    samples = tuple((torch.zeros(SHAPE, device=DEVICE).requires_grad_(),) for _ in layers)
    with capturing() as region:
        if count == 1:
            graphed: Any = (torch.cuda.make_graphed_callables(layers[0], samples[0]),)
        else:
            graphed = torch.cuda.make_graphed_callables(tuple(layers), samples)
    step_end()
    assert_moved(region)
    assert len(region.graphs) == 2 * count
    parameters = parameters_of(layers)
    for replay in range(REPLAYS):
        assert_same_bits(wanted[replay], eager(torch.nn.Sequential(*graphed), *ends(replay), parameters))
        step_end()
    assert region.replays == REPLAYS * len(region.graphs)


# -- around a capture ----------------------------------------------------------------------------------------


@pytest.mark.req("S2-91")
def test_capture_in_the_middle_of_a_step_disturbs_neither(managed: Any) -> None:
    """Spills of an eager forward are in flight when the capture begins, and its backward runs after; replays
    come between steps."""
    wanted = expected()
    manager = managed(WidenedDevice(slow_ms={"d2h": 0.5, "h2d": 0.2}), **CAPS["tiny"])
    model, captured = stages()[0], stages()[0]
    manager.register_parameters(model)
    manager.register_parameters(captured)
    x = ends(0)[0].clone().requires_grad_()
    y = model(x)
    assert manager.engine.transfers.in_flight()[0] > 0
    init_chunk_handler(1, 0, 1)
    with capturing() as region:
        by_hand = ByHand.capture(captured)
    found = torch.autograd.grad(y, (x, *model.parameters()), ends(0)[1])
    assert_same_bits(wanted[0], [y, *found])
    step_end()
    for replay in range(1, REPLAYS):
        init_chunk_handler(1, 0, 1)
        assert_same_bits(wanted[replay], eager(model, *ends(replay), list(model.parameters())))
        step_end()
        assert_same_bits(wanted[replay], by_hand.run(*ends(replay)))
    assert_moved(region)


def test_host_blocks_of_a_region_are_lent_to_nobody_until_its_release(managed: Any) -> None:
    manager = managed(**CAPS["tiny"])
    arena = manager.engine.arena
    model = stages()[0]
    manager.register_parameters(model)
    lent = arena.lent_bytes
    with capturing() as region:
        by_hand = ByHand.capture(model)
    step_end()
    assert arena.lent_bytes - lent == region.host_bytes > 0
    blocks = [block for graph in region.graphs for block in graph.host_blocks]
    own = {extent.data_ptr() for block in blocks for extent in block.extents}
    assert own
    rest = arena.take(arena.stats().free_bytes)
    assert rest is not None
    starts = [(extent.data_ptr(), extent.data_ptr() + extent.numel()) for extent in rest.extents]
    assert not any(start <= address < end for address in own for start, end in starts)
    arena.give_back(rest, None)
    by_hand.run(*ends(0))
    region.release()
    assert arena.lent_bytes == lent
    with pytest.raises(CaptureError, match="its region was released"):
        by_hand.run(*ends(0))


def test_eager_steps_between_replays_have_the_bits_of_no_offload(managed: Any) -> None:
    """Their spills take and give back every block that is free, over and over."""
    wanted, program = expected(), Program(steps=1)
    without = program.run()
    manager = managed(**CAPS["tiny"])
    model = stages()[0]
    manager.register_parameters(model)
    with capturing():
        by_hand = ByHand.capture(model)
    step_end()
    forward, backward = by_hand.graphs
    for replay in range(3):
        with torch.no_grad():
            by_hand.x.copy_(ends(replay)[0])
            by_hand.gradient.copy_(ends(replay)[1])
        forward.replay()
        assert_same_bits(without.gradients, _run_with(program, manager))
        backward.replay()
        assert_same_bits(wanted[replay], by_hand.found)


def _run_with(program: Program, manager: PipelineOffloadManager) -> list[Tensor]:
    """`Program.run` closes its manager; this one is to live on."""
    close, manager.close = manager.close, lambda: None  # type: ignore[method-assign]
    try:
        return program.run(manager).gradients
    finally:
        manager.close = close  # type: ignore[method-assign]
        PipelineOffloadManager.OFFLOAD_MGR = manager


def test_forward_replayed_twice_before_its_backward_is_an_error_that_says_so(managed: Any) -> None:
    managed()
    with capturing() as region:
        by_hand = ByHand.capture(stages()[0])
    forward, backward = by_hand.graphs
    forward.replay()
    with pytest.raises(
        CaptureError, match=r"graph 1 .* replayed for the second time before graph 2 .* hold one forward"
    ):
        forward.replay()
    backward.replay()
    forward.replay()
    region.forget()
    forward.replay()
    backward.replay()
    torch.cuda.synchronize()


def test_group_captured_outside_of_a_region_is_an_error_and_the_capture_ends_well(managed: Any) -> None:
    manager = managed()
    x = torch.zeros(64, device=DEVICE).requires_grad_()
    refused = pytest.raises(CaptureError, match=r"group 'mlp_act' in a graph under capture.*capturing\(\)")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        group_start(x, "mlp_act")
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert_same_bits(Program().run().gradients, _run_with(Program(), manager))


def test_exception_in_a_capture_leaves_an_engine_that_works(managed: Any) -> None:
    wanted = expected()
    manager = managed(**CAPS["tiny"])
    model = stages()[0]
    manager.register_parameters(model)
    lent = manager.engine.arena.lent_bytes
    x = numbers(0).requires_grad_()
    regions: list[CapturedRegion] = []

    def fail() -> None:
        with capturing() as region, torch.cuda.graph(torch.cuda.CUDAGraph()):
            regions.append(region)
            model(x)
            raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        fail()
    assert regions[0].released
    step_end()
    assert manager.engine.arena.lent_bytes == lent
    init_chunk_handler(1, 0, 1)
    with capturing():
        by_hand = ByHand.capture(model)
    assert_same_bits(wanted[0], by_hand.run(*ends(0)))


def test_poll_in_a_capture_is_refused_before_cuda_hears_of_it(managed: Any) -> None:
    device = managed().engine.device
    event = device.record(device.compute)
    x = torch.zeros(64, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with capturing(), torch.cuda.graph(graph):
        x.add_(1)
        for call in (device.poll, device.synchronize):
            with pytest.raises(CaptureError, match="while a CUDA graph is captured"):
                call(event)
    graph.replay()
    assert bool((x == 1).all())


# -- events and delayed groups -------------------------------------------------------------------------------


def wide(x: Tensor) -> Tensor:
    """One group whose copy takes longer than everything else."""
    x = group_start(x, "mlp_act")
    with offload_hooks():
        y = torch.tanh(x * 2)
    return group_commit(y, "mlp_act").sum(0, keepdim=True).expand_as(x) * 1.0


@pytest.mark.req("S2-88", "S2-89")
def test_external_events_let_the_main_stream_run_beside_the_copies_of_a_graph(managed: Any) -> None:
    shape = (64, 1 << 20)  # 256 MiB: 5 ms on the link
    sources = [(numbers(seed, shape), numbers(seed + 9, shape)) for seed in range(3)]
    wanted = [eager(wide, x, gradient, ()) for x, gradient in sources]
    managed(reserve_bytes=1 << 30)
    with capturing() as region:
        by_hand = ByHand.capture(wide, shape=shape, record=True)
    assert_moved(region)
    stream = torch.cuda.Stream()
    for (x, gradient), results in zip(sources, wanted, strict=True):
        assert_same_bits(results, by_hand.run(x, gradient, stream=stream))
        stream.synchronize()
    with torch.cuda.stream(stream):
        by_hand.graphs[0].replay()
        whole = torch.cuda.Event()
        whole.record()
    torch.cuda.current_stream().wait_event(by_hand.events[0])
    here = torch.cuda.Event()
    here.record()
    here.synchronize()
    assert not whole.query(), "the copy was over when the main stream went on: nothing ran beside it"
    torch.cuda.synchronize()


@pytest.mark.req("S2-86", "S2-101")
def test_delayed_groups_are_flushed_after_a_replay(managed: Any) -> None:
    """Eager groups before a captured layer: their commits wait until the graph has been launched. The plan
    keeps the last one from the second step on."""
    wanted = expected()
    # a full piece would leave before its group's end
    manager = managed(max_spilling_bytes=256 << 10, max_restoring_bytes=256 << 10)
    model = stages()[0]
    manager.register_parameters(model)
    with capturing():
        by_hand = ByHand.capture(model)
    step_end()
    for replay in range(3):
        init_chunk_handler(1, 0, 1)
        x = ends(replay)[0].clone().requires_grad_()
        loss = chain(x, 3, delay=True).sum()
        found = by_hand.run(*ends(replay))
        assert manager.engine.transfers.counts.spilled == 0
        flush_delayed_groups()
        assert manager.engine.transfers.counts.spilled == (3 if replay == 0 else 2)
        assert_same_bits(wanted[replay], found)
        gradients = torch.autograd.grad(loss, x)
        manager.disable_offload()
        plain = ends(replay)[0].clone().requires_grad_()
        assert_same_bits(torch.autograd.grad(chain(plain, 3).sum(), plain), gradients)
        manager.enable_offload()
        step_end()


# -- memory --------------------------------------------------------------------------------------------------

MIB = 1 << 20
N = 16 * MIB  # of each tensor; the allocator gives it a segment of its own
DEPTH = 10


def chain(x: Tensor, depth: int, *, delay: bool = False) -> Tensor:
    """So many tanh, each a group. One saves its result and nothing else."""
    for _ in range(depth):
        x = group_start(x, "mlp_act")
        with offload_hooks():
            x = torch.tanh(x)
        x = group_commit(x, "mlp_act", delay_offload=delay)
    return x


def captured_bytes(depth: int, *, one_graph: bool) -> tuple[int, ByHand]:
    by_hand = ByHand.capture(lambda x: chain(x, depth), shape=(N // 4,), one_graph=one_graph)
    return pool_bytes(by_hand.graphs[0]), by_hand


@pytest.mark.req("S2-101")
@pytest.mark.parametrize("one_graph", [True, False], ids=["one graph", "a graph each"])
def test_memory_of_the_graphs_does_not_grow_with_depth(managed: Any, one_graph: bool) -> None:
    """Without offload each tanh holds its result until the backward: a graph of DEPTH more needs N bytes more
    for each. With one piece in flight each way the results of all but the ends leave, and the same few
    buffers serve any depth."""
    shallow, _ = captured_bytes(DEPTH, one_graph=one_graph)
    deep, _ = captured_bytes(2 * DEPTH, one_graph=one_graph)
    assert deep - shallow == DEPTH * N
    managed(reserve_bytes=8 * DEPTH * N, max_spilling_bytes=1, max_restoring_bytes=N, piece_bytes=1)
    with capturing() as region:
        shallow_with, _ = captured_bytes(DEPTH, one_graph=one_graph)
        deep_with, by_hand = captured_bytes(2 * DEPTH, one_graph=one_graph)
    assert region.kept_bytes == 0
    assert deep_with == shallow_with
    assert deep_with < shallow
    x, gradient = numbers(0, (N // 4,)), numbers(1, (N // 4,))
    found = by_hand.run(x, gradient)
    disable_offload()
    assert_same_bits(eager(lambda x: chain(x, 2 * DEPTH), x, gradient, ()), found)


@pytest.mark.req("S2-101")
def test_active_memory_between_forward_and_backward_falls_by_what_the_table_says(managed: Any) -> None:
    """Between the two graphs the saved tensors are all that is held. What left is gone, unless it is
    somebody's input or output."""

    def held_after_forward() -> tuple[int, list[Any]]:
        x = torch.zeros(N // 4, device=DEVICE).requires_grad_()
        with torch.no_grad():
            chain(x, 1)  # its kernel is loaded before the capture
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_allocated()
        with torch.cuda.graph(graph):
            y = chain(x, DEPTH)
        return torch.cuda.memory_allocated() - before, [x, y, graph]

    without, kept = held_after_forward()
    del kept
    manager = managed(reserve_bytes=4 * DEPTH * N, piece_bytes=1)
    with capturing() as region:
        with_offload, alive = held_after_forward()
        left = [record for record in manager.living_blocks() if record.state is BlockState.SPILLED]
        assert len(left) == DEPTH
        gone = [record for record in left if record.storage() is None]
        assert len(gone) == DEPTH - 1  # the last result is the output
    assert region.spill_bytes == sum(record.nbytes for record in left)
    assert without - with_offload == sum(record.nbytes for record in gone)
    del alive
