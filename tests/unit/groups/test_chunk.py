"""The handler of one chunk, called by hand: tensors by tag, groups out and back, forced release, single tensors."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from offload import (
    ChunkOffloadHandler,
    GPUTensorPool,
    GroupOrderError,
    OffloadConfig,
    OffloadEngine,
    OffloadTensorGroup,
    PipelineOffloadManager,
    StaleHandleError,
    init_chunk_handler,
    step_end,
)
from offload.device.sim import SimDevice
from offload.groups.by_hand import OffloadState
from offload.ids import ChunkId
from offload.transfer.record import RecordState
from tests.unit.groups.stack import EXECUTORS, Driver, build_manager, build_stages, installed, no_pipeline


def begun(manager: PipelineOffloadManager, min_elements: int = 1) -> ChunkOffloadHandler:
    """The handler of a forward that has just begun."""
    init_chunk_handler(None, None, min_elements)
    handler = manager.cur_forward_chunk()
    assert handler is not None
    return handler


def group_of(handler: ChunkOffloadHandler, name: str, *tensors: Tensor) -> tuple[OffloadTensorGroup, list[Any]]:
    """A group started, filled and committed by hand; with the tags."""
    group = handler.on_group_start_forward(name)
    tags = [handler.tensor_push(tensor) for tensor in tensors]
    handler.on_group_commit_forward(name=name)
    return group, tags


def settle(manager: PipelineOffloadManager, *groups: OffloadTensorGroup) -> None:
    """Let the sources of their copies go: until then a read finds them alive and needs no copy back."""
    for group in groups:
        assert group.saved is not None
        for transfer in group.saved.transfers:
            manager.engine.transfers.settle_spill(transfer)


def states(group: OffloadTensorGroup) -> list[str]:
    assert group.saved is not None
    return [record.state.name for record in group.saved.living()]


def device_of(manager: PipelineOffloadManager) -> SimDevice:
    device = manager.engine.device
    assert isinstance(device, SimDevice)
    return device


# -- building ---------------------------------------------------------------------------------------------------------
@pytest.mark.req("S2-58", "S3-6")
def test_handler_stands_alone_with_a_pool_of_its_own_and_no_singleton() -> None:
    pool = GPUTensorPool("cpu", pin_memory=True)
    handler = ChunkOffloadHandler(8, pool)
    assert (handler.min_offloaded_tensor_size, handler.cpu_tensor_pool) == (8, pool)
    x = torch.randn(4, 4)
    assert torch.equal(handler.reload(handler.offload(x)), x)
    assert pool.stats["current_in_use"] == 0
    _, (tag,) = group_of(handler, "a", x)
    assert torch.equal(handler.tensor_pop(tag), x)
    assert PipelineOffloadManager.OFFLOAD_MGR is None


@pytest.mark.req("S3-6")
def test_handler_copies_on_the_lanes_that_it_is_given() -> None:
    device = SimDevice()
    engine = OffloadEngine(OffloadConfig(), device=device)
    handler = ChunkOffloadHandler(8, None, device.h2d, device.d2h, engine=engine)  # the other way round, to see the difference
    x = torch.randn(4, 4)
    assert torch.equal(handler.reload(handler.offload(x)), x)
    assert handler.d2h_stream is device.h2d
    assert (device.copies(device.h2d), device.copies(device.d2h)) == (1, 1)


# -- one tensor -------------------------------------------------------------------------------------------------------
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "offset": lambda x: x[3:, 2:5],
    "strided": lambda x: x[:, ::3],
    "expanded": lambda x: x[:, :1].expand(-1, 7),
    "scalar": lambda x: x[0, 0],
    "empty": lambda x: x[:0],
}


@pytest.mark.req("S2-59", "S2-60", "S3-67", "S3-71", "S3-73", "S3-77")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_tensor_comes_back_with_its_bits_and_its_strides(manager: PipelineOffloadManager, dtype: torch.dtype, layout: str) -> None:
    handler = begun(manager)
    source = LAYOUTS[layout]((torch.randn(12, 9) * 100).to(dtype))
    original = source.clone()
    state = handler.offload(source)
    assert isinstance(state, OffloadState)
    assert (state.device, state.use_cpu_pool) == (source.device, True)
    assert not manager.engine.device.owns(state.cpu_tensor) or source.numel() == 0  # it is host memory, not the device's
    back = handler.reload(state)
    assert torch.equal(back, original)
    assert (back.stride(), back.dtype, back.device) == (source.stride(), dtype, source.device)


@pytest.mark.req("S2-60", "S3-67")
def test_reload_reads_the_copy_and_not_what_has_become_of_the_original(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    x = torch.randn(64)
    original = x.clone()
    state = handler.offload(x)
    device_of(manager).note_write(manager.engine.device.compute, x)  # legal: offload has ordered compute after its copy
    x.fill_(-1)
    assert torch.equal(handler.reload(state), original)


@pytest.mark.req("S2-59", "S2-60", "S3-72")
@pytest.mark.parametrize("pin_memory", [True, False])
def test_without_the_pool_a_tensor_gets_host_memory_of_its_own(manager: PipelineOffloadManager, pin_memory: bool) -> None:
    handler = begun(manager)
    x = torch.randn(64)
    state = handler.offload(x, pin_memory=pin_memory, use_cpu_pool=False)
    assert not state.use_cpu_pool
    back = handler.reload(state)
    del state
    assert torch.equal(back, x)
    assert manager.cpu_tensor_pool.stats["allocation_requests"] == 0


@pytest.mark.req("S2-60", "S3-74")
def test_twenty_cycles_need_one_buffer(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    x = torch.randn(64)
    for _ in range(20):
        assert torch.equal(handler.reload(handler.offload(x)), x)
    stats = manager.cpu_tensor_pool.stats
    assert (stats["pool_misses"], stats["pool_hits"], stats["current_in_use"]) == (1, 19, 0)


@pytest.mark.req("S2-60")
@pytest.mark.parametrize(("non_blocking", "blocks"), [(None, 0), (True, 0), (False, 1)])
def test_reload_blocks_the_host_only_when_it_is_told_to(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch, non_blocking: bool | None, blocks: int
) -> None:
    handler = begun(manager)
    x = torch.randn(64)
    calls: list[object] = []
    synchronize = SimDevice.synchronize
    monkeypatch.setattr(SimDevice, "synchronize", lambda self, event: (calls.append(event), synchronize(self, event)))
    assert torch.equal(handler.reload(handler.offload(x), non_blocking), x)
    assert len(calls) == blocks


@pytest.mark.req("S2-33", "S2-60")
def test_step_end_takes_back_what_was_never_reloaded_and_says_so_to_a_late_reload(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    kept, dropped = handler.offload(torch.ones(64), use_cpu_pool=False), handler.offload(torch.ones(64))
    step_end()
    assert manager.cpu_tensor_pool.stats["current_in_use"] == 0
    assert torch.equal(handler.reload(kept), torch.ones(64))
    with pytest.raises(StaleHandleError, match=r"shape \(64,\) was offloaded by hand in step 0, and its .* before step 1; reload it in"):
        handler.reload(dropped)


def test_tensor_of_another_device_is_not_offloaded(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    with pytest.raises(ValueError, match="offload of a tensor on meta, but this handler's device is sim; move it there first"):
        handler.offload(torch.empty(4, device="meta"))
    with pytest.raises(ValueError, match="offload of a list, must be a tensor on sim"):
        handler.offload([1.0])  # type: ignore[arg-type]
    assert manager.cpu_tensor_pool.stats["allocation_requests"] == 0


# -- looking at the groups --------------------------------------------------------------------------------------------
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


# -- tensors by tag ---------------------------------------------------------------------------------------------------
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


@pytest.mark.req("S2-66")
def test_fake_and_functional_tensors_pass_through(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    handler.on_group_start_forward("a")
    with FakeTensorMode():
        fake = torch.ones(64)
    functional = torch._to_functional_tensor(torch.ones(64))
    tags = [handler.tensor_push(fake), handler.tensor_push(functional)]
    handler.on_group_commit_forward()
    assert handler.tensor_pop(tags[0]) is fake
    assert handler.tensor_pop(tags[1]) is functional
    assert device_of(manager).copies(manager.d2h_stream) == 0


@pytest.mark.req("S2-67", "S3-69")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_pop_fetches_a_tensor_that_has_left_whether_its_copy_has_run_or_not(executor: Any) -> None:
    with installed(build_manager(executor)) as manager:
        assert manager is not None
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
    with pytest.raises(GroupOrderError, match=r"tensor_push of shape \(4,\), but no group is open; call on_group_start_forward first"):
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
        "small in a large dtype": (torch.ones(15, dtype=torch.complex128), False),  # elements count, not bytes
        "marked": (marked, False),
        "view of a marked one": (marked.view(4, 4), False),
        "parameter": (parameter, False),
        "view of a parameter": (parameter.t(), False),
    }
    for what, (tensor, needed) in verdicts.items():
        assert handler.tensor_need_offloading_checker(tensor) is needed, what


# -- groups out and back ----------------------------------------------------------------------------------------------
@pytest.mark.req("S2-69", "S3-66", "S3-78")
def test_group_leaves_under_one_event_and_small_tensors_stay() -> None:
    with installed(build_manager(piece_bytes=1 << 20)) as manager:
        assert manager is not None
        handler = begun(manager, min_elements=10)
        group = handler.on_group_start_forward("a")
        tensors = [torch.randn(10), torch.randn(9), torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(12, dtype=torch.bool)]
        tags = [handler.tensor_push(tensor) for tensor in tensors]
        device = device_of(manager)
        assert device.copies(device.d2h) == 0
        handler.bulk_offload_group()
        assert group.saved is not None
        assert (device.copies(device.d2h), len(group.saved.transfers)) == (3, 1)
        assert device.copied_bytes(device.d2h) == 10 * 4 + 4 * 4 * 2 + 12
        expected = [tensor.clone() for tensor in tensors]
        del tensors
        for tag, tensor in zip(tags, expected, strict=True):
            assert torch.equal(handler.tensor_pop(tag), tensor)


@pytest.mark.req("S3-70")
def test_device_bytes_fall_when_a_group_has_left_and_rise_when_it_is_read(manager: PipelineOffloadManager) -> None:
    handler, device = begun(manager), device_of(manager)
    group, tags = group_of(handler, "a", torch.randn(64), torch.randn(32))
    assert device.active_bytes() == (64 + 32) * 4
    settle(manager, group)
    assert device.active_bytes() == 0
    back = handler.tensor_pop(tags[0])
    assert device.active_bytes() == 64 * 4
    del back
    assert device.active_bytes() == 0


@pytest.mark.req("S2-76")
def test_commit_orders_the_copies_after_what_compute_wrote(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    group_of(handler, "a", torch.randn(64))
    assert device_of(manager).waits["spill"] == 1


@pytest.mark.req("S2-71", "S3-69")
def test_groups_are_fetched_back_last_one_first_each_after_its_own_offload(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    groups = [group_of(handler, name, torch.randn(64), torch.randn(32))[0] for name in ("a", "b")]
    device = device_of(manager)
    assert handler.bulk_reload_group()
    assert [states(group) for group in groups] == [["SPILLING"] * 2, ["RESTORING"] * 2]
    assert (device.copies(device.h2d), device.waits["restore"]) == (2, 1)  # one event for the group
    assert handler.bulk_reload_group()
    assert states(groups[0]) == ["RESTORING"] * 2
    assert not handler.bulk_reload_group()


@pytest.mark.req("S2-72")
def test_last_group_is_started_early_once(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    groups = [group_of(handler, name, torch.randn(64))[0] for name in ("a", "b")]
    for _ in range(2):
        handler.pre_reload_last_layer()
        assert [states(group) for group in groups] == [["SPILLING"], ["RESTORING"]]


@pytest.mark.req("S2-77")
def test_reload_goes_on_in_the_next_chunk_once_that_has_finished_its_forward(manager: PipelineOffloadManager) -> None:
    following = begun(manager)
    group, _ = group_of(following, "a", torch.randn(64))
    settle(manager, group)
    read_out = ChunkOffloadHandler(1, engine=manager.engine, chunk_id=ChunkId(0, 7), manager=manager)
    read_out.bulk_reload()
    assert states(group) == ["SPILLED"]  # more of its groups may come
    begun(manager)
    read_out.bulk_reload()
    assert states(group) == ["RESTORING"]


@pytest.mark.req("S2-73")
def test_marked_groups_and_groups_while_offloading_is_off_do_not_leave(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    assert not handler.should_bulk_offload()  # none is open
    group = handler.on_group_start_forward("a")
    assert handler.should_bulk_offload()
    group.stays = True
    assert not handler.should_bulk_offload()
    group.stays = False
    manager.disable_offload()
    assert not handler.should_bulk_offload()
    manager.enable_offload()
    assert handler.should_bulk_offload()


@pytest.mark.req("S2-73")
def test_last_group_of_a_name_stays_in_the_chunk_that_is_read_next(manager: PipelineOffloadManager) -> None:
    first = begun(manager)
    second = begun(manager)
    for handler in (first, second):
        for name in ("a", "b", "a"):
            group_of(handler, name)
            assert not handler.groups[-1].stays
    for handler in (second, first):
        manager.reading(handler)
    step_end()
    assert not manager.is_warmup
    for handler in (begun(manager), begun(manager)):
        leaves = []
        for name in ("a", "b", "a"):
            handler.on_group_start_forward(name).stays = False  # look at this rule alone, not at the plan
            leaves.append(handler.should_bulk_offload())
        # the first of the two is the front of the queue
        assert leaves == ([True, False, False] if handler.id.microbatch == 0 else [True, True, True])


# -- forced release ---------------------------------------------------------------------------------------------------
@pytest.mark.req("S2-74", "S3-68")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_forced_release_frees_at_once_what_python_still_holds_and_it_comes_back(executor: Any) -> None:
    with installed(build_manager(executor)) as manager:
        assert manager is not None
        handler = begun(manager)
        handler.on_group_start_forward("a")
        x = torch.randn(64)
        original = x.clone()
        tag = handler.tensor_push(x)
        handler.bulk_offload([x, x.view(8, 8)])
        assert x.untyped_storage().nbytes() == 0
        assert torch.equal(handler.tensor_pop(tag), original)


@pytest.mark.req("S2-75")
def test_forced_release_leaves_alone_what_the_group_did_not_copy_and_warns(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    handler = begun(manager, min_elements=8)
    never_saved, small, in_another_group = torch.randn(64), torch.randn(4), torch.randn(64)
    group_of(handler, "other", in_another_group)
    group = handler.on_group_start_forward("a")
    handler.tensor_push(small)
    with caplog.at_level(logging.WARNING, "offload"):
        handler.on_group_commit_forward([never_saved, small, in_another_group])
    for tensor in (never_saved, small, in_another_group):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * 4
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert "group s0m0/a#1: a tensor of shape (64,) (256 bytes of storage) was to be released, but this group has not copied all" in said[0]
    assert "take it off forced_released_tensors" in said[0]
    assert group.total_offload_bytes == 0


@pytest.mark.req("S2-75")
def test_forced_release_of_a_storage_of_which_only_a_part_was_copied_is_refused(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    handler.on_group_start_forward("a")
    x = torch.randn(64, 64)
    original = x.clone()
    handler.tensor_push(x[:2])
    handler.on_group_commit_forward([x])
    assert torch.equal(x, original)  # the other 62 rows have no copy


@pytest.mark.req("S2-75")
def test_forced_release_of_what_another_chunk_still_keeps_is_refused(manager: PipelineOffloadManager) -> None:
    x = torch.randn(64)
    original = x.clone()
    keeper = begun(manager)
    keeper.stays = frozenset({0})
    _, (tag,) = group_of(keeper, "a", x)
    handler = begun(manager)
    handler.on_group_start_forward("a")
    handler.tensor_push(x)
    handler.on_group_commit_forward([x])
    assert torch.equal(keeper.tensor_pop(tag), original)


def test_group_that_the_plan_keeps_releases_nothing_and_says_nothing(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(64)
    original = x.clone()
    handler = begun(manager)
    handler.stays = frozenset({0})
    handler.on_group_start_forward("a")
    tag = handler.tensor_push(x)
    with caplog.at_level(logging.WARNING, "offload"):
        handler.on_group_commit_forward([x])
    assert torch.equal(x, original)
    assert torch.equal(handler.tensor_pop(tag), original)
    assert not caplog.records


def test_forced_release_in_a_group_that_stays_in_part_frees_what_leaves_and_leaves_alone_what_stays(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    """What was saved as both stays: the plan's part of it is read where it is."""
    leaving, staying, both = torch.randn(64), torch.randn(64), torch.randn(64)
    handler = begun(manager)
    handler.stays_from = {0: 2}
    handler.on_group_start_forward("a")
    tags = [handler.tensor_push(tensor) for tensor in (leaving, both, staying)]
    original = [tensor.clone() for tensor in (leaving, both, staying)]
    both.add_(1)
    tags.append(handler.tensor_push(both))  # slot 3
    with caplog.at_level(logging.WARNING, "offload"):
        handler.on_group_commit_forward([leaving, staying, both])
    assert not caplog.records
    assert [tensor.untyped_storage().nbytes() for tensor in (leaving, staying, both)] == [0, 256, 256]
    assert torch.equal(handler.tensor_pop(tags[0]), original[0])
    assert torch.equal(handler.tensor_pop(tags[2]), original[2])
    assert torch.equal(handler.tensor_pop(tags[3]), both)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        handler.tensor_pop(tags[1])


@pytest.mark.req("S2-75")
def test_forced_release_waits_for_every_copy_of_that_storage_that_is_under_way(manager: PipelineOffloadManager) -> None:
    """Two chunks save one storage; the second frees it while the first one's copy, issued later, still reads it."""
    x = torch.randn(64)
    original = x.clone()
    one = begun(manager)
    one.on_group_start_forward("a")
    one_tag = one.tensor_push(x)
    other = begun(manager)
    other.on_group_start_forward("a")
    other_tag = other.tensor_push(x)
    other.bulk_offload_group()
    one.on_group_commit_forward()
    other.on_group_commit_forward([x])
    assert x.untyped_storage().nbytes() == 0
    assert torch.equal(one.tensor_pop(one_tag), original)
    assert torch.equal(other.tensor_pop(other_tag), original)


def test_forced_release_takes_a_list_of_tensors_only_and_closes_nothing_else(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    group = handler.on_group_start_forward("a")
    for wrong, found in ((torch.ones(2), "Tensor"), ([1], r"\['int'\]"), ("x", "str")):
        with pytest.raises(ValueError, match=f"forced_released_tensors is {found}, must be a list of tensors, or None"):
            handler.on_group_commit_forward(wrong)  # type: ignore[arg-type]
    assert handler.innermost_open() is group


# -- views and shared storages ----------------------------------------------------------------------------------------
@pytest.mark.req("S2-103")
@pytest.mark.parametrize(
    ("view", "copied"),
    [
        (lambda x: x.t(), 64 * 64 * 4),  # dense: the storage as it is
        (lambda x: x[:, ::2], 64 * 64 * 4),  # half of it: as it is
        (lambda x: x[:, ::4], 64 * 16 * 4),  # a quarter, though from the first to the last bytes: gathered
        (lambda x: x[:, :8], 64 * 8 * 4),
        (lambda x: x[8:16], 8 * 64 * 4),  # contiguous: those bytes and no others
        (lambda x: x[:1].expand(64, -1), 64 * 4),  # an expanded row is one row
    ],
)
def test_view_comes_back_with_its_strides_and_a_sparse_one_is_gathered(manager: PipelineOffloadManager, view: Any, copied: int) -> None:
    handler = begun(manager)
    x = torch.randn(64, 64)
    saved = view(x)
    expected, stride = saved.clone(), saved.stride()
    group, (tag,) = group_of(handler, "a", saved)
    assert device_of(manager).copied_bytes(manager.d2h_stream) == group.total_offload_bytes == copied
    del x, saved
    back = handler.tensor_pop(tag)
    assert torch.equal(back, expected)
    assert back.stride() == stride


@pytest.mark.req("S2-103")
def test_gathered_view_and_a_later_view_of_the_same_storage_are_two_copies(manager: PipelineOffloadManager) -> None:
    """The gathered bytes lie at the start of a new storage; a second view whose offsets happen to fall in there is not among them."""
    handler = begun(manager)
    x = torch.randn(64, 63)
    expected = x.clone()
    _, (sparse,) = group_of(handler, "a", x[:, ::8])
    _, (dense, again) = group_of(handler, "b", x[:2], x[:, ::8])
    del x
    assert torch.equal(handler.tensor_pop(dense), expected[:2])
    assert torch.equal(handler.tensor_pop(again), expected[:, ::8])
    assert torch.equal(handler.tensor_pop(sparse), expected[:, ::8])


@pytest.mark.req("S2-105")
def test_storage_saved_several_times_in_a_group_is_copied_once(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    x = torch.randn(32, 32)
    expected = x.clone()
    group, tags = group_of(handler, "a", x, x, x.t(), x[3:7], x.view(-1))
    device = device_of(manager)
    assert (device.copies(device.d2h), device.copied_bytes(device.d2h)) == (1, 32 * 32 * 4)
    assert group.saved is not None
    assert group.saved.logical_bytes == 4 * (4 * 32 * 32 + 4 * 32)
    del x
    settle(manager, group)
    for tag, tensor in zip(tags, (expected, expected, expected.t(), expected[3:7], expected.view(-1)), strict=True):
        assert torch.equal(handler.tensor_pop(tag), tensor)
    assert device.copied_bytes(device.h2d) == 32 * 32 * 4


@pytest.mark.req("S2-105")
def test_storage_that_was_written_in_between_is_copied_again(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    handler.on_group_start_forward("a")
    x = torch.zeros(64)
    handler.tensor_push(x)
    x.add_(1)
    tag = handler.tensor_push(x)
    handler.on_group_commit_forward()
    assert device_of(manager).copies(manager.d2h_stream) == 2
    del x
    assert torch.equal(handler.tensor_pop(tag), torch.ones(64))


# -- marks ------------------------------------------------------------------------------------------------------------
@pytest.mark.req("S2-78")
def test_backward_of_a_commit_makes_its_chunk_the_one_being_read(manager: PipelineOffloadManager) -> None:
    first, second = begun(manager), begun(manager)
    for handler in (first, second):
        group_of(handler, "a", torch.randn(64))
    assert manager.cur_backward_chunk() is None
    second.on_group_commit_backward("a")
    assert manager.cur_backward_chunk() is second
    first.on_group_commit_backward("a")  # whatever the queue foretold
    assert manager.cur_backward_chunk() is first


@pytest.mark.req("S2-78", "S3-69")
def test_reader_waits_for_the_reload_of_its_own_bytes(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    x = torch.randn(64)
    expected = x.clone()
    group, (tag,) = group_of(handler, "a", x)
    del x
    settle(manager, group)
    handler.on_group_commit_backward("a")
    assert states(group) == ["RESTORING"]
    assert torch.equal(handler.tensor_pop(tag), expected)
    assert device_of(manager).waits["read"] == 1


@pytest.mark.req("S2-80")
def test_backward_of_a_start_lets_the_next_reload_begin_after_what_compute_did() -> None:
    with installed(build_manager(max_restoring_bytes=256, max_spilling_bytes=256)) as manager:
        assert manager is not None
        handler = begun(manager)
        tags = [group_of(handler, name, torch.randn(64))[1][0] for name in ("a", "b", "c")]
        handler.on_group_commit_backward("c")
        device = device_of(manager)
        last = handler.tensor_pop(tags[2])  # the room for reloads is one tensor
        before = device.copies(device.h2d), device.waits["allocate"]
        del last
        handler.on_group_start_backward()
        assert (device.copies(device.h2d), device.waits["allocate"]) == (before[0] + 1, before[1] + 1)


def test_while_one_layer_is_read_the_one_before_it_loads() -> None:
    """What is ahead is bounded in bytes, not by one a name: here the room is a layer and a half."""
    layers, layer_bytes = 6, 64 * 4
    caps = {"max_restoring_bytes": 3 * layer_bytes // 2, "max_spilling_bytes": layer_bytes, "piece_bytes": layer_bytes}
    with installed(build_manager(**caps)) as manager:
        assert manager is not None
        handler = begun(manager)
        groups, tags = zip(*(group_of(handler, f"layer{number}", torch.randn(64)) for number in range(layers)), strict=True)
        handler.on_group_commit_backward("layer5")
        for number in reversed(range(1, layers)):
            read = handler.tensor_pop(tags[number][0])
            handler.on_group_start_backward()
            if number < layers - 1:  # the last ones are still on their way out and need no fetch
                assert states(groups[number - 1]) == ["RESTORING"]
                assert all(states(groups[earlier]) == ["SPILLED"] for earlier in range(number - 1))
            del read


@pytest.mark.xfail(strict=True, reason="decided otherwise: what is ahead is bounded in bytes by max_restoring_bytes, not by one a name")
def test_at_most_one_activation_a_name_is_ahead(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    groups, tags = zip(*(group_of(handler, "layer", torch.randn(64)) for _ in range(4)), strict=True)
    settle(manager, *groups)
    handler.tensor_pop(tags[3][0])
    handler.on_group_commit_backward("layer")
    assert [states(group) for group in groups[:3]] == [["SPILLED"], ["SPILLED"], ["RESTORING"]]


@pytest.mark.req("S2-82")
def test_copies_stand_in_profiler_ranges_named_by_direction_and_group() -> None:
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with installed(build_manager(max_spilling_bytes=1)), torch.profiler.profile(activities=cpu) as profile:
        Driver(build_stages(1, 1)).step(no_pipeline(2))
    names = {event.key for event in profile.key_averages() if event.key.startswith("offload/")}
    assert {name for name in names if "/spill/" in name} == {f"offload/spill/{name}" for name in ("norm", "fc1", "act", "fc2")}
    restored = {name for name in names if "/restore/" in name}
    assert restored
    assert restored <= {f"offload/restore/{name}" for name in ("norm", "fc1", "act", "fc2")}  # a piece is named by its first tensor


# -- pairing ----------------------------------------------------------------------------------------------------------
def test_commit_closes_the_innermost_group_of_its_name(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    outer, other, inner = (handler.on_group_start_forward(name) for name in ("a", "b", "a"))
    assert handler.close("a") is inner
    assert handler.close("a") is outer
    with pytest.raises(GroupOrderError, match=r"group 'a', which has not been started; open: b\. Call group_start\(tensor, 'a'\)"):
        handler.close("a")
    assert handler.innermost_open() is other


def test_start_that_was_muted_and_never_committed_does_not_swallow_a_later_commit(manager: PipelineOffloadManager) -> None:
    handler = begun(manager)
    handler.mute("a")  # a forward without gradients that raised before its commit
    group = handler.on_group_start_forward("a")
    assert not handler.unmute("a")
    assert handler.close("a") is group
    assert handler.unmute("a")
    assert not handler.unmute("a")


def test_records_move_on_when_a_group_is_committed_late(manager: PipelineOffloadManager) -> None:
    """A piece leaves as soon as it is full; the commit sends the rest and decides nothing twice."""
    with installed(build_manager(piece_bytes=256)) as fresh:
        assert fresh is not None
        handler = begun(fresh)
        group = handler.on_group_start_forward("a")
        tags = [handler.tensor_push(torch.randn(64)) for _ in range(2)] + [handler.tensor_push(torch.randn(8))]
        assert states(group) == ["SPILLING", "SPILLING", "RESIDENT"]
        handler.bulk_offload_group()
        handler.bulk_offload_group()
        handler.on_group_commit_forward()
        assert states(group) == ["SPILLING"] * 3
        assert group.saved is not None
        assert {record.state for record in group.saved.living()} == {RecordState.SPILLING}
        assert (group.total_offload_bytes, group.total_tensor_count) == (2 * 256 + 32, 3)
        for tag in tags:
            handler.tensor_pop(tag)
