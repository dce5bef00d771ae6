"""What a step was seen to do: the chunks that it began, their groups' sizes, the order of its actions.

One invariant: it is what the next plan is made from, and nothing in it depends on the last plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from offload.config import OffloadConfig
from offload.groups.chunk import ChunkGroups
from offload.policy.actions import Action, ChunkKey, GroupSize

__all__ = ["PlanSettings", "SeenStep", "sizes_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What `init_chunk_handler` may change between steps; the fields are OffloadConfig's."""

    fraction: float
    delta_bytes: int
    pp_rank: int
    max_inflight_offloads: int | None

    @classmethod
    def of(cls, config: OffloadConfig) -> PlanSettings:
        return cls(
            fraction=config.activation_offload_fraction,
            delta_bytes=config.delta_offload_bytes_across_pp_ranks,
            pp_rank=config.pp_rank,
            max_inflight_offloads=config.max_inflight_offloads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenStep:
    """What a step was seen to do.

    chunks: all that were begun. forward_order, backward_order: in the order of their begin. actions: as they
        were announced.
    seconds: compute by action of an earlier step of this kind, where it was timed.
    """

    chunks: Sequence[ChunkGroups]
    forward_order: Sequence[ChunkGroups]
    backward_order: Sequence[ChunkGroups]
    actions: Sequence[Action]
    seconds: dict[Action, float] | None

    def sizes_in_backward_order(self) -> list[tuple[ChunkKey, list[GroupSize]]]:
        return [(chunk.id, sizes_of(chunk)) for chunk in self.backward_order]

    def shape(self, settings: PlanSettings) -> object:
        """Two steps that compare equal here can follow one plan: equal groups and bytes, one order of actions
        (another has other chunks alive together), and settings."""
        groups = tuple(
            (chunk.id, tuple((group.name, group.logical_bytes) for group in chunk.groups))
            for chunk in self.chunks
        )
        return settings, groups, tuple(self.schedule()[0])

    def schedule(self) -> tuple[list[Action], dict[ChunkKey, list[GroupSize]]]:
        """The actions of the chunks that were read, and their sizes."""
        sizes = dict(self.sizes_in_backward_order())
        known = _once_each(self.actions, sizes)
        return known, {action.chunk: sizes[action.chunk] for action in known}


def _once_each(seen: Sequence[Action], sizes: Collection[ChunkKey]) -> list[Action]:
    """What was seen, as a schedule: of a chunk the forward that its backward read, and that backward. A
    forward that was run again, a backward that was taken up twice and a chunk that was never read would only
    confuse a plan."""
    forwards: dict[ChunkKey, int] = {}
    reads: dict[ChunkKey, dict[str, int]] = {}
    for at, action in enumerate(seen):
        chunk = action.chunk
        if action.kind == "F":
            if chunk not in reads:
                forwards[chunk] = at
        elif chunk in forwards:
            reads.setdefault(chunk, {}).setdefault(action.kind, at)
    places: list[int] = []
    for chunk, kinds in reads.items():
        wanted = ("B",) if "B" in kinds else ("I", "W")
        if chunk in sizes and all(kind in kinds for kind in wanted):
            places += [forwards[chunk], *(kinds[kind] for kind in wanted)]
    return [seen[at] for at in sorted(places)]


def sizes_of(chunk: ChunkGroups, part_bytes: Mapping[int, int] | None = None) -> list[GroupSize]:
    """The groups' eligible bytes. part_bytes: by position, what stays of those that leave in part."""
    part_bytes = part_bytes or {}
    return [
        GroupSize(group.name, group.total_offload_bytes - part_bytes.get(at, 0))
        for at, group in enumerate(chunk.groups)
    ]
