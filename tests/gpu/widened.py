"""Races made wide instead of hoped for: a CUDA device whose lanes are slow, whose buffers start poisoned, and
which can lose an edge.

One invariant: with no edge left out, a program gives the same bytes on it as on `CudaDevice`; it only takes
longer.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

import torch

from offload.device import CopyPair, Event, Lane
from offload.device.cuda import CudaDevice, CudaLane

POISON = 0xA5
"""The value of every byte of a new buffer. As a float32 it is -2.9e-16, which no test saves."""

# 0.1 s at the highest clock: an idle GPU runs at a sixth of it, and needs some time to get there
_WARM_CYCLES = 200_000_000
_CALIBRATION_CYCLES = 20_000_000


@functools.cache
def _cycles_per_ms() -> float:
    """Calibrated once, on a GPU that is awake. Blocks the host."""
    torch.cuda._sleep(_WARM_CYCLES)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(_CALIBRATION_CYCLES)
    end.record()
    end.synchronize()
    return _CALIBRATION_CYCLES / float(start.elapsed_time(end))


def cycles_of(ms: float) -> int:
    """What `torch.cuda._sleep` takes to be busy for about `ms` milliseconds."""
    return int(_cycles_per_ms() * ms)


def sleep(ms: float) -> None:
    """Keep the current stream busy for about `ms` milliseconds; the host goes on at once."""
    torch.cuda._sleep(cycles_of(ms))


class WidenedDevice(CudaDevice):
    """A CUDA device with a delay before each call of `copy`.

    slow_ms: by the lane's name, "d2h" or "h2d"; may be changed at any time. without: titles of ordering edges
    that are left out, as `SimDevice` takes them. poison: fill what `empty` returns, on the compute lane, as
    work that was there before.
    """

    def __init__(
        self,
        *,
        slow_ms: Mapping[str, float] | None = None,
        without: Collection[str] = (),
        poison: bool = True,
    ) -> None:
        super().__init__()
        self.slow_ms = dict(slow_ms or {})
        self.aim: int | None = None  # the address that the next buffer has to get
        self._without = frozenset(without)
        self._poison = poison
        cycles_of(1.0)  # calibrate now: later it would block the host

    def wait(self, lane: Lane, event: Event, order: str) -> None:
        if order not in self._without:
            super().wait(lane, event, order)

    def copy(self, lane: Lane, pairs: Sequence[CopyPair]) -> None:
        slow_ms = self.slow_ms.get(lane.name, 0.0)
        if slow_ms:
            assert isinstance(lane, CudaLane)
            with torch.cuda.stream(lane.stream):
                sleep(slow_ms)
        super().copy(lane, pairs)

    def empty(self, nbytes: int) -> torch.Tensor:
        aim, self.aim = self.aim, None
        buffer = super().empty(nbytes) if aim is None else self.empty_at(aim, nbytes)
        return buffer.fill_(POISON) if self._poison else buffer

    def empty_at(self, address: int, nbytes: int) -> torch.Tensor:
        """A buffer at an address that the current stream has freed. Raises LookupError if the allocator does
        not hand it out."""
        others = []
        for _ in range(32):
            buffer = super().empty(nbytes)
            if buffer.data_ptr() == address:
                return buffer
            others.append(buffer)
        raise LookupError(
            f"the allocator did not hand out {nbytes:,} bytes at {address:#x} in {len(others)} tries"
        )
