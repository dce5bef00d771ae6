"""Storages whose bytes are given back and allocated again, on the simulated device."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from offload.device._sim_queue import POISON
from offload.device.sim import SimDevice
from offload.errors import HazardError

BLOCK = 4096


def new() -> torch.Tensor:
    return torch.ones(BLOCK, dtype=torch.uint8)


def test_a_freed_storage_has_no_bytes_and_a_refilled_one_has_undefined_ones() -> None:
    device, tensor = SimDevice(), new()
    storage, view, version = tensor.untyped_storage(), tensor[:16].view(4, 4), tensor._version
    device.note_read(device.compute, tensor)
    device.free(storage)
    assert storage.nbytes() == 0
    device.refill(storage, BLOCK)
    assert (storage.nbytes(), tensor._version) == (BLOCK, version)
    assert (tensor == POISON).all()
    assert (view == POISON).all()
    assert device.active_bytes() == BLOCK
    device.free(storage)
    assert device.active_bytes() == 0


@pytest.mark.parametrize("verb", ["note_read", "note_write", "copy out", "copy in"])
def test_freed_bytes_that_are_touched_are_a_hazard(verb: str) -> None:
    device, tensor = SimDevice(), new()
    host = device.host_memory(BLOCK, BLOCK).pieces[0]
    touch = {
        "note_read": partial(device.note_read, device.compute, tensor),
        "note_write": partial(device.note_write, device.compute, tensor),
        "copy out": partial(device.copy, device.d2h, [(host, tensor)]),
        "copy in": partial(device.copy, device.h2d, [(tensor, host)]),
    }[verb]
    device.free(tensor.untyped_storage())
    with pytest.raises(
        HazardError, match=r"bytes \[0, 4,096\) of .*were freed, and nothing has refilled them"
    ):
        touch()


def test_bytes_are_not_given_back_before_a_copy_of_them_has_ended() -> None:
    device, tensor = SimDevice(), new()
    host = device.host_memory(BLOCK, BLOCK).pieces[0]
    device.copy(device.d2h, [(host, tensor)])
    event = device.record(device.d2h)
    with pytest.raises(HazardError, match="they are given back"):
        device.free(tensor.untyped_storage())
    device.wait(device.compute, event, "test")
    device.free(tensor.untyped_storage())


def test_refilled_bytes_are_written_by_another_lane_only_behind_the_allocation() -> None:
    device, tensor = SimDevice(), new()
    host = device.host_memory(BLOCK, BLOCK).pieces[0]
    device.note_read(device.compute, tensor)
    device.free(tensor.untyped_storage())
    device.refill(tensor.untyped_storage(), BLOCK)
    with pytest.raises(HazardError, match="allocator reuse hazard"):
        device.copy(device.h2d, [(tensor, host)])
    device.wait(device.h2d, device.record(device.compute), "test")
    device.copy(device.h2d, [(tensor, host)])


def test_nothing_is_refilled_in_a_capture() -> None:
    device, tensor = SimDevice(), new()
    device.free(tensor.untyped_storage())
    with pytest.raises(HazardError, match="an allocation of 4,096 bytes for a storage"), device.capture():
        device.refill(tensor.untyped_storage(), BLOCK)
