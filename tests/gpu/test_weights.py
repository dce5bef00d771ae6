"""Streamed weights on a GPU: bits, memory, the allocator in a settled step, models that begin on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from tests.inside import streaming_of
from tests.nets import Block

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("engine_of_the_gpu", "clean_allocator")]

WIDTH, ROWS, BLOCKS = 1024, 512, 12


class Model(nn.Module):
    """checkpoints: around its blocks; None for none, else use_reentrant."""

    def __init__(self, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH, 4 * WIDTH) for _ in range(BLOCKS))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if self.checkpoints is None else checkpoint(layer, x, use_reentrant=self.checkpoints)
        return x


BLOCK_BYTES = 8 * WIDTH * WIDTH * 2


def pair(**options: Any) -> tuple[Model, Model]:
    torch.manual_seed(0)
    model = Model(**options).to("cuda", torch.bfloat16)
    return model, copy.deepcopy(model)


def step(model: nn.Module, number: int, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(number)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)
    loss = model(x.requires_grad_()).float().square().mean()
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    optimizer.step()
    optimizer.zero_grad()
    return found


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, **options)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("checkpoints", [None, False, True])
@pytest.mark.parametrize("weights", ["host", "100MB"])
@pytest.mark.parametrize("options", [{}, {"fused": True}])  # torch's default is foreach
def test_steps_have_the_bits_of_plain_torch(
    frozen: bool, checkpoints: bool | None, weights: str, options: dict[str, bool]
) -> None:
    model, plain = pair(checkpoints=checkpoints)
    for each in (model, plain):
        each.layers.requires_grad_(not frozen)
    handle = offload.apply(model, weights=weights)
    ours, its = (adam(each, **options) for each in (model, plain))
    for number in range(6):
        for mine, other in zip(step(model, number, ours), step(plain, number, its), strict=True):
            assert torch.equal(mine, other)
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name].to("cuda"), value), name
    handle.remove()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_model_that_begins_on_the_cpu_computes_on_the_gpu_and_goes_back() -> None:
    model, plain = pair()
    model.cpu()
    for each in (model, plain):
        each.layers.requires_grad_(False)
    handle = offload.apply(model, weights="host")
    ours, its = adam(model), adam(plain)
    for number in range(3):
        for mine, other in zip(step(model, number, ours), step(plain, number, its), strict=True):
            assert torch.equal(mine, other)
    handle.remove()
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other.cpu())


def test_the_blocks_bytes_are_off_the_device() -> None:
    model, plain = pair(checkpoints=False)
    for each in (model, plain):
        each.layers.requires_grad_(False)
    del plain
    before = torch.cuda.memory_allocated()
    handle = offload.apply(model, weights="host")
    assert before - torch.cuda.memory_allocated() >= 0.98 * BLOCKS * BLOCK_BYTES
    optimizer = adam(model)
    for number in range(3):
        step(model, number, optimizer)
    stream = streaming_of(handle)
    assert stream.residency.present_bytes_peak == 2 * BLOCK_BYTES


def test_a_settled_step_asks_the_driver_for_no_memory() -> None:
    model, _ = pair(checkpoints=False)
    model.layers.requires_grad_(False)
    offload.apply(model, weights="host")
    optimizer = adam(model)
    seen = []
    for number in range(12):
        step(model, number, optimizer)
        stats = torch.cuda.memory_stats()
        names = ("segment.all.allocated", "num_alloc_retries", "reserved_bytes.all.current")
        seen.append([stats[name] for name in names])
    assert seen[5] == seen[-1]


def test_weights_are_copied_beside_the_compute() -> None:
    model, _ = pair(checkpoints=False)
    model.layers.requires_grad_(False)
    handle = offload.apply(model, weights="host")
    optimizer = adam(model)
    for number in range(8):
        step(model, number, optimizer)
    assert handle.weights is not None
    assert (handle.weights.misses, handle.weights.hits) == (0, 2 * BLOCKS)
    assert handle.weights.compute_ms
    assert handle.weights.in_bytes == 2 * (BLOCKS - 2) * BLOCK_BYTES


def test_a_model_from_the_cpu_keeps_what_was_taken_of_it_and_what_its_forwards_set() -> None:
    model, plain = pair()
    model.cpu()
    handle = offload.apply(model, weights="host")
    ours, its = adam(model), adam(plain)
    step(model, 0, ours)
    step(plain, 0, its)
    old = model.state_dict()
    new = {name: value * 0.5 for name, value in old.items()}
    wide = torch.randn(4 * WIDTH, 2 * WIDTH, dtype=torch.bfloat16)
    new["layers.3.up.weight"] = wide[:, ::2]  # on the CPU, with gaps
    before = {name: value.clone() for name, value in old.items()}
    for each, where in ((model, "cpu"), (plain, "cuda")):
        each.load_state_dict({name: value.to(where, copy=True) for name, value in new.items()}, assign=True)
        each.layers[2].up.weight.data = each.layers[1].up.weight.data.clone()
    for name, _ in model.embed.named_parameters(prefix="embed"):
        assert model.get_parameter(name).device.type == "cpu"  # as assign does: what does not stream
    model.to("cuda")

    def sets(module: nn.Module, args: Any) -> None:
        weight: Any = module.weight
        weight.data = weight.data * 2

    for each in (model, plain):
        each.layers[4].down.register_forward_pre_hook(sets)
    ours, its = adam(model), adam(plain)
    for number in range(3):
        for mine, other in zip(step(model, number, ours), step(plain, number, its), strict=True):
            assert torch.equal(mine, other)
    found = torch.autograd.grad(
        model(torch.ones(2, WIDTH, device="cuda").bfloat16()).sum(), model.parameters()
    )
    its_found = torch.autograd.grad(
        plain(torch.ones(2, WIDTH, device="cuda").bfloat16()).sum(), plain.parameters()
    )
    assert all(map(torch.equal, found, its_found))
    handle.remove()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.cpu(), other.cpu())
    assert model.layers[4].down.weight.device.type == "cpu"
    other, _ = pair()
    offload.apply(other, weights="host")  # takes host memory that was given back
    streams = [name for name in old if name.endswith(("up.weight", "down.weight"))]
    assert all(torch.equal(old[name], before[name]) for name in streams)
