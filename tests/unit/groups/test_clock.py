"""The times of a step's actions: compute alone, read one step late, and never at the price of a wait."""

from __future__ import annotations

import pytest

from offload import OffloadEngine
from offload.device.sim import SimDevice
from offload.groups.seen import StepClock
from offload.policy.actions import Action
from offload.transfer.copier import Stall
from offload.transfer.engine import TransferEngine

F0, B0 = Action("F", 0, 0), Action("B", 0, 0)


def clock_of(device: SimDevice) -> tuple[StepClock, TransferEngine]:
    transfers = OffloadEngine(device=device).transfers
    return StepClock(transfers), transfers


def timed(clock: StepClock, device: SimDevice, action: Action, seconds: float) -> None:
    clock.start(action)
    device.compute_for(seconds)
    clock.stop(action)


def test_step_is_timed_when_the_next_one_ends() -> None:
    device = SimDevice(executor="clock")
    clock, _ = clock_of(device)
    timed(clock, device, F0, 2.0)
    timed(clock, device, B0, 3.0)
    assert clock.end_step() is None
    device.compute_for(1.0)
    timed(clock, device, F0, 7.0)
    assert clock.end_step() == {F0: pytest.approx(2.0), B0: pytest.approx(3.0)}
    assert clock.end_step() == {F0: pytest.approx(7.0)}
    assert clock.end_step() is None  # an evaluation, which announces nothing, has no times


def test_stalls_inside_an_action_are_not_its_compute() -> None:
    device = SimDevice(executor="clock")
    clock, transfers = clock_of(device)
    timed(clock, device, F0, 2.0)
    clock.start(B0)
    before = device.record(device.compute, timed=True)
    device.compute_for(5.0)  # stands for a wait
    transfers.stalls.append(Stall(device.compute, before, device.record(device.compute, timed=True)))
    device.compute_for(1.0)
    clock.stop(B0)
    clock.end_step()
    transfers.stalls = []  # as at the end of a step
    assert clock.end_step() == {F0: pytest.approx(2.0), B0: pytest.approx(1.0)}


def test_action_that_did_not_end_leaves_its_step_without_times() -> None:
    device = SimDevice(executor="clock")
    clock, _ = clock_of(device)
    timed(clock, device, F0, 2.0)
    clock.start(B0)  # an exception
    clock.stop(F0)  # and an end that nobody waited for
    clock.end_step()
    assert clock.end_step() is None
