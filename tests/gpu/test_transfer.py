"""The engine's copies on a real GPU: every byte comes back, host memory is pinned, rates and stalls are
measured, and no wait blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from offload import ChunkOffloadHandler, OffloadConfig, OffloadEngine, StepStats
from offload.client import Client
from offload.ids import ChunkId, GroupId
from offload.saved.handles import Handle, SavedChunk, SavedGroup
from offload.telemetry.records import ClientStats
from offload.transfer.block import BlockState
from offload.transfer.copier import Priority
from tests.gpu.widened import WidenedDevice, cycles_of, sleep
from tests.gpu.workbench import DEVICE, bits

pytestmark = pytest.mark.gpu

MIB = 1 << 20
DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "bool": torch.bool,
}
SLOW_MS = 20.0


class Desk(Client):
    """An engine whose new buffers are poisoned, and the saves of one step."""

    name = "groups"

    def __init__(self, reserve_bytes: int) -> None:
        self.device = WidenedDevice()
        self.engine = OffloadEngine(
            OffloadConfig(min_offloaded_tensor_size=1, piece_bytes=1), device=self.device
        )
        self.engine.attach(self)
        self.engine.arena.reserve(reserve_bytes)
        self.chunk = SavedChunk(ChunkId(0, 0))
        self.groups = 0

    def out(self, tensor: Tensor) -> Handle:
        """A group of its own; all copies are issued, and the source is let go of."""
        group = SavedGroup(GroupId(ChunkId(0, 0), self.groups, "core_attn"), leaves=True)
        self.groups += 1
        handle = self.engine.store.save(tensor, self.chunk, group)
        self.engine.store.commit(group)
        for transfer in group.transfers:
            self.engine.transfers.settle_spill(transfer)
        return handle

    def end(self) -> StepStats:
        stats = self.engine.end_step()
        self.chunk = SavedChunk(ChunkId(0, 0))
        return stats

    def end_step(self) -> ClientStats:
        return self.engine.end_saves([self.chunk])

    def close(self) -> None:
        self.engine.close()


@pytest.fixture(scope="module")
def large_desk() -> Iterator[Desk]:
    """Holds more than the largest tensor here."""
    desk = Desk(384 * MIB)
    yield desk
    desk.close()


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk(64 * MIB)
    yield desk
    desk.close()


def random_bits(dtype: torch.dtype, *size: int) -> Tensor:
    """Any bit pattern that the dtype has, NaNs included."""
    generator = torch.Generator(DEVICE).manual_seed(sum(size))
    if dtype is torch.bool:
        return torch.randint(0, 2, size, dtype=torch.uint8, device=DEVICE, generator=generator).view(
            torch.bool
        )
    *rest, last = size
    return torch.randint(
        0, 256, (*rest, last * dtype.itemsize), dtype=torch.uint8, device=DEVICE, generator=generator
    ).view(dtype)


# -- round trips ---------------------------------------------------------------------------------------------


@pytest.mark.req("S3-73")
@pytest.mark.parametrize("size", [(1,), (511,), (33, 127), (1024, 1024), (3, 5, 7 * 4096)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_comes_back_bit_by_bit(large_desk: Desk, dtype: str, size: tuple[int, ...]) -> None:
    tensor = random_bits(DTYPES[dtype], *size)
    expected = tensor.clone()
    handle = large_desk.out(tensor)
    del tensor
    assert handle.record.block.state is BlockState.SPILLED
    found = large_desk.engine.store.read(handle)
    assert found.device == expected.device
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert torch.equal(bits(found), bits(expected))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda base: base.t(),
    "every second column": lambda base: base[:, ::2],
    "every eighth column": lambda base: base[:, ::8],  # less than half of its span: gathered on the device
    "rows in the middle": lambda base: base[100:300],
    "columns in the middle": lambda base: base[:, 16:48],
    "expanded": lambda base: base[:, 7:8].expand(-1, 300),
    "expanded row": lambda base: base[5].expand(64, -1),
    "from an odd element": lambda base: base.view(-1)[3 : 3 + 4096].view(64, 64),
}


@pytest.mark.req("S2-103", "S3-77")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_comes_back_with_its_strides(large_desk: Desk, view: str, dtype: str) -> None:
    tensor = VIEWS[view](random_bits(DTYPES[dtype], 512, 512))
    shape, stride, expected = tensor.shape, tensor.stride(), bits(tensor).clone()
    handle = large_desk.out(tensor)
    del tensor
    assert handle.record.block.state is BlockState.SPILLED
    found = large_desk.engine.store.read(handle)
    assert (found.shape, found.stride(), found.dtype) == (shape, stride, DTYPES[dtype])
    assert torch.equal(bits(found), expected)


@pytest.mark.req("S0-4", "S3-67", "S4-20", "S4-36", "W-9")
def test_256_mb_cross_several_registrations_and_every_block_is_pinned(large_desk: Desk) -> None:
    """One copy must stay within one registration, and a registration is 64 MiB."""
    tensor = random_bits(torch.float32, 64 * MIB + 1)
    expected = tensor.clone()
    handle = large_desk.out(tensor)
    del tensor
    block = handle.record.block.host
    assert block is not None
    lengths = [extent.numel() for extent in block.extents]
    assert sum(lengths) == 256 * MIB + 4
    assert len(lengths) >= 5
    assert max(lengths) <= 64 * MIB
    assert all(extent.is_pinned() and extent.device.type == "cpu" for extent in block.extents)
    assert torch.equal(bits(large_desk.engine.store.read(handle)), bits(expected))
    torch.cuda.synchronize()
    on_host = torch.cat(block.extents)
    assert torch.equal(on_host, bits(expected).cpu())


def test_a_number_stays_on_the_device(large_desk: Desk) -> None:
    """0-dim: below any size limit above one element."""
    handler = ChunkOffloadHandler(2, engine=large_desk.engine)
    handler.on_group_start_forward("core_attn")
    number = torch.tensor(1.5, device=DEVICE)
    tag = handler.tensor_push(number)
    handler.on_group_commit_forward()
    found = handler.tensor_pop(tag)
    assert found.data_ptr() == number.data_ptr()
    assert found.shape == ()


@pytest.mark.req("S3-77", "S3-78")
def test_tensors_of_all_dtypes_and_layouts_leave_in_one_group(large_desk: Desk) -> None:
    handler = ChunkOffloadHandler(1, engine=large_desk.engine)
    handler.on_group_start_forward("core_attn")
    saved = []
    for number, dtype in enumerate(DTYPES.values()):
        base = random_bits(dtype, 256, 128 + number)
        for tensor in (base, base.clone().t(), base.clone()[:, ::2]):
            saved.append((handler.tensor_push(tensor), tensor.shape, tensor.stride(), bits(tensor).clone()))
        del base, tensor
    handler.on_group_commit_forward()
    assert handler.bulk_reload_group()
    for tag, shape, stride, expected in saved:
        found = handler.tensor_pop(tag)
        assert (found.shape, found.stride()) == (shape, stride)
        assert torch.equal(bits(found), expected)


# -- rates ---------------------------------------------------------------------------------------------------


def test_reserving_host_memory_measures_the_link() -> None:
    """Pinned copies reach tens of GB/s; pageable ones and a link that is not there do not reach one."""
    engine = OffloadEngine(OffloadConfig(), device=WidenedDevice(poison=False))
    try:
        engine.reserve_host(128 * MIB)
        rates = engine.rates
        assert rates is not None
        assert rates.d2h_bytes_per_s > 1e9
        assert rates.h2d_bytes_per_s > 1e9
        assert rates.duplex_bytes_per_s is not None
        assert rates.duplex_bytes_per_s > 1e9
        arena = engine.arena.stats()
        assert (arena.lent, arena.held_bytes, arena.missing) == (0, 128 * MIB, 0)
        lined_up: list[bool] = []
        again = engine.measure_link(lambda: lined_up.append(engine.arena.lent_bytes > 0))
        assert again is engine.rates is not None
        assert again is not rates
        assert lined_up == [True] * 3
    finally:
        engine.close()


# -- stalls --------------------------------------------------------------------------------------------------


def sleep_as_measured() -> float:
    """Milliseconds that a sleep of `SLOW_MS` takes on the device now."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(cycles_of(SLOW_MS))
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@pytest.mark.parametrize("slow", ["h2d", "d2h"])
def test_a_wait_for_a_slow_copy_is_counted_as_a_stall(desk: Desk, slow: str) -> None:
    """A slow h2d delays the reader, a slow d2h the settling of the spill; either is one wait about as long as
    the sleep."""
    desk.out(torch.ones(MIB, device=DEVICE))
    torch.cuda.synchronize()
    desk.end()
    asleep_ms = sleep_as_measured()
    if slow == "d2h":
        desk.device.slow_ms = {"d2h": SLOW_MS}
    handle = desk.out(torch.ones(MIB, device=DEVICE))
    stalls = 1
    if slow == "h2d":
        torch.cuda.synchronize()
        stalls = len(desk.engine.transfers.stalls) + 1  # the settling may have been one
        desk.device.slow_ms = {"h2d": SLOW_MS}
        desk.engine.store.read(handle)
    assert desk.end().stall_count == stalls
    torch.cuda.synchronize()
    stalled = desk.end()  # a step reports the stall of the step before it
    assert stalled.stall_count == 0
    assert stalled.stall_ms >= 0.5 * asleep_ms
    assert desk.end().stall_ms == 0.0


def test_a_copy_that_has_passed_stalls_nobody(desk: Desk) -> None:
    group = SavedGroup(GroupId(ChunkId(0, 0), 0, "core_attn"), leaves=True)
    handle = desk.engine.store.save(torch.ones(MIB, device=DEVICE), desk.chunk, group)
    torch.cuda.synchronize()
    (transfer,) = group.transfers
    desk.engine.transfers.settle_spill(transfer)
    desk.engine.transfers.restore([handle.record.block], Priority.REQUIRED)
    torch.cuda.synchronize()
    assert bool((desk.engine.store.read(handle) == 1.0).all())
    assert desk.end().stall_count == 0


# -- events --------------------------------------------------------------------------------------------------


@pytest.mark.req("S3-78")
def test_poll_and_wait_never_block_the_host_and_synchronize_does(desk: Desk) -> None:
    device = desk.device
    value = torch.zeros(1024, dtype=torch.uint8, device=DEVICE)
    host = device.host_memory(4096, 4096)
    device.copy(device.d2h, [(host.pieces[0][:1024], value)])  # loads what a copy needs
    torch.cuda.synchronize()

    start = device.record(device.compute, timed=True)
    sleep(100.0)
    value.fill_(7)
    written = device.record(device.compute, timed=True)
    assert not device.poll(written)
    device.wait(device.d2h, written, "spill")
    device.copy(device.d2h, [(host.pieces[0][:1024], value)])
    copied = device.record(device.d2h)
    assert not device.poll(written), "wait or copy blocked the host"
    assert not device.poll(copied), "d2h did not wait for compute"
    device.synchronize(copied)
    assert device.poll(copied)
    assert device.poll(written)
    assert device.elapsed_ms(start, written) > 0
    assert bool((host.pieces[0][:1024] == 7).all())
    host.release()


@pytest.mark.req("S4-34")
def test_the_compute_lane_is_the_current_stream_whenever_it_is_asked_for(desk: Desk) -> None:
    device = desk.device
    default = device.compute
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        on_side = device.compute
        assert on_side.stream == side
        assert device.compute is on_side
    assert device.compute is default
    assert default.stream == torch.cuda.current_stream()
    assert len({default.stream, side, device.d2h.stream, device.h2d.stream}) == 4
