"""Streams and events of the CUDA device, on a stand-in for torch.cuda's: made once, events on loan to one
hand-off at a time."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from offload.device.cuda import CudaDevice


class _Stream:
    def __init__(self, device: Any = None) -> None:
        self.stream_id = id(self)
        self.device_index = 0
        self.device_type = 1
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)


class _Event:
    made = 0

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        type(self).made += 1
        self.timed = enable_timing
        self.recorded_on: list[_Stream] = []
        self.passed = True
        self.synchronized = 0

    def record(self, stream: _Stream) -> None:
        self.recorded_on.append(stream)

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.synchronized += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    main = _Stream()
    monkeypatch.setattr(_Event, "made", 0)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentStream", lambda index: (main.stream_id, index, 1), raising=False
    )
    return CudaDevice()


@pytest.mark.req("S2-56")
def test_streams_and_events_are_made_once_however_many_hand_offs_there_are(device: CudaDevice) -> None:
    lanes = [device.compute, device.d2h, device.h2d]
    for _ in range(100):
        device.wait(device.d2h, device.record(device.compute), "spill")
        spilled = device.record(device.d2h)
        device.wait(device.h2d, spilled, "restore")
    assert [device.compute, device.d2h, device.h2d] == lanes
    # the last `spilled` is still held while the next step records; the other event is free again by then
    assert _Event.made == 2


@pytest.mark.req("S2-56")
def test_event_that_somebody_may_still_wait_for_is_never_recorded_anew(device: CudaDevice) -> None:
    held = device.record(device.d2h)
    for _ in range(5):
        device.record(device.compute)
    device.wait(device.h2d, held, "restore")
    (waited,) = device.h2d.stream.waited  # type: ignore[attr-defined]
    assert waited.recorded_on == [device.d2h.stream]  # type: ignore[attr-defined]


def test_timed_and_untimed_events_are_not_lent_for_each_other(device: CudaDevice) -> None:
    device.record(device.compute)
    timed: Any = device.record(device.compute, timed=True)
    untimed: Any = device.record(device.compute)
    assert timed.event.timed
    assert not untimed.event.timed


@pytest.mark.req("S3-78")
@pytest.mark.parametrize("sanitizing", [False, True])
def test_poll_that_finds_an_event_passed_tells_the_sanitizer_and_never_blocks(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch, sanitizing: bool
) -> None:
    """torch's sanitizer sees no query: a wait that was left out because a poll had said that it need not be
    looked like a race."""
    if sanitizing:
        monkeypatch.setitem(sys.modules, "torch.cuda._sanitizer", ModuleType("on"))
    else:
        monkeypatch.delitem(sys.modules, "torch.cuda._sanitizer", raising=False)
    event: Any = device.record(device.d2h)
    event.event.passed = False
    assert not device.poll(event)
    assert event.event.synchronized == 0
    event.event.passed = True
    assert device.poll(event)
    assert event.event.synchronized == int(sanitizing)


def test_a_compute_lane_that_was_made_is_the_one_that_is_current_on_its_stream(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers are protected by the identity of the lane: a second object for one stream would order nothing
    where it should."""
    lane = device.new_compute_lane("optimizer")
    assert device.compute is not lane
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: lane.place, raising=False)
    assert device.compute is lane


class _Process:
    """The current device and each device's current stream, as torch keeps them: making a stream current takes
    its device along."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: CudaDevice, current_device: int) -> None:
        self.device = current_device
        self.streams = {index: (100 + index, index, 1) for index in range(2)}
        self.copied_on: list[tuple[int, ...]] = []
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.device, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_setDevice", self._set_device, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", self.streams.__getitem__, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_setStream", self._set_stream, raising=False)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Stream(device))

    def _set_device(self, index: int) -> None:
        self.device = index

    def _set_stream(self, stream_id: int, device_index: int, device_type: int) -> None:
        self.streams[device_index] = (stream_id, device_index, device_type)
        self.device = device_index

    def copy_(self, source: Any, non_blocking: bool) -> None:
        if source is None:
            raise RuntimeError("refused")
        self.copied_on.append(self.streams[0])


@pytest.mark.parametrize("source", ["bytes", None], ids=["copied", "refused"])
@pytest.mark.parametrize("current_device", [0, 1])
def test_copy_leaves_the_current_device_and_its_streams_as_they_were(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch, current_device: int, source: Any
) -> None:
    """A model on cuda:0 in a thread whose current device is cuda:1: after the first spill, `device="cuda"`
    meant another GPU."""
    process = _Process(monkeypatch, device, current_device)
    before = dict(process.streams)
    with contextlib.nullcontext() if source else pytest.raises(RuntimeError, match="refused"):
        device.copy(device.d2h, [(process, source)])  # type: ignore[list-item]
    assert (process.device, process.streams) == (current_device, before)
    assert process.copied_on == ([device.d2h.place] if source else [])


def test_lane_of_a_stream_is_the_same_one_whenever_it_is_current_again(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records and transfers compare lanes by identity. A stream from outside has its address for an id, and
    nothing else is asked of it."""
    process = _Process(monkeypatch, device, 1)
    first = device.compute
    process.streams[0] = (0x7F00_0000_1000, 0, 1)
    outside = device.compute
    process.streams[1] = (7, 1, 1)  # another device's
    assert device.compute is outside is not first
    process.streams[0] = (100, 0, 1)
    assert device.compute is first
