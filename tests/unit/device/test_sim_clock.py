"""Virtual time: what a copy costs, what hides it, and what compute waits for. All times are derived, in
blocks of one second."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from offload.device.sim import ExecutorName, SimDevice, SimEvent
from offload.errors import HazardError

EXECUTORS: tuple[ExecutorName, ...] = get_args(ExecutorName)
BLOCK = 1000


def device_of(executor: ExecutorName = "clock") -> SimDevice:
    """A block leaves in one second, comes back in two, and a flop takes one."""
    return SimDevice(executor=executor, d2h_gb_s=BLOCK / 1e9, h2d_gb_s=BLOCK / 2e9)


@pytest.fixture
def device() -> SimDevice:
    return device_of()


def leave(device: SimDevice, block: torch.Tensor, source: torch.Tensor) -> SimEvent:
    device.wait(device.d2h, device.record(device.compute), "spill")
    device.copy(device.d2h, [(block, source)])
    return device.record(device.d2h, timed=True)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_copy_beside_enough_compute_costs_nothing(executor: ExecutorName) -> None:
    device = device_of(executor)
    block, source = device.host_memory(BLOCK, BLOCK).pieces[0], torch.zeros(BLOCK, dtype=torch.uint8)
    event = leave(device, block, source)
    device.compute_for(1.5)
    device.wait(device.compute, event, "free")
    assert (device.now_s, device.stall_s, device.busy_s(device.d2h), device.busy_s(device.compute)) == (
        1.5,
        0.0,
        1.0,
        1.5,
    )


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_compute_waits_for_is_the_stall(executor: ExecutorName) -> None:
    device = device_of(executor)
    block, source = device.host_memory(BLOCK, BLOCK).pieces[0], torch.zeros(BLOCK, dtype=torch.uint8)
    event = leave(device, block, source)
    device.compute_for(0.25)
    device.wait(device.compute, event, "free")
    assert (device.now_s, device.stall_s, device.busy_s(device.compute)) == (1.0, 0.75, 0.25)
    device.wait(device.compute, event, "free")
    assert device.stall_s == 0.75, "it has passed"


def test_a_restore_starts_after_its_spill_and_both_directions_run_at_once(device: SimDevice) -> None:
    blocks = device.host_memory(2 * BLOCK, BLOCK).pieces
    source, buffer = torch.zeros(BLOCK, dtype=torch.uint8), device.empty(BLOCK)
    first = leave(device, blocks[0], source)
    second = leave(device, blocks[1], source)
    device.wait(device.h2d, device.record(device.compute), "allocate")
    device.wait(device.h2d, first, "restore")
    device.copy(device.h2d, [(buffer, blocks[0])])
    restored = device.record(device.h2d, timed=True)
    assert [first.time_s, second.time_s, restored.time_s] == [1.0, 2.0, 3.0]
    device.wait(device.compute, restored, "unpack")
    assert device.stall_s == 3.0
    assert device.elapsed_ms(first, restored) == 2000.0


def test_nothing_starts_before_it_is_issued(device: SimDevice) -> None:
    block, buffer = device.host_memory(BLOCK, BLOCK).pieces[0], torch.zeros(BLOCK, dtype=torch.uint8)
    device.compute_for(5.0)
    device.copy(device.h2d, [(buffer, block)])  # waits for nothing
    assert device.record(device.h2d).time_s == 7.0
    assert device.record(device.d2h).time_s == 5.0


def test_a_chunk_restored_one_action_ahead_hides_and_one_asked_for_at_its_reader_does_not() -> None:
    stalls = {}
    for ahead in (False, True):
        device = device_of()
        block, buffer = device.host_memory(BLOCK, BLOCK).pieces[0], device.empty(BLOCK)
        device.wait(device.h2d, device.record(device.compute), "allocate")
        if not ahead:
            device.compute_for(3.0)
        device.copy(device.h2d, [(buffer, block)])
        if ahead:
            device.compute_for(3.0)
        device.wait(device.compute, device.record(device.h2d), "unpack")
        stalls[ahead] = device.stall_s
    assert stalls == {False: 2.0, True: 0.0}


def test_a_blocked_host_is_told_apart_from_a_stall(device: SimDevice) -> None:
    block, source = device.host_memory(BLOCK, BLOCK).pieces[0], torch.zeros(BLOCK, dtype=torch.uint8)
    event = leave(device, block, source)
    device.synchronize(event)
    assert (device.now_s, device.stall_s, device.blocked_s) == (1.0, 0.0, 1.0)


def test_an_event_of_the_clock_passes_by_time_even_if_its_copy_ran_early(device: SimDevice) -> None:
    block, first, second = (
        device.host_memory(BLOCK, BLOCK).pieces[0],
        *torch.zeros(2, BLOCK, dtype=torch.uint8).unbind(),
    )
    event = leave(device, block, first)
    leave(device, block, second)  # poisons the block, so the first copy has run
    assert not device.poll(event)
    device.compute_for(1.0)
    assert device.poll(event)


def test_compute_lanes_have_times_of_their_own_and_their_waits_are_no_stall(device: SimDevice) -> None:
    side = device.new_compute_lane("side")
    with device.use_lane(side):
        device.compute_for(2.0)
        assert device.now_s == 2.0
    assert device.now_s == 0.0
    device.wait(device.compute, device.record(side), "join")
    assert (device.now_s, device.stall_s) == (2.0, 0.0)


def test_time_is_told_only_between_timed_events_that_have_passed(device: SimDevice) -> None:
    block, source = device.host_memory(BLOCK, BLOCK).pieces[0], torch.zeros(BLOCK, dtype=torch.uint8)
    start, plain = device.record(device.compute, timed=True), device.record(device.compute)
    end = leave(device, block, source)
    with pytest.raises(HazardError, match="before d2h got there"):
        device.elapsed_ms(start, end)
    with pytest.raises(ValueError, match="is not timed"):
        device.elapsed_ms(start, plain)
    device.compute_for(1.0)
    assert device.elapsed_ms(start, end) == 1000.0


def test_negative_compute_is_refused() -> None:
    with pytest.raises(ValueError, match="announce 0 or more"):
        SimDevice().compute_for(-1.0)
