"""Tensors out and back by hand, and the pools behind it, on a real GPU: what is freed is freed, what is
reused is nobody's any more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from offload import ChunkOffloadHandler, GPUTensorPool, OffloadConfig, OffloadEngine
from offload.device.cuda import CudaDevice
from tests.gpu.widened import sleep
from tests.gpu.workbench import DEVICE, bits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_allocator")]

MIB = 1 << 20
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def handler() -> Iterator[ChunkOffloadHandler]:
    engine = OffloadEngine(OffloadConfig(), device=CudaDevice())
    handler = ChunkOffloadHandler(1, engine=engine)
    yield handler
    handler.cpu_tensor_pool.clear()
    engine.close()


def allocated() -> int:
    return torch.cuda.memory_allocated()


def random(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, device=DEVICE).to(dtype)


# -- by hand -------------------------------------------------------------------------------------------------


@pytest.mark.req("S3-70")
@pytest.mark.parametrize("nbytes", [64 * MIB, 128 * MIB, 1024 * MIB], ids=["64 MiB", "128 MiB", "1 GiB"])
def test_device_memory_falls_by_the_tensors_bytes_and_rises_again(
    handler: ChunkOffloadHandler, nbytes: int
) -> None:
    tensor = torch.arange(nbytes // 4, dtype=torch.int32, device=DEVICE)
    full = allocated()
    state = handler.offload(tensor)
    del tensor
    assert full - allocated() == nbytes
    found = handler.reload(state)
    assert allocated() == full
    assert found.shape == (nbytes // 4,)
    assert torch.equal(found, torch.arange(nbytes // 4, dtype=torch.int32, device=DEVICE))


@pytest.mark.req("S3-67", "S3-71")
def test_reload_gives_what_was_offloaded_even_if_the_original_is_overwritten(
    handler: ChunkOffloadHandler,
) -> None:
    tensor = random(4 * MIB)
    expected = tensor.clone()
    state = handler.offload(tensor)
    assert state.device == tensor.device
    assert state.cpu_tensor.device.type == "cpu"
    assert state.cpu_tensor.is_pinned()
    tensor.fill_(float("nan"))
    found = handler.reload(state)
    assert found.device == expected.device
    assert found.data_ptr() != tensor.data_ptr()
    assert torch.equal(bits(found), bits(expected))


@pytest.mark.req("S3-73")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(1000,), (128, 512), (16, 64, 256)], ids=str)
def test_a_round_trip_by_hand_is_bitwise(
    handler: ChunkOffloadHandler, size: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = random(*size, dtype=dtype)
    found = handler.reload(handler.offload(tensor))
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(bits(found), bits(tensor))


def test_strides_come_back(handler: ChunkOffloadHandler) -> None:
    base = random(256, 512)
    for tensor in (
        base.t(),
        base[:, ::2],
        base[:, 3:4].expand(-1, 64),
        base.view(16, 16, 512).permute(2, 0, 1),
    ):
        found = handler.reload(handler.offload(tensor))
        assert (found.shape, found.stride()) == (tensor.shape, tensor.stride())
        assert torch.equal(bits(found), bits(tensor))


@pytest.mark.req("S2-59", "S3-72")
@pytest.mark.parametrize("pin_memory", [True, False])
def test_without_the_pool_a_host_tensor_of_its_own_is_pinned_on_request(
    handler: ChunkOffloadHandler, pin_memory: bool
) -> None:
    tensor = random(MIB)
    state = handler.offload(tensor, pin_memory=pin_memory, use_cpu_pool=False)
    assert state.cpu_tensor.is_pinned() is pin_memory
    assert torch.equal(bits(handler.reload(state)), bits(tensor))
    assert handler.cpu_tensor_pool.stats["allocation_requests"] == 0


@pytest.mark.req("S3-74")
def test_twenty_cycles_are_one_miss_and_five_are_right_each_time(handler: ChunkOffloadHandler) -> None:
    for cycle in range(20):
        tensor = random(MIB)
        found = handler.reload(handler.offload(tensor))
        torch.cuda.synchronize()  # the buffer's last copy has passed, so the next cycle may have it
        if cycle < 5:
            assert torch.equal(bits(found), bits(tensor))
    stats = handler.cpu_tensor_pool.stats
    assert (stats["pool_misses"], stats["pool_hits"], stats["current_in_use"]) == (1, 19, 0)


@pytest.mark.req("S2-22")
def test_a_host_buffer_is_not_lent_again_while_a_copy_still_reads_it(handler: ChunkOffloadHandler) -> None:
    tensor, other = torch.ones(MIB, device=DEVICE), torch.full((MIB,), 2.0, device=DEVICE)
    torch.cuda.synchronize()
    state = handler.offload(tensor)
    with torch.cuda.stream(handler.engine.device.h2d.stream):  # the restore is late
        sleep(50.0)
    found = handler.reload(state)
    second = handler.offload(other)
    assert second.cpu_tensor.data_ptr() != state.cpu_tensor.data_ptr()
    assert handler.cpu_tensor_pool.stats["pool_misses"] == 2
    torch.cuda.synchronize()
    assert bool((found == 1.0).all())
    assert bool((handler.reload(second) == 2.0).all())


# -- a pool of device tensors --------------------------------------------------------------------------------


@pytest.mark.req("S2-12", "S2-18")
def test_a_pool_on_the_device_lends_a_freed_tensor_again() -> None:
    pool = GPUTensorPool("cuda")
    before = allocated()
    first = pool.allocate((1024, 1024), torch.bfloat16)
    assert first.device.type == "cuda"
    assert (first.shape, first.dtype) == ((1024, 1024), torch.bfloat16)
    assert allocated() - before == 2 * MIB
    second = pool.allocate((1024, 1024), torch.bfloat16)
    assert second.data_ptr() != first.data_ptr()
    pool.free(first)
    assert pool.allocate((1024, 1024), torch.bfloat16) is first
    assert pool.stats == {
        "total_allocated": 2,
        "current_in_use": 2,
        "allocation_requests": 3,
        "free_requests": 1,
        "pool_hits": 1,
        "pool_misses": 2,
    }
    assert allocated() - before == 4 * MIB


@pytest.mark.req("S2-20")
def test_clear_gives_the_device_memory_back() -> None:
    before = allocated()
    pool = GPUTensorPool("cuda")
    for _ in range(3):
        pool.free(pool.allocate((4 * MIB,)))
        pool.allocate((8 * MIB,), torch.int8)
    assert allocated() - before == (16 + 3 * 8) * MIB
    pool.reset()
    assert allocated() - before == (16 + 3 * 8) * MIB
    pool.clear()
    assert allocated() == before


@pytest.mark.req("S2-22")
def test_a_device_tensor_is_lent_again_once_its_last_use_has_passed() -> None:
    device = CudaDevice()
    pool = GPUTensorPool("cuda", event_device=device)
    first, second = pool.allocate((MIB,)), pool.allocate((MIB,))
    pool.free(second)
    sleep(100.0)
    pool.free(first, after=device.record(device.compute))
    assert pool.allocate((MIB,)) is second
    torch.cuda.synchronize()
    assert pool.allocate((MIB,)) is first
