"""The handler of one chunk, called by hand: building it, its recorded groups, tensors by tag, starts and
commits that pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload import (
    ChunkOffloadHandler,
    GPUTensorPool,
    GroupOrderError,
    OffloadConfig,
    OffloadEngine,
    PipelineOffloadManager,
)
from offload.device.sim import SimDevice
from offload.transfer.block import BlockState
from tests.unit.groups.handlers import begun, device_of, group_of, settle, states
from tests.unit.groups.stack import EXECUTORS, build_manager, installed


# -- building ------------------------------------------------------------------------------------------------
@pytest.mark.req("S2-58", "S3-6")
def test_handler_stands_alone_with_a_pool_of_its_own_and_no_singleton() -> None:
    pool = GPUTensorPool("cpu", pin_memory=True)
    handler = ChunkOffloadHandler(8, pool)
    assert (handler.min_offloaded_tensor_size, handler.cpu_tensor_pool) == (8, pool)
    x = torch.randn(4, 4)
    assert torch.equal(handler.reload(handler.offload(x)), x)
    assert pool.stats["current_in_use"] == 0
    _, (tag,) = group_of(handler, "a", x)
    assert torch.equal(handler.tensor_pop(tensor_tag=tag), x)  # the source's name
    assert PipelineOffloadManager.OFFLOAD_MGR is None


@pytest.mark.req("S3-6")
def test_handler_copies_on_the_lanes_that_it_is_given() -> None:
    device = SimDevice()
    engine = OffloadEngine(OffloadConfig(), device=device)
    # the other way round, to see the difference
    handler = ChunkOffloadHandler(8, None, device.h2d, device.d2h, engine=engine)
    x = torch.randn(4, 4)
    assert torch.equal(handler.reload(handler.offload(x)), x)
    assert handler.d2h_stream is device.h2d
    assert (device.copies(device.h2d), device.copies(device.d2h)) == (1, 1)


# -- looking at the groups -----------------------------------------------------------------------------------
@pytest.mark.req("S2-62", "S2-63", "S2-65", "S2-70")
def test_groups_are_found_by_name_from_an_index_on(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    assert handler.is_empty_chunk()
    groups = [group_of(handler, name)[0] for name in ("a", "b", "a")]
    assert not handler.is_empty_chunk()
    assert handler.is_empty_chunk("c")
    assert not handler.is_empty_chunk("b")
    assert handler.find_group_with_name("a") is groups[0]
    assert handler.find_group_with_name("a", 1) is groups[2]
    assert handler.find_group_with_name("b", 2) is None
    assert handler.get_max_deduplicated_groups() == 2
    assert handler.find_next_group() is None  # all have been started
    handler.reset()
    assert handler.find_next_group() is groups[0]
    assert handler.find_next_group("b") is groups[1]
    handler.on_group_start_forward("a")
    assert handler.find_next_group("a") is groups[2]


@pytest.mark.req("S2-64")
def test_all_groups_are_finished_once_each_was_started(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    with pytest.raises(AssertionError, match="0 of 0 groups remain; say of which name"):
        handler.finish_all_groups()  # none was seen
    assert handler.finish_all_groups("a")
    for name in ("a", "b"):
        group_of(handler, name)
    assert handler.finish_all_groups()
    handler.reset()
    handler.on_group_start_forward("a")
    assert handler.finish_all_groups("a")
    assert not handler.finish_all_groups("b")
    with pytest.raises(AssertionError, match="s0m0: 1 of 2 groups remain; say of which name"):
        handler.finish_all_groups()


@pytest.mark.req("S2-61", "S2-79")
def test_reset_keeps_the_recorded_groups_and_forgets_their_tensors(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    groups = [group_of(handler, name, torch.ones(8))[0] for name in ("a", "b")]
    handler.on_group_start_forward("left open")
    handler.reset()
    assert handler.groups[:2] == groups
    assert [group.saved for group in groups] == [None, None]
    assert (handler.begun, handler.innermost_open()) == (False, None)
    assert handler.on_group_start_forward("a") is groups[0]  # found by name
    assert handler.on_group_start_forward("b") is groups[1]


@pytest.mark.req("S2-79")
def test_step_of_another_shape_is_recorded_from_where_it_differs(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    recorded = [group_of(handler, name)[0] for name in ("a", "b", "c")]
    handler.reset()
    assert handler.on_group_start_forward("a") is recorded[0]
    assert handler.on_group_start_forward("c") is not recorded[2]
    assert [group.name for group in handler.groups] == ["a", "c"]


# -- tensors by tag ------------------------------------------------------------------------------------------
@pytest.mark.req("S2-66")
def test_tags_name_group_and_position_and_are_never_used_twice(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    handler.on_group_start_forward("a")
    tensors = [torch.full((4,), float(number)) for number in range(4)]
    first, second = handler.tensor_push(tensors[0]), handler.tensor_push(tensors[1])
    assert (first, second) == ((0, 0), (0, 1))
    handler.tensor_pop(first)
    third = handler.tensor_push(tensors[2])
    assert third == (0, 2)  # not (0, 1), which the second has
    handler.on_group_start_forward("b")
    fourth = handler.tensor_push(tensors[3])
    assert fourth == (1, 0)
    for tag, tensor in ((second, tensors[1]), (third, tensors[2]), (fourth, tensors[3])):
        assert torch.equal(handler.tensor_pop(tag), tensor)


@pytest.mark.req("S2-67", "S3-69")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_pop_fetches_a_tensor_that_has_left_whether_its_copy_has_run_or_not(executor: Any) -> None:
    with installed(build_manager(executor)) as manager:
        handler = begun(manager)
        x = torch.randn(64)
        original = x.clone()
        group, (tag,) = group_of(handler, "a", x)
        assert states(group) == ["SPILLING"]
        del x
        settle(manager, group)
        assert torch.equal(handler.tensor_pop(tag), original)
        assert device_of(manager).copied_bytes(manager.h2d_stream) == 64 * 4
        with pytest.raises(KeyError, match=r"s0m0 holds no tensor under tag \(0, 0\); it holds 0 others"):
            handler.tensor_pop(tag)


@pytest.mark.req("S2-67")
def test_pop_of_a_tensor_that_still_lives_copies_nothing_back(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    x = torch.randn(64)
    _, (tag,) = group_of(handler, "a", x)
    assert handler.tensor_pop(tag).data_ptr() == x.data_ptr()
    assert device_of(manager).copies(manager.h2d_stream) == 0


def test_push_outside_a_group_is_refused(manager: PipelineOffloadManager) -> None:
    with pytest.raises(
        GroupOrderError,
        match=r"tensor_push of shape \(4,\), but no group is open; call on_group_start_forward first",
    ):
        begun(manager).tensor_push(torch.ones(4))


@pytest.mark.req("S2-68")
def test_small_marked_and_parameter_tensors_need_no_offloading(manager: PipelineOffloadManager) -> None:
    handler = begun(manager, min_elements=16)
    marked = torch.ones(16)
    manager.mark_not_offloadable(marked)
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    verdicts = {
        "large": (torch.ones(16), True),
        "small": (torch.ones(15), False),
        # elements count, not bytes
        "small in a large dtype": (torch.ones(15, dtype=torch.complex128), False),
        "marked": (marked, False),
        "view of a marked one": (marked.view(4, 4), False),
        "parameter": (parameter, False),
        "view of a parameter": (parameter.t(), False),
    }
    for what, (tensor, needed) in verdicts.items():
        assert handler.tensor_need_offloading_checker(tensor) is needed, what


# -- pairing -------------------------------------------------------------------------------------------------
def test_commit_closes_the_innermost_group_of_its_name(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    outer, other, inner = (handler.on_group_start_forward(name) for name in ("a", "b", "a"))
    assert handler.close("a") is inner
    assert handler.close("a") is outer
    with pytest.raises(
        GroupOrderError,
        match=r"group 'a', which has not been started; open: b\. Call group_start\(tensor, 'a'\)",
    ):
        handler.close("a")
    assert handler.innermost_open() is other


def test_start_that_was_muted_and_never_committed_does_not_swallow_a_later_commit(
    manager: PipelineOffloadManager,
) -> None:
    handler = begun(manager)
    handler.mute("a")  # a forward without gradients that raised before its commit
    group = handler.on_group_start_forward("a")
    assert handler.close("a") is group
    assert handler.close("a") is None
    with pytest.raises(GroupOrderError):
        handler.close("a")


def test_records_move_on_when_a_group_is_committed_late(manager: PipelineOffloadManager) -> None:
    """A piece leaves as soon as it is full; the commit sends the rest and decides nothing twice."""
    with installed(build_manager(piece_bytes=256)) as fresh:
        handler = begun(fresh)
        group = handler.on_group_start_forward("a")
        tags = [handler.tensor_push(torch.randn(64)) for _ in range(2)] + [
            handler.tensor_push(torch.randn(8))
        ]
        assert states(group) == ["SPILLING", "SPILLING", "RESIDENT"]
        handler.bulk_offload_group()
        handler.bulk_offload_group()
        handler.on_group_commit_forward()
        assert states(group) == ["SPILLING"] * 3
        assert {record.state for record in group.saved.living()} == {BlockState.SPILLING}
        assert (group.total_offload_bytes, group.total_tensor_count) == (2 * 256 + 32, 3)
        for tag in tags:
            handler.tensor_pop(tag)
