"""A small model of compiled blocks in groups, its training steps, and what a test of them looks at.

One invariant: a step's gradients are a function of the step's number alone; only what is compiled, grouped
and offloaded differs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import offload
from offload import OffloadConfig, PipelineOffloadManager, StepStats, configure
from tests.nets import ProductKeptOnCtx

WIDTH = 32
DEPTH = 3
ROWS = 8
BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
    ),
]
# of one block: WIDTH, 2, WIDTH, 4 * WIDTH and 4 * WIDTH numbers a row
SAVED_BYTES = 4 * ROWS * (10 * WIDTH + 2)
LIMIT = {"device_limit_bytes": 20_000}  # no more than one block's saved bytes fit, so everything leaves

Layer = Callable[[torch.Tensor], torch.Tensor]


class Block(torch.nn.Module):
    """Compiled, it saves its input, the norm's two statistics and result, the wide product and what gelu
    makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class MarkedBlock(Block):
    """The marks inside, and no `with`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = offload.group_start(x, "block", hooks=True)
        return offload.group_commit(super().forward(x), "block")


class KeepingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ProductKeptOnCtx.apply(super().forward(x), self.down.weight.detach()[:, :WIDTH])


class MarkedKeepingBlock(KeepingBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = offload.group_start(x, "block", hooks=True)
        return offload.group_commit(super().forward(x), "block")


@contextmanager
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    PipelineOffloadManager.reset_instance()


def manager_with(**config: Any) -> PipelineOffloadManager:
    """Every saved tensor may leave, unless `config` says otherwise."""
    settings: dict[str, Any] = {"min_offloaded_tensor_size": 4, "host_reserve_bytes": 1 << 22, **config}
    configure(OffloadConfig(**settings), device="sim", print_summary=False)
    return PipelineOffloadManager.get_instance()


def blocks_of(kind: type[Block]) -> list[Block]:
    """DEPTH blocks with the weights of the seed, whatever their kind."""
    torch.manual_seed(0)
    return [kind() for _ in range(DEPTH)]


def in_group(layer: Layer) -> Layer:
    def grouped(x: torch.Tensor) -> torch.Tensor:
        x = offload.group_start(x, "block")
        with offload.offload_hooks():
            y = layer(x)
        return offload.group_commit(y, "block")

    return grouped


def train(
    layers: Sequence[Layer],
    owners: Sequence[torch.nn.Module],
    step: int,
    *,
    rows: int = ROWS,
    microbatches: int = 1,
    around_backward: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[torch.Tensor]:
    """The gradients of one step: all forwards, then the backwards, last first. With a manager, each
    microbatch is a chunk of it."""
    manager = PipelineOffloadManager.OFFLOAD_MGR
    order = list(range(microbatches))
    if manager is not None:
        manager.set_order(
            [*(("F", 0, number) for number in order), *(("B", 0, number) for number in reversed(order))]
        )
    inputs, losses = [], []
    for number in order:
        seed = torch.Generator().manual_seed(100 * step + number)
        inputs.append(torch.randn(rows, WIDTH, generator=seed).requires_grad_())
        y = inputs[-1]
        if manager is not None:
            manager.begin_chunk(0, number)
        for layer in layers:
            y = layer(y)
        if manager is not None:
            manager.end_forward(0, number)
        losses.append(y.square().sum())
    for number in reversed(order):
        if manager is not None:
            manager.begin_backward(0, number, "B")
        with around_backward():
            losses.pop().backward()
        if manager is not None:
            manager.end_backward(0, number, "B")
    found = [x.grad for x in inputs]
    for owner in owners:
        found += [parameter.grad for parameter in owner.parameters()]
        owner.zero_grad()
    gradients = [gradient for gradient in found if gradient is not None]
    assert len(gradients) == len(found), "a gradient is missing"
    return gradients


def reference(
    backend: str, kind: type[Block] = Block, *, steps: int, rows: Sequence[int] = (), **how: Any
) -> list[list[torch.Tensor]]:
    """The gradients of compiled blocks without a manager; the compiler is fresh again afterwards."""
    PipelineOffloadManager.OFFLOAD_MGR = None
    blocks = blocks_of(kind)
    compiled = [torch.compile(block, backend=backend) for block in blocks]
    rows = rows or [ROWS] * steps
    expected = [train(compiled, blocks, step, rows=rows[step], **how) for step in range(steps)]
    torch._dynamo.reset()
    counters.clear()
    return expected


def assert_equal_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def ended(manager: PipelineOffloadManager) -> StepStats:
    """End the step; something left in it."""
    stats = manager.step_end()
    assert stats.spilled > 0
    assert stats.refused == 0
    return stats
