"""When queued copies run: what each executor may do, what poison shows, and what happens to a lane that
cannot go on."""

from __future__ import annotations

import random
from typing import get_args

import pytest
import torch

from offload.device.sim import POISON, ExecutorName, SimDevice, SimEvent
from offload.errors import HazardError

EXECUTORS: tuple[ExecutorName, ...] = get_args(ExecutorName)
BLOCK = 64


def filled(value: int) -> torch.Tensor:
    return torch.full((BLOCK,), value, dtype=torch.uint8)


def spill(device: SimDevice, block: torch.Tensor, source: torch.Tensor) -> SimEvent:
    device.note_write(device.compute, source)
    device.wait(device.d2h, device.record(device.compute), "spill")
    device.copy(device.d2h, [(block, source)])
    return device.record(device.d2h)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_synchronize_returns_when_the_bytes_are_there(executor: ExecutorName) -> None:
    device = SimDevice(executor=executor)
    block, source = device.host_memory(BLOCK, BLOCK).pieces[0], filled(1)
    event = spill(device, block, source)
    device.synchronize(event)
    assert device.poll(event)
    assert torch.equal(block, source)


def test_late_runs_a_copy_only_when_something_needs_it() -> None:
    device = SimDevice(executor="late")
    blocks = device.host_memory(2 * BLOCK, BLOCK).pieces
    sources = [filled(1), filled(2)]
    events = [spill(device, block, source) for block, source in zip(blocks, sources, strict=True)]
    for _ in range(20):
        assert [device.poll(event) for event in events] == [False, False]
    device.wait(device.compute, events[0], "free")
    assert [device.poll(event) for event in events] == [True, False]
    assert [block.unique().tolist() for block in blocks] == [[1], [POISON]]


def test_early_runs_a_copy_at_once() -> None:
    device = SimDevice(executor="early")
    block, source = device.host_memory(BLOCK, BLOCK).pieces[0], filled(1)
    event = spill(device, block, source)
    assert torch.equal(block, source)
    assert device.poll(event)


def test_random_is_decided_by_its_seed_alone() -> None:
    def polls(seed: int) -> list[bool]:
        device = SimDevice(executor="random", seed=seed)
        block, source = device.host_memory(BLOCK, BLOCK).pieces[0], filled(1)
        event = spill(device, block, source)
        return [device.poll(event) for _ in range(10)]

    assert [polls(seed) for seed in range(20)] == [polls(seed) for seed in range(20)]
    first_seen = {answers.index(True) if True in answers else 10 for answers in map(polls, range(50))}
    assert len(first_seen) > 3


def test_under_random_compute_lags_behind_the_host_and_gets_there() -> None:
    device = SimDevice(executor="random", seed=1)
    tensor = filled(1)
    seen = []
    for _ in range(50):
        device.note_read(device.compute, tensor)
        seen.append(device.poll(device.record(device.compute)))
    assert set(seen) == {False, True}
    event = device.record(device.compute)
    device.synchronize(event)
    assert device.poll(event)


@pytest.mark.parametrize("executor", ["late", "early", "clock"])
def test_elsewhere_compute_is_where_the_host_is(executor: ExecutorName) -> None:
    device = SimDevice(executor=executor)
    device.note_write(device.compute, filled(1))
    assert device.poll(device.record(device.compute))


def test_clock_runs_a_copy_when_its_virtual_time_has_come() -> None:
    device = SimDevice(executor="clock", d2h_gb_s=BLOCK / 1e9)  # a block a second
    block, source = device.host_memory(BLOCK, BLOCK).pieces[0], filled(1)
    event = spill(device, block, source)
    device.compute_for(0.99)
    assert not device.poll(event)
    assert block.unique().tolist() == [POISON]
    device.compute_for(0.01)
    assert torch.equal(block, source)
    assert device.poll(event)


def compute_reads(device: SimDevice) -> int:
    """What compute reads from a buffer that a restore of ones fills, at the place where it waits."""
    block, source = device.host_memory(BLOCK, BLOCK).pieces[0], filled(1)
    device.synchronize(spill(device, block, source))
    buffer = device.empty(BLOCK)
    buffer.fill_(1)  # what was there before would look right
    device.copy(device.h2d, [(buffer, block)])
    restored = device.record(device.h2d)
    device.wait(device.compute, restored, "unpack")
    (read,) = buffer.unique().tolist()
    device.synchronize(restored)
    assert buffer.unique().tolist() == [1]
    return int(read)


def test_a_reader_that_skips_the_wait_sees_poison() -> None:
    assert compute_reads(SimDevice(executor="late", check=False, without={"unpack"})) == POISON
    assert compute_reads(SimDevice(executor="clock", check=False, without={"unpack"})) == POISON
    seen = {
        compute_reads(SimDevice(executor="random", seed=seed, check=False, without={"unpack"}))
        for seed in range(30)
    }
    assert seen == {POISON, 1}, "some restores are in time by luck"


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_reader_that_waits_never_sees_poison(executor: ExecutorName) -> None:
    assert {compute_reads(SimDevice(executor=executor, seed=seed, check=False)) for seed in range(30)} == {1}


def test_without_poison_the_destination_keeps_its_bytes_until_the_copy_runs() -> None:
    device = SimDevice(poison=False)
    block, source = device.host_memory(BLOCK, BLOCK).pieces[0], filled(1)
    block.fill_(9)
    event = spill(device, block, source)
    assert block.unique().tolist() == [9]
    device.synchronize(event)
    assert block.unique().tolist() == [1]


def reuse_block(device: SimDevice) -> torch.Tensor:
    """A restore is queued and its block is written again, after it; the restored bytes."""
    block, first, second, buffer = (
        device.host_memory(BLOCK, BLOCK).pieces[0],
        filled(1),
        filled(2),
        device.empty(BLOCK),
    )
    spilled = spill(device, block, first)
    device.wait(device.h2d, device.record(device.compute), "allocate")
    device.wait(device.h2d, spilled, "restore")
    device.copy(device.h2d, [(buffer, block)])
    restored = device.record(device.h2d)
    device.wait(device.d2h, restored, "reuse of a block")
    device.copy(device.d2h, [(block, second)])
    device.synchronize(restored)
    return buffer


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("seed", range(10))
def test_poison_never_reaches_a_reader_that_is_ordered_before_the_writer(
    executor: ExecutorName, seed: int
) -> None:
    assert reuse_block(SimDevice(executor=executor, seed=seed)).unique().tolist() == [1]


def test_a_block_reused_without_its_edge_gives_the_reader_wrong_bytes() -> None:
    assert reuse_block(SimDevice(without={"reuse of a block"}, check=False)).unique().tolist() == [POISON]
    assert reuse_block(
        SimDevice(without={"reuse of a block"}, check=False, poison=False)
    ).unique().tolist() == [1]
    seeds = [
        reuse_block(SimDevice(executor="random", seed=seed, without={"reuse of a block"}, check=False))
        for seed in range(50)
    ]
    assert {tuple(buffer.unique().tolist()) for buffer in seeds} == {(1,), (2,), (POISON,)}, (
        "by luck, the next tensor's, or neither"
    )


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("seed", range(20))
def test_a_long_random_program_with_all_its_edges_moves_every_byte_right(
    executor: ExecutorName, seed: int
) -> None:
    rng = random.Random(seed)
    device = SimDevice(executor=executor, seed=seed)
    piece = device.host_memory(4 * BLOCK, 4 * BLOCK).pieces[0]
    blocks: list[tuple[torch.Tensor, SimEvent | None]] = [
        (piece[i * BLOCK : (i + 1) * BLOCK], None) for i in range(4)
    ]
    away: list[tuple[int, torch.Tensor, SimEvent]] = []
    leaving: list[tuple[torch.Tensor, SimEvent]] = []
    for value in range(100):
        device.compute_for(rng.random() * 2e-9)
        if blocks and rng.random() < 0.5:
            block, reader = blocks.pop(rng.randrange(len(blocks)))
            if reader is not None:
                device.wait(device.d2h, reader, "reuse of a block")
            source = filled(value)
            away.append((value, block, spill(device, block, source)))
            leaving.append((source, away[-1][2]))
            del source
        elif away:
            value, block, spilled = away.pop(rng.randrange(len(away)))
            buffer = device.empty(BLOCK)
            device.wait(device.h2d, device.record(device.compute), "allocate")
            device.wait(device.h2d, spilled, "restore")
            device.copy(device.h2d, [(buffer[:40], block[:40]), (buffer[40:], block[40:])])
            restored = device.record(device.h2d)
            blocks.append((block, restored))
            device.wait(device.compute, restored, "unpack")
            device.note_read(device.compute, buffer)
            assert buffer.unique().tolist() == [value]
            device.note_free(device.compute, buffer)
        while leaving and (device.poll(leaving[0][1]) or len(leaving) > 3):
            device.wait(device.compute, leaving[0][1], "free")
            source, _ = leaving.pop(0)
            device.note_free(device.compute, source)
            del source


def test_a_lane_that_cannot_go_on_names_the_waiter_and_the_copy(device: SimDevice) -> None:
    blocks = device.host_memory(2 * BLOCK, BLOCK).pieces
    source, later = filled(1), filled(2)
    spill(device, blocks[0], source)
    behind = spill(device, blocks[1], later)
    source.untyped_storage().resize_(0)
    for _ in range(2):  # and stays so
        both = (
            r"^compute \('unpack'\) needs operation . of d2h, which can never be reached: "
            r"source freed before .*a device storage of "
        )
        with pytest.raises(HazardError, match=both):
            device.wait(device.compute, behind, "unpack")
        with pytest.raises(HazardError, match=r"^synchronize needs operation"):
            device.synchronize(behind)


def test_a_wait_for_a_point_that_was_never_issued_is_a_deadlock(device: SimDevice) -> None:
    event = device.record(device.h2d)
    event.number = 3
    with pytest.raises(
        HazardError, match=r"deadlock: d2h \('reuse'\) waits for operation 3 of h2d, which was given only 0"
    ):
        device.wait(device.d2h, event, "reuse")
    with pytest.raises(HazardError, match="deadlock: synchronize"):
        device.synchronize(event)


def test_events_and_lanes_of_another_device_are_refused() -> None:
    device, other = SimDevice(), SimDevice()
    event = other.record(other.compute)
    with pytest.raises(HazardError, match=r"compute \('restore'\) waits for SimEvent.*never recorded"):
        device.wait(device.compute, event, "restore")
    for call in (device.poll, device.synchronize):
        with pytest.raises(HazardError, match="never recorded"):
            call(event)
    with pytest.raises(ValueError, match="is not of this device"):
        device.record(other.d2h)
