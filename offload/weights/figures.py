"""What streaming did, as a plain value: for the handle's text, reports and explain().

One invariant: a figure is of the last ended step, or of all; none is of a part of a step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from offload.sizes import bytes_text


@dataclass(slots=True, kw_only=True)
class GradientFigures:
    """Gradients that wait on the host.

    | name | | unit |
    |---|---|---|
    | count, host_bytes | parameters whose gradients do, and the host memory that is kept for them | , bytes |
    | window_bytes | of them on the device at once | bytes |
    | in_bytes, out_bytes | of the last step, to the device and to the host | bytes |
    | stall_ms | of the step before it: compute waited for a gradient that came | ms |
    | misses | uses in all steps that nobody had fetched ahead | |
    | steps | that have ended with a copy | |
    """

    window_bytes: int
    count: int = 0
    host_bytes: int = 0
    in_bytes: int = 0
    out_bytes: int = 0
    stall_ms: float = 0.0
    misses: int = 0
    steps: int = 0

    def line(self) -> str:
        """In a line for the handle."""
        return (
            f"gradients of {self.count:,} parameters, {bytes_text(self.host_bytes)}, wait on the host, "
            f"at most {bytes_text(self.window_bytes)} of them on the device"
        )

    def __str__(self) -> str:
        if not self.steps:
            return f"{self.line()}\n  no step has copied any yet"
        return (
            f"{self.line()}\n  last step: {bytes_text(self.in_bytes)} to the device, "
            f"{bytes_text(self.out_bytes)} to the host; compute waited {self.stall_ms:,.1f} ms for them in "
            "the step before"
        )


@dataclass(slots=True, kw_only=True)
class WeightFigures:
    """
    | name | | unit |
    |---|---|---|
    | blocks, kept_blocks | that stream, and those of them that the plan keeps on the device | |
    | streamed_bytes, limit_bytes | of all streamed weights on the host, and at most on the device | bytes |
    | int8_bytes | of streamed_bytes, what waits as INT8, with its scales | bytes |
    | resident | of all other parameters, why they are resident: how many, and their bytes | |
    | in_bytes, out_bytes | of the last step, to the device and to the host | bytes |
    | stall_ms | of the step before it: compute waited for weights | ms |
    | hits, misses | uses in the last step that found their block there or on its way, and that did not | |
    | expert_weights | that stream by the expert | |
    | expert_hits, expert_misses | as hits and misses, of single experts of those weights | |
    | counts_ms | in the last step, the host waited for the numbers of rows of experts | ms |
    | calls_ms | in the last step, the host waited for calls of other threads that read weights | ms |
    | steps | that have ended with a use | |
    | compute_ms | of the step that was measured, without waits | ms |
    | next_gb_ms | what a GB more of weights= would take off a step, by calculation | ms |
    | gradients | of those weights, or of all | |
    """

    blocks: int
    streamed_bytes: int = 0
    kept_blocks: int = 0
    limit_bytes: int = 0
    int8_bytes: int = 0
    resident: dict[str, tuple[int, int]] = field(default_factory=dict)
    in_bytes: int = 0
    out_bytes: int = 0
    stall_ms: float = 0.0
    hits: int = 0
    misses: int = 0
    expert_weights: int = 0
    expert_hits: int = 0
    expert_misses: int = 0
    counts_ms: float = 0.0
    calls_ms: float = 0.0
    steps: int = 0
    compute_ms: float | None = None
    next_gb_ms: float | None = None
    gradients: GradientFigures | None = None

    def as_dict(self) -> dict[str, Any]:
        """By name, as plain values for JSON."""
        return {**asdict(self), "resident": {why: list(what) for why, what in self.resident.items()}}

    def line(self) -> str:
        """Describe what streams, in a line for the handle."""
        int8 = f" ({bytes_text(self.int8_bytes)} of it as INT8)" if self.int8_bytes else ""
        stays = f", {self.kept_blocks} of them kept on the device" if self.kept_blocks else ""
        rest = sum(nbytes for _, nbytes in self.resident.values())
        return (
            f"weights: {self.blocks} block{'s' * (self.blocks != 1)} of {bytes_text(self.streamed_bytes)}"
            f"{int8} wait on the host, at most {bytes_text(self.limit_bytes)} on the device{stays}; "
            f"{bytes_text(rest)} of others are resident"
        )

    def __str__(self) -> str:
        rest = [str(self.gradients)] if self.gradients is not None and self.gradients.count else []
        lines = [self.line()]
        lines += [
            f"  resident, {why}: {number:,} parameter{'s' * (number != 1)}, {bytes_text(nbytes)}"
            for why, (number, nbytes) in self.resident.items()
        ]
        if not self.steps:
            return "\n".join([*lines, "  no step has ended yet", *rest])
        lines.append(
            f"  last step: {bytes_text(self.in_bytes)} to the device, {bytes_text(self.out_bytes)} to the "
            f"host; {self.hits:,} uses found their block there or on its way, {self.misses:,} did not; "
            f"compute waited {self.stall_ms:,.1f} ms in the step before"
        )
        if self.calls_ms >= 0.05:  # 0.1 as it is written
            lines.append(
                f"  the host waited {self.calls_ms:,.1f} ms for calls of other threads that read weights"
            )
        if self.expert_weights:
            lines.append(
                f"  {self.expert_weights} weights stream by the expert: {self.expert_hits:,} uses of experts "
                f"found them, {self.expert_misses:,} did not; the host waited {self.counts_ms:,.1f} ms for "
                "their numbers of rows"
            )
        if self.compute_ms is not None:
            gain = "nothing" if not self.next_gb_ms else f"{self.next_gb_ms:,.1f} ms"
            lines.append(
                f"  a step computes {self.compute_ms:,.1f} ms between its waits for weights; 1 GB more of "
                f"weights= would take {gain} off it"
            )
        return "\n".join([*lines, *rest])
