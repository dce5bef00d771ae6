"""The simulated device as a Device: whose memory is whose, what lives how long, what is counted, what is
refused."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from offload.device.base import Device, HostMemory, Lane
from offload.device.sim import POISON, SimDevice
from offload.errors import HazardError, HostBudgetError
from tests.threads import run_all

BLOCK = 4096


def spill(device: SimDevice, block: torch.Tensor, source: torch.Tensor) -> Any:
    device.note_write(device.compute, source)
    device.wait(device.d2h, device.record(device.compute), "spill")
    device.copy(device.d2h, [(block, source)])
    return device.record(device.d2h)


def new(value: int = 1) -> torch.Tensor:
    return torch.full((BLOCK,), value, dtype=torch.uint8)


def test_it_is_a_device_of_named_lanes() -> None:
    device: Device = SimDevice()
    assert (device.name, device.torch_device, device.pins, device.is_capturing()) == (
        "sim",
        torch.device("cpu"),
        False,
        False,
    )
    assert [lane.name for lane in (device.compute, device.d2h, device.h2d)] == ["compute", "d2h", "h2d"]
    assert isinstance(device.compute, Lane)


# -- whose memory --------------------------------------------------------------------------------------------
def test_it_owns_ordinary_cpu_tensors_and_not_what_it_lent_as_host_memory(device: SimDevice) -> None:
    piece = device.host_memory(BLOCK, BLOCK).pieces[0]
    for owned in (
        new(),
        torch.zeros(3, 4).t(),
        torch.nn.Parameter(torch.zeros(2)),
        device.empty(8),
        torch.zeros(0),
    ):
        assert device.owns(owned)
    for host in (
        piece,
        piece[10:20],
        piece.view(torch.float32),
        torch.nn.Parameter(piece.view(torch.float32)),
    ):
        assert not device.owns(host)
    assert SimDevice().owns(piece), "it is another device's"


def test_it_does_not_own_tensors_without_bytes_of_its_own(device: SimDevice) -> None:
    with FakeTensorMode():
        fake = torch.empty(4)
    in_vmap: list[bool] = []

    def ask(row: torch.Tensor) -> torch.Tensor:
        in_vmap.append(device.owns(row))
        return row

    torch.vmap(ask)(torch.zeros(2, 2))
    others = (
        fake,
        torch.empty(4, device="meta"),
        torch.eye(3).to_sparse(),
        torch._to_functional_tensor(torch.zeros(3)),
    )
    assert [device.owns(tensor) for tensor in others] + in_vmap == [False] * 5


def test_host_memory_comes_in_pieces_of_at_most_a_registration(device: SimDevice) -> None:
    memory: HostMemory = device.host_memory(2 * BLOCK + 1, BLOCK)
    assert [(piece.numel(), piece.dtype) for piece in memory.pieces] == [
        (BLOCK, torch.uint8),
        (BLOCK, torch.uint8),
        (1, torch.uint8),
    ]
    assert not memory.pieces[0].is_pinned()
    memory.release()
    memory.release()
    assert memory.pieces == device.host_memory(0, BLOCK).pieces == ()


def test_host_memory_that_the_system_refuses_is_a_budget_error() -> None:
    with pytest.raises(HostBudgetError, match="1,152,921,504,606,846,976 bytes"):
        SimDevice().host_memory(1 << 60, 1 << 60)


def test_host_memory_may_not_be_released_while_a_copy_is_in_flight_nor_used_after(device: SimDevice) -> None:
    memory, source = device.host_memory(BLOCK, BLOCK), new()
    block = memory.pieces[0]
    event = spill(device, block, source)
    with pytest.raises(HazardError, match=r"the host releases them.*freed before the copy ran.*of d2h"):
        memory.release()
    assert memory.pieces == (block,)
    device.synchronize(event)
    memory.release()
    with pytest.raises(HazardError, match="host memory that was released"):
        device.copy(device.d2h, [(block, source)])


def test_a_piece_of_host_memory_goes_alone_and_only_after_its_last_copy(device: SimDevice) -> None:
    memory, source = device.host_memory(3 * BLOCK, BLOCK), new()
    first, block, last = memory.pieces
    event = spill(device, block, source)
    with pytest.raises(HazardError, match=r"the host releases them.*freed before the copy ran.*of d2h"):
        memory.release_piece(1)
    assert memory.pieces == (first, block, last)
    device.synchronize(event)
    memory.release_piece(1)
    memory.release_piece(1)
    assert [piece.numel() for piece in memory.pieces] == [BLOCK, 0, BLOCK], "the others keep their index"
    assert memory.pieces[0] is first
    assert memory.pieces[2] is last
    with pytest.raises(HazardError, match="host memory that was released"):
        device.copy(device.d2h, [(block, source)])
    device.synchronize(spill(device, last, source))
    memory.release()
    assert memory.pieces == ()


def test_a_piece_that_was_released_alone_gives_its_storage_up() -> None:
    memory = SimDevice().host_memory(2 * BLOCK, BLOCK)
    storages = [piece.untyped_storage()._weak_ref() for piece in memory.pieces]
    memory.release_piece(0)
    assert [torch.UntypedStorage._expired(weak) for weak in storages] == [True, False]
    for weak in storages:
        torch.UntypedStorage._free_weak_ref(weak)


# -- lifetimes -----------------------------------------------------------------------------------------------
def test_a_queued_copy_keeps_neither_side_alive() -> None:
    device = SimDevice(check=False)
    memory = device.host_memory(BLOCK, BLOCK)
    source, buffer = new(), device.empty(BLOCK)
    held = [t.untyped_storage()._weak_ref() for t in (source, buffer, memory.pieces[0])]
    spill(device, memory.pieces[0], source)
    device.copy(device.h2d, [(buffer, memory.pieces[0])])
    gc.disable()
    try:
        del source, buffer, memory
        assert all(torch.UntypedStorage._expired(weak) for weak in held)
    finally:
        gc.enable()
        for weak in held:
            torch.UntypedStorage._free_weak_ref(weak)


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_side_that_dies_before_its_copy_ran_is_an_error_that_names_the_copy(side: str) -> None:
    device = SimDevice()
    block, source, buffer = device.host_memory(BLOCK, BLOCK).pieces[0], new(), device.empty(BLOCK)
    if side == "source":
        event = spill(device, block, source)
        del source
    else:
        device.wait(device.h2d, device.record(device.compute), "allocate")
        device.copy(device.h2d, [(buffer, block)])
        event = device.record(device.h2d)
        del buffer
    with pytest.raises(
        HazardError,
        match=r"storage of 4,096: their storage died.*freed before the copy ran: copy of 4,096 bytes",
    ):
        device.synchronize(event)


def test_a_storage_resized_away_under_its_copy_is_an_error(device: SimDevice) -> None:
    block, source = device.host_memory(BLOCK, BLOCK).pieces[0], new()
    event = spill(device, block, source)
    source.untyped_storage().resize_(0)
    with pytest.raises(HazardError, match="source freed before the copy ran"):
        device.synchronize(event)


def test_a_source_may_not_die_before_its_lane_is_ordered_after_the_copy_even_if_the_copy_ran() -> None:
    device = SimDevice(executor="early")
    block, source = device.host_memory(BLOCK, BLOCK).pieces[0], new()
    spill(device, block, source)
    del source
    with pytest.raises(HazardError, match=r"allocator reuse hazard.*their storage died.*operation . of d2h"):
        device.record(device.compute)


@pytest.mark.parametrize("executor", ["late", "early"])
def test_a_source_held_until_compute_waited_may_die(executor: Any) -> None:
    device = SimDevice(executor=executor)
    block, source = device.host_memory(BLOCK, BLOCK).pieces[0], new()
    event = spill(device, block, source)
    device.wait(device.compute, event, "free")
    del source
    device.record(device.compute)


def test_a_dead_source_without_the_check_leaves_poison() -> None:
    device = SimDevice(check=False)
    block, source = device.host_memory(BLOCK, BLOCK).pieces[0], new()
    event = spill(device, block, source)
    del source
    device.synchronize(event)
    assert block.unique().tolist() == [POISON]


def test_an_address_that_the_allocator_uses_again_is_not_the_old_storage(device: SimDevice) -> None:
    block = device.host_memory(BLOCK, BLOCK).pieces[0]
    memory = bytearray(BLOCK)
    for _ in range(50):  # the objects' own addresses are used again too
        old = torch.frombuffer(memory, dtype=torch.uint8)
        device.note_write(device.compute, old)  # h2d is not ordered after this
        address = old.data_ptr()
        del old
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        assert buffer.data_ptr() == address
        device.copy(device.h2d, [(buffer, block)])
        device.wait(device.compute, device.record(device.h2d), "unpack")
        del buffer


def test_the_bookkeeping_goes_with_the_storages(device: SimDevice) -> None:
    block = device.host_memory(BLOCK, BLOCK).pieces[0]
    for _ in range(100):
        source = new()
        event = spill(device, block, source)
        device.wait(device.compute, event, "free")
        del source
    device.record(device.compute)
    assert len(device._checker._tracked) == 1


# -- counts --------------------------------------------------------------------------------------------------
def test_active_bytes_are_the_living_storages_that_it_lent_or_was_told_of(device: SimDevice) -> None:
    buffer, source, untold = device.empty(100), new(), new()
    device.note_write(device.compute, source)
    device.note_write(device.compute, source[10:])
    device.note_read(device.compute, untold)
    assert device.active_bytes() == 100 + BLOCK
    device.note_free(device.compute, source[10:])
    assert device.active_bytes() == 100 + BLOCK, "a part of a storage does not go back"
    device.note_free(device.compute, source)
    assert device.active_bytes() == 100
    del source, buffer
    assert device.active_bytes() == 0


def test_copies_are_counted_by_lane_when_they_are_issued(device: SimDevice) -> None:
    block, source = device.host_memory(BLOCK, BLOCK).pieces[0], new()
    device.copy(device.d2h, [(block[:10], source[:10]), (block[10:30], source[10:30])])
    assert (device.copies(device.d2h), device.copied_bytes(device.d2h)) == (2, 30)
    assert (device.copies(device.h2d), device.copied_bytes(device.h2d)) == (0, 0)


# -- threads -------------------------------------------------------------------------------------------------
def test_the_compute_lane_is_chosen_by_each_thread(device: SimDevice) -> None:
    side = device.new_compute_lane("side")
    seen: list[str] = []
    with device.use_lane(side):
        thread = threading.Thread(target=lambda: seen.append(device.compute.name))
        thread.start()
        thread.join()
        assert device.compute is side
    assert (seen, device.compute.name) == (["compute"], "compute")


def test_threads_may_spill_at_the_same_time() -> None:
    device = SimDevice(executor="random")
    pieces = device.host_memory(4 * BLOCK, BLOCK).pieces
    wrong: list[object] = []

    def work(value: int) -> None:
        try:
            for _ in range(50):
                source = new(value)
                event = spill(device, pieces[value], source)
                device.synchronize(event)
                if pieces[value].unique().tolist() != [value]:
                    wrong.append(value)
                del source
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    run_all(threads)
    assert wrong == []


# -- what is refused -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"executor": "eager"}, "unknown executor 'eager'; known: late, early, random, clock"),
        ({"d2h_gb_s": 0.0}, "d2h_gb_s is 0.0"),
        ({"h2d_gb_s": float("nan")}, "h2d_gb_s is nan"),
        ({"without": "restore"}, "without is the string 'restore'"),
    ],
)
def test_bad_settings_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimDevice(**arguments)


@pytest.mark.parametrize(
    ("destination", "source"),
    [
        (torch.zeros(4, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)),
        (torch.zeros(4, dtype=torch.uint8), torch.zeros(4)),
        (torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)),
        (torch.zeros(8, dtype=torch.uint8)[::2], torch.zeros(4, dtype=torch.uint8)),
    ],
)
def test_a_copy_takes_equal_runs_of_bytes_only(destination: torch.Tensor, source: torch.Tensor) -> None:
    device = SimDevice()
    with pytest.raises(ValueError, match="two contiguous 1-D uint8 tensors of equal length"):
        device.copy(device.h2d, [(destination, source)])
    assert device.copies(device.h2d) == 0


def test_the_host_is_no_lane_for_device_work(device: SimDevice) -> None:
    with pytest.raises(ValueError, match="call synchronize"):
        device.wait(device.host, device.record(device.d2h), "restore")
    with pytest.raises(ValueError, match="not a lane for copies"):
        device.copy(device.host, [])
    with pytest.raises(ValueError, match="not a compute lane"), device.use_lane(device.d2h):
        pass


def test_negative_sizes_are_refused(device: SimDevice) -> None:
    with pytest.raises(ValueError, match="-1 bytes of device memory"):
        device.empty(-1)
    for sizes in ((-1, 4), (4, 0)):
        with pytest.raises(ValueError, match="pieces above 0"):
            device.host_memory(*sizes)
