"""A ring of slots on the device, through which buckets of host memory pass: one comes in, one is worked on,
one goes out.

One invariant: a slot is written again only behind the event of its last reader, which the slot keeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from offload.device import Device, Event, Lane

RING_SLOTS = 3
"""Buckets on the device at most: one coming in, one being stepped, one going out."""


def slots_for(numel: int, largest: int, most: int = RING_SLOTS) -> int:
    """How many slots help buckets of `numel` elements together, the largest of `largest`: a small one beside
    it is not worth another."""
    return min(most, max(1, round(numel / largest))) if largest else 0


@dataclass(slots=True)
class Slot:
    """Device memory for one bucket, by name, and the event after which it may be written again."""

    flats: dict[str, Tensor]
    free: Event


class Ring:
    """Slots on the device, each as large as the largest bucket, the lane on which they come in, and the lane
    that steps them.

    flats: (name, bytes of one element). slots: `slots_for` the buckets. Allocated on `compute`; the
        first use of each slot is ordered behind that.
    """

    def __init__(
        self, device: Device, numel: int, flats: Sequence[tuple[str, int]], slots: int = RING_SLOTS
    ) -> None:
        self.device = device
        self.nbytes = slots * numel * sum(size for _, size in flats)
        self.lane: Lane = device.new_compute_lane("optimizer")
        self.inward: Lane = device.new_copy_lane("state in")
        """Of its own: what others fetch ahead on `h2d` waits there for memory, and state would behind it."""
        made = [{name: device.empty(numel * size) for name, size in flats} for _ in range(slots)]
        allocated = device.record(device.compute)
        self._slots = deque(Slot(each, allocated) for each in made)  # the one used longest ago first

    def wait_for_slot(self, most: int | None = None) -> None:
        """Block the host until the next slot is free, and fewer than `most` are used, so that no more buckets
        are queued in front of others' copies, and weights that return from the CPU are not delayed by them.
        most: 0 counts as 1; None for all."""
        slots = self._slots
        self.device.synchronize(slots[-min(len(slots), len(slots) if most is None else max(1, most))].free)

    def next_slot(self) -> Slot:
        """The slot used longest ago."""
        self._slots.rotate(-1)
        return self._slots[-1]
