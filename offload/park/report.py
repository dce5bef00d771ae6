"""What `park` moved, or would move, by kind, and what stayed on the device, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from offload.sizes import bytes_text

Kind = Literal["weights", "gradients", "optimizer", "extra"]
"""Parameters and buffers; gradients; state of optimizers; what `extra=` names."""

_NAMED = 5


@dataclass(slots=True)
class KindReport:
    """Report of one kind, in bytes.

    moved_bytes: of storages that are copied to the host. clean_bytes: of device memory that is given up
    without a copy, because the host has the bytes. seconds: of the copies; before a call, by the link's rate.
    staying: what stays on the device, by name: its bytes, and why.
    """

    moved_bytes: int = 0
    clean_bytes: int = 0
    seconds: float = 0.0
    staying: dict[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(slots=True)
class ParkReport:
    """Report of one call.

    | name | | unit |
    |---|---|---|
    | kinds | those that were awake before | |
    | host_bytes, pageable_bytes | host memory of them; of it in ordinary memory | bytes |
    | pinned_bytes, pin_s | pinned by this call, and the time that took | bytes, s |
    | free_host_bytes | of the host's budget, before the call | bytes |
    | given_back_bytes, release_s | of device memory, to the driver, and the time that took | bytes, s |
    | device_bytes | device memory in use, after the call | bytes |
    | is_plan | nothing has moved: of a dry run | |
    | notes | what was not done, and why | |
    """

    free_host_bytes: int = 0
    is_plan: bool = False
    kinds: dict[Kind, KindReport] = field(default_factory=dict)
    host_bytes: int = 0
    pageable_bytes: int = 0
    pinned_bytes: int = 0
    pin_s: float = 0.0
    given_back_bytes: int = 0
    release_s: float = 0.0
    device_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def staying(self) -> list[tuple[str, int, str]]:
        """Name, bytes and reason of what stays on the device, the largest first."""
        found = [(name, *each) for of in self.kinds.values() for name, each in of.staying.items()]
        return sorted(found, key=lambda each: -each[1])

    def __str__(self) -> str:
        lines = ["would park:" if self.is_plan else "parked:"]
        for kind, of in self.kinds.items():
            clean = f", and {bytes_text(of.clean_bytes)} without a copy" if of.clean_bytes else ""
            lines.append(f"  {kind:10} {bytes_text(of.moved_bytes):>10}  {of.seconds:7.3f} s{clean}")
        stays = [f"stays: {name}, {bytes_text(size)}: {why}" for name, size, why in self.staying]
        if len(stays) > _NAMED:
            stays[_NAMED:] = [f"and {len(stays) - _NAMED} more, in report.staying"]
        host, free = bytes_text(self.host_bytes), bytes_text(self.free_host_bytes)
        ordinary = f", {bytes_text(self.pageable_bytes)} of it ordinary" if self.pageable_bytes else ""
        stays.append(f"host memory: {host}{ordinary}; {free} of the host's budget were free before")
        back, used = bytes_text(self.given_back_bytes), bytes_text(self.device_bytes)
        stays += [] if self.is_plan else [f"device memory: {back} given back to the driver, {used} in use"]
        return "\n".join([*lines, *(f"  {each}" for each in (*stays, *self.notes))])
