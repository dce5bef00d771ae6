"""Hooks are there for an open group of the current chunk only, and what installed them removes them, exactly
them. A group takes what an operator writes after autograd has saved it once it is written."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from offload import (
    PipelineOffloadManager,
    group_commit,
    group_start,
    init_chunk_handler,
    offload_hooks,
    step_end,
)
from offload.groups.chunk import GroupScope, KeptScope
from tests.unit.checkpoint.regions import let_go
from tests.unit.groups.handlers import begun
from tests.unit.groups.stack import EXECUTORS, build_manager, installed, leaf

ELEMENTS = 64


@pytest.mark.req("S2-53")
def test_context_installs_hooks_only_for_a_current_chunk_while_offloading_is_on(
    manager: PipelineOffloadManager,
) -> None:
    def installs() -> bool:
        with manager:
            found = manager.engine.hooks.innermost() is not None
            assert found is (torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
        assert manager.engine.hooks.innermost() is None
        return found

    assert not installs()  # no chunk
    init_chunk_handler(None, None, 1)
    group_start(leaf(), "a")
    assert installs()
    manager.disable_offload()
    assert not installs()
    manager.enable_offload()
    with torch.no_grad():
        assert not installs()
    step_end()
    assert not installs()


@pytest.mark.req("S2-53")
@pytest.mark.parametrize("starts_on", [True, False])
def test_context_removes_exactly_what_it_installed_whatever_was_switched_inside(
    manager: PipelineOffloadManager, starts_on: bool
) -> None:
    init_chunk_handler(None, None, 1)
    group_start(leaf(), "a")
    if not starts_on:
        manager.disable_offload()
    with torch.autograd.graph.save_on_cpu():
        outside = torch._C._autograd._top_saved_tensors_default_hooks(True)
        with manager:
            (manager.disable_offload if starts_on else manager.enable_offload)()
            with manager:
                (manager.enable_offload if starts_on else manager.disable_offload)()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) == outside


def test_hooks_without_a_group_say_so_once(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    init_chunk_handler(None, None, 1)
    with caplog.at_level(logging.WARNING, "offload"):
        for _ in range(2):
            with offload_hooks():
                leaf().square().sum().backward()
    assert [record.getMessage() for record in caplog.records] == [
        "offload_hooks() without an open group in chunk s0m0: nothing saved in it will leave; call "
        "group_start first"
    ]


@pytest.mark.req("S2-54", "S2-55")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_save_and_get_by_hand(executor: Any) -> None:
    with installed(build_manager(executor)) as manager:
        with pytest.raises(AssertionError, match="Must be inside offload context"):
            manager.on_save_for_backward(torch.ones(4))
        init_chunk_handler(None, None, 8)
        group_start(leaf(), "a")
        large, small = torch.randn(64), torch.randn(4)
        expected = large.clone()
        with manager:
            tags = [manager.on_save_for_backward(large), manager.on_save_for_backward(small)]
        with pytest.raises(AssertionError, match="Must be inside offload context"):
            manager.on_save_for_backward(small)
        group_commit(large, "a")
        del large
        for transfer in list(manager.engine.transfers._spilling):
            manager.engine.transfers.settle_spill(transfer)
        assert torch.equal(manager.on_get_saved_tensor(tags[0]), expected)
        assert manager.on_get_saved_tensor(tags[1]) is small
        assert manager.engine.transfers.counts.restore_bytes == 256


def slopes(x: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        x = torch.nn.functional.rrelu(x, 0.1, 0.9, training=True)
    return x


@pytest.mark.parametrize("count", [1, 3])
def test_noise_that_an_operator_draws_after_autograd_has_saved_it_leaves_when_it_is_drawn(count: int) -> None:
    """rrelu in training: no version moves. A piece that was full at the save left with the bytes of
    before."""
    torch.manual_seed(3)
    leaf = torch.randn(ELEMENTS, requires_grad=True)
    slopes(leaf * 1.0, count).sum().backward()
    expected, leaf.grad = leaf.grad, None
    with installed(build_manager("early", piece_bytes=1)) as manager:
        torch.manual_seed(3)
        assert torch.equal(torch.randn(ELEMENTS), leaf.detach())
        init_chunk_handler(None, None, 1)
        x = group_start(leaf * 1.0, "noise")
        with offload_hooks():
            y = slopes(x, count)
        y = group_commit(y, "noise")
        assert manager.engine.transfers.counts.spill_bytes == 2 * count * ELEMENTS * 4, (
            "each call's input and noise"
        )
        loss = y.sum()
        del x, y
        let_go(manager)
        loss.backward()
        del loss
        step_end()
    assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("kept", [False, True])
def test_a_scope_takes_nothing_while_offload_is_off_or_once_its_step_has_ended(
    kept: bool, manager: PipelineOffloadManager
) -> None:
    handler = begun(manager)
    group = handler.on_group_start_forward("a")
    scope = KeptScope(handler, group, None) if kept else GroupScope(handler, group)
    tensors = [torch.randn(ELEMENTS) for _ in range(4)]
    assert scope.take(tensors[0]) is not None
    manager.disable_offload()
    assert scope.take(tensors[1]) is None
    manager.enable_offload()
    assert scope.take(tensors[2]) is not None
    step_end()
    begun(manager)  # of the next step: the handler lives on, its group of that step does not
    assert scope.take(tensors[3]) is None
    assert manager.engine.transfers.counts.saved == 0
