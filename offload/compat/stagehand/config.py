"""What the weight runtime can be told, checked before anything is built.

One invariant: a config that exists is valid. Names and defaults are the source system's; `_mb` means MiB.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.config import MIB, check_flags, check_index
from offload.described import described

__all__ = ["MIB", "StagehandConfig"]

_ALIGNMENTS = [1 << power for power in range(10)]
"""Bytes, up to those at which the arena aligns masters."""


@described
@dataclass(frozen=True, slots=True, kw_only=True)
class StagehandConfig:
    """Marks, windows, guards and telemetry of one `StagehandRuntime`."""

    stagehand_enabled: bool = True
    """False: no hook is installed, nothing moves, and nothing is counted or written."""

    pinned_pool_mb: int = 8192
    """MiB that the largest block may have. Masters of all weights are pinned, within the engine's own host
    limit: a block that leaves unwritten costs no copy."""

    pinned_slab_mb: int = 256
    """MiB. The pool counts in slabs of this size, in its size and in the telemetry."""

    pinned_slab_alignment: int = 512
    """Bytes, a power of two up to 512, at which masters are aligned."""

    vram_high_watermark_mb: float = 22000
    """MiB of allocated device memory, of whatever it is. A load that would pass it evicts blocks first; a
    prefetch that would pass it all the same waits."""

    vram_low_watermark_mb: float = 18000
    """MiB. Eviction stops below it."""

    max_inflight_transfers: int = 2
    """Blocks on their way to the device beyond which none is fetched ahead."""

    copy_stream_priority: int = -1
    """0 or -1. The copy engine serves copies first in, first out, whatever their stream's priority."""

    policy: str = "static"
    """The one that there is: the order is recorded."""

    prefetch_window_blocks: int = 3
    """Blocks that are fetched ahead along the recorded order."""

    eviction_cooldown_steps: int = 2
    """Between steps, a block that was used less than so many steps ago stays. In a step it does not count."""

    strict_bf16: bool = True
    """A block with bfloat16 weights must have bfloat16 outputs."""

    fail_on_dtype_promotion: bool = True
    """A block whose output is wider than its weights is an error. False: it is counted."""

    nan_inf_check: bool = True
    """Count NaN and Inf in the outputs of blocks, on the device, and warn of the first block that has any.
    Costs a read of each output."""

    telemetry_enabled: bool = True
    """Write one JSON line a step, and time copies and steps."""

    telemetry_interval_steps: int = 10
    """Steps between two summaries in the log; 0: none."""

    telemetry_file: str = "stagehand_telemetry.jsonl"
    """Where to; lines are appended."""

    def __post_init__(self) -> None:
        check_flags(self)
        for name in ("pinned_pool_mb", "pinned_slab_mb", "max_inflight_transfers"):
            check_index(name, getattr(self, name), least=1)
        for name in ("prefetch_window_blocks", "eviction_cooldown_steps", "telemetry_interval_steps"):
            check_index(name, getattr(self, name))
        high, low, file = self.vram_high_watermark_mb, self.vram_low_watermark_mb, self.telemetry_file
        align = self.pinned_slab_alignment
        rules = {
            "vram_low_watermark_mb": (0 < low <= high, f"above 0, and at most the high mark, {high!r}"),
            "pinned_pool_mb": (self.pool_bytes > 0, f"a slab at least, {self.pinned_slab_mb:,}"),
            "pinned_slab_alignment": (align in _ALIGNMENTS, "a power of two up to 512, as masters are"),
            "policy": (self.policy == "static", "'static'"),
            "copy_stream_priority": (self.copy_stream_priority in (-1, 0), "0 or -1"),
            "telemetry_file": (isinstance(file, str) and file != "", "the path of a file, as text"),
        }
        for name, (able, must) in rules.items():
            if not able:
                raise ValueError(f"{name} is {getattr(self, name)!r}, must be {must}")

    @property
    def pool_bytes(self) -> int:
        """Of whole slabs."""
        return self.pinned_pool_mb // self.pinned_slab_mb * self.slab_bytes

    @property
    def slab_bytes(self) -> int:
        return self.pinned_slab_mb * MIB
