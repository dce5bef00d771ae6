"""Hooks switch autograd's own version check off, so the engine checks: what autograd would refuse is refused
here, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offload.device.sim import ExecutorName
from tests.unit.saved.rig import ELEMENTS, EXECUTORS, Rig, assert_equal_bits, gradients, leaf
from tests.unit.saved.test_views import keep

VANILLA = "modified by an inplace operation"


def spilled(rig: Rig) -> Any:
    return rig.group()


def kept(rig: Rig) -> Any:
    return rig.group(leaves=False)


def small(rig: Rig) -> Any:
    return rig.group(min_elements=10_000)


WAYS: dict[str, Callable[[Rig], Any]] = {"spilled": spilled, "kept": kept, "small": small}


# -- refused -------------------------------------------------------------------------------------------------
CHANGES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda y: y.add_(1),
    "through a detached alias": lambda y: y.detach().zero_(),
    "through a view": lambda y: y.detach()[3:5].zero_(),
    "by an out argument": lambda y: torch.ones(ELEMENTS, out=y.detach()),
    "by copy_": lambda y: y.detach().copy_(torch.zeros(ELEMENTS)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("gone", [False, True], ids=["in flight", "settled"])
def test_a_change_after_the_save_is_found_out_as_autograd_would(way: str, change: str, gone: bool) -> None:
    def program() -> Tensor:
        y = leaf() * 2
        z = y.sin()
        CHANGES[change](y)
        return z

    with pytest.raises(RuntimeError, match=VANILLA):
        program().sum().backward()
    rig = Rig()
    with WAYS[way](rig):
        y = leaf() * 2
        z = y.sin()
    if gone:
        rig.leave()
    CHANGES[change](y)
    with pytest.raises(RuntimeError, match=VANILLA):
        z.sum().backward()


def test_the_error_names_the_tensor_both_versions_and_the_way_out(rig: Rig) -> None:
    with rig.group():
        y = leaf() * 2
        z = y.sin()
    y.add_(1)
    y.mul_(2)
    with pytest.raises(RuntimeError) as caught:
        z.sum().backward()
    assert str(caught.value) == (
        "a saved tensor needed for the gradient computation was modified by an inplace operation: "
        "torch.float32 [256] is at version 2, "
        "expected version 0; clone it before the in-place change, or save it after"
    )


WATCHED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    # [name] -> of a matrix: (what a node makes of it, what is changed)
    "an output that its own node saves": lambda base: ((y := leaf().exp()), y),
    "a parameter": lambda base: (F.linear(leaf().view(4, 64), w := nn.Parameter(base)), w),
    # autograd too goes by the storage's version, not by the range
    "another part of the storage": lambda base: (keep([], base[1]), base[2]),
    "the base of a packed view": lambda base: (keep([], base[:, ::4]), base),
}


@pytest.mark.parametrize("name", WATCHED)
def test_a_change_of_the_storage_of_what_is_saved_is_found_out(name: str, rig: Rig) -> None:
    with rig.group():
        y, changed = WATCHED[name](torch.randn(64, 64))
    with torch.no_grad():
        changed.add_(1)
    with pytest.raises(RuntimeError, match=VANILLA):
        y.sum().backward()


def test_each_save_of_a_shared_storage_is_watched_by_its_own_version(rig: Rig) -> None:
    """`.data` shares the storage and counts versions of its own: a change of x went unnoticed where x.data
    had been saved first. They share no copy either: a write to one would not be seen by the other."""
    x = torch.randn(ELEMENTS)
    with rig.group():
        y = keep([], x.data, x)
    assert rig.saved == 2
    x.add_(1)
    with pytest.raises(RuntimeError, match=VANILLA):
        y.backward()


# -- allowed -------------------------------------------------------------------------------------------------
class Exponential(torch.autograd.Function):
    """In place, and saves its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y


def masked(x: Tensor) -> Tensor:
    y = x * 2
    y[:10] = 1.0
    return y.sin()


ALLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "before the save": lambda x: (x * 2).add_(1).sin(),
    "of what saves its own output": lambda x: (x * 2).sigmoid_().sin(),
    "relu": lambda x: torch.relu_(x * 2) * 3,
    "of what nothing saved": lambda x: (x + 1).mul_(2).sin(),
    "through a view, before the save": masked,
    "by a custom function": lambda x: Exponential.apply(x * 2).sin(),
    "of a copy": lambda x: x.sin() + x.detach().clone().zero_(),
}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ALLOWED)
def test_a_change_that_autograd_allows_is_allowed(name: str, executor: ExecutorName) -> None:
    rig = Rig(executor, seed=3)
    x = leaf()
    assert_equal_bits(gradients(ALLOWED[name], [x]), gradients(ALLOWED[name], [x], rig))


def test_a_save_before_a_change_may_stay_unread_beside_one_after_it(rig: Rig) -> None:
    x, other = leaf(), torch.randn(ELEMENTS)
    with rig.group():
        _dead = x * other
        other.add_(1)
        y = x * other
    expected = other.clone()
    del other
    rig.leave()
    (found,) = torch.autograd.grad(y.sum(), [x])
    assert_equal_bits([expected], [found])


# -- by the backward itself ----------------------------------------------------------------------------------
class Careless(torch.autograd.Function):
    """Changes what it saved, in its backward, and reads it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        ctx.saved_tensors[0].mul_(2)
        return gradient * ctx.saved_tensors[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_saved_tensor_that_the_backward_changed_is_not_read_again(way: str, rig: Rig) -> None:
    """autograd raises at the second read. A restored buffer was revived with the changed bytes."""
    with pytest.raises(RuntimeError, match=VANILLA):
        Careless.apply(leaf() * 2).sum().backward()
    with WAYS[way](rig):
        y = Careless.apply(leaf() * 2)
    rig.leave()
    with pytest.raises(RuntimeError, match=VANILLA):
        y.sum().backward()
