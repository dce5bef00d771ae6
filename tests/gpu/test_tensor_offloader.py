"""Tensors, weights and gradients by hand on a GPU: bits, the allocator's memory, overlap, graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import OffloadConfig, capturing
from offload.compat.gradients import GradientOffloadHook
from offload.compat.tensors import TensorOffloader
from offload.compat.weights import offload_module_weights

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_allocator")]

MIB = 1 << 20


@pytest.fixture
def offloader() -> Iterator[TensorOffloader]:
    offload.configure(OffloadConfig(host_reserve_bytes=512 * MIB), device="cuda")
    made = TensorOffloader()
    yield made
    made.clear()


@pytest.mark.req("S3-12", "S3-13", "S3-18", "S3-73")
@pytest.mark.parametrize("use_pool", [True, False])
@pytest.mark.parametrize("pin_memory", [True, False])
def test_bits_of_any_tensor_with_and_without_pinned_memory(
    offloader: TensorOffloader, pin_memory: bool, use_pool: bool
) -> None:
    mine = TensorOffloader(pin_memory, use_pool)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for number in range(5):
            x = (torch.randn(1024, 513, device="cuda") * 100).to(dtype)
            source = (x, x.t(), x[3:, 5:77], x[:, ::3], x[:, :1].expand(-1, 7))[number]
            expected = source.clone()
            handle = mine.offload(source)
            del source
            x.zero_()  # comes after the copy
            back = mine.reload(handle)
            assert torch.equal(back, expected)
    handle = mine.offload(x)
    mine.sync_offload()
    assert handle.cpu_tensor.is_pinned() is pin_memory
    mine.clear()
    with pytest.raises(ValueError, match="offload of a tensor on cpu"):
        mine.offload(torch.ones(3))


@pytest.mark.req("S3-14", "S3-15", "S3-70")
def test_released_bytes_are_the_allocators_again(offloader: TensorOffloader) -> None:
    for _ in range(5):
        before = torch.cuda.memory_allocated()
        x = torch.randn(64 * MIB // 4, device="cuda")
        expected, full = x.clone(), torch.cuda.memory_allocated()
        handle = offloader.offload(x, release_storage=True)
        assert x.untyped_storage().size() == 0
        assert full - torch.cuda.memory_allocated() >= 64 * MIB
        scratch = torch.full_like(expected, 7)  # the bytes that were freed, behind the copy
        offloader.reload_into(handle, x)
        assert torch.equal(x, expected)
        offloader.sync_all()
        del x, expected, scratch
        assert torch.cuda.memory_allocated() == before


@pytest.mark.req("S3-17", "S3-69")
def test_reloads_race_with_compute_that_overwrites_and_frees(offloader: TensorOffloader) -> None:
    expected, handles = [], []
    for number in range(24):
        x = torch.full((4 * MIB,), float(number), device="cuda")
        torch.cuda._sleep(2_000_000)
        x.add_(0.5)
        expected.append(number + 0.5)
        handles.append(offloader.offload(x))
        if number % 3:
            x.fill_(-1)
        del x
    for number in torch.randperm(24).tolist():
        back = offloader.reload(handles[number])
        assert bool((back == expected[number]).all())
        del back


@pytest.mark.req("S3-80")
def test_reloads_in_and_before_a_captured_graph(offloader: TensorOffloader) -> None:
    x, out = torch.randn(MIB, device="cuda"), torch.zeros(MIB, device="cuda")
    expected = x.clone()
    before = offloader.reload(offloader.offload(x))
    offloader.sync_all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(before * 2)
    for _ in range(2):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected * 2)
    handle = offloader.offload(x)
    with capturing() as region:
        inside = torch.cuda.CUDAGraph()
        with torch.cuda.graph(inside):
            back = offloader.reload(handle)
            out.copy_(back * 3)
    del handle
    for _ in range(3):
        others = [offloader.offload(torch.full_like(x, 9.0)) for _ in range(4)]
        out.zero_()
        inside.replay()
        assert torch.equal(out, expected * 3)
        del others
    region.release()


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.req("S3-20", "S3-23", "S3-25", "S3-27", "S3-81")
def test_weights_and_gradients_leave_and_no_bit_changes(offloader: TensorOffloader) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(*(Layer(1024) for _ in range(12))).to("cuda", torch.bfloat16)
    plain = copy.deepcopy(ours)
    nbytes = sum(p.nbytes for p in ours.parameters())
    before = torch.cuda.memory_allocated()
    weights = offload_module_weights(ours, offloader)
    assert before - torch.cuda.memory_allocated() >= 0.9 * nbytes
    hook = GradientOffloadHook(offloader)
    hook.register(ours.parameters())
    pair = [torch.optim.SGD(m.parameters(), lr=1e-3, foreach=False) for m in (ours, plain)]
    for step in range(4):
        for microbatch in range(4):
            generator = torch.Generator("cuda").manual_seed(4 * step + microbatch)
            x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16, generator=generator)
            ours(x).float().square().mean().backward()
            assert all(p.grad is None for p in ours.parameters())
            plain(x).float().square().mean().backward()
        hook.reload_all()
        for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, its.grad)
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
    weights.remove_hooks()
    hook.remove_hooks()
    for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, its)
