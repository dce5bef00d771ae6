"""One recorded stretch of training, usually a step: what ran on which lane, and where saved bytes were.

One invariant: plain values, complete when they are made; times are device time in ms since the recording
began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Kind", "MemorySample", "Span", "Timeline"]

Kind = Literal["forward", "backward", "spill", "restore", "stall"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Work of one lane.

    lane: "compute", "d2h" or "h2d". name: the group's, the same in all microbatches. owner: whose it is, such
        as "s0m1/core_attn"; empty for a stall. nbytes: copied; 0 for compute.
    A group's forward is from the opening of its hooks to their end. Its backward is from its first read to
    the next thing seen after its last.
    """

    lane: str
    kind: Kind
    name: str
    owner: str
    start_ms: float
    end_ms: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Bytes at a point of the compute lane."""

    ms: float
    saved_bytes: int
    """Saved tensors on the device, in any state."""

    without_bytes: int
    """What they would be if none had left: all that the graphs still hold."""

    host_bytes: int
    """Host bytes in use, by all clients."""

    other_bytes: int = 0
    """What else is in use on the device: weights, gradients, work. 0 on the simulated device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Spans in the order of their start, and samples in the order of time."""

    spans: Sequence[Span]
    memory: Sequence[MemorySample]
    device_limit_bytes: int | None
    simulated: bool
    """Compute took the host's time, and copies their bytes over the simulated link's rate."""

    @property
    def duration_ms(self) -> float:
        """To the end of the last span or sample."""
        ends = [span.end_ms for span in self.spans] + [sample.ms for sample in self.memory]
        return max(ends, default=0.0)

    def to_json(self) -> dict[str, Any]:
        """The fields by name, as plain values."""
        return asdict(self)
