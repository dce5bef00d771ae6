"""Recomputation inside and around the hooks: what a backward saves is read at once, so it stays; gradients
are the same either way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from offload.device.sim import ExecutorName
from tests.unit.saved.rig import ELEMENTS, EXECUTORS, KIB, Rig, assert_equal_bits, leaf


class Square(torch.autograd.Function):
    """A custom forward: inside it, torch does not tell that a backward is running."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        return 2 * gradient * x


def block(x: Tensor) -> Tensor:
    return Square.apply(x.sin()).exp().tanh()


def network(x: Tensor, *, reentrant: bool | None) -> Tensor:
    """Two blocks; reentrant None: without recomputation."""
    x = x * 2
    for _ in range(2):
        x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
    return x


def expected_of(x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(network(x, reentrant=None).sum(), [x]))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_hooks_around_a_checkpoint_see_its_input_and_nothing_of_its_inside(
    reentrant: bool, executor: ExecutorName
) -> None:
    x = leaf()
    expected = expected_of(x)
    rig = Rig(executor, seed=6)
    with rig.group():
        y = network(x, reentrant=reentrant).sum()
    assert (rig.saved, rig.spilled_bytes) == (2, 2 * KIB)  # the input of each block
    rig.leave()
    y.backward()
    assert x.grad is not None
    assert_equal_bits(expected, [x.grad])
    del y
    stats = rig.end()
    assert (stats.saved, stats.spilled, stats.restored) == (2, 2, 2)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_recomputation_under_active_hooks_keeps_what_it_saves(reentrant: bool, rig: Rig) -> None:
    """The whole step inside the hooks. A recomputed tensor is read at once, so a copy out would only have to
    come back."""
    x = leaf()
    expected = expected_of(x)
    with rig.group():
        y = network(x, reentrant=reentrant).sum()
        rig.leave()
        y.backward()
    assert x.grad is not None
    assert_equal_bits(expected, [x.grad])
    assert rig.saved == 2


def test_hooks_inside_a_reentrant_region_only_see_a_forward_without_gradients_and_a_recomputation() -> None:
    x = leaf()
    expected = expected_of(x)
    rig = Rig()

    def offloaded(x: Tensor) -> Tensor:
        with rig.group():
            return block(x)

    y = x * 2
    for _ in range(2):
        y = checkpoint(offloaded, y, use_reentrant=True)
    y.sum().backward()
    assert x.grad is not None
    assert_equal_bits(expected, [x.grad])
    assert rig.saved == 0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("inner", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("outer", [False, True], ids=["in non-reentrant", "in reentrant"])
def test_nested_checkpoints_under_hooks_give_the_same_gradients(outer: bool, inner: bool, rig: Rig) -> None:
    def nested(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(block, x.cos(), use_reentrant=inner)
        return result.sin()

    def program(x: Tensor, wrap: Callable[[Tensor], Tensor]) -> Tensor:
        return wrap(x * 2).sum()

    x = leaf()
    expected = torch.autograd.grad(program(x, lambda x: block(x.cos()).sin()), [x])
    with rig.group():
        y = program(x, lambda x: checkpoint(nested, x, use_reentrant=outer))
    assert rig.saved == 1
    rig.leave()
    y.backward()
    assert x.grad is not None
    assert_equal_bits(list(expected), [x.grad])
    del y
    assert rig.end().restored == 1


def test_a_checkpoint_may_be_read_twice(rig: Rig) -> None:
    x = leaf()
    expected = expected_of(x)
    with rig.group():
        y = network(x, reentrant=False).sum()
    rig.leave()
    for last in (False, True):
        assert_equal_bits(expected, list(torch.autograd.grad(y, [x], retain_graph=not last)))


def test_a_checkpoint_whose_inputs_are_views_of_one_tensor_sends_it_once(rig: Rig) -> None:
    x = torch.randn(4, ELEMENTS, requires_grad=True)

    def program(*rows: Tensor) -> Tensor:
        return torch.stack([row.sin() for row in rows])

    with rig.group():
        y = checkpoint(program, *(x * 2).unbind(), use_reentrant=False).sum()
    assert (rig.saved, rig.spilled_bytes) == (1, 4 * KIB)
    rig.leave()
    y.backward()
