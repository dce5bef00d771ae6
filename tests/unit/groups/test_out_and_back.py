"""Groups of a chunk, called by hand: when they leave, when they come back, and how often a storage is
copied."""

from __future__ import annotations

import pytest
import torch

from offload import ChunkOffloadHandler, PipelineOffloadManager, step_end
from offload.ids import ChunkId
from tests.unit.groups.handlers import begun, device_of, group_of, settle, states
from tests.unit.groups.stack import Driver, build_manager, build_stages, installed, no_pipeline


# -- groups out and back -------------------------------------------------------------------------------------
@pytest.mark.req("S2-69", "S3-66", "S3-78")
def test_group_leaves_under_one_event_and_small_tensors_stay() -> None:
    with installed(build_manager(piece_bytes=1 << 20)) as manager:
        handler = begun(manager, min_elements=10)
        group = handler.on_group_start_forward("a")
        tensors = [
            torch.randn(10),
            torch.randn(9),
            torch.ones(4, 4, dtype=torch.bfloat16),
            torch.ones(12, dtype=torch.bool),
        ]
        tags = [handler.tensor_push(tensor) for tensor in tensors]
        device = device_of(manager)
        assert device.copies(device.d2h) == 0
        handler.bulk_offload_group()
        assert (device.copies(device.d2h), len(group.saved.transfers)) == (3, 1)
        assert device.copied_bytes(device.d2h) == 10 * 4 + 4 * 4 * 2 + 12
        expected = [tensor.clone() for tensor in tensors]
        del tensors
        for tag, tensor in zip(tags, expected, strict=True):
            assert torch.equal(handler.tensor_pop(tag), tensor)


@pytest.mark.req("S3-70")
def test_device_bytes_fall_when_a_group_has_left_and_rise_when_it_is_read(
    manager: PipelineOffloadManager,
) -> None:
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
def test_groups_are_fetched_back_last_one_first_each_after_its_own_offload(
    manager: PipelineOffloadManager,
) -> None:
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
def test_reload_goes_on_in_the_next_chunk_once_that_has_finished_its_forward(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = begun(manager)
    groups = [group_of(following, name, torch.randn(64))[0] for name in ("a", "b")]
    settle(manager, *groups)
    read_now = ChunkOffloadHandler(1, engine=manager.engine, chunk_id=ChunkId(0, 7), manager=manager)
    read_now.bulk_reload()
    assert [states(group) for group in groups] == [["SPILLED"]] * 2  # more of its groups may come
    own, (tag,) = group_of(read_now, "a", torch.randn(64))
    settle(manager, own)
    with monkeypatch.context() as alone:  # the manager looks at the end of a forward too, and would be first
        alone.setattr(manager.tracker, "pump", lambda: None)
        begun(manager)
    read_now.bulk_reload()
    assert states(own) == ["RESTORING"]  # its own groups come first
    assert [states(group) for group in groups] == [["SPILLED"]] * 2
    read_now.bulk_reload()
    assert states(groups[1]) == ["RESTORING"]
    read_now.tensor_pop(tag)


@pytest.mark.req("S2-73")
def test_marked_groups_and_groups_while_offloading_is_off_do_not_leave(
    manager: PipelineOffloadManager,
) -> None:
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
        manager.tracker.reading(handler)
    step_end()
    assert not manager.is_warmup
    for handler in (begun(manager), begun(manager)):
        leaves = []
        for name in ("a", "b", "a"):
            handler.on_group_start_forward(name).stays = False  # look at this rule alone, not at the plan
            leaves.append(handler.should_bulk_offload())
        # the first of the two is the front of the queue
        assert leaves == ([True, False, False] if handler.id.microbatch == 0 else [True, True, True])


# -- views and shared storages -------------------------------------------------------------------------------
# -- marks ---------------------------------------------------------------------------------------------------
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
    caps = {
        "max_restoring_bytes": 3 * layer_bytes // 2,
        "max_spilling_bytes": layer_bytes,
        "piece_bytes": layer_bytes,
    }
    with installed(build_manager(**caps)) as manager:
        handler = begun(manager)
        groups, tags = zip(
            *(group_of(handler, f"layer{number}", torch.randn(64)) for number in range(layers)), strict=True
        )
        handler.on_group_commit_backward("layer5")
        for number in reversed(range(1, layers)):
            read = handler.tensor_pop(tags[number][0])
            handler.on_group_start_backward()
            if number < layers - 1:  # the last ones are still on their way out and need no fetch
                assert states(groups[number - 1]) == ["RESTORING"]
                assert all(states(groups[earlier]) == ["SPILLED"] for earlier in range(number - 1))
            del read


@pytest.mark.req("S2-82")
def test_copies_stand_in_profiler_ranges_named_by_direction_and_group() -> None:
    cpu = [torch.profiler.ProfilerActivity.CPU]
    # every tensor is a piece of its own, so that every group is named
    limits = {"max_spilling_bytes": 1, "piece_bytes": 1}
    with installed(build_manager(**limits)), torch.profiler.profile(activities=cpu) as profile:
        Driver(build_stages(1, 1)).step(no_pipeline(2))
    names = {event.key for event in profile.key_averages() if event.key.startswith("offload/")}
    assert {name for name in names if "/spill/" in name} == {
        f"offload/spill/{name}" for name in ("norm", "fc1", "act", "fc2")
    }
    # fc2's tensor leaves last, so its source is still there when it is read
    assert {name for name in names if "/restore/" in name} == {
        f"offload/restore/{name}" for name in ("norm", "fc1", "act")
    }
