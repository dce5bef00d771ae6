"""What the runtime did in a step: the figures of its JSON lines, and some more.

One invariant: a line has exactly the fields of `ActivationStepMetrics`, which are the source system's.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.described import described


@described
@dataclass(slots=True, kw_only=True)
class ActivationStepMetrics:
    """One step of one runtime, counted while it runs. A record is a storage, however often it was saved, but
    for tensors that order="reactive" keeps: there each save counts."""

    step: int = 0
    """Number that `step_begin` was given, else counted from 0."""

    activations_saved: int = 0
    """Records: `activations_kept + activations_spilled`."""

    activations_kept: int = 0
    """Records that stayed on the device."""

    activations_spilled: int = 0
    """Records whose copy to the host was issued: `pool_hits + pool_misses`."""

    activations_restored: int = 0
    """Spilled records that a backward has read, each counted once: copied back, or found still there. All of
    the spilled ones where the whole graph ran backward."""

    spill_bytes: int = 0
    """Bytes of the spilled records."""

    restore_bytes: int = 0
    """Bytes of the restored records."""

    stall_time_ms: float = 0.0
    """Time that the host was blocked to finalize spills in this step, and device time that compute waited for
    copies of saved tensors in the step before: reading that earlier would block the host."""

    stall_count: int = 0
    """Waits in this step, of both kinds."""

    pool_hits: int = 0
    """Spilled records that found pinned memory."""

    pool_misses: int = 0
    """Spilled records in unpinned memory."""

    vram_peak_mb: float = 0.0
    """MiB of device memory allocated at most in the step."""


@described
@dataclass(slots=True, kw_only=True)
class SpillDetails:
    """What the source's line has no field for."""

    logical_bytes: int = 0
    """Bytes of the saved tensors that were looked at, one count a save."""

    storage_bytes: int = 0
    """Bytes of the storages that they lie in, one count a storage."""

    kept: int = 0
    """Saves that order="reactive" has kept, which have no record."""

    kept_bytes: int = 0
    """Bytes of those tensors."""

    released_bytes: int = 0
    """Spilled bytes whose copy let device memory go: what the peak can fall by."""

    forecast_bytes: int = 0
    """Bytes that left because the curve of earlier steps said that they would have to."""

    latched_bytes: int = 0
    """Bytes that left because the high mark was reached."""

    forwards_lost: int = 0
    """Forwards of a shape that no curve fits: the latch alone ruled."""

    times_over: int = 0
    """Readings at or above the high mark after which nothing more could leave."""

    retries: int = 0
    """Allocations of the engine that failed, for which room was made, after which they were tried again."""
