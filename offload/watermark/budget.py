"""How much device memory is allocated, and the two marks that say whether spilling is on.

One invariant: the latch turns on at or above the high mark and off below the low one; between them it stays
as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from offload.engine import OffloadEngine


class MemoryMeter(Protocol):
    """Allocated device memory, in bytes. Never blocks the host."""

    def allocated(self) -> int:
        """Now."""

    def peak(self) -> int:
        """At most, since `start_step`."""

    def start_step(self) -> None:
        """The peak begins anew."""


class ReadingsMeter:
    """A meter made of a function that tells the allocated bytes: the peak is the highest of its answers."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._peak = 0

    def allocated(self) -> int:
        found = self._read()
        self._peak = max(self._peak, found)
        return found

    def peak(self) -> int:
        return self._peak

    def start_step(self) -> None:
        self._peak = 0


class DeviceMeter(ReadingsMeter):
    """A device whose allocator counts: its peak has what lies between two readings, too.

    resets: whether `start_step` may start the allocator's own peak anew, which others may be reading.
    """

    def __init__(self, engine: OffloadEngine, *, resets: bool) -> None:
        super().__init__(engine.device.active_bytes)
        self._device = engine.device
        self._resets = resets

    def peak(self) -> int:
        found = self._device.allocator_bytes() if self._resets else None
        return super().peak() if found is None else max(super().peak(), found[1])

    def start_step(self) -> None:
        super().start_step()
        if self._resets:
            self._device.reset_allocator_peak()


def meter_of(
    engine: OffloadEngine, given: MemoryMeter | Callable[[], int] | None, *, resets: bool
) -> MemoryMeter:
    """The meter that was given, else the device's. The simulated device has none: there it is the saved bytes
    that the engine knows. resets: as of DeviceMeter."""
    if given is None:
        if engine.device.allocator_bytes() is None:
            return ReadingsMeter(lambda: engine.transfers.device_bytes)
        return DeviceMeter(engine, resets=resets)
    if callable(getattr(given, "allocated", None)):
        return given  # type: ignore[return-value]
    if callable(given):
        return ReadingsMeter(given)
    raise ValueError(
        f"memory_allocated is a {type(given).__name__}, must be a function that returns the allocated bytes "
        "of the device, as torch.cuda.memory_allocated does, or None for that one"
    )


class ActivationBudgetManager:
    """The meter beside the marks. high_bytes, low_bytes: the marks."""

    def __init__(self, meter: MemoryMeter, high_bytes: int, low_bytes: int) -> None:
        self.meter = meter
        self.high_bytes = high_bytes
        self.low_bytes = low_bytes
        self.last_bytes = 0  # the last reading
        self.spilling = False

    def read(self) -> int:
        """The allocated bytes now; the latch follows."""
        self.last_bytes = allocated = self.meter.allocated()
        if allocated >= self.high_bytes:
            self.spilling = True
        elif allocated < self.low_bytes:
            self.spilling = False
        return allocated

    def above_high_watermark(self) -> bool:
        """Whether the last reading was at the high mark or above."""
        return self.last_bytes >= self.high_bytes

    def below_low_watermark(self) -> bool:
        """Whether the last reading was below the low mark."""
        return self.last_bytes < self.low_bytes
