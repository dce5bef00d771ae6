"""Admission, asked before every piece: what a denial does in each direction, and when a lease ends."""

from __future__ import annotations

import pytest
import torch

from offload.config import OffloadConfig
from offload.device import Event
from offload.device.sim import SimDevice
from offload.ids import Owner
from offload.memory.budget import LocalHostBudget
from offload.transfer.copier import CapsAdmission, DenialReason, Denied, Direction, Lease, Priority
from offload.transfer.limits import Limits
from tests.unit.saved.rig import Rig, assert_equal_bits, gradients

OWNER = Owner("groups", "s0m0/group")
BUSY = Denied(DenialReason.D2H_SLOTS_EXHAUSTED)


class Counted:
    """A lease that says when it ended, and with what."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.ends: list[Event | None] = []

    def done(self, event: Event | None) -> None:
        self.ends.append(event)


class Arbiter:
    """Denies one direction, and remembers who asked and what it granted."""

    def __init__(self, denied: Direction | None = None) -> None:
        self.denied = denied
        self.asked: list[tuple[int, Direction, Owner, Priority]] = []
        self.leases: list[Counted] = []

    def ask(self, nbytes: int, direction: Direction, owner: Owner, priority: Priority) -> Lease | Denied:
        self.asked.append((nbytes, direction, owner, priority))
        if direction is self.denied:
            return BUSY
        self.leases.append(Counted(nbytes))
        return self.leases[-1]

    def priorities(self, direction: Direction) -> list[Priority]:
        return [priority for _, asked, _, priority in self.asked if asked is direction]


def limits(max_spilling_bytes: int) -> Limits:
    return Limits(OffloadConfig(max_spilling_bytes=max_spilling_bytes))


def test_a_cap_of_zero_refuses_every_spill_and_nothing_else() -> None:
    caps = CapsAdmission(limits(0))
    denied = Denied(DenialReason.D2H_CAP_ZERO)
    assert caps.ask(1, Direction.D2H, OWNER, Priority.BACKGROUND) == denied
    assert not isinstance(caps.ask(1, Direction.H2D, OWNER, Priority.BACKGROUND), Denied)
    assert not isinstance(caps.ask(1, Direction.D2H, OWNER, Priority.REQUIRED), Denied)


def test_limits_may_change_between_two_requests() -> None:
    changing = limits(0)
    caps = CapsAdmission(changing)
    changing.max_spilling_bytes = 10
    assert not isinstance(caps.ask(11, Direction.D2H, OWNER, Priority.BACKGROUND), Denied)


def test_a_denied_spill_leaves_its_tensor_on_the_device_and_is_counted() -> None:
    arbiter = Arbiter(Direction.D2H)
    rig = Rig(admission=arbiter)
    x = torch.randn(256, requires_grad=True)
    assert_equal_bits(gradients(torch.sin, [x]), gradients(torch.sin, [x], rig))
    assert rig.spilled_bytes == 0
    assert arbiter.asked == [(1024, Direction.D2H, OWNER, Priority.BACKGROUND)]
    stats = rig.end()
    assert (stats.saved, stats.kept, stats.refused, stats.refused_bytes) == (1, 1, 1, 1024)


def test_a_restore_whose_reader_waits_goes_ahead_although_it_is_denied_and_is_counted() -> None:
    arbiter = Arbiter(Direction.H2D)
    rig = Rig(admission=arbiter)
    x = torch.randn(256, requires_grad=True)
    program = lambda x: (x * 2).sin()  # noqa: E731
    assert_equal_bits(gradients(program, [x]), gradients(program, [x], rig))
    assert arbiter.priorities(Direction.H2D) == [Priority.REQUIRED]
    counts = rig.engine.copier.take_counts()["groups"]
    assert (counts.denied, counts.denied_bytes, counts.in_bytes) == (1, 1024, 1024)
    assert rig.end().restored == 1


def test_a_prefetch_that_is_denied_moves_nothing() -> None:
    arbiter = Arbiter(Direction.H2D)
    rig = Rig(admission=arbiter)
    with rig.group():
        _y = (torch.randn(256, requires_grad=True) * 2).sin()
    rig.leave()
    rig.chunks[0].complete()
    rig.pump()
    assert arbiter.priorities(Direction.H2D) == [Priority.SPECULATIVE]
    assert rig.restored_bytes == 0
    assert rig.transfers.in_flight() == (0, 0)


def test_a_piece_asks_once_whatever_it_holds() -> None:
    arbiter = Arbiter()
    rig = Rig(admission=arbiter, piece_bytes=1 << 20)
    with rig.group():
        _y = (torch.randn(256, requires_grad=True) * 2).sin().sin().sin()
    assert [asked[:2] for asked in arbiter.asked] == [(3 * 1024, Direction.D2H)]


def test_each_lease_ends_once_with_the_event_of_its_copy() -> None:
    arbiter = Arbiter()
    rig = Rig(admission=arbiter)
    x = torch.randn(256, requires_grad=True)
    gradients(lambda x: (x * 2).sin().sin(), [x], rig)
    rig.end()
    assert [lease.nbytes for lease in arbiter.leases] == [1024] * 4
    events = [event for lease in arbiter.leases for event in lease.ends]
    assert len(events) == 4
    for event in events:
        assert event is not None
        rig.device.synchronize(event)


def test_a_lease_ends_where_the_host_has_no_block() -> None:
    arbiter = Arbiter()
    rig = Rig(admission=arbiter, budget=LocalHostBudget(0))
    with rig.group():
        _y = (torch.randn(256, requires_grad=True) * 2).sin()
    assert [lease.ends for lease in arbiter.leases] == [[None]]


def test_a_lease_ends_where_the_device_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    arbiter = Arbiter()
    rig = Rig(admission=arbiter)
    with rig.group():
        _y = (torch.randn(256, requires_grad=True) * 2).sin()
    rig.leave()

    def full(self: SimDevice, nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(SimDevice, "empty", full)
    records = rig.blocks()
    assert rig.transfers.restore(records, Priority.SPECULATIVE) is None
    with pytest.raises(torch.OutOfMemoryError):
        rig.transfers.restore(records, Priority.REQUIRED)
    assert [lease.ends for lease in arbiter.leases[1:]] == [[None], [None]]


@pytest.mark.parametrize("direction", Direction)
def test_a_lease_ends_where_a_copy_fails(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    arbiter = Arbiter()
    rig = Rig(admission=arbiter)

    def save() -> torch.Tensor:
        with rig.group():
            return (torch.randn(256, requires_grad=True) * 2).sin()

    def broken(self: SimDevice, lane: object, pairs: object) -> None:
        raise OSError("the copy cannot be issued")

    if direction is Direction.H2D:
        y = save()
        rig.leave()
    moves = save if direction is Direction.D2H else lambda: y.sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(SimDevice, "copy", broken)
        with pytest.raises(OSError, match="cannot be issued"):
            moves()
    assert len(arbiter.leases[-1].ends) == 1
    assert arbiter.leases[-1].ends[0] is not None


@pytest.mark.parametrize("lower", [Priority.BACKGROUND, Priority.SPECULATIVE])
def test_what_a_reader_waits_for_comes_before_what_nobody_waits_for(lower: Priority) -> None:
    assert lower < Priority.REQUIRED < Priority.CRITICAL
