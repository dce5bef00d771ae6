"""Settings of the two runtimes, checked before anything is built.

One invariant: a config that exists is valid. Names and defaults are the source system's; `_mb` means MiB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any, Literal, Self, get_args

from offload.compat.stagehand.backend_cpu import checked_classes
from offload.config import (
    MIB,
    check_flags,
    check_index,
    check_telemetry_file,
    described,
    load_fields,
    naming_near,
)

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
        """Bytes of the pool, in whole slabs."""
        return self.pinned_pool_mb // self.pinned_slab_mb * self.slab_bytes

    @property
    def slab_bytes(self) -> int:
        return self.pinned_slab_mb * MIB


Order = Literal["forecast", "reactive"]

_REACTIVE = {"pinned_pool_classes_mb", "slabs_per_class", "max_inflight_d2h", "max_inflight_h2d"}
_REACTIVE |= {"inline_finalize"}
"""Fields that order="reactive" alone reads."""

_WAY = ("memory", "stagehand", "activation_stagehand")
"""Where the fields lie in a config file of the source system."""


@described
@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationConfig:
    """Marks, caps and telemetry of one `ActivationRuntime`."""

    enabled: bool = True
    """False: no hook is installed, and nothing is counted or written."""

    order: Order = "forecast"
    """What leaves, and when. "forecast": the oldest saved tensors, as early as the allocation curve of
    earlier steps says that they will have to; they come back ahead of their reader, the device waits and the
    host does not, host memory grows. "reactive": the source's letter: the tensor that is being saved, once
    the high mark is reached; one copy in flight, finalized on the host; a fixed pool. Left out, it is
    "reactive" where a field is given that "reactive" alone reads; beside "forecast" such a field is an
    error."""

    vram_high_watermark_mb: float = 20000
    """MiB. Spilling starts at this much allocated device memory. It bounds what is allocated when a tensor is
    saved or read; what an operator uses for itself comes on top."""

    vram_low_watermark_mb: float = 16000
    """MiB. Spilling that has started stops below it. Equal marks are the plain rule: at the mark or above a
    tensor leaves, below it none does."""

    pinned_pool_classes_mb: tuple[int, ...] = (1, 4, 16, 64, 256)
    """MiB, ascending: sizes of the slabs of the fixed pool. order="reactive" only."""

    slabs_per_class: int | tuple[int, ...] = (512, 2, 2, 2, 2)
    """How many slabs of each size; one number counts for every size. order="reactive" only."""

    max_inflight_d2h: int = 1
    """Spills in flight, with order="reactive". 0: nothing leaves. With "forecast" the mark bounds them, or
    `max_spilling_bytes` of the engine's config where that names a cap."""

    max_inflight_h2d: int = 1
    """Restores in flight, with order="reactive", 1 or more: each is fetched when it is read, and its reader
    waits for it, so there is never a second one. With "forecast" see `restore_ahead`."""

    inline_finalize: bool = True
    """With order="reactive", a spill past the cap waits for those in flight. False: it is kept instead; for
    measuring what that costs."""

    restore_ahead: bool = True
    """With order="forecast": fetch what is read next in the room below the high mark. False: each tensor
    comes back when it is read; for measuring what that costs."""

    debug_checksums: bool = False
    """Compare the CRC32 of each host copy at its spill and at its restore; a mismatch is an error. Blocks the
    host, and holds for all clients of the engine."""

    telemetry_enabled: bool = True
    """Write one JSON line a step, and start torch's peak of allocated memory anew with each step."""

    telemetry_file: str = "activation_telemetry.jsonl"
    """Where to; lines are appended."""

    recompute_threshold_bytes: int = 0
    """Bytes. A smaller tensor is kept, or recomputed where a checkpoint does that; it is never spilled."""

    min_numel: int | None = None
    """Elements. A smaller tensor is not looked at. None: 1 with order="reactive", else 512."""

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise ValueError(
                f"order is {self.order!r}, must be one of {', '.join(map(repr, get_args(Order)))}"
            )
        high, low = self.vram_high_watermark_mb, self.vram_low_watermark_mb
        for name, value in (("vram_high_watermark_mb", high), ("vram_low_watermark_mb", low)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}, must be a number of MiB above 0")
        if high < low:
            raise ValueError(
                f"vram_high_watermark_mb is {high:g} and vram_low_watermark_mb {low:g}: spilling would stop "
                "above where it starts; lower the low mark, or give both the same value for one plain mark"
            )
        for name in ("max_inflight_d2h", "recompute_threshold_bytes"):
            check_index(name, getattr(self, name))
        check_index("max_inflight_h2d", self.max_inflight_h2d, least=1)
        if self.min_numel is not None:
            check_index("min_numel", self.min_numel)
        check_flags(self)
        check_telemetry_file(self.telemetry_file)
        checked_classes(self.pinned_pool_classes_mb, self.slabs_per_class, name="pinned_pool_classes_mb")
        for name in ("pinned_pool_classes_mb", "slabs_per_class"):
            value = getattr(self, name)
            if isinstance(value, list):  # as JSON has it
                object.__setattr__(self, name, tuple(value))
        _check_read(self.order, {one.name for one in fields(self) if getattr(self, one.name) != one.default})

    @property
    def high_bytes(self) -> int:
        return round(self.vram_high_watermark_mb * MIB)

    @property
    def low_bytes(self) -> int:
        return round(self.vram_low_watermark_mb * MIB)

    @property
    def min_elements(self) -> int:
        """Elements of the smallest tensor that is looked at."""
        if self.min_numel is not None:
            return self.min_numel
        return 1 if self.order == "reactive" else 512

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any]) -> Self:
        """From a JSON file of the source system, or from what such a file holds:
        {"memory": {"strategy": "stagehand", "stagehand": {"activation_stagehand": {...}}}}. Lists count as
        tuples; fields that are left out have their defaults, but for `order`: a file that sizes the fixed
        pool is run by "reactive". Raises ValueError for another strategy, a field that is not known or that
        its order does not read, or a value that cannot be."""
        found = load_fields(cls, source, _WAY, "the watermark runtime")
        _check_read(found.get("order", "reactive"), set(found))
        return cls(**found)


def _check_read(order: Order, given: set[str]) -> None:
    """ValueError for fields that this order does not read."""
    if order == "forecast" and (unread := sorted(_REACTIVE & given)):
        raise ValueError(
            f"{', '.join(unread)} beside order={order!r}, which has no fixed pool and no cap of copies: give "
            'order="reactive", or leave them out'
        )


def _choosing_order(call: Callable[..., None]) -> Callable[..., None]:
    """`__init__`, which runs by "reactive" what "reactive" alone reads, unless it is told an order."""

    @wraps(call)
    def called(self: ActivationConfig, **given: Any) -> None:
        if _REACTIVE & given.keys():
            given.setdefault("order", "reactive")
        call(self, **given)

    return called


_init = _choosing_order(ActivationConfig.__init__)
ActivationConfig.__init__ = naming_near(_init)  # type: ignore[method-assign]
