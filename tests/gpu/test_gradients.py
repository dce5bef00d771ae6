"""Gradients that wait on the host, on a GPU: bits, memory, copies beside the backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import HybridDeviceOptimizer
from tests.gpu.test_weights import ROWS, WIDTH, Model, adam, pair
from tests.inside import gradients_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("engine_of_the_gpu", "clean_allocator")]

MICROBATCHES = 4


def backward(model: nn.Module, number: int) -> None:
    generator = torch.Generator("cuda").manual_seed(number)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)
    model(x.requires_grad_()).float().square().mean().backward()


def step(
    model: nn.Module, number: int, optimizer: torch.optim.Optimizer, foreach: bool | None
) -> list[Tensor]:
    for microbatch in range(MICROBATCHES):
        backward(model, MICROBATCHES * number + microbatch)
    found = [nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=foreach)]
    optimizer.step()
    found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    optimizer.zero_grad()
    return found


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("checkpoints", [None, False, True])
@pytest.mark.parametrize("weights", [None, "host"])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}])
def test_steps_have_the_bits_of_plain_torch(
    weights: str | None, checkpoints: bool | None, options: dict[str, bool]
) -> None:
    model, plain = pair(checkpoints=checkpoints)
    handle = offload.apply(model, gradients="host", weights=weights)
    ours, its = (adam(each, **options) for each in (model, plain))
    for number in range(4):
        foreach = options.get("foreach")
        for mine, other in zip(
            step(model, number, ours, foreach), step(plain, number, its, foreach), strict=True
        ):
            assert torch.equal(mine, other)
    handle.remove()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("overlap", ["step", "forward", "backward"])
@pytest.mark.parametrize("share", [None, 1.0])
def test_the_hybrid_optimizer_steps_them(overlap: Any, share: float | None) -> None:
    model, plain = pair()
    handle = offload.apply(model, gradients="host")
    optimizers = [
        HybridDeviceOptimizer(
            each.parameters(),
            offload_fraction=1.0,
            param_update_in_fp32=True,
            overlap=overlap,
            model=each,
            cpu_share=share,
        )
        for each in (model, plain)
    ]
    for number in range(3):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            for microbatch in range(MICROBATCHES):
                optimizer.last_microbatch = microbatch == MICROBATCHES - 1
                backward(each, MICROBATCHES * number + microbatch)
            optimizer.step()
            optimizer.zero_grad()
    for optimizer in optimizers:
        optimizer.synchronize_parameters()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    for optimizer in optimizers:
        optimizer.close()
    handle.remove()


def test_between_backwards_the_device_has_a_window_of_them() -> None:
    model: Model
    model, _ = pair()
    handle = offload.apply(model, gradients="host")
    backward(model, 0)
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    for number in range(MICROBATCHES):
        backward(model, number)
    torch.cuda.synchronize()
    figures = gradients_of(handle).figures
    held = torch.cuda.memory_stats()["active_bytes.all.current"] - before
    small = sum(p.numel() * p.element_size() for p in model.parameters() if p.numel() < 1 << 16)
    assert held <= figures.window_bytes + small + (1 << 20)
    assert figures.window_bytes < figures.host_bytes / 3
    handle.remove()


def test_in_a_settled_step_all_but_the_first_were_fetched_ahead() -> None:
    model, _ = pair()
    handle = offload.apply(model, gradients="host")
    optimizer = adam(model, fused=True)
    figures = gradients_of(handle).figures
    for number in range(6):
        before = figures.misses
        step(model, number, optimizer, None)
    assert figures.misses - before <= 8  # at the turns from one pass over them to another
    handle.remove()


def test_a_write_on_the_device_races_with_no_copy() -> None:
    """The gradient that was sent last is scaled while it is still on its way out, behind a slow kernel."""
    model, plain = pair()
    handle = offload.apply(model, gradients="host")
    for number in range(3):
        for each in (model, plain):
            backward(each, number)
            torch.cuda._sleep(10_000_000)
            for parameter in each.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.equal(mine.grad, its.grad)
    assert copy.deepcopy(model.embed.weight.grad).device.type == "cuda"
    handle.remove()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_large_gradients_have_the_bits_of_plain_torch(
    dtype: torch.dtype, foreach: bool | None
) -> None:
    """torch's two ways to a norm round otherwise. From the second step on they are taken as gradients
    leave."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(1111, 4099), nn.Linear(4099, 777), nn.Linear(777, 3001)).to("cuda", dtype)
    model = copy.deepcopy(plain)
    handle = offload.apply(model, gradients="host")
    figures = gradients_of(handle).residency
    came = []
    for _ in range(3):
        x = torch.randn(64, 1111, device="cuda", dtype=dtype)
        for each in (model, plain):
            each(x).square().mean().backward()
        before = figures.in_bytes
        norms = [
            nn.utils.clip_grad_norm_(each.parameters(), 1e-3, foreach=foreach) for each in (model, plain)
        ]
        came.append(figures.in_bytes - before)
        assert torch.equal(*norms)
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]
        for each in (model, plain):
            each.zero_grad()
        offload.step_end()
    assert came[2] < came[0] or foreach is False
    handle.remove()
