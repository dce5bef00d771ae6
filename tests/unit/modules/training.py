"""Models whose blocks are called in every way that a block can be called, and the loop that trains them with
and without offload."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS = 16, 12

Call = Callable[[nn.Module, Tensor], Tensor]
"""How a model calls one of its blocks."""


@dataclass
class Output:
    hidden: Tensor
    nothing: None = None


class Block(nn.Module):
    """x + fc2(act(fc1(norm(x)))). residual: False leaves the sum to the caller. in_place: the sum is written
    to x. wrap: puts the output into something."""

    def __init__(
        self, *, residual: bool = True, in_place: bool = False, wrap: Callable[[Tensor], Any] | None = None
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(0.1)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)
        self.residual, self.in_place, self.wrap = residual, in_place, wrap

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Any:
        y = self.fc2(self.drop(torch.tanh(self.fc1(self.norm(x * 2 if self.in_place else x)))))
        if scale is not None:
            y = y * scale
        if self.in_place:
            y = x.add_(y)
        elif self.residual:
            y = x + y
        return y if self.wrap is None else self.wrap(y)


class Model(nn.Module):
    """Blocks between an embedding and a head. call: how it calls a block."""

    def __init__(self, call: Call = lambda block, x: block(x), blocks: int = 3, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(**options) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 5)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(x)


def _keyword(block: nn.Module, x: Tensor) -> Tensor:
    return block(x=x, scale=x.sigmoid())


CALLS: dict[str, tuple[Call, dict[str, Any]]] = {
    "plain": (lambda block, x: block(x), {}),
    "residual outside": (lambda block, x: x + block(x), {"residual": False}),
    "in place": (lambda block, x: block(x), {"in_place": True}),
    "keyword": (_keyword, {}),
    "view": (lambda block, x: block(x).view(ROWS, WIDTH), {"wrap": lambda y: y.view(2, -1, WIDTH)}),
    "tuple with none": (lambda block, x: block(x)[1], {"wrap": lambda y: (None, y)}),
    "dictionary": (lambda block, x: block(x)["a"], {"wrap": lambda y: {"a": y}}),
    "dataclass": (lambda block, x: block(x).hidden, {"wrap": Output}),
    "called twice": (lambda block, x: block(block(x)), {}),
    "checkpoint": (lambda block, x: checkpoint(block, x, use_reentrant=False), {}),
    "reentrant checkpoint": (lambda block, x: checkpoint(block, x, use_reentrant=True), {}),
}


def build(call: str = "plain", **options: Any) -> Model:
    """The same weights each time."""
    torch.manual_seed(3)
    how, given = CALLS[call]
    return Model(how, **{**given, **options})


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def train(
    model: nn.Module, *, steps: int = 3, microbatches: int = 2, after_forward: Callable[[], object] = int
) -> list[Tensor]:
    """Gradients of every step, and the last weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    for step in range(steps):
        for microbatch in range(microbatches):
            with seeded(10 * step + microbatch):
                x = torch.randn(ROWS, WIDTH)
                loss = model(x).square().mean()
                after_forward()
                loss.backward()
        seen += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(parameter.detach().clone() for parameter in model.parameters())]


@functools.cache
def plain_of(call: str) -> list[Tensor]:
    """What a model that is called so gives by itself."""
    return train(build(call))


def equal(ours: list[Tensor], plain: list[Tensor]) -> bool:
    """Bit by bit."""
    return len(ours) == len(plain) and all(map(torch.equal, ours, plain))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Messages of warnings and errors."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
