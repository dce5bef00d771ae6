"""A recomputed block is as torch's own checkpoint of it: what raises, what is retained, and what nests."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload import PipelineOffloadManager, init_chunk_handler, step_end
from offload.errors import OffloadError
from tests.loops import ended_step
from tests.unit.checkpoint.recomputed import (
    INPUT_BYTES,
    Block,
    Model,
    assert_bits,
    build,
    compared,
    hooks_left,
    recomputed,
    source,
    train,
    train_step,
    values,
)

Manager = PipelineOffloadManager


def test_a_copy_that_cannot_be_issued_leaves_no_hooks(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block's input is on its way out before its forward begins, which does not then."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    model = build()
    with monkeypatch.context() as patch:
        patch.setattr(type(manager.engine.device), "copy", full)
        with pytest.raises(torch.OutOfMemoryError):
            train_step(model, manager)
    assert not hooks_left()
    step_end()
    compared(model, manager)


@pytest.mark.parametrize("trained", [True, False], ids=["frozen before the backward", "unfrozen"])
def test_weights_that_are_frozen_between_the_two_are_recomputed_as_they_were(
    trained: bool, manager: Manager
) -> None:
    """The recompute would save other tensors than its forward did, and be refused."""
    found = []
    for again in (False, True):
        model = build()
        weights = [weight for block in model.blocks for weight in block.parameters() if weight.dim() > 1]
        for weight in weights:
            weight.requires_grad_(trained)
        init_chunk_handler(None, None, 1)
        with recomputed(list(model.blocks) if again else [], manager):
            loss = model(source()).square().mean()
            for weight in weights:
                weight.requires_grad_(not trained)
            loss.backward()
        assert all(weight.requires_grad is not trained for weight in weights)
        step_end()
        found.append([weight.grad for weight in model.parameters()])
    assert any(gradient is not None for gradient in found[0])
    for plain, own in zip(*found, strict=True):
        assert (plain is None) == (own is None)
        assert plain is None or torch.equal(plain, own)


def test_a_cache_that_the_forward_adds_to_is_refused_by_name(manager: Manager) -> None:
    """A recompute would attend to every key twice. One that the block only reads is an argument like
    others."""

    class Cache(dict[str, Tensor]):
        def get_seq_length(self) -> int:
            return 0

    class Caching(Block):
        def forward(self, x: Tensor, cache: Any = None) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    model = build(Caching, count=1)
    init_chunk_handler(None, None, 1)
    with recomputed(list(model.blocks), manager):
        with pytest.raises(
            OffloadError, match=r"a Caching that is recomputed was called with a Cache.*use_cache"
        ):
            model(source(), cache=Cache())
        with torch.no_grad():
            model(source(), cache=Cache())
        model.requires_grad_(False)(source().detach(), cache=Cache())
        model.requires_grad_()
        assert not hooks_left()
    step_end()
    model.blocks[0]._can_checkpoint_with_cache = True  # type: ignore[assignment]
    compared(model, manager, cache=Cache())


def test_an_input_that_is_changed_in_place_afterwards_raises_as_autograd_does(manager: Manager) -> None:
    block = build(count=1).blocks[0]
    with recomputed([block], manager):
        init_chunk_handler(None, None, 1)
        h = source() * 1.0
        y = block(h)
        h.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_recompute_after_the_hooks_were_taken_off_is_not_remembered_for_the_next_ones(
    manager: Manager,
) -> None:
    block = build(count=1).blocks[0]
    init_chunk_handler(None, None, 1)
    with recomputed([block], manager):
        y = block(source() * 1.0)
    y.sum().backward()
    with recomputed([block], manager):
        block(source() * 1.0).sum().backward()
    stats = ended_step()
    assert stats.saved == 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(0.5), Block(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def test_calls_inside_a_recomputed_call_are_recomputed_with_it_and_only_its_input_leaves(
    manager: Manager,
) -> None:
    model = build(Outer, count=2)
    plain = copy.deepcopy(model)
    expected = train(plain)
    inner = [block for outer in model.blocks for block in (outer.first, outer.second)]  # type: ignore[union-attr]
    with recomputed([*model.blocks, *inner], manager):  # type: ignore[list-item]
        init_chunk_handler(None, None, 1)
        found = train(model)
    stats = ended_step()
    assert_bits(expected, found)
    assert (stats.saved, stats.spill_bytes) == (2, 2 * INPUT_BYTES)


def test_one_block_called_many_times_has_a_call_of_its_own_each_time(manager: Manager) -> None:
    """Also inside itself: the module that is called again is not taken for its own recompute."""

    class Recursive(Block):
        def forward(self, x: Tensor, depth: Any = 1) -> Tensor:
            y = super().forward(x)
            return self(y, depth - 1) if depth else y

    torch.manual_seed(0)
    block = Recursive()
    model = Model([block, block])
    [stats] = compared(model, manager)
    assert (stats.saved, stats.spill_bytes) == (2, 2 * INPUT_BYTES)


def test_a_block_inside_somebodys_own_checkpoint_gives_its_input_to_that_one(manager: Manager) -> None:
    model = build(Outer, count=1)
    plain = copy.deepcopy(model)
    outer = model.blocks[0]

    def run(module: Model, block: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        x = source()
        loss = checkpoint(block, x * 1.0, use_reentrant=False).square().mean()
        loss.backward()
        return [loss.detach(), *values(module, x)]

    expected = run(plain, plain.blocks[0])
    with recomputed([outer.first, outer.second], manager):  # type: ignore[list-item]
        init_chunk_handler(None, None, 1)
        found = run(model, outer)
    stats = ended_step()
    assert_bits(expected, found)
    assert stats.saved == 0
