"""The conductor on a GPU: bits with every kind of copy at once, and how long a required copy waits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import offload
from bench.conflicts import CONFLICTS, stalls_ms
from offload.conductor import Conductor
from offload.transfer.copier import Direction
from tests.nets import Block, Stack

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("engine_of_the_gpu", "clean_allocator")]

WIDTH, ROWS, BLOCKS = 1024, 4096, 8


def frozen() -> nn.Module:
    return Block(WIDTH, 4 * WIDTH).requires_grad_(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("bridge", ["turns", "v0"])
@pytest.mark.parametrize("hard_mb", [1.0, 100_000.0])
def test_bits_with_weights_activations_and_optimizer_at_once(bridge: str, hard_mb: float) -> None:
    """A hard cap of 1 MiB is pressure in every backward; apply() would refuse it."""
    torch.manual_seed(0)
    plain = Stack(frozen, BLOCKS, WIDTH, 4 * WIDTH).cuda()
    model = copy.deepcopy(plain)
    handle = offload.apply(model, "groups", weights="host", device_limit="200MB", min_numel=1)
    conductor = Conductor(bridge=bridge, vram_hard_cap_mb=hard_mb)
    optimizers = [
        offload.HybridDeviceOptimizer(
            [p for p in each.parameters() if p.requires_grad], offload_fraction=1.0, lr=1e-3
        )
        for each in (model, plain)
    ]
    for _ in range(5):
        x = torch.randn(ROWS, WIDTH, device="cuda")
        losses = [each(x).square().mean() for each in (model, plain)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            assert its.grad is None or torch.equal(mine.grad, its.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert conductor.counts.grants > 0
    torch.cuda.synchronize()
    for direction in Direction:
        conductor._reap(direction)
        assert conductor.transfers.in_flight(direction) == 0
    conductor.shutdown()
    handle.remove()
    for optimizer in optimizers:
        optimizer.close()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_one_line_moves_four_kinds_and_all_of_it_comes_back(where: str) -> None:
    """The optimizer's state was on the device, goes to the host, and is on the device again."""
    torch.manual_seed(0)
    plain = Stack(frozen, BLOCKS, WIDTH, 4 * WIDTH).requires_grad_(True).cuda()
    model = copy.deepcopy(plain)
    ours, its = (torch.optim.AdamW(each.parameters(), lr=1e-3, fused=True) for each in (model, plain))

    def train(steps: int) -> None:
        for _ in range(steps):
            x = torch.randn(ROWS, WIDTH, device="cuda")
            for each in (model, plain):
                each(x).square().mean().backward()
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]
            for optimizer in (ours, its):
                optimizer.step()
                optimizer.zero_grad()

    train(2)
    handle = offload.apply(model, "hidden_states", weights="host", optimizer=ours, conductor=True)
    assert handle.conductor is not None
    memory = torch.cuda.get_device_properties(0).total_memory
    assert handle.conductor.config.hard_bytes == memory
    train(3)
    kinds = handle.report().as_dict()["kinds"]
    assert all(kinds[kind]["host_bytes"] > 0 for kind in ("weights", "gradients", "optimizer"))
    handle.remove(where)
    assert type(ours) is torch.optim.AdamW
    for mine, other in zip(ours.state.values(), its.state.values(), strict=True):
        assert mine["exp_avg"].device.type == where
        assert all(torch.equal(mine[key].cpu(), other[key].cpu()) for key in other)
    if where == "cuda":
        train(2)


@pytest.mark.req("S1-60")
@pytest.mark.parametrize("conflict", [name for name in CONFLICTS if name != "saturated"])
def test_a_required_copy_waits_less_than_without(conflict: str) -> None:
    """By how much says bench_conductor.py, on a GPU that nobody else uses: a half at most."""
    stalls = stalls_ms(offload.marks.default_manager().engine, conflict, samples=3)
    assert stalls[True] < stalls[False], stalls
