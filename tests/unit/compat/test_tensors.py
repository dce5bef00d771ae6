"""Any tensor to the host and back by hand: bits, strides, memory, and who waits for which copy."""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import CaptureError, OffloadError
from offload.compat.gradients import GradientOffloadHook
from offload.compat.tensors import OffloadHandle, TensorOffloader
from offload.compat.weights import WeightOffloadHook
from offload.device.sim import ExecutorName, SimDevice
from offload.engine import OffloadEngine
from offload.errors import HazardError, StaleHandleError
from tests.inside import impose
from tests.unit.compat.test_manual_copies import LAYOUTS
from tests.unit.groups.stack import EXECUTORS


@contextmanager
def offloading(
    executor: ExecutorName = "late", pin_memory: bool = True, use_pool: bool = True, **device: object
) -> Iterator[TensorOffloader]:
    """Afterwards the arena has all its memory back."""
    engine = OffloadEngine(device=SimDevice(executor=executor, **device))  # type: ignore[arg-type]
    offloader = TensorOffloader(pin_memory, use_pool, engine=engine)
    yield offloader
    offloader.clear()
    assert engine.arena.stats().lent_bytes == 0


@pytest.mark.req("S3-12", "S3-13", "S3-15", "S3-18", "S3-73", "S3-77")
@pytest.mark.parametrize("use_pool", [True, False])
@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_any_tensor_comes_back_with_its_bits_and_its_strides(
    executor: ExecutorName, pin_memory: bool, use_pool: bool
) -> None:
    with offloading(executor, pin_memory, use_pool) as offloader:
        for layout in LAYOUTS.values():
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
                source = layout((torch.randn(12, 9) * 100).to(dtype))
                original = source.clone()
                handle = offloader.offload(source)
                assert isinstance(handle, OffloadHandle)
                back = offloader.reload(handle)
                assert torch.equal(back, original)
                assert (back.stride(), back.dtype) == (source.stride(), dtype)
                assert (back.data_ptr() - source.data_ptr()) % 64 == 0 or not source.numel()
                target = torch.empty_like(original).t().contiguous().t() if original.dim() == 2 else None
                if target is not None:
                    again = offloader.offload(source)
                    assert offloader.reload_into(again, target) is target
                    assert torch.equal(target, original)


@pytest.mark.req("S3-14", "S3-15")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_released_tensor_has_no_bytes_until_they_are_reloaded_into_it(executor: ExecutorName) -> None:
    with offloading(executor) as offloader:
        device = offloader.engine.device
        for tensor in (torch.randn(64, 8), nn.Parameter(torch.randn(32, 4)), torch.randn(6, 5).t().clone()):
            device.note_write(device.compute, tensor.detach())
            original, before = tensor.detach().clone(), device.active_bytes()
            handle = offloader.offload(tensor, release_storage=True)
            assert tensor.untyped_storage().size() == 0
            assert device.active_bytes() == before - handle.nbytes
            assert isinstance(tensor, nn.Parameter) == tensor.requires_grad
            with pytest.raises(OffloadError, match=r"call reload_into\(handle, tensor\) first"):
                tensor + 1
            with pytest.raises(OffloadError, match=r"call reload_into\(handle, tensor\) first"):
                offloader.offload(tensor)
            assert offloader.reload_into(handle, tensor) is tensor
            assert torch.equal(tensor, original)
            assert type(tensor) is (nn.Parameter if tensor.requires_grad else Tensor)


@pytest.mark.req("S3-14")
def test_a_storage_that_somebody_else_holds_is_not_released() -> None:
    with offloading() as offloader:
        whole, weight = torch.randn(8, 8), nn.Parameter(torch.randn(4, 4))
        view = whole[2:]
        loss = (torch.randn(2, 4, requires_grad=True) @ weight).sum()
        for tensor in (whole, view, weight, torch.randn(4)[:2]):
            before = tensor.detach().clone()
            with pytest.raises(OffloadError, match="is not its own alone"):
                offloader.offload(tensor, release_storage=True)
            assert torch.equal(tensor, before)
        loss.backward()


@pytest.mark.req("S3-13")
def test_a_tensor_that_is_not_on_the_device_is_refused() -> None:
    with offloading() as offloader:
        handle = offloader.offload(torch.ones(3))
        for tensor in (torch.ones(3, device="meta"), handle.cpu_tensor, [1.0], torch.eye(3).to_sparse()):
            with pytest.raises(ValueError, match="offload of a"):
                offloader.offload(tensor)  # type: ignore[arg-type]


@pytest.mark.req("S3-15")
def test_a_reload_that_cannot_be_is_an_error_and_loses_nothing() -> None:
    with offloading() as offloader:
        x = torch.randn(4, 3)
        handle = offloader.offload(x)
        bad = [torch.empty(3, 4), torch.empty(4, 3, dtype=torch.float64), torch.empty(1, 3).expand(4, 3), [1]]
        for target in bad:
            with pytest.raises(ValueError, match="reload_into a"):
                offloader.reload_into(handle, target)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="reload to cuda:1, and this offloader copies to cpu"):
            offloader.reload(handle, device="cuda:1")
        assert torch.equal(offloader.reload(handle, device="cpu"), x)
        with pytest.raises(
            StaleHandleError, match=r"reload of <OffloadHandle of shape .*, reloaded or cleared"
        ):
            offloader.reload(handle)
        cleared = offloader.offload(x)
        offloader.clear()
        for call in (offloader.reload, lambda handle: handle.cpu_tensor):
            with pytest.raises(StaleHandleError, match="its host copy is gone"):
                call(cleared)


@pytest.mark.req("S3-16", "S3-74")
def test_buffers_are_used_again_and_streams_are_the_engines() -> None:
    with offloading() as offloader:
        device = offloader.engine.device
        assert (offloader.d2h_stream, offloader.h2d_stream) == (device.d2h, device.h2d)
        x = torch.randn(64)
        for _ in range(20):
            assert torch.equal(offloader.reload(offloader.offload(x)), x)
            offloader.sync_all()
        assert (offloader.pool.stats["pool_misses"], offloader.pool.stats["pool_hits"]) == (1, 19)
        handles = [offloader.offload(torch.randn(64)) for _ in range(3)]
        offloader.reset_pool()
        assert offloader.pool.stats["current_in_use"] == 0
        with pytest.raises(StaleHandleError):
            offloader.reload(handles[1])


@pytest.mark.req("S3-17")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_each_handle_is_waited_for_by_its_own_event(executor: ExecutorName) -> None:
    """Reloads in another order than the offloads', with the copies of others still in flight."""
    with offloading(executor) as offloader:
        for seed in range(8):
            generator = torch.Generator().manual_seed(seed)
            tensors = [torch.randn(17, generator=generator) for _ in range(6)]
            originals = [tensor.clone() for tensor in tensors]
            handles = [offloader.offload(tensor) for tensor in tensors]
            for tensor in tensors[::2]:
                tensor.fill_(-1)  # waits for its own copy
            for index in torch.randperm(6, generator=generator).tolist():
                assert torch.equal(offloader.reload(handles[index]), originals[index])


@pytest.mark.req("S3-16", "S3-17")
def test_only_sync_offload_blocks_the_host_and_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    with offloading() as offloader:
        events: list[object] = []
        real = SimDevice.synchronize
        monkeypatch.setattr(SimDevice, "synchronize", lambda self, e: (events.append(e), real(self, e)))
        x = torch.randn(32)
        handle, other = offloader.offload(x), offloader.offload(torch.ones(5))
        back = offloader.reload(other)
        offloader.sync_reload()
        assert type(back) is Tensor
        assert events == []
        offloader.sync_offload()
        assert events == [handle.event] or set(events) == {handle.event, other.event}
        assert torch.equal(handle.cpu_tensor, x)
        back, handle = offloader.reload(offloader.offload(torch.ones(3))), offloader.offload(x)
        assert type(back) is not Tensor
        events.clear()
        offloader.sync_all()
        assert handle.event in events
        assert type(back) is Tensor


PROGRAMS: dict[str, Callable[[TensorOffloader], Tensor]] = {
    "spill": lambda o: o.reload(o.offload(torch.arange(9.0))),
    "settle": lambda o: _overwritten(o),
    "allocate": lambda o: o.reload_into(o.offload(torch.arange(9.0)), _used(o)),
    "restore": lambda o: o.reload(o.offload(torch.arange(9.0))),
    "read": lambda o: o.reload(o.offload(torch.arange(9.0))),
}


def _overwritten(offloader: TensorOffloader) -> Tensor:
    x = torch.arange(9.0)
    handle = offloader.offload(x)
    x.zero_()
    offloader.engine.device.note_write(offloader.engine.device.compute, x)
    return offloader.reload(handle)


def _used(offloader: TensorOffloader) -> Tensor:
    target, device = torch.zeros(9), offloader.engine.device
    device.note_write(device.compute, target)
    return target


@pytest.mark.req("S3-17", "S3-69")
@pytest.mark.parametrize("edge", PROGRAMS)
def test_without_an_edge_a_program_that_needs_it_has_a_hazard(
    edge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimDevice, "poll", lambda *_: False)  # the host has seen nothing pass

    def run(without: set[str]) -> Tensor:
        with offloading(without=without) as offloader:
            found = PROGRAMS[edge](offloader)
            device = offloader.engine.device
            with torch.no_grad():
                result = found + 0
            device.note_read(device.compute, found)
            return result

    assert torch.equal(run(set()), torch.arange(9.0))
    with pytest.raises(HazardError):
        run({edge})


@pytest.mark.req("S3-12")
def test_copies_of_what_is_touched_meanwhile_are_waited_for_and_of_others_not() -> None:
    with offloading() as offloader:
        device = offloader.engine.device
        x, y = torch.randn(8), torch.randn(8)
        handle = offloader.offload(x)
        waits = dict(device.waits)  # type: ignore[attr-defined]
        y.mul_(2)
        assert device.waits == waits  # type: ignore[attr-defined]
        offloader.offload(torch.ones(4))
        assert device.waits["settle"] == 0  # type: ignore[attr-defined]
        x.mul_(2)
        assert device.waits["settle"] == waits.get("settle", 0) + 1  # type: ignore[attr-defined]
        other = offloader.offload(torch.ones(8))
        back, into = offloader.reload(handle), offloader.reload_into(other, y)
        torch.ones(3).mul_(2)
        assert device.waits["read"] == 0  # type: ignore[attr-defined]
        assert torch.equal(copy.deepcopy(back) * 2, x)
        assert torch.equal(into, torch.ones(8))
        assert device.waits["read"] == 2  # type: ignore[attr-defined]


@pytest.mark.req("S3-80")
def test_a_reload_inside_a_capture_is_repeated_by_each_replay() -> None:
    with offloading() as offloader:
        device = offloader.engine.device
        x = torch.arange(6.0)
        handle, elsewhere = offloader.offload(x), offloader.offload(torch.ones(2))
        out = torch.zeros(6)
        device.note_write(device.compute, out)
        with device.capture(), pytest.raises(CaptureError, match=r"inside `with offload\.capturing"):
            offloader.reload(handle)
        with offloader.engine.capturing() as region, device.capture() as graph:
            back = offloader.reload(handle)
            device.launch(lambda: out.add_(back))
            with pytest.raises(CaptureError, match="offload of a tensor by hand"):
                offloader.offload(x)
        del handle
        for number in range(3):
            offloader.reset_pool()
            others = [offloader.offload(torch.full((6,), 7.0)) for _ in range(3)]  # not its host buffer
            out.zero_()
            device.note_write(device.compute, out)
            back.fill_(-1)
            device.note_write(device.compute, back)
            graph.replay()
            assert torch.equal(out, torch.arange(6.0)), number
        region.release()
        with pytest.raises(CaptureError, match="its region was released"):
            graph.replay()
        assert len(others) == 3
        with pytest.raises(StaleHandleError):
            offloader.reload(elsewhere)


def test_a_dropped_handle_and_a_dropped_offloader_give_their_memory_back() -> None:
    engine = OffloadEngine(device=SimDevice(executor="late"))
    offloader = TensorOffloader(engine=engine)
    offloader.offload(torch.ones(16))
    offloader.offload(torch.ones(16))
    assert offloader.pool.stats["total_allocated"] <= 2
    handle = offloader.offload(torch.ones(8))
    del offloader, handle
    engine.arena.clear()


def test_more_than_the_limit_in_flight_blocks_for_the_oldest() -> None:
    with offloading() as offloader:
        impose(offloader.engine, max_spilling_bytes=100)
        tensors = [torch.full((10,), float(i)) for i in range(5)]
        handles = [offloader.offload(tensor) for tensor in tensors]
        alive = [weakref.ref(tensor) for tensor in tensors]
        del tensors
        assert [reference() is not None for reference in alive[:2]] == [False, False]
        for number, handle in enumerate(handles):
            assert torch.equal(offloader.reload(handle), torch.full((10,), float(number)))


def test_threads_share_an_offloader() -> None:
    failed: list[BaseException] = []
    with offloading("random") as offloader:

        def work() -> None:
            try:
                for number in range(60):
                    tensor = torch.randn(8)
                    original = tensor.clone()
                    handle = offloader.offload(tensor)
                    tensor.add_(1)
                    assert torch.equal(offloader.reload(handle), original)
                    if number % 5 == 0:
                        offloader.sync_all()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert failed == []


@pytest.mark.req("S3-12", "S3-19", "S3-26")
def test_the_classes_are_names_of_the_package() -> None:
    assert offload.TensorOffloader is TensorOffloader
    assert offload.WeightOffloadHook is WeightOffloadHook
    assert offload.GradientOffloadHook is GradientOffloadHook
