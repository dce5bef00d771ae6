"""What a group takes of an operator that writes after autograd has saved."""

from __future__ import annotations

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
from tests.unit.groups.stack import build_manager, installed

ELEMENTS = 64


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
