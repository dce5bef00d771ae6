"""One tensor to the host and back by hand: its bits and strides, its host buffer, and who waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload import PipelineOffloadManager, StaleHandleError, step_end
from offload.compat.handler import OffloadState
from offload.device.sim import SimDevice
from tests.unit.groups.handlers import begun, device_of
from tests.unit.groups.stack import build_manager, installed

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
def test_one_tensor_comes_back_with_its_bits_and_its_strides(
    manager: PipelineOffloadManager, dtype: torch.dtype, layout: str
) -> None:
    handler = begun(manager)
    source = LAYOUTS[layout]((torch.randn(12, 9) * 100).to(dtype))
    original = source.clone()
    state = handler.offload(source)
    assert isinstance(state, OffloadState)
    assert (state.device, state.use_cpu_pool) == (source.device, True)
    # it is host memory, not the device's
    assert not manager.engine.device.owns(state.cpu_tensor) or source.numel() == 0
    back = handler.reload(state)
    assert torch.equal(back, original)
    assert (back.stride(), back.dtype, back.device) == (source.stride(), dtype, source.device)
    assert (back.data_ptr() - source.data_ptr()) % 64 == 0 or source.numel() == 0


@pytest.mark.req("S2-60", "S3-67")
def test_reload_reads_the_copy_and_not_what_has_become_of_the_original(
    manager: PipelineOffloadManager,
) -> None:
    handler = begun(manager)
    x = torch.randn(64)
    original = x.clone()
    state = handler.offload(x)
    # legal: offload has ordered compute after its copy
    device_of(manager).note_write(manager.engine.device.compute, x)
    x.fill_(-1)
    assert torch.equal(handler.reload(state), original)


@pytest.mark.req("S2-59", "S2-60", "S3-72")
@pytest.mark.parametrize("pin_memory", [True, False])
def test_without_the_pool_a_tensor_gets_host_memory_of_its_own(
    manager: PipelineOffloadManager, pin_memory: bool
) -> None:
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
@pytest.mark.parametrize("executor", ["late", "early", "random"])
def test_a_buffer_is_written_again_after_its_reload_whatever_lane_offloads_next(executor: Any) -> None:
    with installed(build_manager(executor)) as manager:
        handler, device = begun(manager), device_of(manager)
        side, other = device.new_compute_lane("side"), torch.full((64,), 2.0)
        state = handler.offload(torch.ones(64))
        back = handler.reload(state)
        with device.use_lane(side):
            second = handler.offload(other)
        assert second.cpu_tensor.data_ptr() == state.cpu_tensor.data_ptr()
        assert torch.equal(back, torch.ones(64))
        assert torch.equal(handler.reload(second), other)


@pytest.mark.req("S2-60")
@pytest.mark.parametrize(("non_blocking", "blocks"), [(None, 0), (True, 0), (False, 1)])
def test_reload_blocks_the_host_only_when_it_is_told_to(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch, non_blocking: bool | None, blocks: int
) -> None:
    handler = begun(manager)
    x = torch.randn(64)
    calls: list[object] = []
    synchronize = SimDevice.synchronize
    monkeypatch.setattr(
        SimDevice, "synchronize", lambda self, event: (calls.append(event), synchronize(self, event))
    )
    assert torch.equal(handler.reload(handler.offload(x), non_blocking), x)
    assert len(calls) == blocks


@pytest.mark.req("S2-33", "S2-60")
def test_step_end_takes_back_what_was_never_reloaded_and_says_so_to_a_late_reload(
    manager: PipelineOffloadManager,
) -> None:
    handler = begun(manager)
    kept, dropped = handler.offload(torch.ones(64), use_cpu_pool=False), handler.offload(torch.ones(64))
    step_end()
    assert manager.cpu_tensor_pool.stats["current_in_use"] == 0
    assert torch.equal(handler.reload(kept), torch.ones(64))
    with pytest.raises(
        StaleHandleError,
        match=r"shape \(64,\) was offloaded by hand in step 0, and its .* before step 1; reload it in",
    ):
        handler.reload(dropped)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
@pytest.mark.parametrize("kind", ["quantized", "sparse", "nested", "subclass"])
def test_offload_by_hand_refuses_by_name_what_its_bytes_do_not_make_again(
    manager: PipelineOffloadManager, kind: str
) -> None:
    """A quantized tensor came back without its quantizer."""

    class Own(torch.Tensor):
        pass

    tensor = {
        "quantized": lambda: torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 3, torch.qint8),
        "sparse": lambda: torch.eye(4).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "subclass": lambda: torch.ones(4).as_subclass(Own),
    }[kind]()
    with pytest.raises(ValueError, match="bytes alone do not make it again"):
        begun(manager).offload(tensor)


def test_conjugated_and_negated_tensors_come_back_by_hand_with_their_values(
    manager: PipelineOffloadManager,
) -> None:
    handler = begun(manager)
    z = torch.randn(8, dtype=torch.complex64)
    for tensor in (z.conj(), z.conj().imag):
        assert torch.equal(handler.reload(handler.offload(tensor)), tensor)
