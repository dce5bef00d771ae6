"""A small model in training, its twin that never parks, and what a cycle must leave as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from offload.device.sim import ExecutorName, SimDevice
from offload.engine import OffloadEngine

WIDTH = 16


class Net(nn.Module):
    """Tied weights, a buffer, a norm, and a view that the module itself keeps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = (
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))
        self.row = self.norm.weight.detach()[:4]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(torch.relu(self.first(x)))) * self.scale


def engine_of(executor: ExecutorName = "late", seed: int = 0, **others: Any) -> OffloadEngine:
    return OffloadEngine(device=SimDevice(executor=executor, seed=seed, **others))


def train(
    model: nn.Module, optimizer: Optimizer, steps: int = 2, start: int = 0, clear: bool = False
) -> None:
    """Each step has gradients of its own, which stay behind the last one unless they are cleared."""
    for step in range(start, start + steps):
        optimizer.zero_grad()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
    if clear:
        optimizer.zero_grad()


def in_training(**options: Any) -> tuple[Net, AdamW]:
    model = Net()
    optimizer = AdamW(model.parameters(), lr=1e-2, **options)
    train(model, optimizer)
    return model, optimizer


def state_of(model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[Tensor]:
    """All tensors of the training state, in one order."""
    yield from (*model.parameters(), *model.buffers())
    yield from (each.grad for each in model.parameters() if each.grad is not None)
    for entry in optimizer.state.values() if optimizer is not None else ():
        yield from (value for value in entry.values() if isinstance(value, Tensor))


def same(these: Iterator[Tensor], those: Iterator[Tensor]) -> bool:
    """Whether all have the same bits, and none is away."""
    return all(torch.equal(mine, its) for mine, its in zip(these, those, strict=True))
