"""The lanes of a real GPU beside streams and devices that are not the engine's own."""

from __future__ import annotations

import pytest
import torch

from offload.device.cuda import CudaDevice
from tests.gpu.widened import sleep

pytestmark = pytest.mark.gpu

NBYTES = 1 << 20


@pytest.mark.gpus(2)
@pytest.mark.parametrize("current", [0, 1])
def test_copies_of_one_device_leave_the_current_device_and_every_current_stream_as_they_were(
    current: int,
) -> None:
    """A stream that becomes the current one takes its device along: a spill of cuda:0 made `device="cuda"`
    mean cuda:0 from then on."""
    device = CudaDevice(torch.device("cuda", 0))
    host = device.host_memory(NBYTES, NBYTES)
    sides = [torch.cuda.Stream(index) for index in range(2)]
    with torch.cuda.stream(sides[0]), torch.cuda.stream(sides[1]), torch.cuda.device(current):
        value = torch.full((NBYTES,), 7, dtype=torch.uint8, device="cuda:0")
        device.wait(device.d2h, device.record(device.compute), "spill")
        device.copy(device.d2h, [(host.pieces[0], value)])
        assert torch.cuda.current_device() == current
        assert [torch.cuda.current_stream(index) for index in range(2)] == sides
        assert torch.empty(1, device="cuda").device.index == current
        device.synchronize(device.record(device.d2h))
    assert bool((host.pieces[0] == 7).all())
    host.release()


def test_a_stream_from_outside_is_a_compute_lane_like_others() -> None:
    device = CudaDevice()
    own = torch.cuda.Stream()
    outside = torch.cuda.ExternalStream(own.cuda_stream)
    host = device.host_memory(NBYTES, NBYTES)
    default = device.compute
    with torch.cuda.stream(outside):
        lane = device.compute
        assert lane is not default
        assert device.compute is lane
        # loads the kernel
        value = torch.empty(NBYTES, dtype=torch.uint8, device=device.torch_device).fill_(1)
        torch.cuda.synchronize()
        sleep(100.0)
        value.fill_(7)
        device.wait(device.d2h, device.record(lane), "spill")
        device.copy(device.d2h, [(host.pieces[0], value)])
        assert device.compute is lane, "the copy left another stream current"
        copied = device.record(device.d2h)
        assert not device.poll(copied), "d2h did not wait for the stream from outside"
        device.synchronize(copied)
    assert device.compute is default
    assert bool((host.pieces[0] == 7).all())
    host.release()
