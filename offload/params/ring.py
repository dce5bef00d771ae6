"""A ring of slots on the device, through which buckets of host memory pass: one comes in, one is worked on,
one goes out.

One invariant: a slot is written again only behind the event of its last reader, which the slot keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from offload.device import Device, Event, Lane

__all__ = ["RING_SLOTS", "Ring", "Slot"]

RING_SLOTS = 3
"""Buckets on the device: one coming in, one being stepped, one going out."""


class Slot:
    """Device memory for one bucket, and the event after which it may be written again."""

    __slots__ = ("flats", "free")

    def __init__(self) -> None:
        self.flats: dict[str, Tensor] = {}
        self.free: Event | None = None


class Ring:
    """RING_SLOTS slots on the device, each as large as the largest bucket, and the lane that steps them.

    flats: (name, bytes of one element). Allocated on `compute`; the first use of each slot is ordered behind
        that.
    """

    def __init__(self, device: Device, numel: int, flats: Sequence[tuple[str, int]]) -> None:
        self.device = device
        self.lane: Lane = device.new_compute_lane("optimizer")
        self.slots = [Slot() for _ in range(RING_SLOTS)]
        self._next = 0
        for slot in self.slots:
            slot.flats = {name: device.empty(max(1, numel) * size) for name, size in flats}
        allocated = device.record(device.compute)
        for slot in self.slots:
            slot.free = allocated

    @property
    def nbytes(self) -> int:
        return sum(flat.numel() for slot in self.slots for flat in slot.flats.values())

    def wait_for_slot(self) -> None:
        """Block the host until the next slot is free, so that no more than RING_SLOTS buckets are queued in
        front of others' copies, and weights on their way back from the CPU go past."""
        free = self.slots[self._next].free
        if free is not None:
            self.device.synchronize(free)

    def take(self) -> Slot:
        """The slot used longest ago."""
        slot = self.slots[self._next]
        self._next = (self._next + 1) % RING_SLOTS
        return slot
