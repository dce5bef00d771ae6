"""Recomputes compared on a GPU: checksums are those of the host, and take few kernels; atomic additions
differ, and what is repeatable does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import offload
from offload import RecomputeDiffersError
from offload.checkpoint.checksum import checksum
from tests.gpu.workbench import DEVICE, build_manager, installed

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64]


def of_bytes(dtype: torch.dtype, count: int) -> Tensor:
    top = 2 if dtype is torch.bool else 256
    generator = torch.Generator().manual_seed(count)
    return torch.randint(top, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


@pytest.mark.parametrize("count", [1, 7, 70_001, 3_000_001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_is_that_of_the_host_whatever_the_order_of_additions(
    dtype: torch.dtype, count: int
) -> None:
    values = of_bytes(dtype, count)
    there = values.to(DEVICE)
    sums = checksum(values), checksum(there), checksum(there[1:]), checksum(values[1:])
    assert (sums[0] is None) == (sums[1] is None)
    assert int(sums[0]) == int(sums[1])  # type: ignore[arg-type]
    if count > 1:
        assert int(sums[2]) == int(sums[3])  # type: ignore[arg-type]


def test_a_checksum_takes_four_kernels() -> None:
    values = torch.randn(1 << 22, device=DEVICE)
    checksum(values)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        checksum(values)
        torch.cuda.synchronize()
    kernels = [
        event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    assert 0 < len(kernels) <= 5, kernels  # a large reduction may clear its counters first


class Adding(nn.Module):
    """Floats that are added in whatever order they come."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[0], device=x.device) % 3
        return x + torch.tanh(torch.zeros_like(x).index_add(0, at, self.linear(x)) * 1e-3)


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(64, 64, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.conv(x.t()[None])[0].t())


def train(kind: type[nn.Module], mode: Any, rows: int, steps: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    with installed(build_manager()):
        model = nn.Sequential(*[kind() for _ in range(3)]).to(DEVICE)
        if mode is not None:
            offload.apply(model, mode, min_numel=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        found: list[Tensor] = []
        for number in range(steps):
            torch.manual_seed(number)
            optimizer.zero_grad()
            model(torch.randn(rows, 64, device=DEVICE)).square().mean().backward()
            found += [
                parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
            ]
            optimizer.step()
    return found


@pytest.mark.parametrize("mode", ["hidden_states", "selective"])
def test_atomic_additions_of_floats_are_an_error_before_a_step(mode: str) -> None:
    with pytest.raises(RecomputeDiffersError, match="index_add"):
        train(Adding, mode, rows=1 << 16)


@pytest.mark.parametrize("mode", ["hidden_states", "selective"])
def test_a_repeatable_convolution_is_no_difference(mode: str) -> None:
    """Another algorithm may be chosen where memory is short: none is here, and none adds in any order."""
    torch.backends.cudnn.deterministic, before = True, torch.backends.cudnn.deterministic
    try:
        assert all(map(torch.equal, train(Convolving, None, 256), train(Convolving, mode, 256)))
    finally:
        torch.backends.cudnn.deterministic = before
