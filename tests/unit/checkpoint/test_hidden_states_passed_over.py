"""Calls of which nothing is recomputed, or nothing leaves: evaluation, frozen blocks, exceptions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import PipelineOffloadManager, init_chunk_handler, step_end
from offload.checkpoint.hidden_states import RecomputedCall
from offload.errors import CaptureError
from tests.unit.checkpoint.recomputed import (
    BLOCKS,
    Block,
    Watching,
    assert_bits,
    build,
    compared,
    hooks_left,
    recomputed,
    source,
    train,
)
from tests.unit.checkpoint.regions import assert_empty

Manager = PipelineOffloadManager


@pytest.mark.req("S4-45")
def test_without_gradients_nothing_is_saved_and_a_frozen_block_runs_as_without_hooks(
    manager: Manager,
) -> None:
    model = build(Watching)
    x = source()
    with recomputed(list(model.blocks), manager):
        init_chunk_handler(None, None, 1)
        with torch.no_grad():
            model(x)
        model.requires_grad_(False)
        model(x.detach())
        assert manager.engine.transfers.device_bytes == 0
        # it is enough that the input requires one
        model(x).sum().backward()
    stats = step_end()
    assert stats.saved == BLOCKS
    assert [len(block.seen) for block in model.blocks] == [4] * BLOCKS  # type: ignore[arg-type]


@pytest.mark.req("S4-45")
def test_a_forward_whose_backward_never_runs_leaves_nothing_behind(
    manager: Manager, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    with recomputed(list(model.blocks), manager):
        init_chunk_handler(None, None, 1)
        dropped = model(source())
        init_chunk_handler(None, None, 1)
        kept = model(source(2)).sum()
    del dropped
    kept.backward()
    step_end()
    assert "whose backward has not run" not in caplog.text
    assert_empty(manager)
    assert not hooks_left()


def test_while_no_chunk_is_current_a_call_is_recomputed_all_the_same_which_is_said_once(
    manager: Manager, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(Watching)
    with recomputed(list(model.blocks), manager):
        found = train(model)
        train(model)
    assert_bits(train(model), found)
    assert [len(block.seen) for block in model.blocks] == [5] * BLOCKS  # type: ignore[arg-type]
    assert manager.engine.last_stats.saved == 0
    [record] = caplog.records
    assert "group 'hidden_states' is started while no chunk is current" in record.getMessage()


def test_with_offload_switched_off_a_call_is_recomputed_and_nothing_leaves(manager: Manager) -> None:
    manager.disable_offload()
    [stats] = compared(build(), manager)
    assert stats.saved == 0


def test_an_exception_in_the_forward_takes_off_exactly_what_the_call_put_on(manager: Manager) -> None:
    class Failing(Block):
        fails = True

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            y = super().forward(x, mask)
            if self.fails:
                raise KeyError("in the forward")
            return y

    model = build(Failing)
    plain = copy.deepcopy(model)
    for block in (*plain.blocks, *model.blocks[:2]):
        block.fails = False  # type: ignore[assignment]
    with recomputed(list(model.blocks), manager):
        init_chunk_handler(None, None, 1)
        with pytest.raises(KeyError, match="in the forward"):
            model(source())
        assert not hooks_left()
        for block in model.blocks:
            block.fails = False  # type: ignore[assignment]
        init_chunk_handler(None, None, 1)
        found = train(model)
    step_end()
    assert_bits(train(plain), found)


def test_a_call_that_cannot_begin_leaves_no_hooks(manager: Manager) -> None:
    block = build(count=1).blocks[0]

    def no_contexts() -> Any:
        raise ValueError("no contexts")

    init_chunk_handler(None, None, 1)
    call = RecomputedCall(manager, block, (source(),), {}, no_contexts)
    with pytest.raises(ValueError, match="no contexts"):
        call.begin()
    call.end(None)
    call.abort()
    assert not hooks_left()


def test_a_call_in_a_capture_outside_of_a_region_is_refused_and_opens_no_group(manager: Manager) -> None:
    block = build(count=1).blocks[0]
    init_chunk_handler(None, None, 1)
    device = manager.engine.device
    with device.capture():
        call = RecomputedCall(manager, block, (source() * 1.0,), {})
        with pytest.raises(
            CaptureError, match=r"group 'hidden_states' in a graph under capture, outside of a"
        ):
            call.begin()
    assert not hooks_left()
    handler = manager.cur_forward_chunk()
    assert handler.groups == []
