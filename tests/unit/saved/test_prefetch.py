"""The coming reads and the window over them: what is fetched early, what is left where it is, and that a hint
never changes a result."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.device.sim import ExecutorName
from offload.transfer.block import BlockState
from offload.transfer.coming import ComingReads
from tests.unit.saved.rig import ELEMENTS, EXECUTORS, KIB, Rig, assert_equal_bits, chain, leaf
from tests.unit.saved.test_views import keep

SPILLED, RESTORING, RESIDENT = BlockState.SPILLED, BlockState.RESTORING, BlockState.RESIDENT


def saved(rig: Rig, length: int, *, gone: bool = True) -> Tensor:
    """The end of a chain, a chunk of its own, whose forward is complete."""
    chunk = rig.chunk()
    with rig.group():
        y = chain(leaf(), length)
    if gone:
        rig.leave()
    chunk.complete()
    return y


def pump(rig: Rig) -> None:
    rig.pump()


# -- order ---------------------------------------------------------------------------------------------------
def test_reads_are_expected_in_the_reverse_order_of_the_last_saves() -> None:
    rig = Rig(max_restoring_bytes=KIB)
    first, second = torch.randn(ELEMENTS), torch.randn(ELEMENTS)
    with rig.group():
        _y = keep([], first, second, first)  # `first` is saved last, so it is read first
    del first, second
    rig.leave()
    rig.chunks[0].complete()
    pump(rig)
    assert rig.states() == [RESTORING, SPILLED]


def test_a_weight_half_expects_the_reads_of_an_earlier_one() -> None:
    rig = Rig(max_restoring_bytes=2 * KIB)
    _y = saved(rig, 4)
    # one was never saved here, one comes twice
    rig.chunks[0].expect([(0, 1), (0, 0), (0, 9), (0, 1), (0, 3)])
    pump(rig)
    assert rig.states() == [RESTORING, RESTORING, SPILLED, SPILLED]


def test_what_is_read_in_no_order_at_all_is_read_right() -> None:
    for seed in range(20):
        rig = Rig("random", seed=seed, max_restoring_bytes=2 * KIB)
        values = [torch.randn(ELEMENTS) for _ in range(6)]
        expected = [value.clone() for value in values]
        with rig.group():
            packed = [rig.engine.hooks.pack(value) for value in values]
        values.clear()
        rig.leave()
        rig.chunks[0].complete()
        rig.engine.on_read(lambda _, rig=rig: pump(rig))  # type: ignore[misc]
        order = list(range(6)) * 2
        random.Random(seed).shuffle(order)
        for index in order:
            assert_equal_bits([expected[index]], [rig.engine.hooks.unpack(packed[index])])
        packed.clear()


# -- the window ----------------------------------------------------------------------------------------------
@pytest.mark.req("S2-81")
def test_the_window_moves_on_with_the_reader() -> None:
    rig = Rig(max_restoring_bytes=2 * KIB)
    y = saved(rig, 5)
    seen: list[int] = []

    def reader(_: Any) -> None:
        pump(rig)
        seen.append(rig.restored_bytes // KIB)

    rig.engine.on_read(reader)
    pump(rig)
    assert rig.restored_bytes == 2 * KIB
    y.sum().backward()
    assert seen == [3, 4, 5, 5, 5]


def test_the_window_reaches_into_the_chunk_that_is_read_after_this_one() -> None:
    rig = Rig(max_restoring_bytes=3 * KIB)
    _y, _z = saved(rig, 2), saved(rig, 2)
    pump(rig)
    assert rig.states() == [RESTORING, RESTORING, SPILLED, RESTORING]


def test_a_chunk_that_is_still_in_its_forward_closes_the_window(rig: Rig) -> None:
    _y = saved(rig, 1)
    rig.chunk()
    with rig.group():
        _z = chain(leaf(), 1)
    _third = saved(rig, 1)
    pump(rig)
    assert rig.states() == [RESTORING, SPILLED, SPILLED]


def test_what_never_left_takes_room_in_the_window_and_is_not_copied() -> None:
    """Fetching what is read later while what is read next is on the device anyway would only fill the
    device."""
    rig = Rig(max_restoring_bytes=2 * KIB)
    rig.chunk()
    with rig.group():
        y = chain(leaf(), 2)
    with rig.group(leaves=False):
        z = y.cos().cos()
    rig.leave()
    del y
    rig.chunks[0].complete()
    pump(rig)
    assert rig.restored_bytes == 0
    rig.engine.on_read(lambda _: pump(rig))
    z.sum().backward()
    assert rig.restored_bytes == 2 * KIB


def test_a_step_of_which_nothing_has_left_is_not_looked_through() -> None:
    rig = Rig(max_restoring_bytes=4 * KIB)
    rig.chunk()
    with rig.group(leaves=False):
        y = chain(leaf(), 2)
    rig.chunks[0].complete()
    pump(rig)
    assert rig.chunks[0].coming.ahead_bytes == 0
    with rig.group():
        _z = chain(y, 1)
    pump(rig)
    assert rig.chunks[0].coming.ahead_bytes == 2 * KIB


def test_what_is_on_its_way_out_and_read_next_is_kept_instead_of_fetched() -> None:
    rig = Rig(max_restoring_bytes=2 * KIB)
    y = saved(rig, 3, gone=False)
    pump(rig)
    assert rig.states() == [BlockState.SPILLING, RESIDENT, RESIDENT]
    y.sum().backward()
    assert rig.restored_bytes == 0


def test_a_living_receive_buffer_is_fetched_ahead_as_anything_else(rig: Rig) -> None:
    """Its own bytes may have been overwritten, so its reader needs the copy; left alone, each such read had
    to wait."""
    buffer = torch.ones(ELEMENTS)
    rig.engine.register_external(buffer)
    with rig.group():
        y = keep([], buffer)
    rig.leave()
    rig.chunks[0].complete()
    pump(rig)
    assert rig.states() == [RESTORING]
    y.backward()
    del y
    assert rig.end().restored == 1


def test_dead_and_ended_records_are_passed_over() -> None:
    rig = Rig(max_restoring_bytes=KIB)
    rig.chunk()
    with rig.group():
        _y, z = chain(leaf(), 2), chain(leaf(), 1)
    rig.leave()
    rig.chunks[0].complete()
    del z  # it would be read first
    pump(rig)
    assert rig.states() == [SPILLED, RESTORING]
    chunks = list(rig.chunks)
    rig.end()
    rig.engine.prefetch.pump([chunk.coming for chunk in chunks])
    assert rig.restored_bytes == KIB


def test_ahead_bytes_count_what_lies_between_the_reader_and_the_fetch() -> None:
    rig = Rig(max_restoring_bytes=0)
    with rig.group():
        packed = [rig.engine.hooks.pack(torch.randn(ELEMENTS)) for _ in range(4)]
    rig.leave()
    coming = ComingReads(rig.chunks[0].id)
    coming.expect(rig.blocks())
    fetch, keep, sizes = coming.look(3 * KIB, KIB)
    assert [len(fetch), keep, sizes] == [1, [], [KIB]]
    coming.take(sizes)
    coming.take(coming.look(3 * KIB, 100 * KIB)[2])
    assert coming.ahead_bytes == 3 * KIB
    assert coming.look(3 * KIB, KIB) is None
    rig.engine.hooks.unpack(packed[0])
    del packed[1:2]
    assert coming.look(0, KIB) is None  # follows the reader
    assert coming.ahead_bytes == KIB


def test_what_was_fetched_and_dropped_is_fetched_again_after_a_look_back() -> None:
    rig = Rig(max_restoring_bytes=4 * KIB, device_limit_bytes=5 * KIB)
    y = saved(rig, 6)
    pump(rig)
    fetched = [SPILLED, SPILLED, RESTORING, RESTORING, RESTORING, RESTORING]
    assert rig.states() == fetched
    rig.chunk()
    with rig.group(leaves=False):
        z = chain(leaf(), 2)
    dropped = [SPILLED, SPILLED, SPILLED, *fetched[3:], RESIDENT, RESIDENT]
    assert rig.states() == dropped
    del z
    pump(rig)
    assert rig.states() == dropped[:6], "the window thinks that it has it"
    for _ in range(2):
        rig.engine.prefetch.look_back(rig.chunks[0].coming)
        pump(rig)
        assert rig.states() == fetched
        assert rig.chunks[0].coming.ahead_bytes == 4 * KIB
    y.sum().backward()


# -- results -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("kib", [0, 1, 3, 100])
def test_a_prefetch_of_any_size_changes_no_bit(kib: int, executor: ExecutorName) -> None:
    rig = Rig(executor, seed=8, max_restoring_bytes=kib * KIB, piece_bytes=2 * KIB)
    rig.engine.on_read(lambda _: pump(rig))
    inputs = [leaf() for _ in range(3)]
    outputs = []
    for x in inputs:
        rig.chunk()
        with rig.group():
            outputs.append(chain(x, 4).sum())
    rig.leave()
    for chunk in rig.chunks:
        chunk.complete()
    pump(rig)
    for x, output in zip(inputs, outputs, strict=True):
        (expected,) = torch.autograd.grad(chain(x, 4).sum(), [x])
        assert_equal_bits([expected], list(torch.autograd.grad(output, [x])))
    del output
    outputs.clear()
    stats = rig.end()
    assert (stats.saved, stats.spilled, stats.restored) == (12, 12, 12)
