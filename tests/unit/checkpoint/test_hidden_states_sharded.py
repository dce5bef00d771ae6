"""Blocks that are recomputed, on tensors and weights of torch.distributed: DTensors, FSDP2."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module

from offload import PipelineOffloadManager, init_chunk_handler
from tests.loops import ended_step
from tests.unit.checkpoint.recomputed import (
    BLOCKS,
    INPUT_BYTES,
    Block,
    Model,
    assert_bits,
    build,
    recomputed,
    source,
)

Manager = PipelineOffloadManager


def local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local().clone() if isinstance(tensor, DTensor) else tensor.clone()


def run(module: nn.Module, x: Tensor) -> list[Tensor]:
    loss = module(x).square().mean()
    loss.backward()
    found = [local(tensor.grad) for tensor in (x, *module.parameters())]
    for tensor in (x, *module.parameters()):
        tensor.grad = None
    return [local(loss.detach()), *found]


@pytest.mark.req("S4-13")
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_of_a_dtensor_the_local_shard_leaves_and_the_recompute_gets_its_placements(
    mesh: DeviceMesh, manager: Manager, placement: Placement
) -> None:
    seen: list[tuple[type, Any]] = []

    class Watching(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            seen.append((type(x), getattr(x, "placements", None)))
            return super().forward(x, mask)

    model = build(Watching)
    distribute_module(model, mesh)
    plain = copy.deepcopy(model)
    x = DTensor.from_local(source().detach(), mesh, [placement]).requires_grad_()
    expected = run(plain, x)
    seen.clear()
    with recomputed(list(model.blocks), manager):
        init_chunk_handler(None, None, 1)
        found = run(model, x)
    stats = ended_step()
    assert_bits(expected, found)
    assert (stats.saved, stats.spill_bytes) == (BLOCKS, BLOCKS * INPUT_BYTES)
    assert seen == [(DTensor, (placement,))] * 2 * BLOCKS


def test_the_result_of_a_collective_that_still_runs_may_be_an_input(
    mesh: DeviceMesh, manager: Manager
) -> None:
    block = Block()

    def once() -> list[Tensor]:
        h = collectives.all_reduce(source().detach(), "sum", mesh)
        block(h).square().mean().backward()
        found = [local(parameter.grad) for parameter in block.parameters()]
        block.zero_grad()
        return found

    expected = once()
    with recomputed([block], manager):
        init_chunk_handler(None, None, 1)
        found = once()
    stats = ended_step()
    assert_bits(expected, found)
    assert stats.spill_bytes == INPUT_BYTES


def shard(model: Model, mesh: DeviceMesh, **options: Any) -> Model:
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, **options)
    return model


@pytest.mark.req("S4-14")
@pytest.mark.parametrize("hooks_first", [False, True])
@pytest.mark.parametrize("reshards", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_that_fsdp_shards_have_the_bits_that_they_have_without_being_recomputed(
    mesh: DeviceMesh, manager: Manager, hooks_first: bool, reshards: bool, dtype: torch.dtype
) -> None:
    """With and without resharding after the forward; hooks put on before the sharding and after it."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32)
    options: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": reshards}
    expected = run(shard(build(), mesh, **options), source())
    model = build()
    if not hooks_first:
        shard(model, mesh, **options)
    with recomputed(list(model.blocks), manager):
        if hooks_first:
            shard(model, mesh, **options)
        for _ in range(2):
            init_chunk_handler(None, None, 1)
            found = run(model, source())
            stats = ended_step()
            assert_bits(expected, found)
    assert stats.saved == BLOCKS


@pytest.mark.req("S4-14")
def test_where_fsdp_leaves_the_inputs_of_a_recompute_uncast_they_are_cast_all_the_same(
    mesh: DeviceMesh, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before torch 2.13."""
    now = FSDPState._pre_forward

    def before(self: FSDPState, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._training_state == TrainingState.PRE_BACKWARD:
            return args, kwargs
        return now(self, module, args, kwargs)

    monkeypatch.setattr(FSDPState, "_pre_forward", before)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    expected = run(shard(build(), mesh, mp_policy=policy), source())
    model = shard(build(), mesh, mp_policy=policy)
    with recomputed(list(model.blocks), manager):
        init_chunk_handler(None, None, 1)
        assert_bits(expected, run(model, source()))
