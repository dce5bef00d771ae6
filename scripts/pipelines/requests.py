"""What is to be measured, in the order of its value: rows, and the shape that all of them share.

One invariant: what the command line leaves open, layers and limits, is derived once, from the figures of one
block, before the first row that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.workload import StackShape
from parallel.schedules import schedule_named
from pipelines.memory import BlockFacts, most_layers, need_of

SCHEDULE_NAMES = ("1f1b", "interleaved1f1b", "zbv", "dualpipev")
STREAMED = ("weights",)
"""Half of the blocks' weights are on the device, those on their way included, and all activations and
gradients."""
KINDS = ("links", "nothing", "ours", *STREAMED, "auto", "verify")
"""Of "auto" the limit is of all active bytes: a device_total."""
LEAST_STREAMED_LAYERS = 4
"""Layers of a virtual stage, at least: one block computes while the next arrives, so half of fewer cannot
stay away."""
LIMITED_SHARES = (0.5, 0.25)
"""Default limits, of what the first rank under 1F1B would hold: half, which later ranks hardly notice, and a
quarter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """One row of the table."""

    kind: str
    schedule: str = "1f1b"
    saved_limit_bytes: int | None = None
    """Saved tensors on the device, a rank. None: no limit."""
    limit_share: float | None = None
    """The same as a share of what the first rank under 1F1B saves at most; turned into bytes once that is
    known."""
    streamed: tuple[str, ...] = ()
    """Kinds of STREAMED that "verify" compares as well."""

    @property
    def label(self) -> str:
        name = self.kind if self.kind == "links" else f"{self.schedule} {self.kind}"
        if self.saved_limit_bytes is not None:
            return f"{name} {self.saved_limit_bytes / 1e9:.3g} GB"
        return name if self.limit_share is None else f"{name} {self.limit_share:g} of 1f1b's"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """The model and the step; None is derived from the device's memory and the number of ranks."""

    layers: int | None = None
    """Of one rank: divided over its virtual stages."""
    sequence: int = 8192
    microbatches: int = 4
    optimizer_bytes: int = 12
    """A parameter: fp32 master and two moments. Allocated, as a training job would have them; no optimizer
    step is timed."""
    samples: int = 3
    warmup: int = 6
    """Untimed steps after the first one. With 3 the timed plan has run once and unused pinned memory is given
    back: see groups/step_planner.py."""
    tiny: bool = False
    verify_layers: int = 2
    """Of one virtual stage in the comparison of gradients."""
    verify_steps: int = 5

    def stack(self, layers: int) -> StackShape:
        """The blocks of one virtual stage."""
        if self.tiny:
            return StackShape(
                layers=layers, sequence=self.sequence, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16
            )
        return StackShape(layers=layers, sequence=self.sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the processes of one launch do, one of each rank."""

    rows: tuple[RowRequest, ...]
    shape: JobShape
    device: str
    host_limit_bytes: int
    """Pinned by all ranks of the host together."""
    timeout_s: float
    """What a message between ranks may take."""
    facts: dict[str, Any] | None = None
    """What `links` measured of the machine: every row but that one needs it."""


def rows_of(
    schedules: Sequence[str],
    kinds: Sequence[str],
    limits_bytes: Sequence[int],
    *,
    verify: bool,
    totals_bytes: Sequence[int] = (),
) -> tuple[RowRequest, ...]:
    """The rows in the order of their value: the first schedule with and without offload, whether gradients
    are equal, then the other schedules under the first limit, and last what only rounds
    the picture off."""

    def limited(schedule: str, at: slice) -> list[RowRequest]:
        if limits_bytes:
            return [
                RowRequest(kind="ours", schedule=schedule, saved_limit_bytes=limit)
                for limit in limits_bytes[at]
            ]
        return [RowRequest(kind="ours", schedule=schedule, limit_share=share) for share in LIMITED_SHARES[at]]

    def streaming(schedule: str) -> list[RowRequest]:
        return [RowRequest(kind=kind, schedule=schedule) for kind in STREAMED]

    streamed = tuple(kind for kind in STREAMED if kind in kinds)
    first, others = schedules[0], list(schedules[1:])
    ordered = [
        RowRequest(kind="links"),
        RowRequest(kind="nothing", schedule=first),
        *limited(first, slice(0, 1)),
        *streaming(first),
        *(
            [RowRequest(kind="verify", schedule=name, streamed=streamed) for name in schedules]
            if verify
            else []
        ),
        *(row for name in others for row in limited(name, slice(0, 1))),
        *limited(first, slice(1, None)),
        *(
            RowRequest(kind="auto", schedule=name, saved_limit_bytes=total)
            for name in schedules
            for total in totals_bytes
        ),
        *(row for name in others for row in (RowRequest(kind="nothing", schedule=name), *streaming(name))),
    ]
    return tuple(
        row
        for row in ordered
        if row.kind in kinds or row.kind == "links" or (row.kind == "verify" and verify)
    )


def complete(
    rows: Sequence[RowRequest], shape: JobShape, facts: BlockFacts, ranks: int
) -> tuple[tuple[RowRequest, ...], JobShape]:
    """The rows and the shape with the layers and the limits that were left open."""
    live = min(ranks, shape.microbatches)
    layers = shape.layers
    if layers is None:
        stages = max(schedule_named(row.schedule).default_virtual_stages for row in rows)
        layers = stages * (LEAST_STREAMED_LAYERS if any(row.kind in STREAMED for row in rows) else 2)
        if not shape.tiny:
            layers = most_layers(facts, live=live, optimizer_bytes=shape.optimizer_bytes, multiple=stages)
    saved_bytes = need_of(facts, layers=layers, live=live, optimizer_bytes=0).saved_bytes
    done = (
        row
        if row.limit_share is None
        else replace(row, limit_share=None, saved_limit_bytes=_rounded(row.limit_share * saved_bytes))
        for row in rows
    )
    return tuple(done), replace(shape, layers=layers)


def _rounded(nbytes: float) -> int:
    """To whole GB where that changes little."""
    return round(nbytes / 1e9) * 10**9 if nbytes > 20e9 else round(nbytes)
