"""The conductor behind admission: slots of clients, what a denial does, and what it never does.

The simulated device runs copies late: what was issued is in flight until something needs it.
"""

from __future__ import annotations

import logging
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from offload.client import Phase
from offload.conductor import Conductor, ConductorConfig
from offload.conductor.phases import TurnsPolicyBridge
from offload.config import OffloadConfig
from offload.device import Event
from offload.device.sim import ExecutorName, SimDevice
from offload.engine import OffloadEngine
from offload.ids import Owner
from offload.transfer.copier import UNCOUNTED, CapsAdmission, DenialReason, Denied, Direction, Lease, Priority

H2D, D2H = Direction.H2D, Direction.D2H
REQUIRED, SPECULATIVE, BACKGROUND = Priority.REQUIRED, Priority.SPECULATIVE, Priority.BACKGROUND
MIB = 1 << 20


class Link:
    """An engine with a conductor, and pieces of any client over its copier."""

    def __init__(
        self, config: OffloadConfig | None = None, *, executor: ExecutorName = "late", **fields: Any
    ) -> None:
        self.engine = OffloadEngine(config, device=SimDevice(executor=executor))
        self.before = self.engine.copier.admission
        fields = {"telemetry_interval": 0, **fields}
        self.conductor = Conductor(engine=self.engine, **fields)
        self.events: list[Event] = []
        self.alive: list[torch.Tensor] = []

    def ask(
        self, client: str, priority: Priority, direction: Direction = H2D, nbytes: int = 64
    ) -> Lease | Denied:
        return self.conductor.ask(nbytes, direction, Owner(client, "piece"), priority)

    def copy(
        self, client: str, priority: Priority = REQUIRED, direction: Direction = H2D, nbytes: int = 64
    ) -> bool:
        """Whether a piece was issued."""
        copier, owner = self.engine.copier, Owner(client, "piece")
        lease = copier.ask(nbytes, direction, owner, priority)
        if lease is None:
            return False
        device = self.engine.device
        there = device.empty(nbytes)
        here = device.host_memory(nbytes, nbytes).pieces[0]
        pairs = [(there, here) if direction is H2D else (here, there)]
        self.alive += [there, here]
        lane = device.h2d if direction is H2D else device.d2h
        device.wait(lane, device.record(device.compute), "spill")
        self.events.append(copier.copy(lease, direction, owner, pairs, nbytes))
        return True

    def stall_ms(self, client: str, nbytes: int) -> float:
        """How long compute waits for a required copy to the device that is asked for now."""
        device = self.engine.device
        before = device.record(device.compute, timed=True)
        assert self.copy(client, REQUIRED, nbytes=nbytes)
        device.wait(device.compute, self.events[-1], "read")
        after = device.record(device.compute, timed=True)
        device.synchronize(after)
        return device.elapsed_ms(before, after)

    def arrive(self) -> None:
        """All copies have passed."""
        for event in self.events:
            self.engine.device.synchronize(event)
        self.events.clear()
        self.alive.clear()

    def in_flight(self) -> tuple[int, int]:
        for direction in Direction:
            self.conductor._reap(direction)
        return self.conductor.transfers.in_flight(H2D), self.conductor.transfers.in_flight(D2H)


@pytest.fixture
def link() -> Link:
    return Link()


# -- slots of clients ----------------------------------------------------------------------------------------
def test_alone_no_client_is_denied_however_much_it_has_in_flight(link: Link) -> None:
    assert all(link.copy("groups", SPECULATIVE, nbytes=1024) for _ in range(50))
    assert all(link.copy("groups", BACKGROUND, D2H) for _ in range(50))
    assert link.in_flight() == (1, 1)  # one slot in each direction
    link.arrive()
    assert link.in_flight() == (0, 0)


@pytest.mark.req("S1-60", "S1-25")
def test_of_three_clients_at_once_the_third_waits_and_what_is_required_goes_ahead(link: Link) -> None:
    assert link.copy("weights", SPECULATIVE)
    assert link.copy("optim", REQUIRED)
    assert link.ask("groups", SPECULATIVE) == Denied(DenialReason.H2D_SLOTS_EXHAUSTED)
    assert not link.copy("groups", SPECULATIVE)  # skipped
    assert link.copy("groups", REQUIRED)  # its reader waits
    assert link.in_flight() == (3, 0)
    assert link.copy("groups", SPECULATIVE)  # it is one of those that copy now
    link.arrive()
    assert link.copy("experts", SPECULATIVE)
    counts = link.engine.copier.take_counts()
    assert (counts["groups"].denied, counts["weights"].denied) == (2, 0)


@pytest.mark.req("S1-60")
def test_beside_another_client_a_prefetch_queues_no_more_than_a_slots_bytes() -> None:
    link = Link(slot_mb=1024 / MIB)
    assert link.copy("groups", SPECULATIVE, nbytes=1000)
    assert link.copy("groups", SPECULATIVE, nbytes=1000)  # alone: as its own caps have it
    link.arrive()
    link.copy("weights", REQUIRED)
    assert link.copy("groups", SPECULATIVE, nbytes=4000)  # the first, whatever its size
    assert link.ask("groups", SPECULATIVE, nbytes=1) == Denied(DenialReason.H2D_SLOTS_EXHAUSTED)
    link.arrive()
    link.copy("weights", REQUIRED)
    assert [link.copy("groups", SPECULATIVE, nbytes=512) for _ in range(3)] == [True, True, False]


def test_while_the_host_is_ahead_of_compute_nothing_is_denied(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on the link once compute gets here nobody knows. Denied, a prefetch that comes in time would be
    a load that compute waits for: a step with four kinds took 1.06 of itself on a simulated link."""
    link.copy("optim", REQUIRED)
    with monkeypatch.context() as patch:
        patch.setattr(link.engine.device, "poll", lambda event: False)
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            enter(link, phase)
            for client in ("weights", "gradients", "experts"):
                assert [link.copy(client, SPECULATIVE) for _ in range(3)] == [True] * 3
        enter(link, Phase.STEP_END)
        assert link.copy("optim", REQUIRED, D2H)
        assert link.copy("weights", REQUIRED, D2H)
        assert link.copy("groups", BACKGROUND, D2H)
    assert link.conductor.counts.denials == 0
    link.copy("groups", REQUIRED)
    assert link.ask("watermark", SPECULATIVE) == Denied(DenialReason.H2D_SLOTS_EXHAUSTED)


@pytest.mark.parametrize("steps", [0, 1])
def test_where_others_came_in_before_one_that_is_alone_queues_no_more_than_a_slots_bytes(steps: int) -> None:
    link = Link(slot_mb=1024 / MIB)
    for client in ("weights", "groups"):
        link.copy(client)
    link.arrive()
    for _ in range(steps):
        link.engine.end_step()
    assert [link.copy("groups", SPECULATIVE, nbytes=512) for _ in range(3)] == [True, True, False]


def test_where_several_kinds_come_in_none_has_more_than_a_slot_fetched_ahead(link: Link) -> None:
    limits, most = link.engine.limits, link.conductor.config.slot_bytes
    assert most == 512 * MIB  # 10 ms of a 55 GB/s link
    link.copy("weights")
    link.copy("weights", direction=D2H)
    link.arrive()
    link.engine.end_step()
    assert limits.kind_ahead_bytes is None
    link.copy("weights")
    link.copy("watermark")
    link.arrive()
    link.engine.end_step()
    assert (limits.kind_ahead_bytes, limits.held_by("kind_ahead_bytes")) == (most, "conductor")
    link.copy("watermark")
    link.copy("groups")  # both are saved tensors
    link.arrive()
    link.engine.end_step()
    assert limits.kind_ahead_bytes is None


def test_a_spill_is_denied_a_slot_and_kept_only_while_memory_is_enough() -> None:
    link = Link()
    for client in ("optim", "weights"):
        link.copy(client, REQUIRED, D2H)
    assert link.ask("groups", BACKGROUND, D2H) == Denied(DenialReason.D2H_SLOTS_EXHAUSTED)
    limited = Link(OffloadConfig(device_limit_bytes=1 << 20))
    for client in ("optim", "weights"):
        limited.copy(client, REQUIRED, D2H)
    assert limited.copy("groups", BACKGROUND, D2H)
    pressed = Link(allocated=lambda: 23500 * MIB)
    for client in ("optim", "weights"):
        pressed.copy(client, REQUIRED, D2H)
    assert pressed.copy("groups", BACKGROUND, D2H)


# -- phases --------------------------------------------------------------------------------------------------
def enter(link: Link, *phases: Phase) -> None:
    for phase in phases:
        assert link.engine.on_phase is not None
        link.engine.on_phase(phase)


@pytest.mark.req("S1-60", "S1-32")
def test_in_the_optimizer_weights_prefetch_nothing_beside_its_state_which_uses_both_directions(
    link: Link,
) -> None:
    enter(link, Phase.OPTIMIZER)
    assert link.copy("optim", REQUIRED)
    assert link.copy("optim", REQUIRED, D2H)
    assert link.ask("weights", SPECULATIVE) == Denied(DenialReason.H2D_SLOTS_EXHAUSTED)
    assert link.copy("weights", REQUIRED)
    link.arrive()
    # torch's own optimizer reads weights and gradients: one ahead of each, with the usual slots
    assert link.copy("gradients", SPECULATIVE)
    assert link.copy("weights", SPECULATIVE)
    assert link.ask("weights", SPECULATIVE) == Denied(DenialReason.PHASE_RULE_SUPPRESSED_SPECULATIVE)
    link.arrive()
    enter(link, Phase.STEP_END)
    assert link.copy("optim", REQUIRED)
    assert link.copy("weights", SPECULATIVE)


@pytest.mark.req("S1-60", "S1-42", "S1-47")
def test_in_the_optimizer_no_saved_tensor_leaves_and_the_bound_is_lifted_before_a_plan(link: Link) -> None:
    limits, before = link.engine.limits, link.engine.limits.max_spilling_bytes
    enter(link, Phase.OPTIMIZER)
    assert (limits.max_spilling_bytes, limits.held_by("max_spilling_bytes")) == (0, "conductor")
    assert link.ask("groups", BACKGROUND, D2H) == Denied(DenialReason.D2H_CAP_ZERO)
    assert link.copy("optim", REQUIRED, D2H)
    link.engine.end_step()
    assert limits.max_spilling_bytes == before
    enter(link, Phase.STEP_END, Phase.OPTIMIZER)
    assert limits.max_spilling_bytes == 0
    enter(link, Phase.STEP_END)
    assert limits.max_spilling_bytes == before


@pytest.mark.req("S1-60", "S1-30")
def test_pressed_in_the_backward_each_client_prefetches_one_piece_and_loads_go_on() -> None:
    link = Link(allocated=lambda: 19000 * MIB)  # of 23500: 80.9%
    enter(link, Phase.FORWARD)
    assert [link.copy("weights", SPECULATIVE) for _ in range(3)] == [True] * 3
    link.arrive()
    enter(link, Phase.BACKWARD)
    assert [link.copy("weights", SPECULATIVE) for _ in range(3)] == [True, False, False]
    assert [link.copy("groups", SPECULATIVE) for _ in range(2)] == [True, False]
    assert link.copy("groups", BACKGROUND, D2H)
    assert link.copy("weights", REQUIRED)
    link.arrive()
    enter(link, Phase.FORWARD)  # 1F1B: the next turn begins anew
    assert [link.copy("weights", SPECULATIVE) for _ in range(3)] == [True] * 3


def test_a_users_own_calls_are_believed_from_the_first_on(link: Link) -> None:
    enter(link, Phase.BACKWARD)
    assert link.conductor.phase is Phase.BACKWARD
    link.conductor.end_step()
    link.conductor.begin_step(40)
    link.conductor.enter_forward()
    enter(link, Phase.OPTIMIZER, Phase.STEP_END)
    assert (link.conductor.phase, link.conductor.step) == (Phase.FORWARD, 40)


def test_seen_phases_never_raise_and_an_end_without_an_optimizer_is_none(link: Link) -> None:
    enter(link, Phase.STEP_END)
    assert link.conductor.phase is None
    enter(link, Phase.FORWARD, Phase.STEP_END)
    assert link.conductor.phase is Phase.FORWARD
    for phase in [*Phase, *reversed(Phase), Phase.OPTIMIZER, Phase.OPTIMIZER, Phase.STEP_END]:
        enter(link, phase)
    assert link.conductor.phase is Phase.STEP_END


# -- what never happens --------------------------------------------------------------------------------------
@pytest.mark.req("S1-25")
@pytest.mark.parametrize("where", ["a rule", "the meter", "a denial"])
def test_an_exception_in_the_arbiter_blocks_no_copy_and_is_said_once(
    where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named: object) -> Any:
        raise ZeroDivisionError(where)

    class Failing(TurnsPolicyBridge):
        check = fail

    rules = Failing(h2d_slots=2, d2h_slots=2) if where == "a rule" else None
    link = Link(rules=rules)
    if where == "the meter":
        monkeypatch.setattr(link.conductor.budget, "allocated", fail)
        for client in ("optim", "weights"):
            link.copy(client, REQUIRED, D2H)
    elif where == "a denial":
        monkeypatch.setattr(link.conductor.transfers, "refusal", fail)
    with caplog.at_level(logging.WARNING):
        for priority in Priority:
            for direction in Direction:
                assert link.copy("groups", priority, direction)
                enter(link, Phase.FORWARD, Phase.BACKWARD)
    said = [record for record in caplog.records if "the conductor failed" in record.getMessage()]
    assert len(said) == 1
    assert where in said[0].getMessage()
    link.arrive()
    assert link.in_flight() == (0, 0)


@pytest.mark.req("S1-20")
def test_a_copy_that_fails_gives_its_token_back(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(lane: object, pairs: object) -> None:
        raise RuntimeError("no copy")

    with monkeypatch.context() as patch:
        patch.setattr(link.engine.device, "copy", fail)
        owned = link.engine.copier.of(Owner("optim", "bucket 0"))
        there, here = torch.empty(8, dtype=torch.uint8), torch.empty(8, dtype=torch.uint8)
        for move in (owned.send, owned.fetch):
            with pytest.raises(RuntimeError, match="no copy"):
                move([(there, here)])
    assert link.in_flight() == (0, 0)


@pytest.mark.req("S1-15", "S1-20")
def test_tokens_are_conserved_over_threads_that_ask_at_once(link: Link) -> None:
    """The optimizer's workers ask beside the thread that trains."""
    asked, threads = 300, 4
    passed = link.engine.device.record(link.engine.device.h2d)

    def work(seed: int) -> int:
        draw, denied = random.Random(seed), 0
        for _ in range(asked):
            answer = link.ask(
                draw.choice(["weights", "groups", "optim", "experts"]),
                draw.choice(list(Priority)),
                draw.choice(list(Direction)),
            )
            denied += isinstance(answer, Denied)
            lease = answer.lease if isinstance(answer, Denied) else answer
            lease.done(draw.choice([None, passed]))
            enter(link, draw.choice(list(Phase)))
        return denied

    with ThreadPoolExecutor(threads) as pool:
        denied = sum(pool.map(work, range(threads)))
    assert link.in_flight() == (0, 0)
    counts = link.conductor.counts
    assert (counts.grants + counts.denials, counts.denials) == (asked * threads, denied)


def test_a_lease_ends_once(link: Link) -> None:
    lease = link.ask("weights", SPECULATIVE)
    assert not isinstance(lease, Denied)
    event = link.engine.device.record(link.engine.device.h2d)
    lease.done(None)
    lease.done(event)
    assert link.in_flight() == (0, 0)


def test_another_admission_is_asked_first_and_its_leases_end() -> None:
    ended: list[object] = []

    class Inner:
        def ask(self, nbytes: int, direction: Direction, owner: Owner, priority: Priority) -> Lease | Denied:
            return self if nbytes < 1000 else Denied(DenialReason.D2H_CAP_ZERO, self)

        def done(self, event: Event | None) -> None:
            ended.append(event)

    engine = OffloadEngine(device=SimDevice(), admission=Inner())
    conductor = Conductor(engine=engine, telemetry_interval=0)
    owner = Owner("weights", "piece")
    assert conductor.ask(2000, H2D, owner, SPECULATIVE) == Denied(DenialReason.D2H_CAP_ZERO)
    required = conductor.ask(2000, H2D, owner, REQUIRED)
    assert isinstance(required, Denied)
    granted = conductor.ask(10, H2D, owner, SPECULATIVE)
    assert not isinstance(granted, Denied)
    event = engine.device.record(engine.device.h2d)
    for lease in (required.lease, granted):
        lease.done(event)
    assert ended == [None, event, event]


# -- on and off ----------------------------------------------------------------------------------------------
@pytest.mark.req("S1-58", "S0-69")
def test_the_engine_is_as_it_was_after_shutdown_and_nothing_of_it_changes_when_disabled() -> None:
    link = Link()
    assert isinstance(link.before, CapsAdmission)
    assert link.engine.copier.admission is link.conductor
    enter(link, Phase.OPTIMIZER)
    for _ in range(2):
        link.conductor.shutdown()
        assert link.engine.copier.admission is link.before
        assert link.engine.on_phase is None
        assert link.engine.clients == []
        assert link.engine.limits.held_by("max_spilling_bytes") == "default"
    off = Conductor(ConductorConfig(enabled=False), engine=link.engine)
    assert link.engine.copier.admission is link.before
    assert set(vars(off)) == {"engine", "config", "_enabled"}
    off.shutdown()
    assert link.engine.copier.ask(1, H2D, Owner("a", "b"), SPECULATIVE) is UNCOUNTED


def test_an_engine_has_one_conductor(link: Link) -> None:
    with pytest.raises(ValueError, match=r"has a Conductor already; use that one, or shutdown\(\) it first"):
        Conductor(engine=link.engine, telemetry_interval=0)
    link.conductor.shutdown()
    Conductor(engine=link.engine, telemetry_interval=0).shutdown()


def test_a_copy_in_a_capture_is_not_arbitrated(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link.engine.device, "is_capturing", lambda: True)
    assert [link.ask(client, SPECULATIVE) for client in ("a", "b", "c")] == [UNCOUNTED] * 3
