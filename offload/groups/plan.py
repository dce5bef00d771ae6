"""After warm-up: which groups stay, and what the summary says. Glue between the recorded chunks and the pure policies.

One invariant: a plan only says what stays; a step that is unlike the planned one runs all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

from offload.config import OffloadConfig
from offload.groups.chunk import ChunkOffloadHandler
from offload.policy.actions import Action, ChunkKey, GroupSize, Keeps, Kind
from offload.policy.keeps import fraction_keeps, limit_keeps, margin_keeps
from offload.policy.lookahead import ActionKey
from offload.transfer.door import Limits

__all__ = ["PlanSettings", "make_plan", "summary_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What `init_chunk_handler` may change between steps; the fields are OffloadConfig's."""

    min_elements: int
    fraction: float
    delta_bytes: int
    pp_rank: int
    max_inflight_offloads: int | None

    @classmethod
    def of(cls, config: OffloadConfig) -> PlanSettings:
        return cls(
            min_elements=config.min_offloaded_tensor_size,
            fraction=config.activation_offload_fraction,
            delta_bytes=config.delta_offload_bytes_across_pp_ranks,
            pp_rank=config.pp_rank,
            max_inflight_offloads=config.max_inflight_offloads,
        )


def make_plan(
    backward_order: Sequence[ChunkOffloadHandler],
    seen: Sequence[ActionKey],
    settings: PlanSettings,
    limits: Limits,
) -> Keeps:
    """What stays, by (chunk, group index).

    Without a device limit: the margin, the last group of each name in the first chunk to run backward, whose reload could not be hidden.
    With one: as much of every chunk's end as fits under it beside the rooms for what is leaving and coming back.
    Then the fraction and the bytes a pipeline rank keeps.
    """
    ordered: list[tuple[ChunkKey, list[GroupSize]]] = [(chunk.id, _sizes(chunk)) for chunk in backward_order]
    if limits.device_limit_bytes is None:
        held = margin_keeps(ordered)
    else:
        sizes: dict[ChunkKey, list[GroupSize]] = dict(ordered)
        known = _once_each(seen, sizes)
        spilling = limits.max_spilling_bytes if limits.max_spilling_bytes is not None else limits.device_limit_bytes // 4
        read = {action.chunk: sizes[action.chunk] for action in known}
        held = limit_keeps(known, read, limits.device_limit_bytes, spilling, limits.max_restoring_bytes)
    return fraction_keeps(ordered, settings.fraction, held=held, pp_rank=settings.pp_rank, delta_bytes=settings.delta_bytes)


def _once_each(seen: Sequence[ActionKey], sizes: Collection[ChunkKey]) -> list[Action]:
    """What was seen, as a schedule: of a chunk the forward that its backward read, and that backward. A forward that was run again, a
    backward that was taken up twice and a chunk that was never read would only confuse a plan."""
    forwards: dict[ChunkKey, int] = {}
    reads: dict[ChunkKey, dict[str, int]] = {}
    for at, (kind, stage, microbatch) in enumerate(seen):
        chunk = (stage, microbatch)
        if kind == "F":
            if chunk not in reads:
                forwards[chunk] = at
        elif chunk in forwards:
            reads.setdefault(chunk, {}).setdefault(kind, at)
    places: list[tuple[int, Action]] = []
    for chunk, kinds in reads.items():
        wanted = ("B",) if "B" in kinds else ("I", "W")
        if chunk in sizes and all(kind in kinds for kind in wanted):
            places.append((forwards[chunk], Action("F", *chunk)))
            places.extend((kinds[kind], Action(cast(Kind, kind), *chunk)) for kind in wanted)
    return [action for _, action in sorted(places)]


def summary_bytes(
    forward_order: Sequence[ChunkOffloadHandler], backward_order: Sequence[ChunkOffloadHandler], keeps: Keeps
) -> dict[str, int]:
    """Bytes by group name that leave in the chunks up to and including the first that runs backward: those that are on the host together
    when the steady state is reached (S2-41)."""
    summary: dict[str, int] = {}
    if not backward_order:
        return summary
    for chunk in dict.fromkeys(forward_order):
        for index, group in enumerate(chunk.groups):
            leaving = 0 if (chunk.id, index) in keeps else group.total_offload_bytes
            summary[group.name] = summary.get(group.name, 0) + leaving
        if chunk is backward_order[0]:
            break
    return summary


def _sizes(chunk: ChunkOffloadHandler) -> list[GroupSize]:
    return [GroupSize(group.name, group.total_offload_bytes) for group in chunk.groups]
