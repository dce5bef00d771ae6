"""What a step of saved tensors would cost: its actions as items and ops of `play.py`.

    forward   each group is an item, which an op makes; what does not stay leaves as soon as it is made
    read      an op a group, which needs and frees it
    region    groups that a recompute reads are read one after the other, then computed, within the claim of
              what is made again: from its read on a group's bytes are the graph's
    halves    an I reads all but `passed_bytes` of each group, and its W `w_bytes`. Of what was brought back,
              the I leaves on the device what its W reads first, up to `half_room_bytes`, and brings back with
              it what it passed; the rest is dropped without a copy, and the W fetches only what it reads. A
              group that never left is whole until the W: the graph holds it. Of what an I computes again
              `left_bytes` stay from the end of the region's compute to that of the W
    growth    from the read of a group on its `grown_bytes` are on the device, to the end of the step

Compute is spread over an action's groups by their weights, or by their bytes where no group has one. One
invariant: what an action is made of depends on no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from offload.policy.actions import (
    Action,
    ChunkKey,
    ChunkSizes,
    GroupSize,
    Keeps,
    Rates,
    lives_of,
    require_sizes,
    require_times,
)
from offload.policy.play import D2H, H2D, Item, Need, Op, Player


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Times and bytes that one step would take."""

    step_s: float
    compute_s: float
    """Of the actions, without what is computed once more."""
    recompute_s: float
    peak_bytes: int
    """The most saved bytes on the device at once, in any state, and what was made again beside them; above
    the limit where one group, or one recompute, alone did not fit."""
    moved_bytes: int
    """Bytes that left the device."""
    restored_bytes: int
    """Bytes that came back; fewer than left where groups were read on their way out."""
    spill_stall_s: float
    """Compute waiting for room."""
    restore_stall_s: float
    """Compute waiting for a group that it reads."""
    host_peak_bytes: int
    """The most bytes on the host at once, from where a group is queued to leave to its last read."""
    durations_s: tuple[float, ...]
    """Of each action, with what it computes again and its stalls."""
    peaks_bytes: tuple[int, ...]
    """The most during each action, counted as `peak_bytes`."""

    @property
    def stall_s(self) -> float:
        return self.spill_stall_s + self.restore_stall_s


def simulate(
    actions: Sequence[Action],
    sizes: ChunkSizes,
    compute_s: Sequence[float],
    rates: Rates,
    *,
    limit_bytes: int,
    keeps: Keeps,
    restoring_room_bytes: int,
    half_room_bytes: int = 0,
    waits_s: Sequence[float] = (),
    most_s: float = inf,
) -> Simulation | None:
    """Play one step; None as soon as it is seen to take longer than `most_s` seconds.

    actions, compute_s: this rank's order, and the seconds that each action computes.
    keeps: groups that stay; every other group leaves as soon as it is made.
    restoring_room_bytes: how far ahead of the reader the window goes; 0 fetches only what is being read.
    half_room_bytes: of a chunk, so many bytes that its I brought back stay for its W, those that it reads
        first.
    waits_s: before each action, in which nothing computes; () for none.
    """
    require_times(actions, compute_s)
    lives = lives_of(actions)
    require_sizes(actions, sizes)
    step, spans = _Step(keeps, half_room_bytes), list[tuple[int, int]]()
    for action, seconds, wait_s in zip(actions, compute_s, waits_s or [0.0] * len(actions), strict=True):
        if wait_s > 0:
            step.ops.append(Op(wait_s))
        begun = len(step.ops)
        step.add(action, sizes[action.chunk], seconds, lives[action.chunk].half_read is not None)
        spans.append((begun, len(step.ops)))
    played = Player(step.items, step.ops, rates, limit_bytes, restoring_room_bytes)
    if not played.play(most_s):
        return None
    ends_s = (0.0, *played.ends_s)
    peaks_bytes = [max(played.peaks_bytes[begun:ended]) for begun, ended in spans]
    return Simulation(
        step_s=ends_s[-1],
        compute_s=sum(compute_s),
        recompute_s=step.recompute_s,
        peak_bytes=max(peaks_bytes, default=0),
        moved_bytes=played.moved_bytes[D2H],
        restored_bytes=played.moved_bytes[H2D],
        spill_stall_s=played.stall_s[D2H],
        restore_stall_s=played.stall_s[H2D],
        host_peak_bytes=step.host_peak_bytes,
        durations_s=tuple([ends_s[ended] - ends_s[begun] for begun, ended in spans]),
        peaks_bytes=tuple(peaks_bytes),
    )


class _Step:
    """Actions as items and ops. host_peak_bytes: of what leaves, on the host at once."""

    def __init__(self, keeps: Keeps, half_room_bytes: int) -> None:
        self.items: list[Item] = []
        self.ops: list[Op] = []
        self.recompute_s, self.host_peak_bytes = 0.0, 0
        self._keeps, self._half_room_bytes = keeps, half_room_bytes
        self._host_bytes: dict[ChunkKey, int] = {}
        self._items: dict[ChunkKey, list[int]] = {}  # its groups, and what an I leaves of what it made again
        self._ends: dict[ChunkKey, tuple[int, int]] = {}  # the first and the last op of its last action

    def add(self, action: Action, groups: Sequence[GroupSize], seconds: float, is_split: bool) -> None:
        """is_split: the chunk's backward is an I and a W. Raises as `lives_of`."""
        chunk, begun = action.chunk, len(self.ops)
        if action.kind == "F":
            self._forward(chunk, groups, seconds)
        else:
            self._read(chunk, groups, seconds, action.kind if is_split else "")
        if action.kind in ("B", "W"):
            del self._host_bytes[chunk]
        if len(self.ops) == begun:
            self.ops.append(Op(seconds))
        self._ends[chunk] = begun, len(self.ops) - 1

    def _forward(self, chunk: ChunkKey, groups: Sequence[GroupSize], seconds: float) -> None:
        first = len(self.items)
        self._items[chunk] = [*range(first, first + len(groups))]
        spread = _spread(seconds, groups, [group.nbytes for group in groups])
        self._host_bytes[chunk] = 0
        for place, (group, own_s) in enumerate(zip(groups, spread, strict=True)):
            leaves = group.nbytes > 0 and (chunk, place) not in self._keeps
            self._host_bytes[chunk] += group.nbytes if leaves else 0
            self.items.append(Item(group.nbytes, leaves, chunk))
            self.ops.append(Op(own_s, (), (first + place,)))
        self.host_peak_bytes = max(self.host_peak_bytes, sum(self._host_bytes.values()))

    def _read(self, chunk: ChunkKey, groups: Sequence[GroupSize], seconds: float, half: str) -> None:
        """half: of a split backward, I or W; else ""."""
        needs, items = self._needs(chunk, groups, half), self._items[chunk]
        own = [groups[need.item - items[0]] for need in needs]
        spread = _spread(seconds, own, [need.nbytes for need in needs])
        region = left_bytes = 0
        for group, need, own_s in zip(own, needs, spread, strict=True):
            own_s += group.again_s
            self.recompute_s += group.again_s
            is_more = group.region > 0 and group.region == region
            if group.grown_bytes and half != "W":
                self._grow(group.grown_bytes, len(self.ops) - is_more)
            if is_more:
                own_s += self.ops[-1].seconds
                claims = (self.ops[-1].claims or 0) + group.again_bytes
                self.ops[-1] = Op(own_s, (*self.ops[-1].needs, need), (), chunk, claims, True, (), False)
            else:
                self._leave(items, left_bytes)
                region, left_bytes = group.region, 0
                claims = group.again_bytes if region else 0
                self.ops.append(Op(own_s, (need,), (), chunk, claims, region > 0, (), not region))
            left_bytes += group.left_bytes if half == "I" else 0
        self._leave(items, left_bytes)
        if region or half:
            # a graph that an I has read ends with its W
            frees = items if half == "W" else ()
            self.ops.append(Op(0.0 if needs else seconds, claims=0, frees=frees))

    def _leave(self, items: list[int], nbytes: int) -> None:
        """Keep `nbytes` of what was recomputed on the device, as one more of a chunk's items."""
        if nbytes:
            items.append(len(self.items))
            self.ops.append(Op(0.0, (), (len(self.items),), None, 0, looks=False))
            self.items.append(Item(nbytes, leaves=False))

    def _grow(self, nbytes: int, before: int) -> None:
        """Put so many bytes more on the device, from this op on to the end of the step."""
        self.ops.insert(before, Op(0.0, (), (len(self.items),), None, 0, looks=False))
        self.items.append(Item(nbytes, leaves=False))

    def _needs(self, chunk: ChunkKey, groups: Sequence[GroupSize], half: str) -> list[Need]:
        (begun, after), items = self._ends[chunk], self._items[chunk]
        if not half:
            return [Need(item, groups[at].nbytes, None, after) for at, item in enumerate(items)][::-1]
        needs: list[Need] = []
        ends = accumulate([group.w_bytes for group in groups])
        for item, group, end in zip(items, groups, ends, strict=False):
            w_bytes = group.w_bytes
            stays = end <= self._half_room_bytes  # the W reads it first, and the I last
            if half == "I":
                nbytes = group.nbytes - (0 if stays else group.passed_bytes)
                is_last = self.items[item].leaves and not w_bytes
                if nbytes or not group.nbytes:
                    needs.append(Need(item, nbytes, None if is_last else w_bytes * stays, after))
            elif w_bytes:
                needs.append(Need(item, w_bytes, None, after, begun if stays else inf))
        return needs if half == "W" else needs[::-1]


def _spread(seconds: float, groups: Sequence[GroupSize], nbytes: Sequence[int]) -> list[float]:
    """An action's compute over its groups, by their weights, or by their bytes; evenly where there are
    neither."""
    for parts in ([group.weight for group in groups], nbytes, [1] * len(nbytes)):
        if (total := sum(parts)) > 0:
            return [seconds * part / total for part in parts]
    return []
