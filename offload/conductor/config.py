"""Settings of the conductor, checked before anything is built.

One invariant: a config that exists is valid. Names and defaults are the source system's; `_mb` means MiB
(1,048,576 bytes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

from offload.config import check_flags, check_index, check_telemetry_file, described, load_fields

MIB = 1 << 20

BridgeName = Literal["turns", "v0"]

_WAY = ("memory", "stagehand", "conductor_config")
"""Where the fields lie in a config file of the source system."""

_SOFT_SHARE = 22000 / 23500
"""Of the hard cap, where the device's memory gives it: the source's defaults."""


@described
@dataclass(frozen=True, slots=True, kw_only=True)
class ConductorConfig:
    """Caps, slots and telemetry of one conductor."""

    enabled: bool = True
    """False: nothing is built, and every call returns at once."""

    vram_soft_cap_mb: float = 22000
    """MiB of device memory. A reservation, or a prefetch while memory is short, is granted below it; BURST,
    FLOOR and CRITICAL ones up to the hard cap."""

    vram_hard_cap_mb: float = 23500
    """MiB of device memory. Pressure is allocated memory over it."""

    pinned_cap_mb: float | None = None
    """MiB of pinned host memory that may be promised. None: as much as is asked for."""

    h2d_slots: int = 2
    """Copies to the device at once; of the engine's clients, clients that copy there at once."""

    d2h_slots: int = 2
    """The same to the host."""

    slot_mb: float = 512
    """MiB that one client may have queued to the device ahead of their reader while another client copies
    there too: 10 ms of a 55 GB/s link."""

    bridge: BridgeName = "turns"
    """Which rules tighten limits. "v0": the source's letter, nothing loosens within a step; what `load` reads
    means these. "turns": they start anew at each turn of phase, as a pipeline alternates between forward and
    backward."""

    telemetry_interval: int = 1
    """Steps between two lines of telemetry. 0: none is written."""

    telemetry_file: str = "conductor_telemetry.jsonl"
    """Where to; lines are appended."""

    debug_event_trace: bool = False
    """Each line has the events since the last one: phases, requests, slots."""

    def __post_init__(self) -> None:
        check_flags(self)
        for one in fields(self):
            value = getattr(self, one.name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if one.name.endswith("_mb") and value is not None and not (is_number and 0 < value < math.inf):
                raise ValueError(f"{one.name} is {value!r}, must be a number of MiB above 0")
        if self.vram_soft_cap_mb > self.vram_hard_cap_mb:
            raise ValueError(
                f"vram_soft_cap_mb is {self.vram_soft_cap_mb:g} and vram_hard_cap_mb "
                f"{self.vram_hard_cap_mb:g}: the soft cap must not be above the hard one; lower it"
            )
        check_index("h2d_slots", self.h2d_slots, least=1)
        check_index("d2h_slots", self.d2h_slots, least=1)
        check_index("telemetry_interval", self.telemetry_interval)
        if self.bridge not in get_args(BridgeName):
            raise ValueError(f"bridge is {self.bridge!r}, must be 'turns' or 'v0'")
        check_telemetry_file(self.telemetry_file)

    @property
    def soft_bytes(self) -> int:
        return round(self.vram_soft_cap_mb * MIB)

    @property
    def hard_bytes(self) -> int:
        return round(self.vram_hard_cap_mb * MIB)

    @property
    def pinned_bytes(self) -> int | None:
        return None if self.pinned_cap_mb is None else round(self.pinned_cap_mb * MIB)

    @property
    def slot_bytes(self) -> int:
        return round(self.slot_mb * MIB)

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any]) -> Self:
        """From a JSON file of the source system, or from what such a file holds:
        {"memory": {"stagehand": {"conductor_config": {...}}}}. Fields that are left out have their defaults,
        but for `bridge`: such a file means the source's rules, "v0". Raises ValueError for a field that is
        not known, or a value that cannot be."""
        return cls(**{"bridge": "v0", **load_fields(cls, source, _WAY, "the conductor")})

    @classmethod
    def of_device(cls, total_bytes: int | None, **given: Any) -> Self:
        """Caps of a device of so much memory, and no telemetry; None: the defaults' caps. given: fields in
        their place; a hard cap has its share as the soft one."""
        fields: dict[str, Any] = {"telemetry_interval": 0}
        hard = given.get("vram_hard_cap_mb", None if total_bytes is None else total_bytes / MIB)
        if isinstance(hard, (int, float)):
            fields |= {"vram_hard_cap_mb": hard, "vram_soft_cap_mb": hard * _SOFT_SHARE}
        return cls(**fields | given)
