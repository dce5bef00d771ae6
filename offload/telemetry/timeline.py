"""One recorded stretch of training, usually a step: what ran on which lane, and where saved bytes were.

One invariant: plain values, complete when they are made; times are device time in ms since the recording
began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward", "optimizer", "spill", "restore", "stall"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Work of one lane.

    lane: "compute", "d2h" or "h2d". name: the group's, the same in all microbatches. owner: whose it is, such
    as "s0m1/core_attn"; empty for a stall and an optimizer's step, whose name is its class. nbytes: copied;
    0 for compute.
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
    """Bytes at a point of the compute lane: of the device by kind, and of the host.

    | name | |
    |---|---|
    | saved_bytes | saved tensors on the device, in any state; at a new peak, that since the sample before |
    | without_bytes | what they would be if none had left: all that the graphs still hold |
    | weights_bytes, gradient_bytes | of modules that there were when the recording began |
    | optimizer_bytes | the state of optimizers that there were then |
    | other_bytes | all else in use on the device: work, buffers; 0 on the simulated device |
    | host_bytes, pinned_bytes | host memory in use, by all clients, and held for them |
    """

    ms: float
    saved_bytes: int
    without_bytes: int
    host_bytes: int
    weights_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    other_bytes: int = 0
    pinned_bytes: int = 0

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes on the device, by kind; the saved ones last."""
        return {
            "weights": self.weights_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "others": self.other_bytes,
            "activations": self.saved_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Spans in the order of their start, and samples in the order of time."""

    spans: Sequence[Span]
    memory: Sequence[MemorySample]
    device_limit_bytes: int | None
    simulated: bool
    """Compute took the host's time, and copies their bytes over the simulated link's rate."""

    began_ns: int = 0
    """Unix time of 0 ms, as torch.profiler has it."""

    @property
    def duration_ms(self) -> float:
        """To the end of the last span or sample."""
        ends = [span.end_ms for span in self.spans] + [sample.ms for sample in self.memory]
        return max(ends, default=0.0)

    def check_recorded(self) -> None:
        """Raises ValueError where there is nothing to draw."""
        if not self.spans:
            raise ValueError(
                "nothing was recorded: no group was open and nothing was copied in the traced block; run a "
                "whole training step with offload on inside `with offload.tracing()`"
            )
