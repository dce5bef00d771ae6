"""The figures of one training step, as every reader of them sees it: scripts, the summary, files of JSON
lines, to which telemetry appends.

One invariant: a figure has one writer, who knows it, and every other text, table and line reads it here. This
file imports nothing of the rest, so anything may. A path that cannot be written is an error before the first
step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from operator import add
from pathlib import Path
from typing import Any, Self

KINDS = {
    "groups": "activations",
    "watermark": "activations",
    "checkpoint": "activations",
    "auto": "activations",
    "weights": "weights",
    "gradients": "gradients",
    "optim": "optimizer",
}
"""What the clients of these names move."""


class Summed:
    """Figures that add up field by field, by the field's rule: a level takes the larger of both, and a field
    without a rule is summed."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        """Both together."""
        return type(self)(
            **{
                one.name: one.metadata.get("rule", add)(getattr(self, one.name), getattr(other, one.name))
                for one in fields(self)  # type: ignore[arg-type]
            }
        )


def level() -> Any:
    """A field whose largest value counts."""
    return field(default=0, metadata={"rule": max})


@dataclass(slots=True, kw_only=True)
class ClientStats(Summed):
    """Figures of one client of the engine in a step, such as "groups" or "optim". The copier counts what it
    copied and what was denied; the client says the rest when the step ends."""

    out_bytes: int = 0
    """Bytes copied from device to host since the step before ended."""

    in_bytes: int = 0
    """Bytes copied from host to device."""

    lent_bytes: int = 0
    """Host bytes that were on loan to it when the step ended: what it keeps from step to step. Saved tensors
    keep none; their share of `StepStats.host_bytes_lent_peak` is what the other clients' loans leave of
    it."""

    device_bytes: int = 0
    """Device bytes that it holds for its copies from step to step, such as the optimizer's ring. They are not
    saved tensors: `device_limit_bytes` does not count them."""

    stall_ms: float = 0.0
    """Device time in ms that `compute` waited for its copies, in the step before."""

    stall_count: int = 0
    """Waits of `compute` in this step that found the event of its copy not yet passed."""

    refused: int = 0
    """Tensors that should have left and stayed."""

    refused_bytes: int = 0
    """Bytes of those tensors."""

    kept_bytes: int = 0
    """Saved bytes that it chose to leave on the device. The groups' own are in their figures, as are the next
    two."""

    came_back_bytes: int = 0
    """Bytes that it sent and that came back, one count a record."""

    read_here_bytes: int = 0
    """Bytes that it sent and that were read before they had left the device."""

    denied: int = 0
    """Pieces that admission denied, those included that were REQUIRED and copied all the same."""

    denied_bytes: int = 0
    """Bytes of those pieces."""


@dataclass(slots=True, kw_only=True)
class TransferCounts(Summed):
    """Counts of transfer/ while a step runs: records (one per distinct storage) and bytes of storage, of
    saved tensors. Counts of two clients whose saves a step ended one after the other add up."""

    saved: int = 0
    """Records that autograd's saves made. Every one is either kept or spilled: `saved == kept + spilled`."""

    spilled: int = 0
    """Records copied to the host at least once."""

    restored: int = 0
    """Records copied back. Fewer than `spilled` where a graph was freed unread."""

    saved_bytes: int = 0
    """Bytes of storage of the saved records. Every one is either kept or spilled:
    `saved_bytes == kept_bytes + spill_bytes`."""

    spill_bytes: int = 0
    """Bytes that crossed the link from device to host."""

    restore_bytes: int = 0
    """Bytes that crossed the link from host to device. A split backward may fetch a record twice, so this can
    exceed `spill_bytes`."""

    refused: int = 0
    """Records that should have left and stayed: no host block was there, or the budget had no room."""

    retries: int = 0
    """Allocations of the engine that the device had no room for: saved bytes were released, and they were
    tried again."""

    refused_bytes: int = 0
    """Bytes of the refused records. More than a warm-up's worth means that the host reservation is too
    small."""

    device_bytes_peak: int = level()
    """Largest number of saved bytes on the device at once, in any state: resident, spilling, restoring,
    restored."""

    host_bytes_wanted_peak: int = level()
    """`host_bytes_lent_peak`, or more if records were refused for want of a block: what the host would have
    had to hold for them too."""

    replays: int = 0
    """Replays of captured graphs that copy. What such a graph moves is counted above in the step of its
    capture, once."""

    replayed_bytes: int = 0
    """Bytes that those replays carried over the link, both directions together."""


@dataclass(slots=True, kw_only=True)
class StepStats(TransferCounts):
    """Figures of a rank's ended step. `clients` and the host's bytes are of more than saved tensors."""

    step: int
    """Index of the step since the engine was built, or configured anew."""

    kept: int = 0
    """Records that stayed on the device for their whole life."""

    kept_bytes: int = 0
    """Bytes of the kept records, the refused ones among them."""

    stall_ms: float = 0.0
    """Device time in ms that `compute` waited for a transfer's event."""

    stall_count: int = 0
    """Waits that found their event not yet passed."""

    host_bytes_lent_peak: int = 0
    """Largest number of host bytes on loan at once."""

    host_bytes_held: int = 0
    """Host bytes that the arena owned when the step ended, lent or not. `held - lent_peak` was pinned for
    nothing."""

    disk_write_bytes: int = 0
    """Bytes written to the file of `disk_directory`. Less than `spill_bytes` where a reader or the end of a
    tensor came before its write."""

    disk_read_bytes: int = 0
    """Bytes read back from it."""

    disk_bytes_peak: int = 0
    """Largest number of bytes in it at once, whole pages."""

    disk_blocked_ms: float = 0.0
    """Time in ms that the host was blocked by reads that came before their bytes."""

    disk_write_bytes_per_s: float = 0.0
    """Rate of the writes while one ran; 0.0 where nothing was written."""

    disk_read_bytes_per_s: float = 0.0
    """Rate of the reads while one ran; 0.0 where nothing was read."""

    clients: Mapping[str, ClientStats] = field(default_factory=dict)
    """What each client of the engine did, by its name; one that copied by hand, or has left, is among
    them."""

    @property
    def by_kind(self) -> dict[str, ClientStats]:
        """`clients` by what they move, as in KINDS: saved tensors of all clients are one, with the most that
        the device had of them, and the host beside the others' loans. A client of another name is a kind."""
        found: dict[str, ClientStats] = {}
        for name, one in self.clients.items():
            kind = KINDS.get(name, name)
            if one != ClientStats():
                found[kind] = found[kind] + one if kind in found else one
        saved, lent = found.pop("activations", ClientStats()), sum(one.lent_bytes for one in found.values())
        host_bytes = max(0, self.host_bytes_lent_peak - lent)
        return {
            "activations": replace(saved, device_bytes=self.device_bytes_peak, lent_bytes=host_bytes),
            **found,
        }

    @property
    def lacked_host(self) -> bool:
        """Predicate: records were refused for want of host memory, and not by admission alone."""
        return self.refused_bytes > 0 and self.host_bytes_wanted_peak > self.host_bytes_lent_peak

    def to_json(self) -> dict[str, Any]:
        """The fields by name, `step` first: one line of a telemetry file."""
        return {"step": self.step} | asdict(self)


class JsonLines:
    """path: of the file, which need not be there yet; None writes none. off: how a user leaves it out. Raises
    ValueError for a path that cannot be written."""

    def __init__(self, path: str | None, *, off: str) -> None:
        self._path = None if path is None else Path(path).absolute()  # wherever the process goes
        if self._path is not None and not can_be_written(self._path):
            raise ValueError(
                f"telemetry_file is {path!r}, which cannot be written: give a file in a folder that is "
                f"there, or {off}"
            )

    def write(self, line: dict[str, Any]) -> None:
        """Append a line. Raises OSError where the file cannot be written."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def can_be_written(path: Path) -> bool:
    """A file that is there, or a new one in a folder that is."""
    if path.exists():
        return not path.is_dir() and os.access(path, os.W_OK)
    return path.parent.is_dir() and os.access(path.parent, os.W_OK)
