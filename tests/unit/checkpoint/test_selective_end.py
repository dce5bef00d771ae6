"""How a selective checkpoint's outputs end: changed in place, dropped unread, after an exception or their
step, or never to leave."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from offload import OffloadError, PipelineOffloadManager, init_chunk_handler, step_end
from offload.sizes import bytes_text
from offload.transfer.block import BlockState
from tests.unit.checkpoint.regions import (
    BLOCKS,
    CALLS,
    FC1_BYTES,
    WIDTH,
    Block,
    Call,
    assert_bits,
    assert_empty,
    build_blocks,
    forward,
    kept,
    kept_in_group,
    let_go,
    plain,
    source,
    train,
    train_step,
)

pytestmark = pytest.mark.usefixtures("manager")


# -- a change in place ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("late", [False, True], ids=["before the next save", "after it"])
def test_a_kept_output_that_is_changed_in_place_is_an_error_of_the_backward(late: bool) -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def body(x: Tensor) -> Tensor:
        h = x @ weight
        y = h.detach().sin() * x if late else x
        h.add_(1.0)
        return (h * y).sin()

    init_chunk_handler(None, None, 1)
    y = kept(body, source() * 1.0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# -- nothing is left -----------------------------------------------------------------------------------------
@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@CALLS
def test_a_graph_that_is_dropped_unread_leaves_nothing(call: Call, manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    loss = forward(build_blocks(), source(), call)
    assert manager.engine.transfers.device_bytes > 0
    del loss
    let_go(manager)
    assert_empty(manager)


@pytest.mark.usefixtures("no_collector")
@CALLS
def test_an_exception_in_the_forward_leaves_nothing_and_the_next_step_is_right(
    call: Call, manager: PipelineOffloadManager
) -> None:
    blocks = build_blocks()
    expected = train(blocks, plain)

    class Failing(Block):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x).sin()
            raise ArithmeticError("on purpose")

    init_chunk_handler(None, None, 1)
    failing = Failing()
    try:
        forward([*blocks, failing], source(), call)
    except ArithmeticError:
        pass
    else:
        pytest.fail("the block did not fail")
    let_go(manager)
    assert_empty(manager)
    assert manager.tracker.open_regions == 0
    step_end()
    found, stats = train_step(blocks, call)
    assert_bits(expected, found)
    assert stats.saved == BLOCKS * (1 + (call is kept_in_group))


@pytest.mark.usefixtures("no_collector")
def test_a_graph_that_outlives_its_step_is_reported_and_holds_no_bytes(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    init_chunk_handler(None, None, 1)
    loss = forward(build_blocks(), source(), kept)
    step_end()
    assert_empty(manager)
    nbytes = bytes_text(BLOCKS * FC1_BYTES)
    assert f"{BLOCKS} saved tensors ({nbytes}) whose backward has not run" in caplog.text
    with pytest.raises(OffloadError, match="was saved in a step that has ended"):
        loss.backward()


def test_a_kept_output_is_let_go_by_its_reader_when_it_was_fetched(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    loss = forward(build_blocks(), source(), kept)
    let_go(manager)
    states: list[BlockState] = []
    manager.engine.on_read(lambda handle: states.append(handle.record.block.state))
    loss.backward()
    assert states == [BlockState.SPILLED] * BLOCKS


# -- what does not leave -------------------------------------------------------------------------------------
def test_without_gradients_nothing_is_kept_and_nothing_said(caplog: pytest.LogCaptureFixture) -> None:
    with torch.no_grad():
        init_chunk_handler(None, None, 1)
        forward(build_blocks(), source(), kept)
    stats = step_end()
    assert stats.saved == 0
    assert caplog.records == []


def test_without_a_chunk_the_outputs_stay_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    blocks = build_blocks()
    expected = train(blocks, plain)
    for _ in range(2):
        assert_bits(expected, train(blocks, kept))
        step_end()
    (record,) = caplog.records
    assert "no chunk is current" in record.message
    assert "init_chunk_handler()" in record.message
