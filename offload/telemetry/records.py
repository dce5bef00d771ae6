"""The figures of one training step, as every reader of them sees it: scripts, the summary, files of JSON
lines.

One invariant: a record is a plain value, complete when it is made. It imports nothing of the rest, so
anything may read it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["StepStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one ended step did on this rank. Counts are of records (one per distinct storage), bytes are of
    storage."""

    step: int
    """Index of the step since the manager was built."""

    saved: int = 0
    """Records that autograd's saves made. Every one is either kept or spilled: `saved == kept + spilled`."""

    kept: int = 0
    """Records that stayed on the device for their whole life."""

    spilled: int = 0
    """Records copied to the host at least once."""

    restored: int = 0
    """Records copied back. Fewer than `spilled` where a graph was freed unread."""

    spill_bytes: int = 0
    """Bytes that crossed the link from device to host."""

    restore_bytes: int = 0
    """Bytes that crossed the link from host to device. A split backward may fetch a record twice, so this can
    exceed `spill_bytes`."""

    stall_ms: float = 0.0
    """Device time in ms that `compute` waited for a transfer's event."""

    stall_count: int = 0
    """Waits that found their event not yet passed."""

    refused: int = 0
    """Records that should have left and stayed: no host block was there, or the budget had no room."""

    refused_bytes: int = 0
    """Bytes of the refused records. More than a warm-up's worth means that the host reservation is too
    small."""

    device_bytes_peak: int = 0
    """Largest number of saved bytes on the device at once, in any state: resident, spilling, restoring,
    restored."""

    host_bytes_lent_peak: int = 0
    """Largest number of host bytes on loan at once."""

    host_bytes_wanted_peak: int = 0
    """`host_bytes_lent_peak`, or more if records were refused for want of a block: what the host would have
    had to hold for them too."""

    host_bytes_held: int = 0
    """Host bytes that the arena owned when the step ended, lent or not. `held - lent_peak` was pinned for
    nothing."""

    replays: int = 0
    """Replays of captured graphs that copy. What such a graph moves is counted above in the step of its
    capture, once."""

    replayed_bytes: int = 0
    """Bytes that those replays carried over the link, both directions together."""

    def to_json(self) -> dict[str, int | float]:
        """The fields by name, in the order above: one line of a telemetry file."""
        return asdict(self)
