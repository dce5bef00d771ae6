"""State dicts of the hybrid optimizer across two ranks: whichever way they are saved, a run goes on with the same bits, in any split, and
torch's AdamW takes over from it and it from torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
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
from tests.ranks import run_ranks

SPLITS: dict[str, dict[str, Any] | None] = {
    "torch's": None,
    "on the device": {"offload_fraction": 0.0},
    "half": {"offload_fraction": 0.5, "cpu_share": 1.0},
    "cpu": {"cpu_share": 1.0},
    "streamed": {"cpu_share": 0.0},
    "measured": {},
    "apart": {},
}
"""Options of the optimizer that saves, or loads. Apart: a share of its own on each rank, as measured before ranks agreed."""
PAIRS = (
    ("torch's", "half"),
    ("half", "torch's"),
    ("half", "half"),
    ("half", "streamed"),
    ("streamed", "cpu"),
    ("cpu", "on the device"),
    ("on the device", "measured"),
    ("apart", "measured"),
)
WAYS = ("whole", "whole on rank 0", "shards", "flat", "files", "own")
SHARDS = Case(over="shards")
FIRST, ALL = 2, 4
RUNS = {f"{source} to {target}, {way}": (source, target, way) for way in WAYS for source, target in PAIRS}


def resumed(rank: int, world: int, folder: str) -> dict[str, list[str]]:
    """By run: the weights that differ from those of the run that nothing interrupted."""
    torch.use_deterministic_algorithms(True)
    mesh = init_device_mesh("cpu", (world,))
    expected = _continued(mesh, "torch's", None)
    found: dict[str, list[str]] = {}
    for name, (source, target, way) in RUNS.items():
        weights = _continued(mesh, target, _saved(mesh, source, way, f"{folder}/{name}"))
        found[name] = [each for each in expected if not same_bits(expected[each], weights[each])]
    return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    """By rank, by run."""
    folder = tmp_path_factory.mktemp("ranks")
    found: list[dict[str, list[str]]] = run_ranks(resumed, 2, folder, str(folder))
    return found


@pytest.mark.req("S3-40")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_over_shards_goes_on_with_the_same_bits(seen: list[dict[str, list[str]]], name: str) -> None:
    for rank in seen:
        assert rank[name] == []


# -- a rank -----------------------------------------------------------------------------------------------------------------------
Load = Callable[[nn.Module, Optimizer], None]


def _optimizer(model: nn.Module, split: str, rank: int) -> tuple[Optimizer, Callable[[], None]]:
    """And what closes it."""
    options = SPLITS[split] if split != "apart" else {"cpu_share": 0.25 + 0.5 * rank}
    if options is None:
        return AdamW(model.parameters(), **RECIPE), lambda: None
    engine = engine_for(torch.device("cpu"))
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
    model = build(SHARDS, mesh, torch.device("cpu"))
    optimizer, close = _optimizer(model, split, mesh.get_rank())
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
        full_state_dict=way.startswith("whole"), cpu_offload=way == "whole on rank 0", flatten_optimizer_state_dict=way == "flat"
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
    model = build(SHARDS, mesh, torch.device("cpu"))
    optimizer, close = _optimizer(model, split, mesh.get_rank())
    if load is not None:
        load(model, optimizer)
    _steps(model, optimizer, mesh.get_rank(), 0 if load is None else FIRST, ALL)
    if isinstance(optimizer, HybridDeviceOptimizer):
        optimizer.synchronize_parameters()
    found = {name: whole(parameter) for name, parameter in model.named_parameters()}
    close()
    return found
