"""Warnings from the figures of a steady step: a limit that was passed, and copies that save no memory.

One invariant: each is given once, with its cause and the way out, and changes nothing.
"""

from __future__ import annotations

import logging

from offload.telemetry.records import StepStats
from offload.transfer.admission import Limits

__all__ = ["StepReport"]

logger = logging.getLogger(__name__)


class StepReport:
    """Of one planner."""

    def __init__(self) -> None:
        self._said_passed = self._said_nothing_saved = False

    def look(self, stats: StepStats, limits: Limits, live_peak_bytes: int) -> None:
        """stats: of a step that followed its plan. live_peak_bytes: what its saved tensors would take of the
        device at once if none left."""
        limit, peak = limits.device_limit_bytes, stats.device_bytes_peak
        if limit is not None and peak > limit and not self._said_passed:
            self._said_passed = True
            logger.warning(
                "saved tensors took up to %s bytes of the device at once in step %d, and "
                "device_limit_bytes is %s: %s",
                f"{peak:,}",
                stats.step,
                f"{limit:,}",
                f"{stats.refused_bytes:,} bytes found no host memory; call "
                f"reserve_host({stats.host_bytes_wanted_peak:,}) before the first step"
                if stats.refused_bytes
                else "what is being saved or read must fit beside what is on its way; raise the limit, or "
                "mark smaller groups",
            )
        if limit is None and stats.spill_bytes and peak >= live_peak_bytes and not self._said_nothing_saved:
            self._said_nothing_saved = True
            logger.warning(
                "step %d copied %s bytes out and %s back, and its saved tensors took as much of the device "
                "at once, %s bytes, as if none had left: copies in flight have room for all of them. Set "
                "device_limit_bytes to what they may take",
                stats.step,
                f"{stats.spill_bytes:,}",
                f"{stats.restore_bytes:,}",
                f"{peak:,}",
            )
