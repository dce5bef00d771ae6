"""How long compute waited for copies: timed events around each such wait, read one step late; and what the
link between device and host carries, measured on the engine's own lanes and in its own memory.

One invariant: reading waits never blocks the host, and asks about one event a lane: where the last one has
passed, so have those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.device import CopyPair, Device, Event, Lane
from offload.ids import Owner
from offload.memory.arena import HostArena
from offload.policy.actions import Rates
from offload.transfer.copier import Copier


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


_COPIES = 6  # after one to warm up; 64 MiB each: 7 ms a direction at 55 GB/s
_COPY_BYTES = 64 << 20
_MEASUREMENTS = 3

LINK_TEST_BYTES = 2 * _COPY_BYTES
"""Free host bytes that the measurement needs."""


def measure_rates(
    copier: Copier, arena: HostArena, line_up: Callable[[], None] | None = None
) -> Rates | None:
    """Bytes per second out, in, and both at once; None where the arena cannot lend two blocks of 64 MiB.

    line_up: called before each of the three, whatever comes of it: a barrier, so that devices which share the
        host's memory or a switch are measured while they share it.
    Blocks the host for about 30 ms: for before step 1. Nothing else may use the lanes meanwhile.
    """
    line_up = line_up or (lambda: None)  # nobody to line up with
    device, link = copier.device, copier.of(Owner("engine", "link"))
    blocks = [arena.take(_COPY_BYTES), arena.take(_COPY_BYTES)]
    out, back = blocks
    try:
        if out is None or back is None:
            for _ in range(_MEASUREMENTS):
                line_up()
            return None
        source, target = device.empty(_COPY_BYTES), device.empty(_COPY_BYTES)
        device.note_write(device.compute, source)
        outward = list(zip(out.extents, source.split([part.numel() for part in out.extents]), strict=True))
        inward = list(zip(target.split([part.numel() for part in back.extents]), back.extents, strict=True))
        for lane in (device.d2h, device.h2d):
            device.wait(lane, device.record(device.compute), "allocate")
        out_work, in_work = (device.d2h, link.send, outward), (device.h2d, link.fetch, inward)
        d2h_s = _seconds(device, [out_work], line_up)
        h2d_s = _seconds(device, [in_work], line_up)
        both_s = _seconds(device, [out_work, in_work], line_up)
        moved = _COPIES * _COPY_BYTES
        if min(d2h_s, h2d_s, both_s) <= 0:
            return None
        return Rates(
            d2h_bytes_per_s=moved / d2h_s,
            h2d_bytes_per_s=moved / h2d_s,
            duplex_bytes_per_s=2 * moved / both_s,
        )
    finally:
        for block in blocks:
            if block is not None:
                arena.give_back(block, None)


_Work = tuple[Lane, Callable[[list[CopyPair]], Event], list[CopyPair]]


def _seconds(device: Device, work: list[_Work], line_up: Callable[[], None]) -> float:
    """Device time of `_COPIES` rounds on each lane, side by side: the longest lane's."""
    spans = []
    for _, copy, pairs in work:
        copy(pairs)
    line_up()
    starts = [device.record(lane, timed=True) for lane, _, _ in work]
    for _ in range(_COPIES):
        for _, copy, pairs in work:
            copy(pairs)
    for (lane, _, _), start in zip(work, starts, strict=True):
        end = device.record(lane, timed=True)
        device.synchronize(end)
        spans.append(device.elapsed_ms(start, end) / 1000)
    return max(spans)
