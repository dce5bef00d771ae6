"""Groups that stay, whole or from some slot on: what a read gives, what shares, and when the bytes go."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from offload.transfer.block import BlockState, WeakStorage
from tests.unit.saved.rig import ELEMENTS, EXECUTORS, Rig, assert_equal_bits
from tests.unit.saved.test_views import keep

NBYTES = 4 * ELEMENTS
SPILLED, RESIDENT = BlockState.SPILLED, BlockState.RESIDENT


def value() -> Tensor:
    return torch.randn(ELEMENTS)


# -- what a read gives ---------------------------------------------------------------------------------------
def test_each_read_gives_an_alias_of_its_own(rig: Rig) -> None:
    """What the engine keeps must not be what somebody else makes a part of a graph, resizes or gives other
    bytes."""
    x = value()
    expected = x.clone()
    with rig.group(leaves=False):
        packed = rig.engine.hooks.pack(x)
    first = rig.engine.hooks.unpack(packed)
    first.requires_grad_()
    first.data = torch.zeros(3)
    second = rig.engine.hooks.unpack(packed)
    assert second.data_ptr() == x.data_ptr()
    assert not second.requires_grad
    assert_equal_bits([expected], [second])


@pytest.mark.parametrize("leaves", [True, False], ids=["left", "kept"])
def test_a_wrapper_is_put_together_anew_for_each_read(rig: Rig, leaves: bool) -> None:
    x = TwoTensor(value(), value())
    expected = [x.a.clone(), x.b.clone()]
    with rig.group(leaves=leaves):
        packed = rig.engine.hooks.pack(x)
    del x
    rig.leave()
    reads = [rig.engine.hooks.unpack(packed) for _ in range(2)]
    for read in reads:
        assert_equal_bits(expected, [read.a, read.b])
    assert reads[0].a is not reads[1].a
    del packed
    assert rig.end().saved == 2


@pytest.mark.parametrize("executor", EXECUTORS)
def test_slots_from_the_one_that_stays_are_read_where_they_are_and_the_others_come_back(
    executor: str,
) -> None:
    rig = Rig(executor)  # type: ignore[arg-type]
    values = [value() for _ in range(4)]
    expected = [x.clone() for x in values]
    where = [x.data_ptr() for x in values]
    found: list[Tensor] = []
    with rig.group(stays_from=2):
        y = keep(found, *values, values[3][10:20], values[0][10:20])
    values.clear()
    rig.leave()
    assert rig.states() == [SPILLED, SPILLED, RESIDENT, RESIDENT]
    y.backward(retain_graph=True)
    y.backward()
    assert_equal_bits([*expected, expected[3][10:20], expected[0][10:20]] * 2, found)
    assert [read.data_ptr() for read in found[2:4]] == where[2:]
    assert found[4].data_ptr() == where[3] + 40
    del y, found
    stats = rig.end()
    assert (stats.spilled, stats.spill_bytes, stats.restored) == (2, 2 * NBYTES, 2), (
        "the second read finds what `found` holds"
    )


def test_a_group_that_an_exception_left_open_holds_nothing_that_no_graph_holds(rig: Rig) -> None:
    """It held the block that its next save would have joined, and an apply() for other limits was refused for
    good: that block's backward could not come any more."""
    with rig.group(leaves=False, commit=False):
        packed = rig.engine.hooks.pack(value())
        assert len(rig.blocks()) == 1
        del packed
        assert not rig.blocks()
        _packed = rig.engine.hooks.pack(value())
        assert rig.states() == [RESIDENT]


# -- sharing -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("first_stays", [True, False])
def test_a_storage_saved_by_a_group_that_stays_and_one_that_leaves_follows_the_first_in_each_chunk(
    first_stays: bool, rig: Rig
) -> None:
    x = value()
    expected = x.clone()
    found: list[Tensor] = []
    outputs = []
    for stays in (first_stays, not first_stays):
        rig.chunk()
        with rig.group(leaves=not stays):
            outputs.append(keep(found, x, x[:8]))
        with rig.group(leaves=stays):
            outputs.append(keep(found, x.view(16, 16)))
        rig.chunks[-1].complete()
    storage = WeakStorage(x.untyped_storage())
    del x
    rig.leave()
    assert rig.states() == [RESIDENT, SPILLED] if first_stays else [SPILLED, RESIDENT]
    assert (rig.saved, rig.spilled_bytes) == (2, NBYTES)
    for output in outputs:
        output.backward()
    assert_equal_bits([expected, expected[:8], expected.view(16, 16)] * 2, found)
    found.clear()
    del output, outputs
    assert storage.storage() is None


def test_a_tensor_that_stays_and_is_changed_before_it_leaves_again_is_two_records(rig: Rig) -> None:
    x = value()
    with rig.group(leaves=False):
        before = keep([], x)
    x.add_(1)
    expected = x.clone()
    found: list[Tensor] = []
    with rig.group():
        after = keep(found, x)
    assert rig.saved == 2
    after.backward()
    assert_equal_bits([expected], found)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


# -- when the bytes go ---------------------------------------------------------------------------------------
def test_what_stays_and_is_never_read_goes_with_its_graph_without_the_garbage_collector(rig: Rig) -> None:
    x = torch.randn(ELEMENTS, requires_grad=True)
    gc.disable()
    try:
        with rig.group(leaves=False):
            y = x.exp()  # saves its own output
        storage = WeakStorage(y.untyped_storage())
        del y
        assert storage.storage() is None
    finally:
        gc.enable()


def test_what_stays_and_is_left_over_lets_go_of_its_bytes_at_the_end_of_the_step(rig: Rig) -> None:
    x = value()
    storage = WeakStorage(x.untyped_storage())
    with rig.group(leaves=False):
        packed = [rig.engine.hooks.pack(x), rig.engine.hooks.pack(x[:8])]
    del x
    assert storage.storage() is not None
    rig.end()
    assert storage.storage() is None
    assert len(packed) == 2, "the handles live"


def test_the_bytes_that_stay_go_when_the_last_of_their_nodes_has_run(rig: Rig) -> None:
    x = value()
    storage = WeakStorage(x.untyped_storage())
    with rig.group(leaves=False):
        outputs = [keep([], x), keep([], x[:8])]
    del x
    for number, output in enumerate(outputs):
        output.grad_fn.found.clear()  # type: ignore[union-attr]
        output.backward()
        output.grad_fn.found.clear()  # type: ignore[union-attr]
        assert (storage.storage() is None) == (number == 1)
    rig.transfers.reclaim_freed()
    assert rig.transfers.resident_bytes == 0


def test_a_tensor_that_stays_is_gone_with_its_handle_though_its_piece_is_not() -> None:
    rig = Rig(piece_bytes=4 * NBYTES)
    with rig.group(leaves=False):
        packed = [rig.engine.hooks.pack(torch.randn(ELEMENTS)) for _ in range(2)]
    first, second = (WeakStorage(handle.probe.untyped_storage()) for handle in packed)
    del packed[0]
    assert first.storage() is None
    assert second.storage() is not None
    assert [block.nbytes for block in rig.blocks()] == [2 * NBYTES]


def test_what_has_died_is_counted_out_before_the_next_save_is_counted_in(rig: Rig) -> None:
    with rig.group(leaves=False):
        for _ in range(5):
            rig.engine.hooks.pack(value())  # and its handle dies at once
    assert rig.end().device_bytes_peak == NBYTES
