"""Pinned host memory without a GPU: mapping, pieces and the return of their pages are the system's own; only
registration is played.

What needs a GPU is in tests/gpu/test_host_memory.py.
"""

from __future__ import annotations

import gc
import mmap
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.device import _cuda_memory
from offload.device._cuda_memory import PinnedMemory
from offload.device.base import HostMemory
from offload.errors import HostBudgetError, OffloadError
from tests.mapping import address_space

MIB = 1 << 20
PIECE = 8 * MIB


class FakeRuntime:
    """Of CUDA's runtime, the registration. It knows what is registered, and refuses what the driver would
    refuse."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.limit_bytes = 1 << 60
        self.broken = False

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        if sum(self.registered.values()) + nbytes > self.limit_bytes:
            return 2
        assert address not in self.registered
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        if self.broken:
            return 700
        del self.registered[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sizes(memory: HostMemory) -> list[int]:
    return [piece.numel() for piece in memory.pieces]


def test_a_piece_goes_alone_and_the_others_keep_their_bytes_and_places(runtime: FakeRuntime) -> None:
    memory: HostMemory = PinnedMemory(4 * PIECE + 4096, PIECE)
    pieces = memory.pieces
    for number, piece in enumerate(pieces):
        piece.fill_(number + 1)
    memory.release_piece(1)
    memory.release_piece(4)
    assert sizes(memory) == [PIECE, 0, PIECE, PIECE, 0]
    assert set(runtime.registered) == {pieces[index].data_ptr() for index in (0, 2, 3)}
    # a private mapping reads zero where its pages were given up; that is how the test sees exactly which ones
    # were
    assert [int(piece.min()) for piece in pieces] == [int(piece.max()) for piece in pieces] == [1, 0, 3, 4, 0]
    memory.release()
    assert memory.pieces == ()
    assert runtime.registered == {}


def test_the_pages_of_a_released_piece_go_back_to_the_system(runtime: FakeRuntime) -> None:
    memory = PinnedMemory(8 * PIECE, PIECE)
    before = resident_bytes()
    for index in range(8):
        memory.release_piece(index)
    released = before - resident_bytes()
    assert released > 4 * PIECE, (
        "all of 8 pieces; half, because the kernel counts each processor's last pages late"
    )


def test_the_storage_of_a_piece_starts_where_its_registration_does(runtime: FakeRuntime) -> None:
    """Tensor.is_pinned() asks about the first byte of the storage: a view into the whole mapping would be
    called unpinned."""
    memory = PinnedMemory(2 * PIECE + 4096, PIECE)
    storages = {
        piece.untyped_storage().data_ptr(): piece.untyped_storage().nbytes() for piece in memory.pieces
    }
    assert storages == runtime.registered
    starts = sorted(storages)
    assert [start - starts[0] for start in starts] == [0, PIECE, 2 * PIECE], "one mapping, without gaps"
    assert starts[0] % (2 * MIB) == 0, "huge pages"
    memory.release()


def test_no_piece_is_unregistered_twice(runtime: FakeRuntime) -> None:
    memory = PinnedMemory(3 * PIECE, PIECE)
    for index in (2, 0, 2):  # the runtime fails at an address that is not registered
        memory.release_piece(index)
    memory.release()
    memory.release()
    assert runtime.registered == {}


@pytest.mark.parametrize("alone", [0, 1, 2])
def test_the_mapping_goes_with_the_last_piece(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, alone: int
) -> None:
    class Mapping(mmap.mmap):
        """mmap.mmap itself cannot be watched weakly."""

    monkeypatch.setattr(mmap, "mmap", Mapping)
    memory = PinnedMemory(2 * PIECE, PIECE)
    assert isinstance(memory._mapping, Mapping)
    mapping = weakref.ref(memory._mapping)
    for index in range(alone):
        memory.release_piece(index)
        gc.collect()
        assert (mapping() is None) == (index == 1)
    if alone < 2:
        memory.release()
    gc.collect()
    assert mapping() is None


def test_a_piece_that_cuda_does_not_unregister_stays(runtime: FakeRuntime) -> None:
    memory = PinnedMemory(2 * PIECE, PIECE)
    memory.pieces[0].fill_(7)
    runtime.broken = True
    with pytest.raises(OffloadError, match=r"a piece of 8,388,608 bytes, one of 2 registered \(error 700\)"):
        memory.release_piece(0)
    assert sizes(memory) == [PIECE, PIECE]
    assert bool((memory.pieces[0] == 7).all())
    runtime.broken = False
    memory.release_piece(0)
    assert sizes(memory) == [0, PIECE]


def test_pages_that_the_system_keeps_are_said(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    class Locked(mmap.mmap):
        def madvise(self, option: int, *arguments: Any) -> None:
            if option == mmap.MADV_DONTNEED:
                raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Locked)
    memory = PinnedMemory(2 * PIECE, PIECE)
    with pytest.warns(RuntimeWarning, match="keeps the pages of a piece of 8,388,608 bytes"):
        memory.release_piece(0)
    assert sizes(memory) == [0, PIECE], "unpinned all the same"
    assert len(runtime.registered) == 1


def test_what_was_registered_before_a_refusal_is_unregistered(runtime: FakeRuntime) -> None:
    runtime.limit_bytes = 2 * PIECE
    with pytest.raises(
        HostBudgetError, match=r"refused 8,388,608 bytes after 16,777,216 of 33,554,432 \(error 2\)"
    ):
        PinnedMemory(4 * PIECE, PIECE)
    assert runtime.registered == {}


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_what_was_registered_before_any_error_is_unregistered_and_no_thread_stays(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """At once, and not when somebody lets go of the error: it holds the frames that hold the memory."""
    register, calls = runtime.cudaHostRegister, []

    def interrupted(address: int, nbytes: int, flags: int) -> int:
        calls.append(address)
        if len(calls) == 3:
            raise error
        return register(address, nbytes, flags)

    monkeypatch.setattr(runtime, "cudaHostRegister", interrupted)
    before = threading.active_count()
    with pytest.raises(type(error)):
        PinnedMemory(6 * PIECE, PIECE)
    assert len(calls) == 3
    assert runtime.registered == {}
    assert threading.active_count() == before


def test_pages_that_cannot_be_touched_leave_nothing_registered(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[int] = []

    def touch(piece: torch.Tensor) -> None:
        touched.append(piece.numel())
        if len(touched) > 2:
            raise MemoryError("no pages")

    monkeypatch.setattr(_cuda_memory, "_touch", touch)
    with pytest.raises(MemoryError, match="no pages") as caught:
        PinnedMemory(6 * PIECE, PIECE)
    assert runtime.registered == {}, "although the error is still held"
    assert caught.value is not None


def test_a_mapping_that_the_system_refuses_is_a_budget_error_and_pins_nothing(runtime: FakeRuntime) -> None:
    """Really: this process may have 64 MiB of addresses more, and asks for a GiB."""
    with (
        address_space(64 * MIB),
        pytest.raises(HostBudgetError, match=r"the system refused 1,073,741,824 bytes of host memory \("),
    ):
        PinnedMemory(1 << 30, 64 * MIB)
    assert runtime.registered == {}
    PinnedMemory(PIECE, PIECE).release()


def test_memory_that_is_dropped_is_unregistered_before_the_system_gets_it_back(runtime: FakeRuntime) -> None:
    """An optimizer went out of scope with its engine: the next mapping lay at the same address, and CUDA
    refused to register it."""
    memory = PinnedMemory(2 * PIECE, PIECE)
    extent = memory.pieces[0]
    assert len(runtime.registered) == 2
    del memory
    assert runtime.registered == {}
    extent.fill_(1)  # still there for whoever holds it


def test_memory_that_is_dropped_in_a_capture_keeps_its_address(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up: list[Any] = []
    monkeypatch.setattr(_cuda_memory, "_capturing", lambda: True)
    monkeypatch.setattr(_cuda_memory, "_GIVEN_UP", given_up)
    memory = PinnedMemory(PIECE, PIECE)
    (address,) = runtime.registered
    del memory
    assert list(runtime.registered) == [address]
    assert given_up[0][0].data_ptr() == address


def test_a_kernel_without_huge_pages_pins_all_the_same(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small(mmap.mmap):
        def madvise(self, option: int, *arguments: Any) -> None:
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(22, "Invalid argument")
            super().madvise(option, *arguments)

    monkeypatch.setattr(mmap, "mmap", Small)
    memory = PinnedMemory(2 * PIECE, PIECE)
    assert len(runtime.registered) == 2
    memory.release()


@pytest.mark.parametrize("call", ["register", "unregister"])
def test_the_error_of_a_refused_call_is_cleared(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """CUDA keeps it for the thread, and torch raised it after the next kernel launch as that kernel's own."""
    launched: list[int] = []

    def launch(cycles: int) -> None:
        launched.append(cycles)
        raise RuntimeError("CUDA error: invalid argument")  # as torch does for an error that it finds

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "_sleep", launch)
    if call == "register":
        runtime.limit_bytes = PIECE
        with pytest.raises(HostBudgetError):
            PinnedMemory(2 * PIECE, PIECE)
    else:
        memory = PinnedMemory(PIECE, PIECE)
        runtime.broken = True
        with pytest.raises(OffloadError):
            memory.release_piece(0)
        runtime.broken = False
        memory.release()
    assert launched == [0]
