"""HybridDeviceOptimizer over streamed weights on a GPU: bits, memory, and what a settled step asks for."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import offload
from tests.gpu.test_weights import BLOCK_BYTES, BLOCKS, ROWS, WIDTH, Model, pair
from tests.inside import impose
from tests.optim_pair import OVERLAPS, Overlap

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("engine_of_the_gpu", "clean_allocator")]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(number)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def made(model: Model, overlap: Overlap, share: float, **options: Any) -> offload.HybridDeviceOptimizer:
    return offload.HybridDeviceOptimizer(
        model.parameters(),
        1.0,
        lr=1e-3,
        param_update_in_fp32=True,
        overlap=overlap,
        cpu_share=share,
        model=model,
        bucket_bytes=4 << 20,
        **options,
    )


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("weights", ["host", "120MB"])
@pytest.mark.parametrize("gradients", ["host", "device"])
def test_full_training_has_the_bits_of_weights_on_the_device(
    overlap: Overlap, share: float, weights: str, gradients: str
) -> None:
    model, plain = pair(checkpoints=False)
    handle = offload.apply(model, weights=weights, gradients=gradients)
    optimizers = [made(model, overlap, share), made(plain, "step", share)]
    for number in range(6):
        losses = [
            train(each, optimizer, number) for each, optimizer in zip((model, plain), optimizers, strict=True)
        ]
        assert torch.equal(*losses), number
        state = copy.deepcopy(model.state_dict()) if number == 3 else {}
        for name, value in state.items():
            assert torch.equal(value, plain.state_dict()[name].to(value.device)), name
    handle.remove()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, its)
    for optimizer in optimizers:
        optimizer.close()


@pytest.mark.parametrize("gradients", ["host", "device"])
@pytest.mark.parametrize("behind_bytes", [0, BLOCK_BYTES])
def test_a_backward_that_waits_for_its_steps_has_the_bits_of_one_that_does_not(
    gradients: str, behind_bytes: int
) -> None:
    model, plain = pair(checkpoints=True)
    handle = offload.apply(model, weights="host", gradients=gradients)
    optimizers = [made(model, "backward", 0.0), made(plain, "step", 0.0)]
    impose(optimizers[0].engine, gradients_behind_bytes=behind_bytes)
    for number in range(6):
        losses = [
            train(each, optimizer, number) for each, optimizer in zip((model, plain), optimizers, strict=True)
        ]
        assert torch.equal(*losses), number
    if not behind_bytes:  # else the steps may keep up
        assert offload.report().as_dict()["kinds"]["optimizer"]["stall_ms"] > 0
    handle.remove()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, its)
    for optimizer in optimizers:
        optimizer.close()


def test_a_settled_step_asks_the_driver_for_nothing_and_holds_two_blocks() -> None:
    gc.collect()  # the engine of the test before, which is closed by now, and what it held
    held = torch.cuda.memory_allocated()
    model = pair(checkpoints=False)[0]  # the other one is gone
    handle = offload.apply(model, weights="host")
    optimizer = made(model, "backward", 0.0)
    for number in range(12):
        train(model, optimizer, number)
    # how many gradients wait for their steps at once is a matter of time, on a machine of others most of all,
    # and a step that has more of them than any before asks the driver once more
    for _ in range(BLOCKS):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        for number in range(3):
            train(model, optimizer, number)
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        if after["num_device_alloc"] == before["num_device_alloc"]:
            break
    assert after["num_device_alloc"] == before["num_device_alloc"]
    figures = handle.weights
    assert figures is not None
    # a block whose step is not issued when it is wanted may come in another's place
    assert 2 * (BLOCKS - 2) * BLOCK_BYTES <= figures.in_bytes <= 2 * BLOCKS * BLOCK_BYTES
    # the ring, two blocks, all gradients and a block's activations, less than half of the weights alone
    peak = after["active_bytes.all.peak"] - held
    assert peak < optimizer.ring_bytes + 2 * BLOCKS * BLOCK_BYTES, f"{held:,} bytes were held before"
    handle.remove()
    optimizer.close()
