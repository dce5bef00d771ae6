"""How long each action of a step computed: the time between timed events at its two ends, less the stalls in
between.

One invariant: nothing here blocks the host. A step's times are read when a later step ends, and only if all
of its events have passed.
"""

from __future__ import annotations

from offload.device import Device, Event
from offload.policy.actions import Action
from offload.transfer.stalls import Stall, all_passed

__all__ = ["StepClock"]

Stalls = list[Stall]


class _Timed:
    __slots__ = ("action", "end", "first_stall", "last_stall", "start")

    def __init__(self, action: Action, start: Event, first_stall: int) -> None:
        self.action = action
        self.start = start
        self.end: Event | None = None
        self.first_stall = first_stall
        self.last_stall = first_stall


class StepClock:
    """Times the announced actions of a step. Actions do not nest."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._timed: list[_Timed] = []
        self._before: tuple[list[_Timed], Stalls] = ([], [])

    def start(self, action: Action, stalls: Stalls) -> None:
        if self._device.is_capturing():
            return  # a captured event has no time
        self._timed.append(_Timed(action, self._device.record(self._device.compute, timed=True), len(stalls)))

    def stop(self, action: Action, stalls: Stalls) -> None:
        if self._device.is_capturing():
            return
        if self._timed and self._timed[-1].action == action and self._timed[-1].end is None:
            self._timed[-1].end = self._device.record(self._device.compute, timed=True)
            self._timed[-1].last_stall = len(stalls)

    def end_step(self, stalls: Stalls) -> dict[Action, float] | None:
        """Seconds of compute by action of the step BEFORE the one that ends; None if there was none or it is
        not over on the device.

        stalls: of the step that ends, in order.
        """
        timed, old_stalls = self._before
        self._before = (self._timed, stalls)
        self._timed = []
        device = self._device
        ends = [entry.end for entry in timed if entry.end is not None]
        if len(ends) != len(timed) or not ends:
            return None
        # not in one lane, maybe
        if not (all(device.poll(event) for event in ends) and all_passed(device, old_stalls)):
            return None
        seconds: dict[Action, float] = {}
        for entry in timed:
            assert entry.end is not None
            waited_ms = sum(stall.ms(device) for stall in old_stalls[entry.first_stall : entry.last_stall])
            seconds[entry.action] = max(0.0, (device.elapsed_ms(entry.start, entry.end) - waited_ms) / 1000)
        return seconds
