"""Small results that the host waits for, on a GPU: their bits, and that queued copies do not hold them up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import offload
from offload.device import _cuda_memory

pytestmark = pytest.mark.gpu

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_those_of_tolist(dtype: torch.dtype) -> None:
    values = torch.arange(-60, 60, device="cuda").to(dtype).view(10, 12)
    values.view(-1)[5] = -0.0
    trained = values.clone().requires_grad_() if dtype.is_floating_point else values
    views = (values.t(), values[3:7, ::2], values[0, 0], values[:0], values.expand(3, 10, 12))
    for each in (values, *views, trained):
        assert repr(offload.read_numbers(each)) == repr(each.tolist())
    if dtype.is_complex:
        assert offload.read_numbers(values.conj()) == values.conj().tolist()
    large = values.view(-1).repeat(2000)
    assert offload.read_numbers(large) == large.tolist()


def test_the_host_does_not_wait_for_copies_that_are_queued() -> None:
    counts = torch.arange(8, device="cuda")
    offload.read_numbers(counts * 3)  # makes the page and loads the kernels, for which the driver waits
    source = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    copies = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(copies):
        for _ in range(64):  # 4 GiB: 75 ms
            host.copy_(source, non_blocking=True)
        last = copies.record_event()
    assert offload.read_numbers(counts * 3) == [3 * number for number in range(8)]
    assert not last.query()
    torch.cuda.synchronize()


def test_each_thread_reads_its_own() -> None:
    def read(number: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(200):
                there = torch.full((50,), number * 1000 + turn, device="cuda")
                if offload.read_numbers(there) != [number * 1000 + turn] * 50:
                    return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(8)))


def test_a_page_that_was_made_in_inference_mode_serves_outside_of_it() -> None:
    counts = torch.arange(8, device="cuda")
    _cuda_memory._free_pages.clear()
    with torch.inference_mode():
        assert offload.read_numbers(counts + 1) == [*range(1, 9)]
    assert offload.read_numbers(counts) == [*range(8)]


def test_inside_a_transform_it_is_tolist() -> None:
    counts = torch.arange(8, device="cuda")

    def loss(x: torch.Tensor) -> torch.Tensor:
        assert offload.read_numbers(counts) == [*range(8)]
        return x.sum()

    assert torch.equal(torch.func.grad(loss)(torch.ones(3, device="cuda")), torch.ones(3, device="cuda"))


def test_a_capture_refuses() -> None:
    counts = torch.arange(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError), torch.cuda.graph(graph):
        offload.read_numbers(counts)
    torch.cuda.synchronize()
    assert offload.read_numbers(counts) == [*range(8)]
