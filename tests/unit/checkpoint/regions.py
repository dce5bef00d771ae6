"""Checkpointed blocks whose kept outputs leave: what the tests of selective checkpoints share.

A block is x + fc2(gelu(fc1(norm(x)))) without biases. With matrix products kept, fc1's output is kept; fc2's
comes after all that autograd saves in the block, so no recompute reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offload import (
    PipelineOffloadManager,
    group_commit,
    group_start,
    init_chunk_handler,
    offload_hooks,
    selective_contexts,
    step_end,
)
from offload.telemetry.records import StepStats

ROWS, WIDTH = 12, 16
INPUT_BYTES = 4 * ROWS * WIDTH
FC1_BYTES = 2 * INPUT_BYTES
BLOCKS = 3
MM = torch.ops.aten.mm.default
Call = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


def build_blocks(kind: Callable[[], nn.Module] = Block, count: int = BLOCKS) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(kind() for _ in range(count))


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def recomputed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def kept(block: nn.Module, x: Tensor, keep_ops: Any = frozenset({MM}), **keywords: Any) -> Tensor:
    return checkpoint(block, x, use_reentrant=False, context_fn=selective_contexts(keep_ops), **keywords)


def kept_in_group(block: nn.Module, x: Tensor) -> Tensor:
    """The input of the checkpoint leaves too."""
    x = group_start(x, "block")
    with offload_hooks():
        y = kept(block, x)
    return group_commit(y, "block")


def source(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def forward(blocks: Sequence[nn.Module], x: Tensor, call: Call) -> Tensor:
    """The loss. The marks are on a value that only the graph holds."""
    h = x * 1.0
    for block in blocks:
        h = call(block, h)
    return h.square().mean()


def gradients(blocks: nn.ModuleList, x: Tensor) -> list[Tensor]:
    """Of the input and of every weight; taken away."""
    found = [tensor.grad for tensor in (x, *blocks.parameters())]
    for tensor in (x, *blocks.parameters()):
        tensor.grad = None
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


def train(blocks: nn.ModuleList, call: Call, *, seed: int = 1) -> list[Tensor]:
    """The loss and the gradients of one forward and one backward."""
    x = source(seed)
    loss = forward(blocks, x, call)
    loss.backward()
    return [loss.detach(), *gradients(blocks, x)]


def train_step(blocks: nn.ModuleList, call: Call, *, seed: int = 1) -> tuple[list[Tensor], StepStats]:
    """The same as a step of the process-wide manager."""
    init_chunk_handler(None, None, 1)
    found = train(blocks, call, seed=seed)
    stats = step_end()
    assert stats is not None
    return found, stats


def assert_bits(expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    assert len(expected) == len(found)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(one, other), f"number {number} differs by up to {(one - other).abs().max().item()}"


def let_go(manager: PipelineOffloadManager) -> None:
    """Compute waits for every spill in flight: a short step would find its sources still there, and copy
    nothing back."""
    transfers = manager.engine.transfers
    with manager.engine.lock:
        for transfer in list(transfers._spilling):
            transfers.settle_spill(transfer)


def assert_empty(manager: PipelineOffloadManager) -> None:
    """No saved byte is on the device, on loan or in flight."""
    engine = manager.engine
    with engine.lock:
        engine.transfers.reclaim_freed()
    assert engine.transfers.device_bytes == 0
    assert engine.transfers.in_flight() == (0, 0)
    assert engine.arena.stats().lent == 0


def coming_labels(manager: PipelineOffloadManager) -> list[str]:
    """Of the chunk whose forward is over, in the order in which the prefetch would fetch them."""
    handler = manager.cur_forward_chunk()
    handler.saved.complete()
    return [str(block.label) for block in handler.saved.coming._blocks if not block.is_freed]


@contextmanager
def noted_reads(manager: PipelineOffloadManager) -> Iterator[list[str]]:
    reads: list[str] = []
    manager.engine.on_read(lambda handle: reads.append(str(handle.record.block.label)))
    yield reads


CALLS = pytest.mark.parametrize("call", [kept, kept_in_group], ids=["no group", "in a group"])
