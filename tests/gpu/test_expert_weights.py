"""Weights of experts that stream by the expert, on a GPU: pieces of a product have the bits of the whole,
steps those of resident experts, and memory stays in its room."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import moe
import offload
from tests.inside import by_expert, window_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("engine_of_the_gpu", "clean_allocator")]

WIDTH, HIDDEN, EXPERTS, LAYERS = 512, 256, 32, 4
LAYER_BYTES = 3 * EXPERTS * HIDDEN * WIDTH * 2


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [40, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_of_experts_have_the_bits_of_one_product(
    rows: int, transposed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    draws = torch.multinomial(1 / torch.arange(1.0, EXPERTS + 1), rows, replacement=True)
    counts = torch.bincount(draws, minlength=EXPERTS).tolist()
    ends = torch.tensor([*itertools.accumulate(counts)], dtype=torch.int32, device="cuda")
    x = torch.randn(rows, HIDDEN if transposed else WIDTH, device="cuda", dtype=dtype)
    weight = torch.randn(EXPERTS, WIDTH, HIDDEN, device="cuda", dtype=dtype)

    def laid(matrices: Tensor) -> Tensor:
        """In the weight's order of memory, as the copies are: float32 has other bits in another one."""
        return matrices.transpose(1, 2) if transposed else matrices

    whole = functional.grouped_mm(x, laid(weight), offs=ends)
    used = [expert for expert, count in enumerate(counts) if count]
    slices = x.split(counts)
    for size in (1, 2, 5, len(used)):
        found: dict[int, Tensor] = {}
        for start in range(0, len(used), size):
            chunk = used[start : start + size]
            numbers = [counts[expert] for expert in chunk]
            offs = torch.tensor([*itertools.accumulate(numbers)], dtype=torch.int32, device="cuda")
            stacked = laid(torch.stack([weight[expert] for expert in chunk]))
            y = functional.grouped_mm(torch.cat([slices[expert] for expert in chunk]), stacked, offs=offs)
            found |= zip(chunk, y.split(numbers), strict=True)
        assert torch.equal(torch.cat([found[expert] for expert in used]), whole), size


class Model(nn.Module):
    def __init__(self, checkpoints: bool | None = None) -> None:
        super().__init__()
        config = moe.MixtureConfig(dim=WIDTH, expert_hidden=HIDDEN, experts=EXPERTS, top_k=2)
        self.layers = nn.ModuleList(moe.Mixture(config) for _ in range(LAYERS))
        for layer in self.layers:
            layer.experts.requires_grad_(False)
        self.embed, self.checkpoints = nn.Linear(WIDTH, WIDTH), checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            made = (
                layer(x) if self.checkpoints is None else checkpoint(layer, x, use_reentrant=self.checkpoints)
            )
            x = x + made
        return x


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("checkpoints", "rows", "weights"),
    [(None, 3, "host"), (False, 60, "60MB"), (True, 2000, "host"), (None, 2000, "60MB")],
)
def test_steps_have_the_bits_of_resident_experts(checkpoints: bool | None, rows: int, weights: str) -> None:
    torch.manual_seed(0)
    model = Model(checkpoints).to("cuda", torch.bfloat16)
    plain = copy.deepcopy(model)
    handle = offload.apply(model, weights=weights, blocks="layers.*")
    optimizers = [
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-3)
        for each in (model, plain)
    ]
    for number in range(6):
        x = torch.randn(rows + number, WIDTH, device="cuda", dtype=torch.bfloat16)
        losses = [each(x).float().square().mean() for each in (model, plain)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        for (name, mine), its in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (its.grad is None), name
            assert mine.grad is None or torch.equal(mine.grad, its.grad), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(by_expert(handle)) == 2 * LAYERS
    handle.remove()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def steps(model: Model, number: int) -> list[int]:
    """How often the allocator has asked the driver for memory, after each."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    seen = []
    for _ in range(number):
        x = torch.randn(256, WIDTH, device="cuda", dtype=torch.bfloat16)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_stats()["num_device_alloc"])
    return seen


def test_memory_is_that_of_resident_experts_with_the_limit_in_their_place() -> None:
    """Beside it a product in pieces has its result twice, and a copy of a piece's rows."""
    torch.manual_seed(0)
    model = Model().to("cuda", torch.bfloat16)
    steps(model, 4)  # also what libraries allocate once for themselves, which stays
    resident = torch.cuda.max_memory_allocated()
    handle = offload.apply(model, weights="host", blocks="layers.*")
    steps(model, 4)
    torch.cuda.reset_peak_memory_stats()
    seen = steps(model, 16)
    assert seen[-1] == seen[6], "a settled step asks the driver for nothing"
    assert handle.weights is not None
    pieces = 2 * 2 * 256 * max(WIDTH, 2 * HIDDEN) * 2  # bytes: of 2 rows a token, twice
    expected = resident - LAYERS * LAYER_BYTES + handle.weights.limit_bytes + pieces
    assert torch.cuda.max_memory_allocated() <= expected
    window = window_of(handle)
    assert window.held_bytes <= window.room_bytes <= 2 * LAYER_BYTES
