"""What the weight runtime can be told, checked before anything is built.

One invariant: a config that exists is valid. Names and defaults are the source system's; `_mb` means MiB.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from offload.config import check_index
from offload.described import described
from offload.sizes import bytes_text

__all__ = ["MIB", "StagehandConfig"]

MIB = 1 << 20
_ALIGNMENT = 512
"""Bytes, of the arena that the masters lie in."""


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

    debug_trace: bool = False
    """Log each move of a block at level DEBUG."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(one.default, bool) and not isinstance(value, bool):
                raise ValueError(f"{one.name} is {value!r}, must be True or False")
        for name in ("pinned_pool_mb", "pinned_slab_mb", "max_inflight_transfers"):
            check_index(name, getattr(self, name), least=1)
        for name in ("prefetch_window_blocks", "eviction_cooldown_steps", "telemetry_interval_steps"):
            check_index(name, getattr(self, name))
        high, low = self.vram_high_watermark_mb, self.vram_low_watermark_mb
        if not 0 < low <= high:
            raise ValueError(
                f"vram_high_watermark_mb is {high!r} and vram_low_watermark_mb {low!r}: eviction starts at "
                "the first and stops below the second; give numbers above 0, the low one at most the high one"
            )
        if self.pinned_pool_mb < self.pinned_slab_mb:
            raise ValueError(
                f"pinned_pool_mb is {self.pinned_pool_mb:,} and pinned_slab_mb {self.pinned_slab_mb:,}: the "
                "pool holds no slab; give a pool of one at least"
            )
        align = self.pinned_slab_alignment
        if align not in [1 << power for power in range(_ALIGNMENT.bit_length())]:
            raise ValueError(
                f"pinned_slab_alignment is {align!r}, and masters are aligned at {bytes_text(_ALIGNMENT)}; "
                f"give a power of two up to {_ALIGNMENT}"
            )
        if self.policy != "static" or self.copy_stream_priority not in (-1, 0):
            raise ValueError(
                f"policy is {self.policy!r} and copy_stream_priority {self.copy_stream_priority!r}, must be "
                "'static' and 0 or -1"
            )
        if not (self.telemetry_file and isinstance(self.telemetry_file, str)):
            raise ValueError(
                f"telemetry_file is {self.telemetry_file!r}, must be the path of a file, as text"
            )

    @property
    def pool_bytes(self) -> int:
        """Of whole slabs."""
        return self.pinned_pool_mb // self.pinned_slab_mb * self.slab_bytes

    @property
    def slab_bytes(self) -> int:
        return self.pinned_slab_mb * MIB
