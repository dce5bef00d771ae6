"""The door that every transfer passes, and what a denial does in each direction."""

from __future__ import annotations

import pytest
import torch

from offload.ids import ChunkId, GroupId
from offload.transfer.door import CapsDoor, Denied, Direction, Grant, Limits, Priority
from tests.unit.saved.rig import Rig, assert_equal_bits, gradients

OWNER = GroupId(ChunkId(0, 0), 0, "group")


class Doorman:
    """Denies one direction, and remembers who asked."""

    def __init__(self, denied: Direction) -> None:
        self.denied = denied
        self.asked: list[tuple[int, Direction, str, Priority]] = []

    def admit(self, nbytes: int, direction: Direction, owner: GroupId, priority: Priority) -> Grant | Denied:
        self.asked.append((nbytes, direction, str(owner), priority))
        return Denied("CLOSED") if direction is self.denied else Grant(nbytes)


def test_a_cap_of_zero_refuses_every_spill_and_no_restore() -> None:
    door = CapsDoor(Limits(device_limit_bytes=None, max_spilling_bytes=0, max_restoring_bytes=0))
    assert door.admit(1, Direction.D2H, OWNER, Priority.BACKGROUND) == Denied("D2H_CAP_ZERO")
    assert door.admit(1, Direction.H2D, OWNER, Priority.REQUIRED) == Grant(1)


def test_limits_may_change_between_two_requests() -> None:
    limits = Limits(device_limit_bytes=None, max_spilling_bytes=0, max_restoring_bytes=0)
    door = CapsDoor(limits)
    limits.max_spilling_bytes = 10
    assert door.admit(11, Direction.D2H, OWNER, Priority.BACKGROUND) == Grant(11)


def test_a_denied_spill_leaves_its_tensor_on_the_device_and_is_counted() -> None:
    door = Doorman(Direction.D2H)
    rig = Rig(door=door)
    x = torch.randn(256, requires_grad=True)
    assert_equal_bits(gradients(torch.sin, [x]), gradients(torch.sin, [x], rig))
    assert rig.spilled_bytes == 0
    assert door.asked == [(1024, Direction.D2H, "s0m0/group#0", Priority.BACKGROUND)]
    stats = rig.end()
    assert (stats.saved, stats.kept, stats.refused, stats.refused_bytes) == (1, 1, 1, 1024)


def test_a_restore_whose_reader_waits_goes_ahead_although_it_is_denied() -> None:
    door = Doorman(Direction.H2D)
    rig = Rig(door=door)
    x = torch.randn(256, requires_grad=True)
    program = lambda x: (x * 2).sin()  # noqa: E731
    assert_equal_bits(gradients(program, [x]), gradients(program, [x], rig))
    assert [priority for _, direction, _, priority in door.asked if direction is Direction.H2D] == [
        Priority.REQUIRED
    ]
    assert rig.end().restored == 1


def test_a_prefetch_that_is_denied_moves_nothing() -> None:
    door = Doorman(Direction.H2D)
    rig = Rig(door=door)
    with rig.group():
        y = (torch.randn(256, requires_grad=True) * 2).sin()
    rig.leave()
    rig.chunks[0].complete()
    rig.engine.prefetch.pump(rig.chunks)
    assert [priority for _, direction, _, priority in door.asked if direction is Direction.H2D] == [
        Priority.SPECULATIVE
    ]
    assert rig.restored_bytes == 0
    assert rig.transfers.in_flight() == (0, 0)
    del y
    rig.end()


@pytest.mark.parametrize("lower", [Priority.BACKGROUND, Priority.SPECULATIVE])
def test_what_a_reader_waits_for_comes_before_what_nobody_waits_for(lower: Priority) -> None:
    assert lower < Priority.REQUIRED < Priority.CRITICAL
