"""A named group by itself: its tensors by tag, its two events, its sizes."""

from __future__ import annotations

import pytest
import torch

from offload import OffloadTensorGroup
from offload.compat.handler import DYNAMIC_SHAPE_GROUPS
from offload.device.sim import SimDevice
from offload.engine import default_engine


@pytest.mark.req("S2-23", "S3-5")
def test_pop_removes_the_very_tensor_that_was_pushed_under_its_tag() -> None:
    group = OffloadTensorGroup("core_attn")
    one, other = torch.ones(2), torch.zeros(2)
    group.push_tensor((0, 0), one)
    group.push_tensor((0, 1), other)
    assert group.pop_tensor((0, 1)) is other
    assert group.pop_tensor((0, 0)) is one
    with pytest.raises(KeyError, match=r"'core_attn' holds no tensor under tag \(0, 0\); it holds 0 others"):
        group.pop_tensor((0, 0))


def test_tag_that_is_taken_is_refused_and_keeps_its_tensor() -> None:
    group = OffloadTensorGroup("core_attn")
    first = torch.ones(2)
    group.push_tensor("tag", first)
    with pytest.raises(KeyError, match="'core_attn' already holds a tensor under tag 'tag'; pop it first"):
        group.push_tensor("tag", torch.zeros(2))
    assert group.pop_tensor("tag") is first


@pytest.mark.req("S2-24", "S3-69")
def test_lane_that_waits_for_the_offload_event_may_read_what_was_copied_out() -> None:
    device = SimDevice()
    group = OffloadTensorGroup("core_attn", device=device)
    source = torch.arange(8, dtype=torch.uint8)
    host = device.host_memory(8, 4096).pieces[0]
    device.note_write(device.compute, source)
    device.wait(device.d2h, device.record(device.compute), "spill")
    device.copy(device.d2h, [(host, source)])
    group.record_offload_event(device.d2h)
    home = device.empty(8)
    device.wait(device.h2d, device.record(device.compute), "allocate")
    group.wait_offload_event(device.h2d)  # without it the next line is a hazard
    device.copy(device.h2d, [(home, host)])
    assert device.waits["restore"] == 1


@pytest.mark.req("S2-25", "S3-69")
def test_lane_that_waits_for_the_reload_event_may_read_what_was_copied_back() -> None:
    device = SimDevice()
    group = OffloadTensorGroup("core_attn", device=device)
    host = device.host_memory(8, 4096).pieces[0]
    host.copy_(torch.arange(8, dtype=torch.uint8))
    device.note_write(device.host, host)
    home = device.empty(8)
    device.wait(device.h2d, device.record(device.compute), "allocate")
    device.copy(device.h2d, [(home, host)])
    group.record_reload_event(device.h2d)
    group.wait_reload_event(device.compute)
    device.note_read(device.compute, home)
    assert torch.equal(home, torch.arange(8, dtype=torch.uint8))


@pytest.mark.req("S2-24", "S2-25")
def test_wait_without_an_event_is_nothing() -> None:
    device = SimDevice()
    group = OffloadTensorGroup("core_attn", device=device)
    group.wait_offload_event(device.h2d)
    group.wait_reload_event(device.compute)
    assert not device.waits


@pytest.mark.req("S2-23", "S2-24", "S2-25")
def test_a_group_that_is_built_by_its_name_alone_has_the_lanes_of_the_default_engine() -> None:
    """It raised: a source's caller has no device to give."""
    device = default_engine().device
    group = OffloadTensorGroup("core_attn")
    group.record_offload_event(stream=device.d2h)
    group.wait_offload_event(stream=device.h2d)
    group.record_reload_event(stream=device.h2d)
    group.wait_reload_event(stream=device.compute)
    assert (device.waits["restore"], device.waits["read"]) == (1, 1)


@pytest.mark.req("S2-26", "S3-5")
def test_sizes_add_up_tensor_by_tensor() -> None:
    group = OffloadTensorGroup("core_attn")
    group.update_offload_info(torch.empty(4, 8))
    group.update_offload_info(torch.empty(10, dtype=torch.bfloat16))
    assert (group.total_offload_bytes, group.total_tensor_count) == (4 * 8 * 4 + 10 * 2, 2)
    assert repr(group) == "OffloadTensorGroup('core_attn', 148 bytes, leaves)"


@pytest.mark.req("S2-27", "S3-5")
@pytest.mark.parametrize("name", ["expert_fc1", "moe_act", "fused_group_mlp", "core_attn", "attn_norm"])
def test_groups_of_dynamic_shapes_stay_out_of_the_shape_keyed_pool(name: str) -> None:
    assert OffloadTensorGroup(name).use_cpu_pool is (name in {"core_attn", "attn_norm"})
    assert OffloadTensorGroup(name, use_cpu_pool=True).use_cpu_pool
    assert not OffloadTensorGroup(name, use_cpu_pool=False).use_cpu_pool
    assert (name in DYNAMIC_SHAPE_GROUPS) is not OffloadTensorGroup(name).use_cpu_pool


@pytest.mark.req("S3-5")
def test_group_leaves_unless_the_plan_keeps_it() -> None:
    group = OffloadTensorGroup("core_attn")
    assert group.name == "core_attn"
    assert group.offload
    group.stays = True
    assert not group.offload
    assert "stays" in repr(group)
