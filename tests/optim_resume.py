"""A run over FSDP2's shards that is saved half-way, in any way that torch knows, and goes on in another
optimizer.

One invariant: what is compared with is a run of the optimizer that goes on, which nothing interrupted.
`resumed` is one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import AdamW, Optimizer

from offload.optim import HybridDeviceOptimizer
from tests.optim_ranks import RECIPE, Case, backward, build, engine_for, hybrid, same_bits, whole

Load = Callable[[nn.Module, Optimizer], None]


SPLITS: dict[str, dict[str, Any] | None] = {
    "torch's": None,
    "on the device": {"offload_fraction": 0.0},
    "half": {"offload_fraction": 0.5, "cpu_share": 1.0},
    "cpu": {"cpu_share": 1.0},
    "streamed": {"cpu_share": 0.0},
    "apart": {},
}
"""Options of the optimizer that saves, or loads. Apart: a share of its own on each rank."""
SHARDS = Case(over="shards")
FIRST, ALL = 2, 4


def resumed(
    rank: int, world: int, folder: str, runs: dict[str, tuple[str, str, str]], device_type: str
) -> dict[str, list[str]]:
    """By run, given as (who saves, who goes on, way): the weights that differ from those of the run that
    nothing interrupted."""
    torch.use_deterministic_algorithms(True)
    mesh = init_device_mesh(device_type, (world,))
    expected = {target: _continued(mesh, target, None) for _, target, _ in runs.values()}
    found: dict[str, list[str]] = {}
    for name, (source, target, way) in runs.items():
        weights = _continued(mesh, target, _saved(mesh, source, way, f"{folder}/{name}"))
        found[name] = [
            each for each, other in expected[target].items() if not same_bits(other, weights[each])
        ]
    return found


def _optimizer(model: nn.Module, split: str, mesh: DeviceMesh) -> tuple[Optimizer, Callable[[], None]]:
    """And what closes it."""
    options = SPLITS[split] if split != "apart" else {"cpu_share": 0.25 + 0.5 * mesh.get_rank()}
    if options is None:
        return AdamW(model.parameters(), **RECIPE), lambda: None
    engine = engine_for(_device_of(mesh))
    optimizer = hybrid(model, engine, model=model, **options)

    def close() -> None:
        optimizer.close()
        engine.close()

    return optimizer, close


def _steps(model: nn.Module, optimizer: Optimizer, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        backward(SHARDS, model, step, rank)
        optimizer.step()
        optimizer.zero_grad()


def _saved(mesh: DeviceMesh, split: str, way: str, folder: str) -> Load:
    """Train the first steps and save; what loads it."""
    model = build(SHARDS, mesh, _device_of(mesh))
    optimizer, close = _optimizer(model, split, mesh)
    _steps(model, optimizer, mesh.get_rank(), 0, FIRST)
    if way == "own":
        own = _unshared({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        close()

        def load_own(other: nn.Module, into: Optimizer) -> None:
            mine = _unshared(own)
            other.load_state_dict(mine["model"])
            into.load_state_dict(mine["optimizer"])

        return load_own
    saving = StateDictOptions(
        full_state_dict=way.startswith("whole"),
        cpu_offload=way == "whole on rank 0",
        flatten_optimizer_state_dict=way == "flat",
    )
    loading = StateDictOptions(
        full_state_dict=way.startswith("whole"),
        broadcast_from_rank0=way == "whole on rank 0",
        flatten_optimizer_state_dict=way == "flat",
    )
    weights = get_model_state_dict(model, options=saving)
    state = _unshared(get_optimizer_state_dict(model, optimizer, options=saving))
    if way == "files":
        checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    close()

    def load(other: nn.Module, into: Optimizer) -> None:
        mine = _unshared({"model": weights, "optimizer": state})
        if way == "files":
            mine = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, into)}
            checkpoint.load(mine, checkpoint_id=folder)
        set_model_state_dict(other, mine["model"], options=loading)
        set_optimizer_state_dict(other, into, mine["optimizer"], options=loading)

    return load


def _unshared(saved: Any) -> Any:
    """A copy: torch trains on with the tensors that it loads, and changes the dictionaries."""
    if isinstance(saved, Tensor):
        return saved.detach().clone()
    if isinstance(saved, dict):
        return {key: _unshared(value) for key, value in saved.items()}
    return [_unshared(value) for value in saved] if isinstance(saved, list) else saved


def _continued(mesh: DeviceMesh, split: str, load: Load | None) -> dict[str, Tensor]:
    """The weights at the end of a run that begins with what `load` loads, or from the first step."""
    model = build(SHARDS, mesh, _device_of(mesh))
    optimizer, close = _optimizer(model, split, mesh)
    if load is not None:
        load(model, optimizer)
    _steps(model, optimizer, mesh.get_rank(), 0 if load is None else FIRST, ALL)
    if isinstance(optimizer, HybridDeviceOptimizer):
        optimizer.synchronize_parameters()
    found = {name: whole(parameter) for name, parameter in model.named_parameters()}
    close()
    return found


def _device_of(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", mesh.get_rank()) if mesh.device_type == "cuda" else torch.device("cpu")
