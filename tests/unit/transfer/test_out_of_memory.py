"""A device without room, and calls of it that fail half-way: nothing is lost, nothing leaks, and what can go
on does.

Whole steps that run out of memory are in tests/unit/groups/test_out_of_memory.py, and on a GPU in
tests/gpu/test_out_of_memory.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from offload.device import CopyPair, Event, Lane
from offload.device.sim import ExecutorName, SimDevice
from offload.transfer.block import BlockState
from offload.transfer.copier import Priority
from tests.unit.saved.rig import EXECUTORS, KIB, Rig, assert_equal_bits
from tests.unit.saved.test_views import keep


class SmallDevice(SimDevice):
    """A device of `capacity_bytes`, whose calls can be made to fail. copies_left, records_left: calls that
    still succeed; None: all."""

    def __init__(self, executor: ExecutorName = "late") -> None:
        super().__init__(executor=executor, seed=3)
        self.capacity_bytes = 1 << 40
        self.asked = 0
        self.copies_left: int | None = None
        self.records_left: int | None = None

    def empty(self, nbytes: int) -> Tensor:
        self.asked += 1
        if self.active_bytes() + nbytes > self.capacity_bytes:
            raise torch.OutOfMemoryError(f"tried to allocate {nbytes} bytes")
        return super().empty(nbytes)

    def copy(self, lane: Lane, pairs: Sequence[CopyPair]) -> None:
        """Of a call that fails, half of the copies have been issued."""
        if self.copies_left is not None:
            self.copies_left -= 1
            if self.copies_left < 0:
                super().copy(lane, pairs[: (len(pairs) + 1) // 2])
                raise torch.OutOfMemoryError("in the middle of a piece")
        super().copy(lane, pairs)

    def record(self, lane: Lane, *, timed: bool = False) -> Event:  # type: ignore[override]
        if self.records_left is not None:
            self.records_left -= 1
            if self.records_left == -1:
                raise torch.OutOfMemoryError("no room for an event")
        return super().record(lane, timed=timed)

    def heal(self) -> None:
        self.capacity_bytes = 1 << 40
        self.copies_left = self.records_left = None


@pytest.fixture(params=EXECUTORS)
def device(request: pytest.FixtureRequest) -> SmallDevice:
    return SmallDevice(request.param)


def values(count: int) -> list[Tensor]:
    return [torch.randn(KIB // 4) for _ in range(count)]


def save_all(rig: Rig, count: int, found: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """`count` tensors of 1 KiB that only the graph holds; (what to run backward from, their values)."""
    kept = values(count)
    expected = [value.clone() for value in kept]
    with rig.group():
        y = keep(found, *kept)
    return y, expected


# -- a restore that finds no room ----------------------------------------------------------------------------
def test_a_prefetch_without_room_gives_up_and_asks_no_more_in_that_step(
    device: SmallDevice, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(device=device)
    found: list[Tensor] = []
    y, expected = save_all(rig, 3, found)
    rig.leave()
    records = rig.blocks()
    device.capacity_bytes = device.active_bytes()
    for _ in range(2):
        assert rig.transfers.restore(records[:1], Priority.SPECULATIVE) is None
    assert device.asked == 1, (
        "torch frees its cached blocks, and so blocks the host, each time that it finds no room"
    )
    assert rig.states() == [BlockState.SPILLED] * 3
    assert (rig.transfers.restoring_bytes, rig.restored_bytes) == (0, 0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "the device has no room for 1.02 kB that come back" in caplog.text
    assert "Lower device_limit (device_limit_bytes in OffloadConfig, " in caplog.text
    assert "or the high mark of mode='watermark', to leave more room" in caplog.text

    device.heal()
    y.backward()
    assert_equal_bits(expected, found)
    del y
    rig.end()
    y, _ = save_all(rig, 1, [])
    rig.leave()
    assert rig.transfers.restore(rig.blocks(), Priority.SPECULATIVE) is not None, "a new step tries again"
    y.backward()
    del y
    rig.end()


def test_a_reader_without_room_gets_what_spills_in_flight_and_fetched_records_held(
    device: SmallDevice,
) -> None:
    rig = Rig(device=device)
    found: list[Tensor] = []
    y, expected = save_all(rig, 4, found)
    first, second, third, fourth = rig.blocks()
    for record in (first, second, fourth):
        assert record.transfer is not None
        rig.transfers.settle_spill(record.transfer)
    rig.transfers.restore([second], Priority.SPECULATIVE)
    assert (rig.transfers.spilling_bytes, rig.transfers.restoring_bytes) == (KIB, KIB)
    device.capacity_bytes = device.active_bytes()
    rig.transfers.restore([first], Priority.REQUIRED)
    assert [first.state, second.state, third.state] == [
        BlockState.RESTORING,
        BlockState.SPILLED,
        BlockState.SPILLED,
    ]
    assert (rig.transfers.spilling_bytes, rig.transfers.restoring_bytes) == (0, KIB)
    device.heal()
    y.backward()
    assert_equal_bits(expected, found)


def test_a_reader_that_no_room_can_be_made_for_raises_and_may_read_again_later(device: SmallDevice) -> None:
    rig = Rig(device=device)
    found: list[Tensor] = []
    y, expected = save_all(rig, 2, found)
    rig.leave()
    device.capacity_bytes = 0
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 1024 bytes"):
        y.backward(retain_graph=True)
    assert rig.states() == [BlockState.SPILLED] * 2
    assert rig.transfers.device_bytes == 0
    device.heal()
    found.clear()
    y.backward()
    assert_equal_bits(expected, found)


# -- calls that fail half-way --------------------------------------------------------------------------------
@pytest.mark.parametrize("fails", ["copies_left", "records_left"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_spill_that_fails_leaves_its_tensors_where_they_were_and_lends_nothing(
    device: SmallDevice, fails: str, after: int
) -> None:
    """A piece of four tensors; some copies were issued. `after` calls succeed: the event before the copies,
    or the one after them."""
    rig = Rig(device=device, piece_bytes=1 << 20)
    kept = values(4)
    expected = [value.clone() for value in kept]
    found: list[Tensor] = []
    setattr(device, fails, after if fails == "records_left" else 0)
    with pytest.raises(torch.OutOfMemoryError), rig.group(commit=True):
        y = keep(found, *kept)
    del kept
    assert rig.states() == [BlockState.RESIDENT] * 4
    assert rig.transfers.device_bytes == rig.transfers.resident_bytes == 4 * KIB
    assert rig.engine.arena.stats().lent == 0
    assert not rig.transfers._sources
    device.heal()
    y.backward()
    assert_equal_bits(expected, found)
    found.clear()  # the sources die, and the copies that were issued must have read them
    del y
    assert rig.end().kept == 4
    y, _ = save_all(rig, 4, [])  # into the same host bytes
    rig.leave()
    y.backward()
    del y
    assert rig.end().spilled == 4


def test_host_bytes_of_a_spill_that_failed_before_it_waited_are_not_written_under_their_last_reader(
    device: SmallDevice,
) -> None:
    """The block goes back with one event, which has to come after all that it came with. On another lane than
    the reader's, which nothing else orders behind it."""
    rig = Rig(device=device, piece_bytes=1 << 20)
    y, _ = save_all(rig, 4, [])
    rig.leave()
    y.backward()  # h2d reads the host bytes
    del y
    with device.use_lane(device.new_compute_lane("side")):
        device.records_left = 0
        with pytest.raises(torch.OutOfMemoryError), rig.group(commit=True):
            y = keep([], *values(4))
        device.heal()
        y, _ = save_all(rig, 4, [])  # d2h writes them
        rig.leave()
    y.backward()


def test_host_memory_of_a_spill_that_failed_is_not_released_under_its_copies(device: SmallDevice) -> None:
    rig = Rig(device=device, piece_bytes=1 << 20)
    device.copies_left = 0
    kept = values(4)
    with pytest.raises(torch.OutOfMemoryError), rig.group(commit=True):
        _y = keep([], *kept)
    device.heal()
    assert rig.engine.arena.trim(0) > 0


def test_host_memory_of_a_restore_that_failed_is_not_released_under_its_copies(device: SmallDevice) -> None:
    rig = Rig(device=device)
    y, _ = save_all(rig, 4, [])
    rig.leave()
    device.copies_left = 0
    with pytest.raises(torch.OutOfMemoryError):
        rig.transfers.restore(rig.blocks(), Priority.SPECULATIVE)
    device.heal()
    del y
    rig.end()
    assert rig.engine.arena.trim(0) > 0


@pytest.mark.parametrize("fails", ["copies_left", "records_left"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_restore_that_fails_can_be_tried_again(device: SmallDevice, fails: str, after: int) -> None:
    rig = Rig(device=device)
    found: list[Tensor] = []
    y, expected = save_all(rig, 4, found)
    rig.leave()
    setattr(device, fails, after if fails == "records_left" else 0)
    with pytest.raises(torch.OutOfMemoryError):
        rig.transfers.restore(rig.blocks(), Priority.SPECULATIVE)
    assert rig.states() == [BlockState.SPILLED] * 4
    assert (rig.transfers.device_bytes, rig.transfers.in_flight()) == (0, (0, 0))
    device.heal()
    y.backward()
    assert_equal_bits(expected, found)


def test_a_restore_after_one_that_failed_before_its_copies_still_waits_for_the_spill(
    device: SmallDevice,
) -> None:
    """On another lane than the one that settled the spill, which nothing else orders behind it. What failed
    leaves its own event with each record: to wait for that is to wait for the spill if it waited itself."""
    rig = Rig(device=device)
    found: list[Tensor] = []
    y, expected = save_all(rig, 4, found)
    rig.leave()
    with device.use_lane(device.new_compute_lane("side")):
        device.records_left = 0
        with pytest.raises(torch.OutOfMemoryError):
            rig.transfers.restore(rig.blocks(), Priority.SPECULATIVE)
        device.heal()
        assert rig.transfers.restore(rig.blocks(), Priority.SPECULATIVE) is not None
    y.backward()
    assert_equal_bits(expected, found)


def test_a_sparse_view_that_there_is_no_room_to_pack_leaves_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    wide = torch.randn(16, 64)
    found: list[Tensor] = []
    with rig.group(commit=False) as group:
        y = keep(found, wide[:, :4])
    expected = wide[:, :4].clone()
    del wide

    def full(*_arguments: object, **_keywords: object) -> Tensor:
        raise torch.OutOfMemoryError("no room for the packed copy")

    record = group.deferred[0]()
    assert record is not None
    packed_bytes = rig.engine.store._packed_bytes(record)
    assert packed_bytes is not None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1)
        rig.engine.store._gather(record, packed_bytes)
    assert record.gathered is None
    del record
    rig.engine.store.commit(group)
    rig.leave()
    y.backward()
    assert torch.equal(found[0], expected)
    del y
    assert rig.end().spilled == 1
