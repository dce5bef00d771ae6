"""The size-class pool of the watermark runtime. Slabs are never touched here, so the large ones cost no
memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from offload.compat.stagehand.backend_cpu import CPUSpillBackend
from offload.device.sim import SimDevice
from offload.errors import HostBudgetError, PoolError
from offload.memory.arena import HostArena
from offload.memory.budget import LocalHostBudget
from tests.unit.memory.fakes import FakeDevice, FakeEvent

MIB = 1 << 20


def slab_bytes(buffer: torch.Tensor) -> int:
    return buffer.untyped_storage().nbytes()


@pytest.mark.req("S0-19", "S0-20", "S0-21")
def test_the_default_classes_add_up_to_1192_mib() -> None:
    backend = CPUSpillBackend()
    assert backend.total_bytes == (512 * 1 + 2 * 4 + 2 * 16 + 2 * 64 + 2 * 256) * MIB == 1192 * MIB
    assert backend.free_slabs == {1 * MIB: 512, 4 * MIB: 2, 16 * MIB: 2, 64 * MIB: 2, 256 * MIB: 2}


@pytest.mark.req("S0-22", "S0-23")
def test_an_int_means_that_count_for_every_class() -> None:
    assert CPUSpillBackend(class_sizes_mb=(1, 2), slabs_per_class=3).free_slabs == {1 * MIB: 3, 2 * MIB: 3}


@pytest.mark.req("S0-24")
@pytest.mark.parametrize(
    ("sizes", "counts", "message"),
    [
        ((1, 2), (1,), "1 counts for 2 class sizes"),
        ((1,), (1, 2), "2 counts for 1 class sizes"),
        ((2, 1), 1, "ascending"),
        ((1, 1), 1, "ascending"),
        ((0, 1), 1, "positive"),
        ((1,), -1, "negative"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(
    sizes: tuple[int, ...], counts: int | tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CPUSpillBackend(sizes, counts)
    gc.collect()


@pytest.mark.req("S0-25", "S0-26")
@pytest.mark.parametrize(
    ("nbytes", "expected"), [(1, 1), (MIB, 1), (MIB + 1, 4), (4 * MIB, 4), (200 * MIB, 256), (256 * MIB, 256)]
)
def test_the_smallest_class_that_fits_serves(nbytes: int, expected: int) -> None:
    backend = CPUSpillBackend()
    buffer = backend.allocate(nbytes)
    assert (buffer.dtype, tuple(buffer.shape)) == (torch.uint8, (nbytes,))
    assert slab_bytes(buffer) == expected * MIB
    assert (backend.pool_hits, backend.pool_misses) == (1, 0)


@pytest.mark.req("S0-27", "S0-28")
def test_an_exhausted_class_is_followed_by_the_next_larger_then_by_plain_memory() -> None:
    backend = CPUSpillBackend((1, 2, 4), 1)
    served = [slab_bytes(backend.allocate(1000)) for _ in range(4)]
    assert served == [1 * MIB, 2 * MIB, 4 * MIB, 1000]
    assert (backend.pool_hits, backend.pool_misses) == (3, 1)


@pytest.mark.req("S0-28", "S0-30")
def test_a_buffer_beyond_the_largest_class_is_plain_memory_and_dropped_on_release() -> None:
    backend = CPUSpillBackend((1,), 1)
    buffer = backend.allocate(MIB + 1)
    assert not buffer.is_pinned()
    assert (backend.pool_hits, backend.pool_misses) == (0, 1)
    backend.release(buffer)
    assert backend.free_slabs == {MIB: 1}
    with pytest.raises(PoolError, match="release each buffer once"):
        backend.release(buffer)


@pytest.mark.req("S0-29")
def test_a_slab_returns_to_its_own_class_whatever_it_served() -> None:
    backend = CPUSpillBackend((1, 4), 1)
    small, large = backend.allocate(10), backend.allocate(10)
    assert slab_bytes(large) == 4 * MIB
    pointer = large.data_ptr()
    backend.release(large.view(torch.int16))  # found by data pointer, not by object
    assert backend.free_slabs == {1 * MIB: 0, 4 * MIB: 1}
    assert backend.allocate(3 * MIB).data_ptr() == pointer
    backend.release(small)


@pytest.mark.req("S0-30")
def test_an_unknown_buffer_and_a_second_release_are_errors() -> None:
    backend = CPUSpillBackend((1,), 1)
    with pytest.raises(PoolError, match="none of the 0 slabs on loan"):
        backend.release(torch.empty(10, dtype=torch.uint8))
    buffer = backend.allocate(10)
    backend.release(buffer)
    with pytest.raises(PoolError, match="none of the 0 slabs"):
        backend.release(buffer)


@pytest.mark.req("S0-32")
def test_420_tensors_of_a_little_less_than_a_mib_fit_at_once() -> None:
    backend = CPUSpillBackend()
    buffers = [backend.allocate(900_000) for _ in range(420)]
    assert (backend.pool_hits, backend.pool_misses) == (420, 0)
    assert {slab_bytes(buffer) for buffer in buffers} == {MIB}
    assert len({buffer.data_ptr() for buffer in buffers}) == 420


@pytest.mark.req("S0-33")
def test_the_pool_never_grows() -> None:
    backend = CPUSpillBackend((1,), 2)
    total_bytes = backend.total_bytes
    for _ in range(3):
        buffers = [backend.allocate(10) for _ in range(5)]
        for buffer in buffers:
            backend.release(buffer)
    assert backend.total_bytes == total_bytes
    assert (backend.pool_hits, backend.pool_misses) == (6, 9)


@pytest.mark.req("S0-34")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="with an accelerator the slabs are pinned")
def test_without_an_accelerator_slabs_are_plain_memory() -> None:
    assert not CPUSpillBackend((1,), 1).allocate(10).is_pinned()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_buffer_without_bytes_is_a_mistake(nbytes: int) -> None:
    with pytest.raises(ValueError, match="without bytes"):
        CPUSpillBackend((1,), 1).allocate(nbytes)


def test_a_slab_is_not_lent_again_before_its_last_copy_has_ended() -> None:
    backend = CPUSpillBackend((1,), 2, event_device=FakeDevice().protocol)
    event = FakeEvent("restore")
    first = backend.allocate(10)
    backend.release(first, after=event)
    second = backend.allocate(10)
    assert second.data_ptr() != first.data_ptr()
    assert backend.allocate(10).data_ptr() not in (first.data_ptr(), second.data_ptr()), (
        "a miss rather than a wait"
    )
    event.passed = True
    assert backend.allocate(10).data_ptr() == first.data_ptr()


@pytest.mark.req("S0-38")
def test_reset_takes_leftover_buffers_back() -> None:
    backend = CPUSpillBackend((1,), 2)
    fallbacks = []
    for _ in range(10):
        backend.allocate(10)
        fallbacks.append(weakref.ref(backend.allocate(4 * MIB)))
        backend.reset()
        assert all(fallback() is None for fallback in fallbacks), "no 4 MB stay from step to step"
    assert backend.free_slabs == {MIB: 2}
    assert (backend.pool_hits, backend.pool_misses) == (10, 10)


def arena_of(limit_bytes: int) -> HostArena:
    return HostArena(
        FakeDevice().protocol, budget=LocalHostBudget(limit_bytes), slab_bytes=4 * MIB, registration_bytes=MIB
    )


def test_slabs_from_an_arena_count_in_the_host_budget() -> None:
    arena = arena_of(16 * MIB)
    backend = CPUSpillBackend((1, 4), 2, arena=arena)
    assert arena.held_bytes == 0, "backed when used"
    backend.reserve()
    assert arena.budget.used_bytes == backend.total_bytes == 10 * MIB
    buffer = backend.allocate(3 * MIB)
    assert arena.held_bytes == 10 * MIB
    with pytest.raises(PoolError, match="1 slabs of 4,194,304 bytes are lent"):
        backend.clear()
    backend.release(buffer)
    backend.clear()
    assert backend.free_slabs == {MIB: 2, 4 * MIB: 2}, "none is both given back and free"
    arena.clear()
    assert arena.budget.used_bytes == 0
    assert backend.allocate(10).numel() == 10


def test_a_spent_host_budget_is_a_pool_miss() -> None:
    arena = arena_of(1 * MIB)
    backend = CPUSpillBackend((1,), 2, arena=arena)
    backend.allocate(10)
    backend.allocate(10)
    assert (backend.pool_hits, backend.pool_misses) == (1, 1)
    with pytest.raises(HostBudgetError, match=r"raise host_limit \(host_limit_bytes in"):
        backend.reserve()


def test_clear_waits_for_the_last_copy_of_an_unpinned_buffer() -> None:
    device = SimDevice(executor="late")
    pool = CPUSpillBackend((1,), 0, event_device=device)
    buffer, source = pool.allocate(64), device.empty(64)
    device.wait(device.d2h, device.record(device.compute), "spill")
    device.copy(device.d2h, [(buffer, source)])
    copied = device.record(device.d2h)
    pool.release(buffer, after=copied)
    del buffer
    pool.clear()
    device.record(device.compute)  # where bytes that died under a copy are found out
    assert device.poll(copied)


def test_a_dropped_pool_gives_its_slabs_back() -> None:
    arena = arena_of(4 * MIB)
    backend = CPUSpillBackend((1,), 2, arena=arena)
    backend.release(backend.allocate(10))
    with arena._lock:  # as if the garbage collector ran inside a call of the arena
        del backend
        gc.collect()
    assert arena.stats().lent == 0
