"""One runtime, many clients: who is told of a step's end and of a capture, what each is counted for, and that
nobody waits for another's copies."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from offload import PipelineOffloadManager
from offload.client import Client
from offload.config import OffloadConfig
from offload.device import Event, Lane
from offload.device.sim import ExecutorName, SimDevice
from offload.engine import OffloadEngine
from offload.ids import Owner
from offload.optim.hybrid import HybridDeviceOptimizer
from offload.telemetry.records import ClientStats, StepStats
from offload.transfer.captures import CapturedRegion
from offload.transfer.copier import Direction, Lease, Priority

KIB = 1024


class Diary(Client):
    """A client that writes down what it is told."""

    def __init__(self, name: str, pages: list[str], figures: ClientStats | None = None) -> None:
        self.name = name
        self.pages = pages
        self.figures = figures if figures is not None else ClientStats()

    def begin_step(self) -> None:
        self.pages.append(f"{self.name} begins")

    def end_step(self) -> ClientStats:
        self.pages.append(f"{self.name} ends")
        return self.figures

    def step_ended(self, stats: StepStats) -> None:
        self.pages.append(f"{self.name} hears of step {stats.step}")

    def capture_begins(self) -> None:
        self.pages.append(f"{self.name} prepares")

    def capture_ends(self) -> None:
        self.pages.append(f"{self.name} joins")


def engine_with(*clients: Client, executor: ExecutorName = "early") -> OffloadEngine:
    engine = OffloadEngine(OffloadConfig(), device=SimDevice(executor=executor))
    for client in clients:
        engine.attach(client)
    return engine


# -- what clients are told -----------------------------------------------------------------------------------
def test_every_client_ends_the_step_before_any_hears_of_its_figures() -> None:
    pages: list[str] = []
    one, other = Diary("groups", pages), Diary("weights", pages)
    engine = engine_with(one, other)
    engine.begin_step()
    engine.begin_step()
    engine.end_step()
    assert pages == [
        "groups begins",
        "weights begins",
        "groups ends",
        "weights ends",
        "groups hears of step 0",
        "weights hears of step 0",
    ]


def test_every_client_is_told_of_a_capture() -> None:
    pages: list[str] = []
    one, other = Diary("groups", pages), Diary("weights", pages)
    engine = engine_with(one, other)
    device = engine.device
    with engine.capturing(), device.capture():
        assert pages == ["groups prepares", "weights prepares"]
    assert pages[2:] == ["groups joins", "weights joins"]


def test_a_client_that_has_left_or_was_dropped_is_told_nothing() -> None:
    pages: list[str] = []
    leaver, dropped = Diary("leaver", pages), Diary("dropped", pages)
    engine = engine_with(leaver, dropped)
    engine.detach(leaver)
    del dropped
    gc.collect()
    engine.end_step()
    assert pages == []
    assert engine.clients == []


def test_a_client_may_attach_twice_and_is_told_once() -> None:
    pages: list[str] = []
    client = Diary("groups", pages)
    engine_with(client, client).end_step()
    assert pages == ["groups ends", "groups hears of step 0"]


# -- figures by client ---------------------------------------------------------------------------------------
def a_copy(engine: OffloadEngine, client: str, nbytes: int = 64) -> None:
    """Out and back."""
    device = engine.device
    host = device.host_memory(nbytes, nbytes).pieces[0]
    there = device.empty(nbytes).fill_(1)
    device.note_write(device.compute, there)
    device.wait(device.d2h, device.record(device.compute), "spill")
    copies = engine.copier.of(Owner(client, "layer 3"))
    device.wait(device.h2d, copies.send([(host, there)]), "restore")
    device.synchronize(copies.fetch([(there, host)]))


def test_the_figures_of_a_client_are_what_it_says_and_what_it_copied() -> None:
    weights = Diary("weights", [], ClientStats(lent_bytes=100, device_bytes=7))
    engine = engine_with(weights)
    a_copy(engine, "weights")
    stats = engine.end_step()
    assert stats.clients == {
        "weights": ClientStats(out_bytes=64, in_bytes=64, lent_bytes=100, device_bytes=7)
    }
    assert engine.end_step().clients["weights"].out_bytes == 0
    assert (stats.spill_bytes, stats.restore_bytes) == (0, 0)  # of saved tensors
    assert stats.to_json()["clients"]["weights"]["lent_bytes"] == 100


def test_two_clients_of_one_name_are_counted_together() -> None:
    ring = ClientStats(device_bytes=3, stall_ms=0.5, stall_count=2)
    one, other = Diary("optim", [], ring), Diary("optim", [], ring)
    stats = engine_with(one, other).end_step()
    assert stats.clients == {"optim": ClientStats(device_bytes=6, stall_ms=1.0, stall_count=4)}
    assert (stats.stall_ms, stats.stall_count) == (1.0, 4)


def test_a_copy_of_somebody_who_never_attached_is_counted_all_the_same() -> None:
    engine = engine_with()
    a_copy(engine, "by hand")
    assert engine.end_step().clients == {"by hand": ClientStats(out_bytes=64, in_bytes=64)}


class Saver(Client):
    """Another client that saves tensors, and has saved none."""

    name = "watermark"

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine

    def end_step(self) -> ClientStats:
        return self._engine.end_saves([])


@pytest.mark.parametrize("others", [0, 1])
def test_the_groups_figures_are_those_of_their_saved_tensors(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside another client whose saves end after theirs: it read the step's stalls before they had
    ended, so on a GPU they were lost, and counted what graphs hold once more."""
    engine = OffloadEngine(
        OffloadConfig(min_offloaded_tensor_size=0, piece_bytes=1, max_restoring_bytes=0),
        device=SimDevice(executor="clock"),
    )
    manager = PipelineOffloadManager(engine, print_summary=False)
    savers = [Saver(engine) for _ in range(others)]
    for saver in savers:
        engine.attach(saver)
    with engine.capturing():
        monkeypatch.setattr(CapturedRegion, "host_bytes", 5)
    step_of_groups(manager)
    stats, after = manager.step_end(), manager.step_end()
    groups = stats.clients["groups"]
    assert stats.spill_bytes > 0
    assert (groups.out_bytes, groups.in_bytes) == (stats.spill_bytes, stats.restore_bytes)
    assert groups.stall_count == stats.stall_count > 0
    assert (stats.stall_ms, after.stall_ms) == (0.0, after.clients["groups"].stall_ms)
    assert after.stall_ms > 0
    assert sum(client.lent_bytes for client in stats.clients.values()) == 5
    manager.close()


# -- nobody waits for another's copies -----------------------------------------------------------------------
def step_of_groups(manager: PipelineOffloadManager) -> None:
    from offload.fine_grained_activation_offload import (
        FineGrainedOffloadingGroupCommitFunction,
        FineGrainedOffloadingGroupStartFunction,
    )

    x = torch.randn(256, requires_grad=True)
    manager.init_model_chunk_offload_handler(min_offloaded_tensor_size=0)
    handler = manager.cur_forward_chunk()
    assert handler is not None
    y = FineGrainedOffloadingGroupStartFunction.apply(x, handler, "fc1")
    with manager:
        y = (y * 2).sin()
    y = FineGrainedOffloadingGroupCommitFunction.apply(y, handler, "fc1", None, False)
    y.sum().backward()


class WatchedDevice(SimDevice):
    """Notes what compute waits for."""

    def __init__(self) -> None:
        super().__init__(executor="late")
        self.waited_for: list[Event] = []

    def wait(self, lane: Lane, event: Event, order: str) -> None:
        if lane is self.compute:
            self.waited_for.append(event)
        super().wait(lane, event, order)


class Grants:
    """Admission that grants all, and keeps the events of each client's copies."""

    def __init__(self) -> None:
        self.copied: dict[str, list[Event]] = {"groups": [], "optim": []}

    def ask(self, nbytes: int, direction: Direction, owner: Owner, priority: Priority) -> Lease:
        return Granted(self.copied[owner.client])


class Granted:
    def __init__(self, copied: list[Event]) -> None:
        self.copied = copied

    def done(self, event: Event | None) -> None:
        assert event is not None
        self.copied.append(event)


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["streamed", "stepped by the CPU"])
def test_the_end_of_a_step_does_not_make_compute_wait_for_the_optimizer_s_buckets(share: float) -> None:
    device, grants = WatchedDevice(), Grants()
    engine = OffloadEngine(OffloadConfig(max_restoring_bytes=0), device=device, admission=grants)
    manager = PipelineOffloadManager(engine, print_summary=False)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=1e-2, cpu_share=share, engine=engine)
    for _ in range(3):
        step_of_groups(manager)
        model(torch.randn(4, 32)).sum().backward()
        optimizer.step()
        device.waited_for.clear()
        stats = manager.step_end()
        assert stats.clients["optim"].out_bytes > 0
        assert grants.copied["optim"]
        assert {id(event) for event in device.waited_for} <= {id(event) for event in grants.copied["groups"]}
    optimizer.close()
    manager.close()
