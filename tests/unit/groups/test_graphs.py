"""Groups inside captured graphs on the simulated device: what is captured, refused, held, counted and said.

A capture runs once as it is captured; compute is not run again by a replay (tests/gpu/test_graphs.py does
that), copies are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import (
    CapturedRegion,
    CaptureError,
    PipelineOffloadManager,
    backward_record,
    capturing,
    flush_delayed_groups,
    forward_record,
    group_commit,
    group_start,
    init_chunk_handler,
    offload_hooks,
    step_end,
)
from offload.device.sim import SimDevice, SimGraph
from offload.transfer.block import DeviceBlock, Transfer
from offload.transfer.copier import Priority
from tests.unit.groups.handlers import device_of
from tests.unit.groups.stack import EXECUTORS, ROWS, WIDTH, Stack, build_manager, build_stages, installed

CAPS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one at a time": {"max_spilling_bytes": 1, "max_restoring_bytes": 1024},
    "device limit": {"device_limit_bytes": 4096},
    "wait at each commit": {"max_inflight_offloads": 0},
    "audit": {"audit": True, "max_spilling_bytes": 1},
}


@pytest.fixture
def manager() -> Iterator[PipelineOffloadManager]:
    built = build_manager()
    built.reserve_host(1 << 20)
    with installed(built):
        init_chunk_handler(None, None, 1)
        yield built


def leaf(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradients(model: Stack, x: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(model(x).sum(), (x, *model.parameters()))]


def one_group(x: Tensor, name: str = "act", *, delay: bool = False) -> Tensor:
    x = group_start(x, name)
    with offload_hooks():
        y = torch.tanh(x * 1.0)
    return group_commit(y, name, delay_offload=delay) * 1.0


def bytes_of(x: Tensor) -> int:
    return x.numel() * x.element_size()


# -- a layer -------------------------------------------------------------------------------------------------


@pytest.mark.req("S2-101")
@pytest.mark.parametrize("one_graph", [True, False], ids=["one graph", "a graph each"])
@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_captured_layers_have_the_bits_of_no_offload_and_their_replays_no_hazard(
    executor: Any, caps: str, one_graph: bool
) -> None:
    (model,), x = build_stages(), leaf()
    wanted = gradients(model, x)
    for seed in range(5 if executor == "random" else 1):
        device = SimDevice(executor=executor, seed=seed)
        manager = build_manager(device=device, **CAPS[caps])
        manager.reserve_host(1 << 20)
        with installed(manager):
            init_chunk_handler(None, None, 1)
            with capturing() as region:
                for _ in range(2):
                    gradients(model, x)  # warm-up, as before every capture
                with device.capture() as forward:
                    y = model(x).sum()
                    if one_graph:
                        found = torch.autograd.grad(y, (x, *model.parameters()))
                graphs = [forward]
                if not one_graph:
                    with device.capture() as backward:
                        found = torch.autograd.grad(y, (x, *model.parameters()))
                    graphs.append(backward)
            assert all(torch.equal(expected, one) for expected, one in zip(wanted, found, strict=True))
            for _ in range(3):
                for graph in graphs:
                    graph.replay()
            check_figures(manager, region, len(graphs), restored=not (one_graph and caps == "defaults"))


def check_figures(
    manager: PipelineOffloadManager, region: CapturedRegion, graphs: int, *, restored: bool
) -> None:
    assert region.spill_bytes == region.host_bytes > 0
    assert (region.restore_bytes > 0) == restored
    assert region.kept_bytes == 0
    stats = step_end()
    assert stats.replays == region.replays == 3 * graphs
    assert stats.replayed_bytes == 3 * (region.spill_bytes + region.restore_bytes)
    arena = manager.engine.arena
    assert arena.lent_bytes == region.host_bytes
    region.release()
    region.release()
    assert arena.lent_bytes == 0


def test_what_a_backward_reads_next_is_fetched_ahead_inside_its_graph(
    manager: PipelineOffloadManager,
) -> None:
    """The chunk was read by the warm-up; the capture begins it anew, so its reads are known in order."""
    device, transfers, priorities = device_of(manager), manager.engine.transfers, []
    restore = transfers.restore

    def spy(records: Any, priority: Priority, *rest: Any) -> Transfer | None:
        found = restore(records, priority, *rest)
        if found is not None and transfers.capture is not None:
            priorities.append(priority)
        return found

    transfers.restore = spy  # type: ignore[method-assign]
    (model,), x = build_stages(), leaf()
    with capturing():
        gradients(model, x)
        with device.capture():
            y = model(x).sum()
        with device.capture():
            torch.autograd.grad(y, x)
    assert priorities[0] is Priority.REQUIRED
    assert Priority.SPECULATIVE in priorities[1:]


def test_each_graph_fetches_what_its_own_forward_saved_and_no_more(manager: PipelineOffloadManager) -> None:
    """However large the window: who replays the second layer's backward need not replay the first's after
    it."""
    device, ends = device_of(manager), [leaf(), leaf()]
    models = build_stages(2)
    with capturing() as region:
        outputs = []
        for model, x in zip(models, ends, strict=True):
            with device.capture():
                outputs.append(model(x).sum())
        for model, x, y in [*zip(models, ends, outputs, strict=True)][::-1]:
            with device.capture():
                torch.autograd.grad(y, (x, *model.parameters()))
    first, second, second_back, first_back = region.graphs
    assert set(second_back.sources) == {second}
    assert set(first_back.sources) == {first}
    assert first_back.restore_bytes == second_back.restore_bytes


def test_graph_of_a_group_that_the_plan_keeps_copies_nothing(manager: PipelineOffloadManager) -> None:
    handler = manager.cur_forward_chunk()
    assert handler is not None
    handler.stays = frozenset({0})
    with capturing() as region, device_of(manager).capture():
        y = one_group(leaf())
        one_group(y)
    assert [graph.spill_bytes for graph in region.graphs] == [bytes_of(leaf())]


def test_chunk_that_was_captured_is_no_part_of_the_plan(manager: PipelineOffloadManager) -> None:
    """Its marks run in no step to come: the next step is the first one, and all of it leaves."""
    captured_pair(manager)
    step_end()
    assert manager.is_warmup
    for leaving in (3, 2):
        init_chunk_handler(None, None, 1)
        x = leaf()
        y = one_group(one_group(one_group(x)))
        assert manager.engine.transfers.counts.spilled == leaving
        y.sum().backward()
        step_end()
    assert manager.offload_summary_bytes == {"act": 2 * bytes_of(leaf())}


# -- boundaries ----------------------------------------------------------------------------------------------


@pytest.mark.req("S2-91")
def test_a_group_open_across_a_capture_sends_each_part_where_it_was_saved(
    manager: PipelineOffloadManager,
) -> None:
    manager.engine.store._piece_bytes = 1 << 20  # nothing leaves before its commit
    device, x = device_of(manager), leaf()
    x = group_start(x, "act")
    with offload_hooks(), capturing() as region:
        eager = torch.tanh(x * 1.0)
        assert manager.engine.transfers.counts.spilled == 0
        with device.capture():
            captured = torch.sigmoid(x * 1.0)
        assert manager.engine.transfers.counts.spilled == 2
        last = torch.exp(x * 1.0)
    y = group_commit(eager + captured + last, "act")
    assert region.spill_bytes == bytes_of(captured)
    assert manager.engine.transfers.counts.spilled == 3
    assert y is not None


@pytest.mark.req("S2-86")
def test_delayed_groups_leave_where_they_were_delayed(manager: PipelineOffloadManager) -> None:
    """An eager one stays delayed while a capture flushes its own; one that nobody flushed leaves at the
    capture's end."""
    device, counts = device_of(manager), manager.engine.transfers.counts
    manager.engine.store._piece_bytes = 1 << 20
    eager = one_group(leaf(), delay=True)
    with capturing() as region:
        with device.capture():
            captured = one_group(leaf(), delay=True)
            assert counts.spilled == 0
            flush_delayed_groups()
            assert counts.spilled == 1
            unflushed = one_group(leaf(), delay=True)
            assert counts.spilled == 1
        assert counts.spilled == 2
    assert region.spill_bytes == 2 * bytes_of(leaf())
    flush_delayed_groups()
    assert counts.spilled == 3
    assert (eager + captured + unflushed).sum().isfinite()


class Event:
    """Notes what had happened when it was recorded."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self.ask = ask
        self.seen: list[Any] = []

    def record(self) -> None:
        self.seen.append(self.ask())


@pytest.mark.req("S2-88", "S2-89", "S2-91")
def test_records_in_a_capture_come_before_the_lanes_are_joined_and_join_them(
    manager: PipelineOffloadManager,
) -> None:
    """Whoever waits for the event runs beside the copies; the graph still ends with them, with nothing left
    to join."""
    device, transfers, x = device_of(manager), manager.engine.transfers, leaf()
    first, last = Event(transfers.in_flight), Event(lambda: device.waits["join"])
    with capturing():
        with device.capture() as forward:
            y = one_group(backward_record(x, last))
            forward_record(first)
            assert transfers.in_flight() == (0, 0)
            assert device.waits["join"] == 1
        joins = device.waits["join"]
        with device.capture() as backward:
            y.sum().backward()
    assert first.seen == [(1, 0)]
    assert last.seen == [joins]
    for _ in range(2):
        forward.replay()
        backward.replay()


def test_record_in_a_capture_that_copies_nothing_waits_for_no_lane(manager: PipelineOffloadManager) -> None:
    device, event = device_of(manager), Event(lambda: None)
    with capturing(), device.capture():
        forward_record(event)
        backward_record(leaf(), event).sum().backward()
    assert len(event.seen) == 2
    assert device.waits["join"] == 0


# -- refused -------------------------------------------------------------------------------------------------


def test_group_in_a_capture_outside_of_a_region_is_refused(manager: PipelineOffloadManager) -> None:
    x = leaf()
    with device_of(manager).capture():
        with pytest.raises(
            CaptureError,
            match=r"group 'act' in a graph under capture, outside of a region.*with offload.capturing\(\)",
        ):
            group_start(x, "act")
        with pytest.raises(CaptureError, match="an event record"):
            forward_record(Event(lambda: None))
        manager.disable_offload()
        one_group(x)
    assert manager.engine.transfers.counts.saved == 0


def test_hooks_of_a_group_opened_before_a_capture_outside_of_a_region_are_refused(
    manager: PipelineOffloadManager,
) -> None:
    group_start(leaf(), "act")
    with device_of(manager).capture(), pytest.raises(CaptureError, match="group 'act'"), offload_hooks():
        pass


def test_captured_backward_of_an_eager_forward_that_left_is_refused(manager: PipelineOffloadManager) -> None:
    """Its block will be lent to others when the graph is replayed."""
    y = one_group(leaf())
    match = (
        r"s0m0/act#0\[0\] \(768 bytes\) was saved before graph 1 of its region was "
        r"captured.*capture the forward"
    )
    with capturing(), device_of(manager).capture(), pytest.raises(CaptureError, match=match):
        y.sum().backward()


CALLS: dict[str, Callable[[PipelineOffloadManager, CapturedRegion], Any]] = {
    "a step's end": lambda manager, region: step_end(),
    "offload of a tensor by hand": lambda manager, region: manager.cur_forward_chunk().offload(torch.ones(4)),  # type: ignore[union-attr]
    "release of a region": lambda manager, region: region.release(),
}


@pytest.mark.parametrize("what", CALLS)
def test_what_no_replay_could_repeat_is_refused_in_a_capture(
    manager: PipelineOffloadManager, what: str
) -> None:
    with capturing() as region, device_of(manager).capture(), pytest.raises(CaptureError, match=what):
        CALLS[what](manager, region)


def test_region_inside_a_region_is_refused(manager: PipelineOffloadManager) -> None:
    with (
        capturing(),
        pytest.raises(CaptureError, match="watched already; close the open region"),
        capturing(),
    ):
        pass
    with capturing():
        pass


# -- replays -------------------------------------------------------------------------------------------------


def captured_pair(manager: PipelineOffloadManager) -> tuple[CapturedRegion, SimGraph, SimGraph]:
    device, x = device_of(manager), leaf()
    with capturing() as region:
        with device.capture() as forward:
            y = one_group(x)
        with device.capture() as backward:
            y.sum().backward()
    return region, forward, backward


def test_forward_replayed_again_before_its_backward_is_an_error_that_says_so(
    manager: PipelineOffloadManager,
) -> None:
    region, forward, backward = captured_pair(manager)
    forward.replay()
    match = (
        r"graph 1 of its region is replayed for the second time before graph 2 of its region, which reads "
        r"back what it sent: its 1 host "
        r"blocks of 768 bytes hold one forward\. Run that forward's backward first.*region\.forget\(\)"
    )
    with pytest.raises(CaptureError, match=match):
        forward.replay()
    backward.replay()
    backward.replay()  # the bytes are still there
    forward.replay()
    region.forget()
    forward.replay()
    assert region.replays == 5


def test_replay_after_the_release_is_an_error(manager: PipelineOffloadManager) -> None:
    region, forward, _ = captured_pair(manager)
    forward.replay()
    region.release()
    with pytest.raises(CaptureError, match="graph 1 of its region is replayed, but its region was released"):
        forward.replay()


def test_manager_releases_its_regions_when_it_is_closed(manager: PipelineOffloadManager) -> None:
    region, forward, _ = captured_pair(manager)
    forward.replay()
    manager.close()
    assert region.released
    assert manager.engine.arena.held_bytes == 0


def test_exception_that_leaves_a_region_releases_it(manager: PipelineOffloadManager) -> None:
    regions: list[CapturedRegion] = []

    def fail() -> None:
        with capturing() as region, device_of(manager).capture():
            regions.append(region)
            one_group(leaf())
            raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        fail()
    assert regions[0].released
    assert manager.engine.arena.lent_bytes == 0
    captured_pair(manager)


def test_what_finds_no_host_memory_at_the_capture_is_counted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A capture pins nothing, whatever the budget: the tensor stays in the graph's memory, and the gradients
    are right."""
    manager, x = build_manager(), leaf()
    with installed(manager), caplog.at_level(logging.WARNING):
        init_chunk_handler(None, None, 1)
        with capturing() as region, device_of(manager).capture() as graph:
            one_group(x).sum().backward()
        graph.replay()
        assert (region.spill_bytes, region.kept_bytes) == (0, bytes_of(x))
        assert manager.engine.arena.held_bytes == 0
    plain = leaf()
    (torch.tanh(plain * 1.0) * 1.0).sum().backward()
    assert torch.equal(x.grad, plain.grad)  # type: ignore[arg-type]
    (said,) = [record.getMessage() for record in caplog.records if "captured graphs" in record.getMessage()]
    assert said.startswith("768 B that should have left stay in the memory of the captured graphs")
    assert "set host_reserve_bytes of OffloadConfig to 768 B before it" in said


def test_records_of_two_captures_are_never_shared(manager: PipelineOffloadManager) -> None:
    """Each graph copies what it computed or was given, so a replay of one needs no replay of the other."""
    device, x = device_of(manager), leaf()
    kept: list[DeviceBlock] = []
    with capturing() as region:
        for _ in range(2):
            with device.capture():
                marked = group_start(x, "act")
                with offload_hooks():
                    y = marked.square()
                kept.extend(manager.living_blocks())
                group_commit(y, "act")
                del y
    assert [graph.spill_bytes for graph in region.graphs] == [bytes_of(x)] * 2
    assert len(set(kept)) == 2
