"""What each rank of test_park_ranks.py does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import offload
from offload.device.sim import SimDevice
from offload.engine import OffloadEngine
from offload.errors import OffloadError
from offload.memory.budget import SharedHostBudget
from tests.loops import local
from tests.unit.park.states import WIDTH

LIMIT_BYTES = 40 << 20


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)) for _ in range(2)))


def step(model: nn.Module, optimizer: Optimizer, at: int) -> None:
    optimizer.zero_grad()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(at + 10 * dist.get_rank()))
    model(x).square().mean().backward()
    optimizer.step()


def main(rank: int, world: int, folder: str) -> None:
    engine = OffloadEngine(device=SimDevice(), budget=SharedHostBudget(Path(folder) / "budget", LIMIT_BYTES))
    replicas(engine, bucket_views=False)
    replicas(engine, bucket_views=True)
    shards(engine, Path(folder))
    one_dies(engine, rank)
    (Path(folder) / "outlived").touch()


def replicas(engine: OffloadEngine, *, bucket_views: bool) -> None:
    models = [DistributedDataParallel(blocks(), gradient_as_bucket_view=bucket_views) for _ in range(2)]
    optimizers = [AdamW(model.parameters(), lr=1e-2) for model in models]
    for at in range(3):
        for each in zip(models, optimizers, strict=True):
            step(*each, at)
        parked = offload.park(models[0], optimizers[0], engine=engine)
        staying = {name for name, *_ in parked.report.staying}
        assert {name.endswith(".grad") for name in staying} == ({True} if bucket_views else set())
        with pytest.raises(OffloadError, match="a forward of DistributedDataParallel"):
            models[0](torch.ones(1, WIDTH))
        parked.wake()
    for mine, its in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine, its)


def shards(engine: OffloadEngine, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    models = [blocks() for _ in range(2)]
    for model in models:
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizers = [AdamW(model.parameters(), lr=1e-2) for model in models]
    for at in range(3):
        for each in zip(models, optimizers, strict=True):
            step(*each, at)
        parameters = [*models[0].parameters()]
        parked = offload.park(models[0], optimizers[0], engine=engine)
        assert parked.report.staying == [], parked.report
        for refused in refused_calls(models[0], parameters, optimizers[0]):
            with pytest.raises(OffloadError, match="wake"):
                refused()
        for name, value in models[1].state_dict().items():
            assert torch.equal(local(models[0].state_dict()[name]), local(value))
        loads_shards(models, optimizers)
        if at == 1:
            weights, state = get_state_dict(models[0], optimizers[0])
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "saved")
            parked.wake()
            weights, state = get_state_dict(*(each[1] for each in (models, optimizers)))
            dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "saved")
        parked.wake()
        assert parameters == [*models[0].parameters()] or all(
            mine is its for mine, its in zip(parameters, models[0].parameters(), strict=True)
        )
        for mine, its in zip(*(model.parameters() for model in models), strict=True):
            assert type(mine) is type(its)
            assert torch.equal(local(mine), local(its))
            assert torch.equal(local(mine.grad), local(its.grad))


def loads_shards(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
    """The first of each is parked: what its optimizer loads are the host's bytes. FSDP2 reads a shard's
    memory behind a load, so one of the model is refused before its first weight."""
    model, optimizer = models[0], optimizers[0]
    with pytest.raises(OffloadError, match=r"load_state_dict\(\) of .* under fully_shard\(\) .*wake"):
        model.load_state_dict({name: value * 2 for name, value in models[1].state_dict().items()})
    other = optimizers[1].state_dict()
    for state in other["state"].values():
        state["exp_avg"] = state["exp_avg"] * 2
    optimizer.load_state_dict(other)
    for mine, its in zip(optimizer.state_dict()["state"].values(), other["state"].values(), strict=True):
        assert torch.equal(local(mine["exp_avg"]), local(its["exp_avg"]))
    optimizer.load_state_dict(optimizers[1].state_dict())


def refused_calls(model: Any, parameters: list[Any], optimizer: Optimizer) -> list[Callable[[], object]]:
    return [
        lambda: model(torch.ones(1, WIDTH)),
        lambda: model[0](torch.ones(1, WIDTH)),
        lambda: model[0].unshard(),
        lambda: parameters[0] + 1,
        lambda: parameters[0].detach().full_tensor(),
        lambda: parameters[0].to_local().sum(),
        lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        optimizer.step,
    ]


def one_dies(engine: OffloadEngine, rank: int) -> None:
    """Both have parked, and one budget counts them; a rank that is killed gives its part back, and the other
    goes on."""
    model = blocks()
    parked = offload.park(model, engine=engine)
    dist.barrier()
    both, mine = engine.arena.budget.used_bytes, engine.arena.held_bytes
    assert mine < both <= LIMIT_BYTES
    child = os.fork()
    if not child:
        with pytest.raises(OffloadError, match="in a fork of process"):
            parked.wake()
        assert torch.equal(model.state_dict()["0.0.weight"], blocks()[0][0].weight)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while engine.arena.budget.used_bytes > mine:
        time.sleep(0.01)
    parked.wake()
    assert torch.equal(model[0][0].weight, blocks()[0][0].weight)
