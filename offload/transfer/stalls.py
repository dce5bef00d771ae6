"""How long compute waited for copies: timed events around each such wait, read one step late.

One invariant: reading them never blocks the host, and asks about one event a lane: where the last one has
passed, so have those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.device import Device, Event, Lane


@dataclass(slots=True, eq=False)
class Stall:
    """A wait of `lane` between two timed events."""

    lane: Lane
    before: Event
    after: Event
    _ms: float | None = None

    def ms(self, device: Device) -> float:
        """Device time between the two, which have passed. The device is asked once: a step's clock and its
        figures both want it."""
        if self._ms is None:
            self._ms = device.elapsed_ms(self.before, self.after)
        return self._ms


class Stalls(list[Stall]):
    """Waits of one client's lanes for copies and steps in one step, in their order. before: those of the step
    before it."""

    def __init__(self, device: Device, before: Sequence[Stall] = ()) -> None:
        super().__init__()
        self._device, self._before = device, before

    def wait(self, lane: Lane, event: Event, order: str) -> None:
        """The lane waits for the event, which is a stall where it has not passed yet. order: as
        `Device.wait`."""
        before = None if self._device.poll(event) else self._device.record(lane, timed=True)
        self._device.wait(lane, event, order)
        if before is not None:
            self.append(Stall(lane, before, self._device.record(lane, timed=True)))

    def end_step(self) -> tuple[Stalls, int, float]:
        """Three things: the list for the next step, empty yet; the number of waits in this one; and the ms
        that the waits of the step BEFORE took, read one step late so that it never blocks the host."""
        before, self._before = self._before, ()
        return Stalls(self._device, self), len(self), total_ms(self._device, before)


def all_passed(device: Device, stalls: Sequence[Stall]) -> bool:
    """Whether the device got to the end of each. stalls: in the order of their waits, as everywhere here."""
    return not _lanes_under_way(device, stalls)


def total_ms(device: Device, stalls: Sequence[Stall]) -> float:
    """The device time of those that have ended."""
    under_way = _lanes_under_way(device, stalls)
    ended = [stall for stall in stalls if stall.lane not in under_way or device.poll(stall.after)]
    return sum((stall.ms(device) for stall in ended), 0.0)


def _lanes_under_way(device: Device, stalls: Sequence[Stall]) -> set[Lane]:
    """Lanes that have not got to the end of their last one."""
    last = {stall.lane: stall.after for stall in stalls}
    return {lane for lane, after in last.items() if not device.poll(after)}
