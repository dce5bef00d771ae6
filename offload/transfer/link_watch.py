"""What the link carries while training runs, seen from the copies of one step.

One invariant: it only observes, and never blocks the host: copies of a step are read when a later step ends,
if the device has done them. A copy costs two timed events while it is watched.
"""

from __future__ import annotations

from typing import NamedTuple

from offload.device import Event
from offload.ids import Owner
from offload.policy.actions import Rates
from offload.policy.seen_link import Copied, seen_rates
from offload.transfer.admission import Direction
from offload.transfer.copier import Copier

__all__ = ["LinkWatch"]


class _Timed(NamedTuple):
    nbytes: int
    start: Event
    end: Event


class LinkWatch:
    """Of the copies that pass `copier`. least_bytes: as of `seen_rates`."""

    def __init__(self, copier: Copier, least_bytes: int) -> None:
        self._copier = copier
        self._least_bytes = least_bytes
        self._copies: dict[Direction, list[_Timed]] = {}
        self._ended: dict[Direction, list[_Timed]] = {}

    def begin(self) -> None:
        """Watch from here on."""
        self._copier.unwatch(self._copied)  # a step that was no whole one has not ended it
        self._copies = {direction: [] for direction in Direction}
        self._copier.watch(self._copied)

    def end(self) -> None:
        """Watch no more. What was watched before and not read is forgotten."""
        self._copier.unwatch(self._copied)
        self._ended, self._copies = self._copies, {}

    def rates(self, thought: Rates) -> Rates | None:
        """At what the copies went that had been watched at the last `end`; None where they were too few, are
        under way, or were read before. thought: rates that they are compared with."""
        device, (out, back) = self._copier.device, (self._ended.get(way, []) for way in Direction)
        self._ended = {}
        # not the last alone: a copy may have gone on a lane of its own
        if not out or not back or not all(device.poll(timed.end) for timed in (*out, *back)):
            return None
        begin = out[0].start

        def copied(timed: _Timed) -> Copied:
            start_s, end_s = (device.elapsed_ms(begin, event) / 1e3 for event in timed[1:])
            return Copied(timed.nbytes, start_s, end_s)

        return seen_rates(thought, [*map(copied, out)], [*map(copied, back)], self._least_bytes)

    def _copied(self, direction: Direction, owner: Owner, nbytes: int, start: Event, end: Event) -> None:
        copies = self._copies.get(direction)
        if copies is not None:
            copies.append(_Timed(nbytes, start, end))
