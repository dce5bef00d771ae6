"""GPUTensorPool and its other name, with and without an arena behind it."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.compat.tensor_pool import GPUTensorPool, TensorPool
from offload.errors import HostBudgetError, PoolError
from offload.memory.arena import HostArena
from offload.memory.budget import LocalHostBudget
from tests.unit.memory.fakes import FakeDevice, FakeEvent

SHAPE = (128, 512)


@pytest.fixture
def arena(device: FakeDevice) -> HostArena:
    return HostArena(
        device.protocol, budget=LocalHostBudget(16 << 20), slab_bytes=1 << 20, registration_bytes=1 << 20
    )


@pytest.fixture(params=["empty", "arena"])
def pool(request: pytest.FixtureRequest, device: FakeDevice, arena: HostArena) -> GPUTensorPool:
    if request.param == "empty":
        return GPUTensorPool("cpu", event_device=device.protocol)
    return GPUTensorPool("cpu", pin_memory=True, arena=arena)


@pytest.mark.req("S2-8", "S3-2")
def test_defaults_differ_between_the_two_names() -> None:
    gpu, host = GPUTensorPool(), TensorPool()
    assert (gpu.device.type, gpu.pin_memory) == ("cuda", False)
    assert (host.device.type, host.pin_memory) == ("cpu", True)
    assert isinstance(host, GPUTensorPool)
    host.free(host.allocate((2, 2)))


@pytest.mark.req("S2-8", "S3-2")
def test_a_pool_makes_its_tensors_where_and_as_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with an accelerator, seen at what torch is asked for."""
    asked: list[tuple[str, bool]] = []
    plain = torch.empty

    def empty(shape: tuple[int, ...], *, device: torch.device, pin_memory: bool, **options: Any) -> Any:
        asked.append((device.type, pin_memory))
        return plain(shape, **options)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for pool in (GPUTensorPool(), TensorPool(), GPUTensorPool("cpu"), GPUTensorPool("cuda", True)):
        pool.allocate((2, 2))
    assert asked == [("cuda", False), ("cpu", True), ("cpu", False), ("cuda", False)]


@pytest.mark.req("S2-9", "S2-10", "S3-2")
def test_a_sub_pool_serves_one_shape_and_dtype(pool: GPUTensorPool) -> None:
    assert pool._get_pool_key(torch.Size(SHAPE), torch.float32) == pool._get_pool_key(SHAPE, torch.float32)
    keys = {
        pool._get_pool_key(shape, dtype)
        for shape in [(2, 3), (3, 2), (6,)]
        for dtype in [torch.float32, torch.int32]
    }
    assert len(keys) == 6
    tensor = pool.allocate((2, 3))
    pool.free(tensor)
    assert pool.allocate((3, 2)) is not tensor
    assert pool.allocate((2, 3), dtype=torch.int32) is not tensor
    assert pool.allocate(torch.Size((2, 3))) is tensor


@pytest.mark.req("S2-11")
@pytest.mark.parametrize(
    ("shape", "dtype", "nbytes"),
    [
        (SHAPE, torch.float32, 128 * 512 * 4),
        ((3,), torch.bfloat16, 6),
        ((), torch.float64, 8),
        ((0, 5), torch.int8, 0),
        ((7,), torch.bool, 7),
    ],
)
def test_bytes_are_those_of_a_dense_tensor(shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> None:
    assert GPUTensorPool._calculate_memory_size(shape, dtype) == nbytes


@pytest.mark.req("S2-12", "S2-14", "S3-2")
def test_a_freed_tensor_is_reused(pool: GPUTensorPool) -> None:
    first = pool.allocate(SHAPE, dtype=torch.bfloat16)
    assert (tuple(first.shape), first.dtype, first.is_contiguous()) == (SHAPE, torch.bfloat16, True)
    second = pool.allocate(SHAPE, dtype=torch.bfloat16)
    assert second.data_ptr() != first.data_ptr()
    pool.free(first)
    assert pool.allocate(SHAPE, dtype=torch.bfloat16) is first
    assert pool.stats["pool_hits"] == 1
    assert pool.stats["pool_misses"] == 2


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5, 1, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_any_shape_and_dtype_can_be_lent(
    pool: GPUTensorPool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = pool.allocate(shape, dtype)
    tensor.zero_()
    assert tuple(tensor.shape) == shape
    assert tensor.dtype == dtype
    pool.free(tensor)


@pytest.mark.req("S2-13", "S3-2")
def test_the_cost_of_allocate_and_free_does_not_grow_with_the_pool() -> None:
    """No container that the pool keeps is walked: dictionaries are asked for one id, and of lists and queues
    only the ends are touched."""
    pool = GPUTensorPool("cpu", event_device=FakeDevice().protocol)
    tensors = [pool.allocate((1,)) for _ in range(50)]

    def walked(*_: object) -> Any:
        raise AssertionError("walked")

    def unwalked(kind: type) -> type:
        ways = ["__iter__", "__reversed__", "keys", "values", "items", "copy", "index", "count", "remove"]
        if kind is not dict:
            ways.append("__contains__")
        return type("Unwalked", (kind,), {way: walked for way in ways if hasattr(kind, way)})

    (sub_pool,) = pool._pools.values()
    for owner, name in ((sub_pool, "all"), (sub_pool, "lent"), (sub_pool, "ready"), (sub_pool, "pending")):
        container = getattr(owner, name)
        setattr(owner, name, unwalked(type(container))(container))
    event = FakeEvent()
    event.passed = True
    for position, tensor in enumerate(tensors):
        pool.free(tensor, after=event if position % 2 else None)
    assert {id(pool.allocate((1,))) for _ in range(50)} == {id(tensor) for tensor in tensors}


@pytest.mark.req("S2-14", "S3-4")
def test_a_foreign_tensor_is_refused(pool: GPUTensorPool) -> None:
    with pytest.raises(ValueError, match="No pool"):
        pool.free(torch.empty(SHAPE))
    mine = pool.allocate(SHAPE)
    with pytest.raises(ValueError, match="does not belong"):
        pool.free(torch.empty(SHAPE))
    with pytest.raises(ValueError, match="does not belong"):
        pool.free(mine.view(SHAPE))  # another tensor of the same bytes
    pool.free(mine)


@pytest.mark.req("S2-15")
def test_optional_arguments_of_free_are_checked(pool: GPUTensorPool) -> None:
    tensor = pool.allocate(SHAPE)
    with pytest.raises(ValueError, match="as shape"):
        pool.free(tensor, (512, 128))
    with pytest.raises(ValueError, match="dtype"):
        pool.free(tensor, SHAPE, dtype=torch.int32)
    pool.free(tensor, SHAPE, dtype=torch.float32)


@pytest.mark.req("S2-16")
def test_freeing_twice_is_an_error_and_lends_once(pool: GPUTensorPool) -> None:
    tensor = pool.allocate(SHAPE)
    pool.free(tensor)
    with pytest.raises(PoolError, match="freed twice"):
        pool.free(tensor)
    assert pool.allocate(SHAPE) is tensor
    assert pool.allocate(SHAPE) is not tensor


@pytest.mark.req("S2-17", "S2-18", "S3-3")
def test_status_counts_one_pool_or_all(pool: GPUTensorPool) -> None:
    first, second = pool.allocate(SHAPE), pool.allocate(SHAPE)
    pool.free(first)
    assert pool.get_pool_status(SHAPE, torch.float32) == {
        "shape": SHAPE,
        "dtype": torch.float32,
        "total_count": 2,
        "allocated_count": 1,
        "free_count": 1,
        "utilization": 0.5,
    }
    status = pool.get_pool_status()
    assert list(status) == ["global_stats", "pools"]
    assert (
        status["global_stats"]
        == pool.stats
        == {
            "total_allocated": 2,
            "current_in_use": 1,
            "allocation_requests": 2,
            "free_requests": 1,
            "pool_hits": 0,
            "pool_misses": 2,
        }
    )
    assert status["pools"][pool._get_pool_key(SHAPE, torch.float32)]["total_count"] == 2
    pool.free(second)


@pytest.mark.req("S2-17")
def test_status_of_half_a_key_or_of_an_unknown_pool_is_an_error(pool: GPUTensorPool) -> None:
    pool.allocate(SHAPE)
    with pytest.raises(ValueError, match="both"):
        pool.get_pool_status(SHAPE)
    with pytest.raises(ValueError, match="both"):
        pool.get_pool_status(dtype=torch.float32)
    with pytest.raises(ValueError, match="No pool"):
        pool.get_pool_status((1, 2), torch.float32)


@pytest.mark.req("S2-19", "S3-2")
def test_reset_makes_every_tensor_available(pool: GPUTensorPool) -> None:
    tensors = [pool.allocate(SHAPE) for _ in range(3)]
    pool.reset()
    assert pool.stats["current_in_use"] == 0
    assert {id(pool.allocate(SHAPE)) for _ in range(3)} == {id(tensor) for tensor in tensors}
    assert pool.stats["pool_misses"] == 3


@pytest.mark.req("S2-20", "S3-2")
def test_clear_releases_everything_and_the_next_allocate_is_a_miss(pool: GPUTensorPool) -> None:
    tensor = pool.allocate(SHAPE)
    pool.free(tensor)
    gone = weakref.ref(tensor)
    del tensor
    pool.clear()
    assert gone() is None
    assert pool.stats["total_allocated"] == 0
    pool.allocate(SHAPE)
    assert pool.stats["pool_misses"] == 2


@pytest.mark.req("S2-20")
def test_clear_returns_blocks_to_the_arena_when_their_borrowers_are_done(arena: HostArena) -> None:
    pool = TensorPool(arena=arena)
    freed, lent = pool.allocate(SHAPE), pool.allocate(SHAPE)
    pool.free(freed)
    pool.clear()
    assert arena.stats().lent == 1, "somebody still holds this tensor"
    del lent
    assert arena.stats().lent == 0
    arena.clear()


@pytest.mark.req("S2-21")
def test_a_dropped_pool_gives_its_blocks_back(arena: HostArena) -> None:
    pool = TensorPool(arena=arena)
    pool.free(pool.allocate(SHAPE))
    with arena._lock:  # as if the garbage collector ran inside a call of the arena
        del pool
        gc.collect()
    assert arena.stats().lent == 0


@pytest.mark.req("S2-21")
def test_a_pool_whose_constructor_failed_is_dropped_quietly(
    arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in a finalizer is only printed: it is seen where Python would print it."""
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with pytest.raises(ValueError, match="cannot back a pool on cuda"):
        GPUTensorPool("cuda", arena=arena)
    gc.collect()
    assert unraisable == []


AT_EXIT = """
import torch
from offload.memory.arena import HostArena
from offload.memory.budget import LocalHostBudget
from offload.compat.tensor_pool import TensorPool
from tests.unit.memory.fakes import FakeDevice
sizes = {"slab_bytes": 1 << 20, "registration_bytes": 1 << 20}
arena = HostArena(FakeDevice().protocol, budget=LocalHostBudget(1 << 20), **sizes)
pool = TensorPool(arena=arena)
lent = pool.allocate((4,))
pool.free(pool.allocate((8,)))
pool.itself = pool  # only the interpreter's last collection finds it
"""


@pytest.mark.req("S2-21")
def test_a_pool_that_lives_until_the_interpreter_ends_says_nothing() -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", AT_EXIT]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.req("S2-22")
def test_a_tensor_is_not_lent_again_before_its_last_copy_has_ended(pool: GPUTensorPool) -> None:
    event = FakeEvent("restore")
    tensor = pool.allocate(SHAPE)
    pool.free(tensor, after=event)
    other = pool.allocate(SHAPE)
    assert other is not tensor
    assert pool.get_pool_status(SHAPE, torch.float32)["free_count"] == 1
    event.passed = True
    assert pool.allocate(SHAPE) is tensor


@pytest.mark.req("S2-22")
def test_a_late_copy_does_not_hide_the_tensors_behind_it(pool: GPUTensorPool) -> None:
    late = FakeEvent("late")
    tensors = [pool.allocate(SHAPE) for _ in range(4)]
    for tensor in tensors:
        event = late
        if tensor is not tensors[0]:
            event = FakeEvent()
            event.passed = True
        pool.free(tensor, after=event)
    assert {id(pool.allocate(SHAPE)) for _ in range(3)} == {id(tensor) for tensor in tensors[1:]}


@pytest.mark.req("S2-22")
def test_an_event_nobody_can_ask_about_is_refused_and_the_tensor_stays_lent() -> None:
    pool = GPUTensorPool("cpu")
    tensor = pool.allocate(SHAPE)
    with pytest.raises(ValueError, match="event_device"):
        pool.free(tensor, after=FakeEvent())
    pool.free(tensor)


@pytest.mark.req("S2-22")
def test_the_arena_learns_the_last_copy_of_a_cleared_tensor(device: FakeDevice) -> None:
    arena = HostArena(device.protocol, budget=LocalHostBudget(4096), slab_bytes=4096, registration_bytes=4096)
    pool = TensorPool(arena=arena)
    event = FakeEvent("restore")
    pool.free(pool.allocate((1024,)), after=event)
    pool.clear()
    block = arena.take(4096)
    assert block.after == (event,)


def test_a_pool_beyond_the_host_budget_says_so(device: FakeDevice) -> None:
    arena = HostArena(device.protocol, budget=LocalHostBudget(4096), slab_bytes=4096, registration_bytes=4096)
    pool = TensorPool(arena=arena)
    pool.allocate((1024,))
    with pytest.raises(HostBudgetError, match=r"raise host_limit \(host_limit_bytes in"):
        pool.allocate((1024,))
