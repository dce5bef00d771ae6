"""Pinned host memory on a GPU: it is pinned, carries bytes both ways unchanged, and goes back to the system
piece by piece.

The bookkeeping of a trim is proved without a GPU in tests/unit/memory/test_arena_trim.py; here registrations,
copies and pages are real.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.device import Event
from offload.device.cuda import CudaDevice
from offload.memory.arena import Block, HostArena
from offload.memory.budget import LocalHostBudget, available_bytes
from tests.gpu.widened import cycles_of

pytestmark = pytest.mark.gpu

MIB = 1 << 20
PIECE = 16 * MIB


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice()


@pytest.fixture
def arena(device: CudaDevice) -> Iterator[HostArena]:
    """Two slabs of four pieces, all free; it may hold no more."""
    arena = HostArena(
        device, budget=LocalHostBudget(8 * PIECE), slab_bytes=4 * PIECE, registration_bytes=PIECE
    )
    arena.reserve(8 * PIECE)
    yield arena
    torch.cuda.synchronize()
    arena.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def random_bytes(nbytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda", generator=generator)


def spill(device: CudaDevice, extents: tuple[Tensor, ...], source: Tensor) -> Event:
    device.wait(device.d2h, device.record(device.compute), "spill")
    device.copy(
        device.d2h, list(zip(extents, source.split([extent.numel() for extent in extents]), strict=True))
    )
    return device.record(device.d2h)


def restore(device: CudaDevice, extents: tuple[Tensor, ...], after: Event) -> tuple[Tensor, Event]:
    """The bytes on the device again, for the compute lane, and the event of their last read on the host."""
    home = device.empty(sum(extent.numel() for extent in extents))
    device.wait(device.h2d, device.record(device.compute), "allocate")
    device.wait(device.h2d, after, "restore")
    device.copy(
        device.h2d, list(zip(home.split([extent.numel() for extent in extents]), extents, strict=True))
    )
    read = device.record(device.h2d)
    device.wait(device.compute, read, "restore")
    return home, read


def there_and_back(device: CudaDevice, extents: tuple[Tensor, ...], seed: int = 0) -> None:
    """Asserts that the copies are bitwise, and nothing is in flight afterwards."""
    source = random_bytes(sum(extent.numel() for extent in extents), seed)
    home, _ = restore(device, extents, spill(device, extents, source))
    assert torch.equal(home, source)  # read by the host: both copies have passed
    assert torch.equal(torch.cat(extents), source.cpu())


def taken(arena: HostArena, nbytes: int) -> Block:
    block = arena.take(nbytes)
    assert block is not None
    return block


# -- pieces of the device ------------------------------------------------------------------------------------
def test_every_piece_is_pinned_to_its_last_byte(device: CudaDevice) -> None:
    memory = device.host_memory(2 * PIECE + 4096, PIECE)
    assert [piece.numel() for piece in memory.pieces] == [PIECE, PIECE, 4096]
    assert all(end.is_pinned() for piece in memory.pieces for end in (piece, piece[-1:]))
    memory.release()
    assert memory.pieces == ()


def test_copies_through_each_piece_are_bitwise(device: CudaDevice) -> None:
    memory = device.host_memory(2 * PIECE + 4096, PIECE)
    for seed, piece in enumerate(memory.pieces):
        there_and_back(device, (piece,), seed)
    there_and_back(device, memory.pieces)
    memory.release()


def test_a_copy_to_pinned_memory_does_not_block_the_host(device: CudaDevice) -> None:
    memory = device.host_memory(PIECE, PIECE)
    source = random_bytes(PIECE)
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles_of(200.0))
    event = spill(device, memory.pieces, source)
    assert not device.poll(event), "the host came back while the copy still waited for compute"
    device.synchronize(event)
    assert torch.equal(memory.pieces[0], source.cpu())
    memory.release()


def test_a_released_piece_is_unpinned_and_its_neighbours_stay_as_they_are(device: CudaDevice) -> None:
    memory = device.host_memory(3 * PIECE, PIECE)
    pieces = memory.pieces
    sources = [random_bytes(PIECE, seed) for seed in range(3)]
    for piece, source in zip(pieces, sources, strict=True):
        device.synchronize(spill(device, (piece,), source))
    memory.release_piece(1)
    memory.release_piece(1)
    assert [piece.numel() for piece in memory.pieces] == [PIECE, 0, PIECE]
    assert [piece.is_pinned() for piece in pieces] == [True, False, True]
    for index in (0, 2):
        assert torch.equal(pieces[index], sources[index].cpu())
        there_and_back(device, (pieces[index],), seed=10 + index)
    memory.release()
    assert not any(piece.is_pinned() for piece in pieces)


def test_released_pieces_leave_the_process(device: CudaDevice) -> None:
    memory = device.host_memory(32 * PIECE, PIECE)
    there_and_back(device, memory.pieces[:1])  # what CUDA allocates for its first copies is there already
    full = resident_bytes()
    for index in range(1, 31):
        memory.release_piece(index)
    assert full - resident_bytes() > 15 * PIECE, (
        "30 pieces; half, because the kernel counts each processor's last pages late"
    )
    there_and_back(device, (memory.pieces[0], memory.pieces[31]))
    memory.release()


# -- the arena's trim ----------------------------------------------------------------------------------------
def test_a_trim_gives_pages_and_budget_back_and_the_arena_grows_again(
    device: CudaDevice, arena: HostArena
) -> None:
    block = taken(arena, 8 * PIECE)
    there_and_back(device, block.extents)
    arena.give_back(block, None)
    full = resident_bytes()
    assert arena.trim(2 * PIECE) == 6 * PIECE
    assert full - resident_bytes() > 3 * PIECE, (
        "6 pieces; half, because the kernel counts each processor's last pages late"
    )
    assert arena.held_bytes == arena.budget.used_bytes == 2 * PIECE
    arena.reserve(8 * PIECE)
    block = taken(arena, 8 * PIECE)
    assert all(extent.is_pinned() for extent in block.extents)
    there_and_back(device, block.extents, seed=1)
    arena.give_back(block, None)
    arena.clear()
    assert arena.held_bytes == arena.budget.used_bytes == 0


def test_a_trim_waits_for_the_restore_that_still_reads_the_pieces(
    device: CudaDevice, arena: HostArena
) -> None:
    block = taken(arena, 8 * PIECE)
    source = random_bytes(block.nbytes)
    # torch keeps its bytes for `home`: an allocation by the driver may block the host
    device.empty(block.nbytes)
    cycles = cycles_of(200.0)
    spilled = spill(device, block.extents, source)
    device.synchronize(spilled)
    with torch.cuda.stream(device.h2d.stream):
        torch.cuda._sleep(cycles)
    home, read = restore(device, block.extents, spilled)
    arena.give_back(block, read)
    assert not device.poll(read), "the restore is still ahead when the trim begins"
    assert arena.trim(0) == 8 * PIECE
    assert device.poll(read)
    assert torch.equal(home, source)


def test_a_trim_leaves_lent_bytes_alone_while_they_are_copied(device: CudaDevice, arena: HostArena) -> None:
    kept = taken(arena, PIECE // 2)
    arena.give_back(taken(arena, 6 * PIECE), None)
    source = random_bytes(kept.nbytes)
    torch.cuda.synchronize()
    cycles = cycles_of(200.0)
    torch.cuda._sleep(cycles)
    spilled = spill(device, kept.extents, source)
    assert arena.trim(0) == 7 * PIECE
    home, read = restore(device, kept.extents, spilled)
    assert torch.equal(home, source)
    arena.give_back(kept, read)
    assert arena.trim(0) == PIECE


def test_pinned_memory_is_charged_to_what_is_available(device: CudaDevice) -> None:
    """A budget of what is available counts pinned pages, too, or ranks would pin more than there is."""

    def charged() -> int:
        arena = HostArena(device, budget=LocalHostBudget(4 << 30))
        before = available_bytes(Path("/proc/meminfo"))
        arena.reserve(4 << 30)
        after = available_bytes(Path("/proc/meminfo"))
        arena.close()
        return before - after

    assert any(charged() > 3 << 30 for _ in range(5)), "others give memory back meanwhile, but not each time"
