"""Scopes, groups and checkpoints in one another: each save belongs to one group, and gradients are those
without offload."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload import (
    GroupOrderError,
    PipelineOffloadManager,
    group_commit,
    group_start,
    init_chunk_handler,
    offload_hooks,
    step_end,
)
from tests.unit.groups.both import assert_nothing_is_left
from tests.unit.groups.stack import (
    EXECUTORS,
    NAMES,
    ROWS,
    WIDTH,
    Layer,
    assert_same,
    build_manager,
    build_stages,
    installed,
)


# -- scopes and groups in one another ------------------------------------------------------------------------
def test_save_in_an_inner_scope_belongs_to_the_inner_group_and_after_its_commit_to_the_outer(
    manager: PipelineOffloadManager,
) -> None:
    init_chunk_handler(None, None, 1)
    a, b, c, d = (torch.randn(8 * size, requires_grad=True) for size in (1, 2, 3, 4))
    x = group_start(a, "outer")
    with offload_hooks():
        first = a * a
        y = group_start(b, "inner")
        with offload_hooks():
            second = b * b
            y = group_commit(y, "inner")
            third = c * c  # still inside the inner scope
        fourth = d * d
    x = group_commit(x, "outer")
    handler = manager.cur_forward_chunk()
    assert {group.name: group.total_offload_bytes for group in handler.groups} == {
        "outer": 4 * (8 + 24 + 32),
        "inner": 4 * 16,
    }
    (first.sum() + second.sum() + third.sum() + fourth.sum() + x.sum() + y.sum()).backward()
    for leaf in (c, d):
        assert torch.equal(leaf.grad, 2 * leaf.detach())  # type: ignore[arg-type]


def test_scope_may_outlive_its_group_and_its_step(manager: PipelineOffloadManager) -> None:
    x = torch.randn(64, requires_grad=True)
    init_chunk_handler(None, None, 1)
    y = group_start(x, "a")
    with offload_hooks():
        step_end()
        init_chunk_handler(None, None, 1)
        group_start(torch.ones(1), "a")  # the same group object, recorded in the chunk
        z = y * y
        group_commit(torch.ones(1), "a")
    z.sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())  # type: ignore[arg-type]
    assert manager.step_end().saved == 0


def test_groups_that_overlap_without_nesting(manager: PipelineOffloadManager) -> None:
    def run() -> Tensor:
        x = torch.ones(8, 8).mul(3).requires_grad_()
        a = group_start(x, "a")
        with offload_hooks():
            y = a * a
        b = group_start(y, "b")
        z = group_commit(b, "a")
        with offload_hooks():
            z = z * z
        group_commit(z, "b").sum().backward()
        assert x.grad is not None
        return x.grad

    with installed(None):
        expected = run()
    with installed(build_manager("random", seed=15)) as other:
        for _ in range(3):
            init_chunk_handler(None, None, 1)
            assert torch.equal(run(), expected)
            assert step_end() == other.stats
        assert other.stats.saved == 2


def test_work_that_a_layer_does_on_a_thread_of_its_own_stays_on_the_device(
    manager: PipelineOffloadManager,
) -> None:
    """torch's saved-tensor hooks belong to a thread; what another one saves is right, and does not leave."""
    init_chunk_handler(None, None, 1)
    x = torch.randn(64, requires_grad=True)
    results: list[Tensor] = []
    y = group_start(x, "a")
    with offload_hooks():
        thread = threading.Thread(target=lambda: results.append(y * y))
        thread.start()
        thread.join()
        z = y * 3 * y
    group_commit(z + results[0], "a").sum().backward()
    torch.testing.assert_close(x.grad, 8 * x.detach())
    assert manager.step_end().saved == 2


def test_commit_in_the_next_chunk_is_an_error_that_says_what_is_open(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    x = group_start(torch.ones(4, requires_grad=True), "a")
    init_chunk_handler(None, None, 1)
    with pytest.raises(
        GroupOrderError, match=r"chunk s0m1: commit of group 'a', which has not been started; open: none"
    ):
        group_commit(x, "a")


# -- checkpoints ---------------------------------------------------------------------------------------------
def checkpointed(reentrant: bool, inside: bool, around: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    """A forward whose body is checkpointed; with marks in the body, around the checkpoint, or both."""
    names = NAMES if inside else ()

    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(layer, Layer)
        layer.names = names

        def body(x: Tensor) -> Tensor:
            return torch.tanh(layer(x)) * 2

        if around:
            x = group_start(x, "around")
            with offload_hooks():
                y = checkpoint(body, x, use_reentrant=reentrant)
            return group_commit(y, "around")
        y = checkpoint(body, x, use_reentrant=reentrant)
        assert isinstance(y, Tensor)
        return y

    return forward


@pytest.mark.req("S3-62")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("inside", "around"), [(True, False), (False, True), (True, True)])
def test_group_inside_a_checkpoint_around_one_or_both(reentrant: bool, inside: bool, around: bool) -> None:
    """Inside, a non-reentrant checkpoint counts what its forward and its recompute save; taking a tensor away
    from one of them ended in "different metadata" at best, and would have ended in another tensor's bits
    where the shapes agree."""
    forward = checkpointed(reentrant, inside, around)

    def run(module: nn.Module) -> list[Tensor]:
        for seed in (1, 2):
            if PipelineOffloadManager.OFFLOAD_MGR is not None:
                init_chunk_handler(None, None, 1)
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            for layer in module.children():
                x = forward(layer, x * 1)
            x.square().mean().backward()
        found = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
        module.zero_grad()
        return found

    with installed(None):
        expected = run(build_stages()[0])
    for executor in EXECUTORS:
        with installed(build_manager(executor, seed=16, max_spilling_bytes=1)) as manager:
            module = build_stages()[0]
            for _ in range(3):
                assert_same([expected], [run(module)])
                stats = step_end()
                # the input of each checkpoint and nothing of its recomputation: two layers, two microbatches
                assert stats.saved == (4 if around else 0)
                assert stats.spill_bytes <= 4 * ROWS * WIDTH * 4
                assert_nothing_is_left(manager)


def test_recompute_inside_a_group_keeps_what_it_saves(manager: PipelineOffloadManager) -> None:
    """A Function that drops its output and makes it again in its backward, as Megatron's output-discarding
    checkpoint does."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.detach().tanh() * x.detach()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad(), offload_hooks():
                x = x.detach().requires_grad_()
                y = group_start(x, "a").tanh() * x
                group_commit(y, "a").backward(grad)
            assert x.grad is not None
            return x.grad

    x = torch.randn(64, requires_grad=True)
    (expected,) = torch.autograd.grad((x.tanh() * x).square().sum(), x)
    for _ in range(3):
        init_chunk_handler(None, None, 1)
        y = group_start(x * 1, "a")
        with offload_hooks():
            z = Again.apply(y).square()
        (found,) = torch.autograd.grad(group_commit(z, "a").sum(), x)
        assert torch.equal(found, expected)
        assert manager.step_end().saved == 2  # the input and the output; nothing of the recomputation
