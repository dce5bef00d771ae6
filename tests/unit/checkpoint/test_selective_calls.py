"""Selective checkpoints that keep single calls of operators, and what writes to the bytes of a kept call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offload import PipelineOffloadManager, init_chunk_handler, selective_contexts
from offload.device.sim import ExecutorName
from tests.unit.checkpoint import recomputed as hooked
from tests.unit.checkpoint.regions import (
    BLOCKS,
    FC1_BYTES,
    INPUT_BYTES,
    MM,
    ROWS,
    WIDTH,
    assert_bits,
    build_blocks,
    forward,
    gradients,
    kept,
    let_go,
    plain,
    source,
    train,
    train_step,
)
from tests.unit.groups.stack import EXECUTORS, build_manager, installed

pytestmark = pytest.mark.usefixtures("manager")

aten = torch.ops.aten
Manager = PipelineOffloadManager


class Four(nn.Module):
    """Four products in a row, each followed by a function that saves its result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("numbers", [(0,), (2,), (1, 3), (0, 1, 2, 3)])
def test_only_the_calls_that_are_named_are_kept(numbers: tuple[int, ...], executor: ExecutorName) -> None:
    blocks = build_blocks(Four, 2)
    expected = train(blocks, plain)
    keep = {(MM, number) for number in numbers}
    with installed(build_manager(executor, max_spilling_bytes=1)):
        for step in range(2):
            found, stats = train_step(blocks, lambda block, h: kept(block, h, keep))
            assert_bits(expected, found)
            assert stats.saved == 2 * len(numbers)
            if step == 0:  # the plan keeps some later
                assert stats.spill_bytes == 2 * len(numbers) * INPUT_BYTES


def test_calls_of_several_operators_are_numbered_apart() -> None:
    """gelu comes between two products: each is its operator's call number 0 or 1."""
    blocks = build_blocks()
    expected = train(blocks, plain)
    keep = {(MM, 0), (aten.gelu.default, 0), (aten.gelu.default, 7), (aten.exp.default, 0)}
    found, stats = train_step(blocks, lambda block, h: kept(block, h, keep))
    assert_bits(expected, found)
    assert stats.spill_bytes == BLOCKS * 2 * FC1_BYTES


class Branching(nn.Module):
    """Calls one product more on some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        again = bool(x.sum() > 0)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.tanh(self.layers[0](x)) if again else x


def test_a_call_that_one_forward_has_and_another_has_not_is_no_warning_and_the_bits_are_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocks = build_blocks(Branching, 1)
    saved = set()
    for seed in range(6):
        expected = train(blocks, plain, seed=seed)
        found, stats = train_step(blocks, lambda block, h: kept(block, h, {(MM, 2)}), seed=seed)
        assert_bits(expected, found)
        saved.add(stats.saved)
    assert saved == {0, 1}
    assert caplog.records == []


class Normed(nn.Module):
    """A batch norm, whose statistics a recompute starts from copies of, and calls of the copy's own
    operator."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).clone().tanh()
        return (y * 2.0).clone().sin()


def test_copies_that_the_recompute_makes_of_buffers_are_no_calls_of_the_block(manager: Manager) -> None:
    """Counted, the block's first clone would be taken for its third."""
    torch.manual_seed(0)
    model = hooked.Model([Normed(), Normed()])
    context_fn = selective_contexts({(aten.clone.default, 0), (aten.clone.default, 1)})
    for stats in hooked.compared(model, manager, context_fn=context_fn, steps=2):
        assert stats.saved_bytes == 2 * 3 * INPUT_BYTES  # the input and both clones


class WrittenThroughAView(nn.Module):
    """A linear layer without a bias, on three dimensions, returns an untracked view of its product, which is
    then written: the product's own version stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH, bias=False)
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x.view(2, ROWS // 2, WIDTH))
        y.mul_(2.0)
        return self.other(F.silu(y)).tanh().view(ROWS, WIDTH)


@pytest.mark.parametrize("leaves", [False, True])
def test_an_operators_product_that_is_written_through_an_untracked_view_is_an_error_not_other_bits(
    leaves: bool, manager: Manager
) -> None:
    """Before, the recompute wrote a second time to what it was given, silently."""
    blocks = build_blocks(WrittenThroughAView, 1)
    init_chunk_handler(None, None, 1 if leaves else 10**6)
    loss = forward(blocks, source(), kept)
    if leaves:
        let_go(manager)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: torch.float32 \[2, 6, 16\]"):
        loss.backward()


@pytest.mark.parametrize("numbers", [(0,), (0, 1)])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_call_whose_product_is_written_in_this_forward_is_recomputed(
    numbers: tuple[int, ...], leaves: bool, manager: Manager
) -> None:
    """Its number was another call's in the forward that it was named after."""
    blocks = build_blocks(WrittenThroughAView, 1)
    expected = train(blocks, plain)
    init_chunk_handler(None, None, 1 if leaves else 10**6)
    x = source()
    loss = forward(blocks, x, lambda block, h: kept(block, h, {(MM, number) for number in numbers}))
    let_go(manager)
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert_bits(expected, [loss.detach(), *gradients(blocks, x)])


def test_a_product_whose_untracked_view_is_only_read_is_kept() -> None:
    blocks = build_blocks(WrittenThroughAView, 1)
    expected = train(blocks, plain)
    found, stats = train_step(blocks, lambda block, h: kept(block, h, {(MM, 1)}))
    assert_bits(expected, found)
    assert stats.saved == 1
