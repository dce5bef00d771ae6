"""The conductor on a GPU: bits with every kind of copy at once, and how long a required copy waits."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import OffloadConfig
from offload.conductor import Conductor
from offload.ids import Owner
from offload.transfer.admission import Direction, Priority
from tests.inside import streams_from

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_allocator")]

WIDTH, ROWS, BLOCKS = 1024, 4096, 8
MIB = 1 << 20


@pytest.fixture(autouse=True)
def engine_of_the_gpu() -> Iterator[None]:
    offload.configure(OffloadConfig(), device="cuda")
    with streams_from(1 << 16):
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block().requires_grad_(False) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("bridge", ["turns", "v0"])
@pytest.mark.parametrize("hard_mb", [1.0, 100_000.0])
def test_bits_with_weights_activations_and_optimizer_at_once(bridge: str, hard_mb: float) -> None:
    """A hard cap of 1 MiB is pressure in every backward."""
    torch.manual_seed(0)
    plain = Model().cuda()
    model = copy.deepcopy(plain)
    fields = {"bridge": bridge, "vram_hard_cap_mb": hard_mb, "vram_soft_cap_mb": hard_mb}
    config = {"memory": {"stagehand": {"conductor_config": {**fields, "telemetry_interval": 0}}}}
    handle = offload.apply(
        model, "groups", weights="host", device_limit="200MB", min_numel=1, conductor=config
    )
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
    conductor = handle.conductor
    assert conductor is not None
    assert conductor.counts.grants > 0
    torch.cuda.synchronize()
    for direction in Direction:
        conductor._reap(direction)
        assert conductor.transfers.in_flight(direction) == 0
    handle.remove()
    for optimizer in optimizers:
        optimizer.close()


@pytest.mark.req("S1-60")
def test_a_required_copy_waits_at_most_half_as_long_as_without() -> None:
    """4 GiB of another client's prefetches are asked for, and then a block that compute waits for."""
    manager = offload.marks.default_manager()
    engine, device = manager.engine, manager.engine.device
    memory = device.host_memory(64 * MIB, 64 * MIB)
    host = memory.pieces[0]
    buffers = [device.empty(64 * MIB) for _ in range(66)]
    device.wait(device.h2d, device.record(device.compute), "allocate")

    def waited_s() -> float:
        device.synchronize(device.record(device.h2d))
        weights, groups = Owner("weights", "block"), Owner("groups", "piece")
        engine.copier.of(weights).fetch([(buffers[0], host)])
        for buffer in buffers[2:]:
            lease = engine.copier.ask(buffer.numel(), Direction.H2D, groups, Priority.SPECULATIVE)
            if lease is not None:
                engine.copier.copy(lease, Direction.H2D, groups, [(buffer, host)], buffer.numel())
        begun = time.perf_counter()
        device.synchronize(engine.copier.of(weights).fetch([(buffers[1], host)]))
        return time.perf_counter() - begun

    without = min(waited_s() for _ in range(3))
    conductor = Conductor(engine=engine, telemetry_interval=0)
    with_it = max(waited_s() for _ in range(3))
    conductor.shutdown()
    device.synchronize(device.record(device.h2d))
    memory.release()
    assert with_it <= without / 2, f"{with_it * 1e3:.1f} ms beside {without * 1e3:.1f} ms"
