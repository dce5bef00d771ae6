"""The way out: what is in flight under the caps, who waits, and what comes back to whom when a record dies on
the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from offload.device import Event
from offload.device.sim import ExecutorName, SimDevice
from offload.memory.budget import LocalHostBudget
from offload.transfer.block import BlockState, WeakStorage
from tests.inside import impose
from tests.unit.saved.rig import ELEMENTS, EXECUTORS, KIB, Rig, assert_equal_bits, gradients, leaf


class NeverBlocks(SimDevice):
    """Whatever would block the host is an error."""

    def synchronize(self, event: Event) -> None:
        raise AssertionError(f"the host was blocked until {event}")


def chain(x: Tensor, length: int) -> Tensor:
    """Saves `length` tensors of the size of x: a sine saves its input, and only the first of them is held by
    somebody else."""
    for _ in range(length):
        x = x.sin()
    return x


# -- caps ----------------------------------------------------------------------------------------------------
def test_past_the_spilling_cap_compute_waits_for_the_oldest_and_the_host_for_nothing() -> None:
    device = NeverBlocks()
    rig = Rig(device=device, max_spilling_bytes=2 * KIB)
    with rig.group():
        _y = chain(leaf(), 5)
    assert rig.transfers.in_flight() == (2, 0)
    assert rig.transfers.spilling_bytes == 2 * KIB
    assert device.waits["settle"] == 3
    assert rig.states() == 3 * [BlockState.SPILLED] + 2 * [BlockState.SPILLING]
    assert device.blocked_s == 0


def test_a_tensor_larger_than_the_spilling_cap_leaves_alone() -> None:
    rig = Rig(max_spilling_bytes=KIB)
    with rig.group():
        _y = chain(leaf(3), 1)
        assert rig.transfers.in_flight() == (1, 0)
        _z = chain(leaf(3), 1)
    assert rig.transfers.in_flight() == (1, 0)
    assert rig.states() == [BlockState.SPILLED, BlockState.SPILLING]


def test_a_spilling_cap_of_zero_refuses_and_waits_for_nothing() -> None:
    rig = Rig(device=NeverBlocks(), max_spilling_bytes=0)
    x = leaf()
    program = lambda x: chain(x, 3)  # noqa: E731
    assert_equal_bits(gradients(program, [x]), gradients(program, [x], rig))
    stats = rig.end()
    assert (stats.saved, stats.kept, stats.spilled) == (3, 3, 0)
    assert (stats.refused, stats.refused_bytes) == (3, 3 * KIB)
    assert rig.device.waits["settle"] == 0


def test_spills_that_were_refused_by_a_cap_pin_nothing_for_the_next_step() -> None:
    """The step's end reserves what it was seen to lack; a cap of zero lacks no memory, and 64 MiB were pinned
    for nothing."""
    rig = Rig(max_spilling_bytes=0)
    with rig.group():
        y = chain(leaf(), 3)
    del y
    rig.end()
    assert rig.engine.arena.held_bytes == 0


@pytest.mark.parametrize("executor", EXECUTORS)
def test_saved_bytes_on_the_device_stay_under_the_limit_forward_and_backward(executor: ExecutorName) -> None:
    """Room is made before bytes are added, so the peak is the limit itself, and with a limit of no use, one
    record."""
    for limit_kib, expected_kib in ((4, 4), (2, 2), (1, 1), (0, 1)):
        rig = Rig(executor, device_limit_bytes=limit_kib * KIB)
        x = leaf()
        program = lambda x: chain(x, 8)  # noqa: E731
        assert_equal_bits(gradients(program, [x]), gradients(program, [x], rig))
        stats = rig.end()
        assert stats.spilled == 8
        if executor == "early":  # a spill that has passed already need not be waited for
            assert stats.device_bytes_peak <= expected_kib * KIB
        else:
            assert stats.device_bytes_peak == expected_kib * KIB


def test_past_the_limit_a_piece_leaves_before_it_is_full() -> None:
    """A limit below the size of a piece was passed by all that a piece holds, and then by the save that had
    no room beside it."""
    rig = Rig(device_limit_bytes=2 * KIB, piece_bytes=100 * KIB)
    with rig.group() as group:
        y = chain(leaf(), 8)
    assert [transfer.nbytes for transfer in group.transfers] == [2 * KIB] * 4
    del y
    assert rig.end().device_bytes_peak == 2 * KIB


def test_tensors_of_many_sizes_never_pass_the_limit_by_more_than_one_of_them() -> None:
    sizes = [3, 1, 7, 2, 5, 1, 1, 6, 4]
    rig = Rig(device_limit_bytes=6 * KIB)
    with rig.group():
        outputs = [leaf(size).sin() for size in sizes]
    rig.leave()
    sum(output.sum() for output in outputs).backward()  # type: ignore[union-attr]
    del outputs
    assert rig.end().device_bytes_peak <= (6 + max(sizes)) * KIB


def test_what_may_not_leave_is_not_waited_for() -> None:
    rig = Rig(device=NeverBlocks(), device_limit_bytes=2 * KIB)
    with rig.group(leaves=False):
        _y = chain(leaf(), 4)
    assert rig.transfers.resident_bytes == 4 * KIB
    assert rig.device.waits["settle"] == 0


def test_limits_may_change_between_steps() -> None:
    rig = Rig(max_spilling_bytes=0)
    for cap, spilled in ((0, 0), (KIB, 2), (0, 0)):
        impose(rig.engine, max_spilling_bytes=cap)
        with rig.group():
            y = chain(leaf(), 2)
        del y
        assert rig.end().spilled == spilled


# -- host blocks ---------------------------------------------------------------------------------------------
def test_without_a_host_block_a_tensor_stays_and_is_counted() -> None:
    rig = Rig(budget=LocalHostBudget(0))
    x = leaf()
    program = lambda x: chain(x, 3)  # noqa: E731
    assert_equal_bits(gradients(program, [x]), gradients(program, [x], rig))
    stats = rig.end()
    assert (stats.kept, stats.spilled, stats.refused, stats.refused_bytes) == (3, 0, 3, 3 * KIB)


def test_what_found_no_block_finds_one_in_the_next_step() -> None:
    budget = LocalHostBudget(0)
    rig = Rig(budget=budget)
    for refused, spilled in ((3, 0), (0, 3)):
        with rig.group():
            y = chain(leaf(), 3)
        budget.limit_bytes = 1 << 30
        del y
        stats = rig.end()
        assert (stats.refused, stats.spilled) == (refused, spilled)
    assert stats.host_bytes_held >= 3 * KIB


@pytest.mark.req("S2-22")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_block_is_written_again_only_after_its_last_copy(executor: ExecutorName) -> None:
    """Six steps through the bytes of one: the checker of the simulated device raises where a copy is not
    waited for."""
    rig = Rig(executor, seed=1, device_limit_bytes=0)
    x = leaf()
    program = lambda x: chain(x, 4)  # noqa: E731
    expected = gradients(program, [x])
    held = set()
    for _ in range(6):
        assert_equal_bits(expected, gradients(program, [x], rig))
        stats = rig.end()
        assert (stats.spilled, stats.host_bytes_lent_peak) == (4, 4 * KIB)
        held.add(stats.host_bytes_held)
    assert len(held) == 1


# -- pieces --------------------------------------------------------------------------------------------------
def test_a_group_larger_than_a_piece_leaves_in_several_transfers_before_its_commit() -> None:
    rig = Rig(piece_bytes=2 * KIB)
    with rig.group(commit=False) as group:
        _y = chain(leaf(), 5)
    assert [transfer.nbytes for transfer in group.transfers] == [2 * KIB, 2 * KIB]
    assert rig.states() == 4 * [BlockState.SPILLING] + [BlockState.RESIDENT]
    rig.engine.store.commit(group)
    assert [transfer.nbytes for transfer in group.transfers] == [2 * KIB, 2 * KIB, KIB]
    assert rig.device.copies(rig.device.d2h) == 5


def test_a_group_smaller_than_a_piece_leaves_at_its_commit_under_one_event() -> None:
    rig = Rig(piece_bytes=100 * KIB)
    with rig.group(commit=False) as group:
        _y = chain(leaf(), 5)
    assert group.transfers == []
    rig.engine.store.commit(group)
    assert [transfer.nbytes for transfer in group.transfers] == [5 * KIB]
    assert rig.device.waits["spill"] == 1


def test_a_second_commit_sends_nothing_twice() -> None:
    rig = Rig(piece_bytes=100 * KIB)
    with rig.group() as group:
        _y = chain(leaf(), 2)
    rig.engine.store.commit(group)
    assert rig.spilled_bytes == 2 * KIB


# -- lives ---------------------------------------------------------------------------------------------------
def test_the_source_lives_until_compute_is_ordered_after_its_copy(rig: Rig) -> None:
    with rig.group():
        _y = (leaf() * 2).sin()
    (record,) = rig.blocks()
    source = WeakStorage(record.storage())  # type: ignore[arg-type]
    assert record.device_bytes is None
    assert source.storage() is not None
    rig.leave()
    assert source.storage() is None


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_graph_dropped_while_its_tensors_leave_gives_every_block_back(executor: ExecutorName) -> None:
    rig = Rig(executor)
    with rig.group():
        y = chain(leaf(), 3)
    assert rig.states() == 3 * [BlockState.SPILLING]
    del y
    assert rig.blocks() == []
    rig.transfers.reclaim_freed()
    assert rig.engine.arena.stats().lent == 0
    # the copies still read their sources
    assert (rig.transfers.spilling_bytes, rig.transfers.in_flight()) == (3 * KIB, (3, 0))
    rig.leave()
    rig.assert_empty()
    assert rig.end().spilled == 3


@pytest.mark.req("S2-22")
def test_the_copy_that_nobody_will_read_and_the_next_one_into_its_block_are_ordered() -> None:
    """Each dies once the next one is saved, before that leaves."""
    rig = Rig("late", piece_bytes=2 * KIB)
    for _ in range(3):
        with rig.group():
            y = (leaf() * 2).sin()
    del y
    assert rig.engine.arena.stats().lent_peak_bytes == KIB
    assert rig.device.waits["reuse"] == 2


def test_a_piece_waits_once_for_an_event_that_its_host_blocks_share() -> None:
    rig = Rig("late", piece_bytes=2 * KIB)
    for _ in range(2):
        with rig.group():
            y = chain(leaf() * 2, 2)
        del y
    assert rig.engine.arena.stats().lent_peak_bytes == 2 * KIB
    assert rig.device.waits["reuse"] == 1


def test_a_tensor_that_dies_before_its_piece_is_full_never_leaves() -> None:
    rig = Rig(piece_bytes=100 * KIB)
    with rig.group():
        y = chain(leaf(), 3)
        del y
    assert rig.spilled_bytes == 0
    stats = rig.end()
    assert (stats.saved, stats.kept) == (3, 3)


# -- one storage, two chunks ---------------------------------------------------------------------------------
@pytest.mark.parametrize("executor", EXECUTORS)
def test_two_chunks_may_send_the_same_tensor_at_the_same_time(executor: ExecutorName) -> None:
    """A mask or a table that every microbatch saves: the second spill was declared a new write of what the
    first one still read."""
    table = torch.randn(ELEMENTS)
    leaves = [leaf() for _ in range(3)]
    rig = Rig(executor)
    outputs = []
    for x in leaves:
        rig.chunk()
        with rig.group():
            outputs.append(x * table)
    expected = table.clone()
    del table
    assert rig.spilled_bytes == 3 * KIB
    rig.leave()
    sum(output.sum() for output in outputs).backward()  # type: ignore[union-attr]
    for x in leaves:
        assert torch.equal(x.grad, expected)
    del outputs
    assert rig.end().restored == 3


def test_bytes_that_two_copies_read_are_free_after_the_second(rig: Rig) -> None:
    table = torch.randn(ELEMENTS)
    outputs = []
    for _ in range(2):
        rig.chunk()
        with rig.group():
            outputs.append(leaf() * table)
    del table
    before = rig.device.active_bytes()
    first, second = (group.transfers[0] for group in rig.groups)
    rig.transfers.settle_spill(first)
    assert rig.device.active_bytes() == before
    rig.transfers.settle_spill(second)
    assert rig.device.active_bytes() == before - KIB


# -- staying after all ---------------------------------------------------------------------------------------
def reclaimed(**config: Any) -> tuple[Rig, Tensor]:
    """A rig whose one record was on its way out when a prefetch found that it is read next."""
    rig = Rig(**config)
    with rig.group():
        y = (leaf() * 2).sin()
    rig.chunks[0].complete()
    rig.pump()
    return rig, y


def test_a_tensor_on_its_way_out_that_is_read_next_stays() -> None:
    rig, y = reclaimed()
    assert rig.states() == [BlockState.RESIDENT]
    assert (rig.transfers.resident_bytes, rig.transfers.spilling_bytes) == (KIB, 0)
    assert rig.engine.arena.stats().lent == 1, "while its copy runs it may have to leave after all"
    rig.leave()
    assert rig.states() == [BlockState.RESIDENT]
    assert rig.engine.arena.stats().lent == 0
    y.sum().backward()
    assert rig.restored_bytes == 0


@pytest.mark.parametrize("executor", ["late", "early"])
def test_what_was_held_back_makes_room_for_a_save_that_finds_no_other(executor: ExecutorName) -> None:
    """The group's tensors stay by plan, so nothing of them is in flight."""
    rig, y = reclaimed(executor=executor, device_limit_bytes=2 * KIB, max_restoring_bytes=KIB)
    with rig.group(leaves=False):
        z = chain(leaf(), 2)
    assert rig.states() == [BlockState.SPILLED, BlockState.RESIDENT, BlockState.RESIDENT]
    assert rig.transfers.counts.device_bytes_peak == 2 * KIB
    (y.sum() + z.sum()).backward()
    assert rig.restored_bytes == KIB


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_was_held_back_makes_room_after_its_spill_was_settled_for_others(executor: ExecutorName) -> None:
    """It had given its host block back, and could make no room until its reader had it."""
    rig, y = reclaimed(executor=executor, device_limit_bytes=2 * KIB, max_restoring_bytes=KIB)
    rig.leave()
    assert rig.states() == [BlockState.RESTORED]
    with rig.group(leaves=False):
        z = chain(leaf(), 2)
    assert rig.states() == [BlockState.SPILLED, BlockState.RESIDENT, BlockState.RESIDENT]
    assert rig.transfers.counts.device_bytes_peak == 2 * KIB
    (y.sum() + z.sum()).backward()
    assert rig.restored_bytes == KIB
    del y, z
    rig.transfers.reclaim_freed()
    rig.assert_empty()


def test_the_bytes_of_a_tensor_that_stayed_count_until_its_unused_copy_has_run() -> None:
    rig, y = reclaimed()
    del y
    rig.transfers.reclaim_freed()
    assert (rig.transfers.resident_bytes, rig.transfers.spilling_bytes) == (0, KIB)


def test_room_is_not_made_by_waiting_for_a_spill_that_holds_nothing() -> None:
    device = SimDevice(poison=False)  # poisoning a block makes what wrote it before run
    rig, _y = reclaimed(device=device, device_limit_bytes=2 * KIB, max_restoring_bytes=KIB)
    with rig.group():
        _z = chain(leaf(), 2)
    assert rig.device.waits["settle"] == 1  # for the first of the two new ones
    assert rig.states() == [BlockState.RESIDENT, BlockState.SPILLED, BlockState.SPILLING]


@pytest.mark.parametrize(
    ("limit_bytes", "state"), [(2 * KIB, BlockState.RESIDENT), (2 * KIB - 1, BlockState.SPILLING)]
)
def test_a_tensor_on_its_way_out_stays_only_if_the_largest_still_fits_beside_what_stays(
    limit_bytes: int, state: BlockState
) -> None:
    rig, y = reclaimed(device_limit_bytes=limit_bytes, max_restoring_bytes=KIB)
    assert rig.states() == [state]
    y.sum().backward()
    assert rig.restored_bytes == 0, "it was read where it was"


def test_the_next_spill_into_the_block_of_an_unused_copy_waits_for_it() -> None:
    rig, y = reclaimed(executor="late")
    rig.leave()
    with rig.group():
        z = (leaf() * 2).sin()
    assert rig.engine.arena.stats().lent_peak_bytes == KIB
    rig.leave()
    (y.sum() + z.sum()).backward()


def test_the_next_spill_into_the_block_of_a_dead_tensor_waits_for_its_unused_copy() -> None:
    rig, y = reclaimed(executor="late")
    del y
    rig.transfers.reclaim_freed()
    with rig.group():
        z = (leaf() * 2).sin()
    assert rig.engine.arena.stats().lent_peak_bytes == KIB, "the copy of the first is still in flight"
    rig.leave()
    z.sum().backward()


def test_a_claim_takes_room_of_the_limit_until_the_next_one_or_the_step_ends() -> None:
    device = NeverBlocks()
    rig = Rig(device=device, device_limit_bytes=4 * KIB)
    with rig.group():
        y = chain(leaf(), 4)  # all in flight, and within the limit
    assert (device.waits["settle"], rig.transfers.device_bytes) == (0, 4 * KIB)
    rig.transfers.claim(3 * KIB)
    assert (device.waits["settle"], rig.transfers.device_bytes) == (3, 4 * KIB)
    assert rig.states() == 3 * [BlockState.SPILLED] + [BlockState.SPILLING]
    rig.transfers.claim(KIB)  # in place of the first
    assert rig.transfers.device_bytes == 2 * KIB
    for grown, settles in ((2 * KIB, 3), (3 * KIB, 4), (KIB, 4)):  # each in place of the one before
        rig.transfers.grow(grown)
        assert device.waits["settle"] == settles
    assert rig.transfers.device_bytes == 2 * KIB
    del y
    assert rig.end().device_bytes_peak == 4 * KIB
    assert rig.transfers.device_bytes == 0
