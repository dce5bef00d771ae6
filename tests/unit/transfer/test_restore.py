"""The way back: buffers, who waits for them, dropping and fetching again, and what a restore that nobody
reads leaves behind."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from offload.device.sim import ExecutorName, SimDevice
from offload.errors import HazardError, OffloadError
from offload.transfer.block import BlockState
from offload.transfer.copier import Priority
from tests.unit.saved.rig import ELEMENTS, EXECUTORS, KIB, Rig, assert_equal_bits, chain, gradients, leaf
from tests.unit.saved.test_views import keep

PAGE = 4096


def gone(length: int, rig: Rig) -> Tensor:
    """The end of a chain whose saved tensors are on the host, its forward complete."""
    with rig.group():
        y = chain(leaf(), length)
    rig.leave()
    rig.chunks[-1].complete()
    assert rig.states() == length * [BlockState.SPILLED]
    return y


# -- read when asked -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("executor", EXECUTORS)
def test_each_tensor_comes_back_once_and_is_dropped_after_its_last_read(executor: ExecutorName) -> None:
    rig = Rig(executor, max_restoring_bytes=0)
    y = gone(3, rig)
    y.sum().backward()
    assert rig.reads == ["s0m0/group#0[2]", "s0m0/group#0[1]", "s0m0/group#0[0]"]
    assert rig.restored_bytes == 3 * KIB
    assert rig.transfers.restoring_bytes == 0
    del y
    stats = rig.end()
    assert (stats.spilled, stats.restored) == (3, 3)
    assert stats.spill_bytes == stats.restore_bytes == 3 * KIB
    assert stats.device_bytes_peak == 3 * KIB


def test_compute_waits_for_its_own_bytes_and_the_host_for_nothing() -> None:
    rig = Rig(max_restoring_bytes=0)
    y = gone(3, rig)
    y.sum().backward()
    assert rig.device.waits["read"] == 3
    assert rig.device.waits["restore"] == 3
    assert rig.device.blocked_s == 0


def test_records_of_one_piece_are_fetched_under_one_event() -> None:
    rig = Rig(piece_bytes=3 * KIB)
    y = gone(3, rig)
    rig.pump()
    assert rig.transfers.in_flight() == (0, 1)
    # one spill, so one event to wait for
    assert (rig.device.waits["allocate"], rig.device.waits["restore"]) == (1, 1)
    assert rig.states() == 3 * [BlockState.RESTORING]
    y.sum().backward()
    assert rig.device.waits["read"] == 1


# -- fetched ahead -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("caps", "peak"),
    [
        ({"max_restoring_bytes": 2 * KIB}, 5 * KIB),
        ({"device_limit_bytes": 2 * KIB, "max_restoring_bytes": 100 * KIB}, 2 * KIB),
    ],
)
def test_a_prefetch_fetches_what_is_read_next_within_its_cap_and_the_device_limit(
    caps: dict[str, int], peak: int
) -> None:
    rig = Rig(**caps)
    y = gone(5, rig)
    rig.pump()
    assert rig.transfers.restoring_bytes == rig.transfers.device_bytes == 2 * KIB
    assert rig.states() == 3 * [BlockState.SPILLED] + 2 * [BlockState.RESTORING]
    rig.engine.on_read(lambda _: rig.pump())
    y.sum().backward()
    del y
    stats = rig.end()
    assert (stats.restored, stats.device_bytes_peak) == (5, peak)


def test_a_prefetch_is_issued_where_the_device_limit_has_room_for_it() -> None:
    rig = Rig(device_limit_bytes=4 * KIB, max_restoring_bytes=2 * KIB)
    _y = gone(3, rig)
    rig.chunk()
    with rig.group():
        _z = chain(leaf(), 1)
    assert rig.transfers.spilling_bytes == KIB, "it need not make way"
    rig.pump()
    assert rig.states() == [BlockState.SPILLED] + 2 * [BlockState.RESTORING] + [BlockState.SPILLING]


def test_what_one_graph_fetches_ahead_another_graph_fetches_for_itself() -> None:
    """Graphs may be replayed without the one that fetched a tensor and did not read it."""
    rig = Rig(max_restoring_bytes=2 * KIB)
    rig.engine.reserve_host(64 * PAGE)
    with rig.engine.capturing() as region:
        with rig.device.capture(), rig.group():
            packed = [rig.engine.hooks.pack(torch.randn(ELEMENTS)) for _ in range(2)]
        rig.chunks[0].complete()
        with rig.device.capture():
            rig.engine.hooks.unpack(packed[1])
            rig.pump()
        assert rig.states() == 2 * [BlockState.SPILLED], "nor does a reader outside of graphs find it here"
        with rig.device.capture():
            rig.engine.hooks.unpack(packed[0])
    assert [graph.restore_bytes for graph in region.graphs] == [0, 2 * KIB, KIB]
    packed.clear()
    region.release()


def test_nothing_is_fetched_before_its_forward_is_complete(rig: Rig) -> None:
    """A prefetch once brought back, inside a forward, what that forward had just sent out."""
    with rig.group():
        _y = chain(leaf(), 3)
    rig.leave()
    rig.pump()
    assert rig.restored_bytes == 0
    rig.chunks[0].complete()
    rig.pump()
    assert rig.restored_bytes == 3 * KIB


def test_a_tensor_larger_than_the_prefetch_cap_is_fetched_alone() -> None:
    rig = Rig(max_restoring_bytes=KIB)
    with rig.group():
        _y = chain(leaf(3), 2)
    rig.leave()
    rig.chunks[0].complete()
    rig.pump()
    assert rig.transfers.restoring_bytes == 3 * KIB
    rig.pump()
    assert rig.transfers.restoring_bytes == 3 * KIB


def test_what_is_still_alive_is_not_fetched(rig: Rig) -> None:
    x = leaf()
    with rig.group():
        y = x.sin()
    rig.leave()
    rig.chunks[0].complete()
    rig.pump()
    y.sum().backward()
    assert rig.restored_bytes == 0
    del y
    stats = rig.end()
    assert (stats.spilled, stats.restored) == (1, 0)


# -- lives ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_graph_dropped_while_its_tensors_come_back_leaves_nothing(executor: ExecutorName) -> None:
    rig = Rig(executor)
    y = gone(3, rig)
    rig.pump()
    assert rig.states() == 3 * [BlockState.RESTORING]
    assert rig.transfers.restoring_bytes == 3 * KIB
    del y
    rig.transfers.reclaim_freed()
    rig.assert_empty()
    if executor == "late":
        assert rig.device.waits["abandon"] == 3
    stats = rig.end()
    assert (stats.spilled, stats.restored) == (3, 3)


def test_what_is_freed_between_the_look_and_the_fetch_is_passed_over() -> None:
    """A finaliser runs whenever it likes, on any thread."""
    rig = Rig(max_restoring_bytes=0)
    with rig.group():
        packed = [rig.engine.hooks.pack(torch.randn(ELEMENTS)) for _ in range(2)]
    rig.leave()
    kept, freed = rig.blocks()
    del packed[1]
    transfer = rig.transfers.restore([kept, freed], Priority.SPECULATIVE)
    assert transfer.blocks == (kept,)
    assert (freed.host, freed.event, freed.transfer) == (None, None, None)
    packed.clear()
    assert rig.transfers.restore([kept], Priority.SPECULATIVE) is None


def test_part_of_a_restored_piece_may_die_unread() -> None:
    rig = Rig(piece_bytes=4 * KIB)
    with rig.group():
        y, z = chain(leaf(), 2), chain(leaf(), 2)
    rig.leave()
    rig.chunks[0].complete()
    rig.pump()
    assert rig.transfers.in_flight() == (0, 1)
    del y
    rig.transfers.reclaim_freed()
    assert rig.transfers.restoring_bytes == 2 * KIB
    assert rig.states() == 2 * [BlockState.RESTORED]
    z.sum().backward()


def test_blocks_given_back_by_a_finaliser_are_lent_again(rig: Rig) -> None:
    for _ in range(5):
        rig.chunk()
        y = gone(2, rig)
        rig.engine.prefetch.pump([rig.chunks[-1].coming])
        del y
    assert rig.engine.arena.stats().lent_peak_bytes == 2 * KIB


# -- dropping ------------------------------------------------------------------------------------------------
def test_a_dropped_tensor_is_fetched_again_without_a_second_spill() -> None:
    rig = Rig(max_restoring_bytes=0)
    y = gone(3, rig)
    y.sum().backward(retain_graph=True)
    assert rig.states() == 3 * [BlockState.SPILLED]
    y.sum().backward()
    assert (rig.spilled_bytes, rig.restored_bytes) == (3 * KIB, 6 * KIB)
    del y
    stats = rig.end()
    assert (stats.spilled, stats.restored) == (3, 6)


def test_what_was_fetched_ahead_and_not_read_is_forgotten_with_its_step() -> None:
    rig = Rig(device_limit_bytes=2 * KIB, max_restoring_bytes=KIB)
    _y = gone(4, rig)
    first, second, *_ = rig.blocks()
    rig.transfers.restore([first], Priority.SPECULATIVE)
    rig.transfers.drop_furthest(KIB)
    rig.transfers.restore([second], Priority.SPECULATIVE)
    assert rig.transfers.dropped
    assert rig.transfers._ahead
    rig.end()
    assert not rig.transfers.dropped
    assert not rig.transfers._ahead, "blocks of a step that is over"


def test_a_dropped_tensor_that_somebody_still_holds_is_not_fetched_again() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            (first,) = ctx.saved_tensors
            (second,) = ctx.saved_tensors
            assert first.data_ptr() == second.data_ptr()
            return gradient * first * second

    program = lambda x: Doubled.apply(x * 3)  # noqa: E731
    x = leaf()
    rig = Rig(max_restoring_bytes=0)
    assert_equal_bits(gradients(program, [x]), gradients(program, [x], rig))
    stats = rig.end()
    assert (stats.spilled, stats.restored) == (1, 1)


# -- lanes and threads ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_reader_on_another_compute_lane_gets_a_copy_of_its_own(executor: ExecutorName) -> None:
    rig = Rig(executor)
    x = leaf()
    program = lambda x: chain(x, 3)  # noqa: E731
    with rig.group():
        y = chain(x, 3)
    rig.leave()
    rig.chunks[0].complete()
    rig.pump()  # allocates on the first lane
    with rig.device.use_lane(rig.device.new_compute_lane("second")):
        (found,) = torch.autograd.grad(y.sum(), [x])
    assert_equal_bits(gradients(program, [x]), [found])


def test_that_copy_is_not_the_buffer_and_both_lanes_are_ordered(rig: Rig) -> None:
    value = torch.randn(ELEMENTS)
    expected = value.clone()
    with rig.group():
        packed = [rig.engine.hooks.pack(value) for _ in range(2)]
    del value
    rig.leave()
    first = rig.engine.hooks.unpack(packed[0])  # the other reader is to come: the buffer stays
    returned = rig.device.waits["return"]
    with rig.device.use_lane(rig.device.new_compute_lane("second")):
        second = rig.engine.hooks.unpack(packed[1])
    assert_equal_bits([expected, expected], [first, second])
    assert first.data_ptr() != second.data_ptr()
    # the buffer goes back to the first lane, after the second has read it
    assert rig.device.waits["return"] == returned + 1


def test_without_the_edge_of_a_read_the_checker_says_so() -> None:
    rig = Rig(device=SimDevice(without={"read"}))
    y = gone(1, rig)
    with pytest.raises(HazardError, match="RAW"):
        y.sum().backward()


def test_a_reader_on_another_thread_reads_the_same_bits() -> None:
    rig = Rig("random", seed=5)
    x = leaf()
    program = lambda x: chain(x, 3)  # noqa: E731
    with rig.group():
        y = chain(x, 3)
    rig.leave()
    found: list[Tensor] = []

    def read(y: Tensor) -> None:
        found.extend(torch.autograd.grad(y.sum(), [x]))

    reader = threading.Thread(target=read, args=(y,))
    reader.start()
    reader.join()
    assert_equal_bits(gradients(program, [x]), found)


# -- audit ---------------------------------------------------------------------------------------------------
def test_an_audit_passes_what_nobody_touched() -> None:
    rig = Rig(audit=True, max_restoring_bytes=0)
    y = gone(2, rig)
    y.sum().backward()
    del y
    assert rig.end().restored == 2


def test_an_audit_finds_a_host_copy_that_was_written_to() -> None:
    rig = Rig(audit=True, max_restoring_bytes=0)
    y = gone(2, rig)
    block = rig.blocks()[0].host
    block.extents[0][7] ^= 1  # one bit of 8,192
    with pytest.raises(
        OffloadError,
        match=r"s0m0/group#0\[0\]: the 1,024 bytes in host memory are not the ones that were written there",
    ):
        y.sum().backward()


def test_without_an_audit_nothing_is_checked() -> None:
    rig = Rig(max_restoring_bytes=0)
    y = gone(1, rig)
    rig.device.synchronize(rig.device.record(rig.device.d2h))
    (block,) = rig.blocks()
    assert block.host is not None
    assert block.checksum is None
    block.host.extents[0].zero_()
    y.sum().backward()


def test_a_restore_may_be_asked_for_by_hand(rig: Rig) -> None:
    y = gone(2, rig)
    transfer = rig.transfers.restore(rig.blocks(), Priority.BACKGROUND)
    assert transfer.nbytes == 2 * KIB
    y.sum().backward()
    del y
    assert rig.end().restored == 2


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_tensor_whose_host_bytes_lie_in_two_places_comes_back_whole(executor: ExecutorName) -> None:
    """Three pages of host memory, the middle one lent: what needs two gets the first and the last."""
    rig = Rig(executor, host_limit_bytes=3 * PAGE)
    found: list[Tensor] = []
    pages = [torch.randn(PAGE // 4) for _ in range(3)]
    graphs = []
    for page in pages:
        with rig.group():
            graphs.append(keep(found, page))
    middle = pages[1].clone()
    del page, pages
    rig.leave()
    graphs[0] = graphs[2] = None
    rig.transfers.reclaim_freed()
    wide = torch.randn(2 * PAGE // 4)
    expected = wide.clone()
    with rig.group():
        y = keep(found, wide)
    del wide
    (block,) = [block for block in rig.blocks() if block.nbytes == 2 * PAGE]
    assert [extent.numel() for extent in block.host.extents] == [PAGE, PAGE]
    rig.leave()
    y.backward()
    graphs[1].backward()
    assert_equal_bits([expected, middle], found)
    del y
    graphs.clear()
