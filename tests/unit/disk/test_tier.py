"""Saved tensors that lie in the file: what is written and read when, and what a disk that fails leads to."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import OffloadConfig, OffloadEngine, OffloadError
from offload.device.sim import SimDevice
from offload.disk.loans import SpareMemory
from offload.disk.tier import DiskTier
from offload.transfer.copier import Priority
from tests.inside import has_work, read_ahead
from tests.property.disk_steps import step_disk
from tests.unit.saved.rig import EXECUTORS, Rig, assert_equal_bits, gradients

ROWS = 4096  # of a float32 tensor of 16 KiB
NBYTES = 4 * ROWS


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Over a file, its threads stepped: late."""
    made = Rig(disk_directory=str(tmp_path), disk_ahead_bytes=0, host_limit_bytes=1 << 20)
    step_disk(made.engine)
    yield made
    made.engine.close()


def disk_of(rig: Rig) -> DiskTier:
    assert rig.transfers.disk is not None
    return rig.transfers.disk


def leaves(count: int) -> list[Tensor]:
    return [torch.full((ROWS,), float(number + 1), requires_grad=True) for number in range(count)]


def sines(*inputs: Tensor) -> Tensor:
    """Saves one new tensor for each input, in order."""
    return torch.stack([torch.sin(x * 1.0) for x in inputs]).sum(0)


def write_out(rig: Rig) -> None:
    """What has left is in the file and nowhere else."""
    rig.leave()
    disk_of(rig).writer.drain()
    disk_of(rig).collect()
    assert all(block.host is None for block in rig.blocks())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "offload.disk.tier" and record.levelno == logging.WARNING
    ]


# -- out and back --------------------------------------------------------------------------------------------
@pytest.mark.req("S4-22")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_tensors_go_to_the_file_and_come_back_with_their_bits(executor: Any, tmp_path: Path) -> None:
    """With the real threads. All lies in the file before the backward."""
    rig = Rig(executor, disk_directory=str(tmp_path), disk_ahead_bytes=0, host_limit_bytes=1 << 20)
    inputs = leaves(8)
    with rig.group():
        result = sines(*inputs)
    write_out(rig)
    assert rig.engine.arena.stats().lent == 0
    assert disk_of(rig).extents.lent_bytes == 8 * NBYTES
    found = torch.autograd.grad(result.sum(), inputs)
    assert_equal_bits(gradients(sines, inputs), found)
    disk_of(rig).drain()
    stats = rig.end()
    assert (stats.disk_write_bytes, stats.disk_read_bytes) == (8 * NBYTES, 8 * NBYTES)
    assert stats.disk_bytes_peak == 8 * NBYTES
    assert stats.disk_write_bytes_per_s > 0
    assert stats.disk_read_bytes_per_s > 0
    assert stats.disk_blocked_ms > 0, "each reader came before its bytes"
    assert disk_of(rig).extents.lent_bytes == 0
    rig.engine.close()


def test_a_step_without_a_disk_has_no_figures_of_one() -> None:
    rig = Rig()
    gradients(sines, leaves(2), rig)
    stats = rig.end()
    assert (stats.disk_write_bytes, stats.disk_read_bytes, stats.disk_bytes_peak) == (0, 0, 0)
    assert (stats.disk_blocked_ms, stats.disk_write_bytes_per_s) == (0.0, 0.0)


def test_a_piece_is_one_write_and_what_lies_side_by_side_one_read(tmp_path: Path) -> None:
    rig = Rig(
        piece_bytes=4 * NBYTES,
        disk_directory=str(tmp_path),
        disk_ahead_bytes=4 * NBYTES,
        max_restoring_bytes=0,
        host_limit_bytes=1 << 20,
    )
    disk = step_disk(rig.engine)
    inputs = leaves(8)
    with rig.group():
        result = sines(*inputs)
    write_out(rig)
    assert disk.writer.ran == 2
    rig.chunks[0].complete()
    rig.pump()  # the backward reads the last four first: one piece, from its end
    disk.reader.drain()
    assert disk.reader.ran == 1
    assert_equal_bits(gradients(sines, inputs), torch.autograd.grad(result.sum(), inputs))
    rig.end()
    rig.engine.close()


def test_what_is_read_soon_is_not_written_and_what_was_written_is_read_ahead(tmp_path: Path) -> None:
    """Eight tensors; the first four were written when the forward ends. The window holds six."""
    rig = Rig(
        disk_directory=str(tmp_path),
        disk_ahead_bytes=6 * NBYTES,
        max_restoring_bytes=0,
        host_limit_bytes=1 << 20,
    )
    disk = step_disk(rig.engine, "random")
    disk.writer.passed = lambda job, order: job.is_over  # type: ignore[method-assign]
    inputs = leaves(8)
    with rig.group():
        first = sines(*inputs[:4])
    disk.writer.drain()
    with rig.group():
        second = sines(*inputs[4:])
    rig.leave()
    rig.chunks[0].complete()
    rig.pump()
    blocks = rig.blocks()
    assert [block.stored is None for block in blocks] == [False] * 4 + [True] * 4, "four stay"
    disk.reader.drain()
    assert disk.bring(blocks[2:4], required=False)
    assert [block.host is None for block in blocks] == [True] * 2 + [False] * 6
    assert_equal_bits(gradients(sines, inputs), torch.autograd.grad(first.sum() + second.sum(), inputs))
    stats = rig.end()
    assert (stats.disk_write_bytes, stats.disk_read_bytes) == (4 * NBYTES, 4 * NBYTES)
    rig.engine.close()


def test_a_prefetch_does_not_wait_for_the_disk_and_asks_for_the_bytes(rig: Rig) -> None:
    (x,) = leaves(1)
    with rig.group():
        y = sines(x)
    write_out(rig)
    (block,) = rig.blocks()
    assert rig.transfers.restore([block], Priority.SPECULATIVE) is None
    assert has_work(disk_of(rig).reader)
    disk_of(rig).reader.drain()
    assert rig.transfers.restore([block], Priority.SPECULATIVE) is not None
    y.sum().backward()
    assert x.grad is not None
    assert rig.end().disk_blocked_ms == 0.0


def test_two_reads_are_under_way_at_once_and_their_time_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two reads waits until the other has begun, and so do the writes."""
    monkeypatch.setattr("offload.disk.tier.READ_BYTES", NBYTES)
    rig = Rig(disk_directory=str(tmp_path), disk_ahead_bytes=0, host_limit_bytes=1 << 20, piece_bytes=NBYTES)
    file, both = disk_of(rig).file, threading.Barrier(2)

    def together(call: Callable[..., None]) -> Callable[..., None]:
        def wait_and_call(*arguments: Any) -> None:
            both.wait(60)
            time.sleep(0.02)
            call(*arguments)

        return wait_and_call

    monkeypatch.setattr(file, "write", together(file.write))
    monkeypatch.setattr(file, "read", together(file.read))
    copies, locked = disk_of(rig).copies, set()

    def now() -> float:
        locked.add(copies.writes._lock.locked() or copies.reads._lock.locked())
        return time.monotonic()

    monkeypatch.setattr("offload.disk.worker.time", SimpleNamespace(monotonic=now))
    inputs = leaves(2)
    began = time.monotonic()
    with rig.group():
        result = sines(*inputs)
    write_out(rig)
    assert not disk_of(rig).bring(rig.blocks(), required=False)
    disk_of(rig).reader.drain()
    assert_equal_bits(gradients(sines, inputs), torch.autograd.grad(result.sum(), inputs))
    stats = rig.end()
    assert (stats.disk_write_bytes, stats.disk_read_bytes) == (2 * NBYTES, 2 * NBYTES)
    write_s, read_s = 2 * NBYTES / stats.disk_write_bytes_per_s, 2 * NBYTES / stats.disk_read_bytes_per_s
    assert 0.04 <= write_s + read_s <= time.monotonic() - began
    assert locked == {True}, "two threads count one after the other"
    rig.engine.close()


def test_a_second_backward_reads_the_file_again(rig: Rig) -> None:
    inputs = leaves(2)
    with rig.group():
        result = sines(*inputs)
    write_out(rig)
    first = torch.autograd.grad(result.sum(), inputs, retain_graph=True)
    assert all(block.host is None for block in rig.blocks()), "its host bytes went back after the first"
    assert_equal_bits(first, torch.autograd.grad(result.sum(), inputs))
    assert rig.end().disk_read_bytes == 4 * NBYTES


def test_a_tensor_that_is_freed_before_its_write_is_never_written(rig: Rig) -> None:
    disk = disk_of(rig)
    disk.writer.passed = lambda job, order: job.is_over  # type: ignore[method-assign]
    gradients(sines, leaves(3), rig)
    stats = rig.end()
    assert (stats.spilled, stats.disk_write_bytes, stats.disk_bytes_peak) == (3, 0, 0)


def test_a_tensor_that_is_freed_while_it_is_read_ahead_is_forgotten(rig: Rig) -> None:
    with rig.group():
        result = sines(*leaves(2))
    write_out(rig)
    disk_of(rig).bring(rig.blocks(), required=False)
    assert len(read_ahead(disk_of(rig))) == 2
    del result
    rig.end()
    assert read_ahead(disk_of(rig)) == []


def test_captured_graphs_stay_in_host_memory(rig: Rig) -> None:
    rig.engine.reserve_host(1 << 20)
    (x,) = leaves(1)
    with rig.engine.capturing() as region, rig.device.capture() as graph:
        with rig.group():
            y = sines(x)
        torch.autograd.grad(y.sum(), x)
    graph.replay()
    assert region.spill_bytes == NBYTES
    assert not disk_of(rig).in_use
    region.release()
    assert rig.end().disk_write_bytes == 0


def test_before_a_capture_the_threads_have_nothing_left_to_do(rig: Rig) -> None:
    """In a capture no event may be synchronized, on any thread."""
    (x,) = leaves(1)
    with rig.group():
        y = sines(x)
    rig.leave()
    assert has_work(disk_of(rig).writer)
    with rig.engine.capturing() as region, rig.device.capture():
        assert not has_work(disk_of(rig).writer)
    region.release()
    y.sum().backward()


# -- a disk that is slow, full or broken ---------------------------------------------------------------------
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_what_cannot_be_written_stays_in_host_memory_with_one_warning(
    error: int, rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "pwritev", fail)
    inputs = leaves(3)
    with rig.group():
        result = sines(*inputs)
    rig.leave()
    disk_of(rig).drain()
    assert all(block.host is not None for block in rig.blocks())
    assert disk_of(rig).extents.lent_bytes == 0
    assert_equal_bits(gradients(sines, inputs), torch.autograd.grad(result.sum(), inputs))
    (warning,) = warnings_of(caplog)
    assert f"its 16.38 kB could not be written to {disk_of(rig).file.directory}" in warning
    assert f": {os.strerror(error)}. Such tensors stay in host memory" in warning
    assert rig.end().disk_write_bytes == 0


def test_a_full_file_keeps_what_it_has_and_the_rest_stays_in_host_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit = 16 << 20
    rig = Rig(disk_directory=str(tmp_path), disk_limit_bytes=limit, disk_ahead_bytes=0)
    inputs = [torch.full((1 << 20,), float(number), requires_grad=True) for number in range(6)]
    with rig.group():
        result = sines(*inputs)
    rig.leave()
    disk_of(rig).drain()
    # two threads write, so the two that find no space need not be the last
    assert [block.host is None for block in rig.blocks()].count(True) == 4
    assert_equal_bits(gradients(sines, inputs), torch.autograd.grad(result.sum(), inputs))
    said = "No space left for 4,194,304 bytes, 0 are free of disk_limit_bytes=16,777,216"
    assert said in warnings_of(caplog)[0]
    rig.end()
    rig.engine.close()


def test_what_cannot_be_read_back_is_an_error_that_names_it_and_a_retry_may_succeed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x,) = leaves(1)
    with rig.group("core_attn"):
        y = sines(x)
    write_out(rig)
    read = os.preadv

    def fail(*arguments: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(
        OffloadError,
        match=r"s0m0/core_attn#0\[0\]: its 16,384 bytes could not be read back from the file in .* \(.* at /"
        r".*\): Input/output error. They are lost, and with them this step; check the disk",
    ):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    monkeypatch.setattr(os, "preadv", read)
    assert_equal_bits(gradients(sines, [x]), torch.autograd.grad(y.sum(), [x]))


def test_a_read_ahead_that_failed_is_tried_again_by_the_reader(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x,) = leaves(1)
    with rig.group():
        y = sines(x)
    write_out(rig)
    read, calls = os.preadv, [0]

    def fail_once(*arguments: Any) -> int:
        calls[0] += 1
        if calls[0] == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", fail_once)
    assert not disk_of(rig).bring(rig.blocks(), required=False)
    disk_of(rig).reader.drain()
    assert not disk_of(rig).bring(rig.blocks(), required=False)
    assert_equal_bits(gradients(sines, [x]), torch.autograd.grad(y.sum(), [x]))


@pytest.mark.parametrize("side", ["write", "read"])
def test_what_a_thread_met_that_no_disk_answers_for_reaches_the_user(
    side: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x,) = leaves(1)
    with rig.group():
        y = sines(x)

    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError("in a thread")

    if side == "write":
        monkeypatch.setattr(disk_of(rig).file, side, fail)
        with pytest.raises(ZeroDivisionError, match="in a thread"):
            disk_of(rig).drain()
    else:
        write_out(rig)
        monkeypatch.setattr(disk_of(rig).file, side, fail)
        with pytest.raises(ZeroDivisionError, match="in a thread"):
            y.sum().backward()


def test_a_disk_slower_than_the_step_leaves_tensors_on_the_device_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory holds two tensors; a write takes as long as the step, and no save waits for it."""
    rig = Rig(disk_directory=str(tmp_path), disk_ahead_bytes=0, host_limit_bytes=2 * NBYTES)
    write, gate = disk_of(rig).file.write, threading.Event()

    def slow(*arguments: Any) -> None:
        assert gate.wait(60)
        write(*arguments)

    monkeypatch.setattr(disk_of(rig).file, "write", slow)
    inputs = leaves(12)
    for _ in range(2):
        gate.clear()
        expected = gradients(sines, inputs)
        assert_equal_bits(expected, gradients(sines, inputs, rig))
        gate.set()
        disk_of(rig).drain()
        stats = rig.end()
        assert (stats.spilled, stats.refused, stats.refused_bytes) == (2, 10, 10 * NBYTES)
    (warning,) = [each for each in warnings_of(caplog) if "the disk writes" in each]
    assert "host memory was full and" in warning
    assert "Save less, raise host_limit_bytes, or use a faster disk" in warning
    rig.engine.close()


def test_spare_memory_is_unpinned_once_its_copy_has_passed_and_never_in_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SimDevice(executor="late")
    spare = SpareMemory(device, 1 << 20)
    events, targets = [], [device.empty(100) for _ in range(2)]
    device.wait(device.h2d, device.record(device.compute), "allocated")
    for target in targets:
        block = spare.take(100)
        device.copy(device.h2d, [(target, block.extents[0])])
        events.append(device.record(device.h2d))
        spare.give_back(block, events[-1])
        spare.release_passed()
        assert block in spare, "its copy is under way"
    device.synchronize(events[0])
    with monkeypatch.context() as captured:
        captured.setattr(device, "is_capturing", lambda: True)
        spare.release_passed()
    assert len(spare._memory) == 2
    spare.release_passed()
    assert len(spare._memory) == 1
    kept = spare.take(100)
    spare.close()
    assert device.poll(events[1])
    device.wait(device.compute, events[1], "the targets are freed")
    assert not spare
    assert kept not in spare


def test_a_reader_without_host_memory_gets_bytes_beside_the_limit_for_as_long_as_it_needs_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another client has taken all of the host memory meanwhile."""
    rig = Rig(disk_directory=str(tmp_path), disk_ahead_bytes=0, host_limit_bytes=2 * NBYTES)
    inputs = leaves(2)
    with rig.group():
        result = sines(*inputs)
    write_out(rig)
    taken = [rig.engine.arena.take(NBYTES) for _ in range(2)]
    assert rig.engine.arena.take(NBYTES) is None
    assert_equal_bits(gradients(sines, inputs), torch.autograd.grad(result.sum(), inputs))
    rig.device.synchronize(rig.device.record(rig.device.h2d))
    disk_of(rig).collect()
    assert not disk_of(rig).spare, "it went back once its copy had passed"
    (warning,) = warnings_of(caplog)
    assert "host memory has no room for its 16.38 kB, which its reader waits for" in warning
    for block in taken:
        assert block is not None
        rig.engine.arena.give_back(block, None)
    rig.end()
    rig.engine.close()


def test_a_reader_takes_the_host_memory_of_what_was_read_ahead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Host memory holds two tensors, and those that are read last have it: one is there, one is coming."""
    rig = Rig(disk_directory=str(tmp_path), disk_ahead_bytes=0, host_limit_bytes=2 * NBYTES)
    disk = step_disk(rig.engine)
    inputs = leaves(4)
    with rig.group():
        result = sines(*inputs)
    write_out(rig)
    first, second = rig.blocks()[:2]
    assert not disk.bring([first, second], required=False)
    disk.reader.drain()
    assert disk.bring([first], required=False)
    assert_equal_bits(gradients(sines, inputs), torch.autograd.grad(result.sum(), inputs))
    assert warnings_of(caplog) == []
    rig.end()
    rig.engine.close()


def test_an_audit_finds_bytes_that_the_file_has_changed(tmp_path: Path) -> None:
    rig = Rig(disk_directory=str(tmp_path), disk_ahead_bytes=0, audit=True)
    (x,) = leaves(1)
    with rig.group():
        y = sines(x)
    write_out(rig)
    disk_of(rig).file.write([[torch.zeros(4096, dtype=torch.uint8)]], 0)
    with pytest.raises(OffloadError, match="are not the ones that were written there"):
        y.sum().backward()
    rig.end()
    rig.engine.close()


# -- set up and end ------------------------------------------------------------------------------------------
def disk_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("offload-disk")]


def test_a_directory_that_cannot_be_used_is_an_error_at_configure_and_changes_nothing(tmp_path: Path) -> None:
    engine = OffloadEngine(OffloadConfig(disk_directory=str(tmp_path)), device=SimDevice())
    before = engine.transfers.disk
    with pytest.raises(ValueError, match="is no directory"):
        engine.reconfigure(OffloadConfig(disk_directory=str(tmp_path / "none")))
    assert engine.transfers.disk is before
    assert engine.config.disk_directory == str(tmp_path)
    engine.close()
    with pytest.raises(ValueError, match="is no directory"):
        OffloadEngine(OffloadConfig(disk_directory=str(tmp_path / "none")), device=SimDevice())
    assert disk_threads() == []


def test_another_config_keeps_the_disk_or_ends_it(tmp_path: Path) -> None:
    engine = OffloadEngine(OffloadConfig(disk_directory=str(tmp_path)), device=SimDevice())
    before = engine.transfers.disk
    engine.reconfigure(OffloadConfig(disk_directory=str(tmp_path), device_limit_bytes=1 << 20))
    assert engine.transfers.disk is before
    engine.reconfigure(OffloadConfig())
    assert engine.transfers.disk is None
    assert disk_threads() == []
    engine.close()


def test_the_disk_cannot_be_changed_while_tensors_lie_on_it(rig: Rig) -> None:
    (x,) = leaves(1)
    with rig.group():
        y = sines(x)
    write_out(rig)
    with pytest.raises(OffloadError, match=r"lie in the file of '.*', and the new config has another"):
        rig.engine.reconfigure(OffloadConfig())
    y.sum().backward()


def test_closing_ends_the_threads_and_who_attaches_again_has_a_disk(tmp_path: Path) -> None:
    rig = Rig(disk_directory=str(tmp_path))
    assert len(disk_threads()) == 4, "two of each direction"
    gradients(sines, leaves(2), rig)
    rig.engine.close()
    assert disk_threads() == []
    rig.engine.attach(rig)
    gradients(sines, leaves(2), rig)
    disk_of(rig).drain()
    rig.end()
    rig.engine.close()
    assert disk_threads() == []


def test_a_dropped_engine_leaves_no_thread_and_no_file(tmp_path: Path) -> None:
    """It was not closed; its queue is empty."""
    rig = Rig(disk_directory=str(tmp_path))
    gradients(sines, leaves(2), rig)
    disk_of(rig).drain()
    rig.end()
    number, reference = disk_of(rig).file._number, weakref.ref(disk_of(rig))
    threads = disk_threads()
    del rig
    gc.collect()
    assert reference() is None
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
