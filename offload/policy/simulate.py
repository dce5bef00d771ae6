"""What a step would cost: the engine's rules played on numbers, in program order.

The host issues everything in the order of the program and never learns where the device is. So room on the
device can only be made by letting compute wait for the oldest spill, and a restore can only start when
compute has got to the point that issued it. One invariant: saved bytes on the device, in any state, stay
within the limit unless a single save or read cannot go on otherwise; `peak_bytes` says so.

    save      a group takes its room when its compute starts; one that leaves is queued on d2h when its
              compute ends
    room      while a save or a restore would pass the limit, compute waits for the oldest spill in flight and
              its bytes are dropped
    window    at each group's end, what is read within the next `restoring_room_bytes` of reads is brought
              back, in reading order, once its forward is complete. Groups that are on the device count too:
              with a whole window at hand nothing is fetched early
    read      waits for the group's own restore, which is issued now if it was not; a group still on its way
              out is read where it is
    region    groups that a recompute reads are read one after the other, then computed: from its read on a
              group's bytes are the graph's
    free      after the last read, at the end of the group's compute; if it was on its way out, when room is
              needed and the copy has ended. Between the I and the W of a chunk what was brought back is
              dropped without a copy

Compute is spread over an action's groups by their bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate

from offload.policy.actions import Action, ChunkKey, ChunkSizes, GroupKey, GroupSize, Keeps, Rates, reads_of
from offload.policy.link_model import D2H, H2D, Link

__all__ = ["Simulation", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What one step would take."""

    step_s: float
    compute_s: float
    peak_bytes: int
    """The most saved bytes on the device at once, in any state; above the limit where one group alone did not
    fit."""
    moved_bytes: int
    """Bytes that left the device."""
    restored_bytes: int
    """Bytes that came back; fewer than left where groups were read on their way out."""
    spill_stall_s: float
    """Compute waiting for room."""
    restore_stall_s: float
    """Compute waiting for a group that it reads."""

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
) -> Simulation:
    """Play one step.

    actions, compute_s: this rank's order, and the seconds that each action computes.
    keeps: groups that stay; every other group leaves as soon as it is made.
    restoring_room_bytes: how far ahead of the reader the window goes; 0 fetches only what is being read.
    """
    if len(actions) != len(compute_s):
        raise ValueError(
            f"{len(actions)} actions and {len(compute_s)} compute times; give one time for each action"
        )
    step = _Step(actions, sizes, rates, limit_bytes, keeps, restoring_room_bytes)
    for at, (action, seconds) in enumerate(zip(actions, compute_s, strict=True)):
        groups = sizes[action.chunk]
        if not groups:
            step.compute(seconds)
        elif action.kind == "F":
            step.forward(action.chunk, _spread(seconds, groups))
        else:
            step.read(at, action.chunk, _spread(seconds, groups))
    return step.result(sum(compute_s))


class _At(Enum):
    """Where a group's bytes are, as the host knows it."""

    HERE = auto()  # on the device, and never left or no longer leaving
    LEAVING = auto()  # queued on d2h, or there: the host does not know
    AWAY = auto()  # dropped from the device
    BACK = auto()  # a restore was issued; the host copy is clean
    READ_LEAVING = auto()  # dead, but its copy out may still read it
    GONE = auto()


class _Step:
    """The clock of compute, the link, and where every group is."""

    def __init__(
        self,
        actions: Sequence[Action],
        sizes: ChunkSizes,
        rates: Rates,
        limit_bytes: int,
        keeps: Keeps,
        restoring_room_bytes: int,
    ) -> None:
        self._sizes = sizes
        self._limit_bytes = limit_bytes
        self._keeps = keeps
        self._window_bytes = restoring_room_bytes
        self._link = Link(rates)
        self._reads = reads_of(actions, sizes)
        self._read_bytes = [sizes[read.group.chunk][read.group.position].nbytes for read in self._reads]
        self._ahead_bytes = [0, *accumulate(self._read_bytes)]
        self._passes: dict[ChunkKey, deque[int]] = {}
        for read in self._reads:
            passes = self._passes.setdefault(read.group.chunk, deque())
            if read.action_index not in passes:
                passes.append(read.action_index)
        # actions whose reads may be fetched: their chunk is complete, its I is over
        self._open_passes: set[int] = set()
        self._at: dict[GroupKey, _At] = {}
        self._spills: deque[GroupKey] = deque()
        self._left: set[GroupKey] = set()
        self._next_read = 0
        self._next_fetch = 0
        self._now_s = 0.0
        self._device_bytes = self._peak_bytes = self._moved_bytes = self._restored_bytes = 0
        self._spill_stall_s = self._restore_stall_s = 0.0

    def compute(self, seconds: float) -> None:
        self._now_s += seconds

    def forward(self, chunk: ChunkKey, seconds: Sequence[float]) -> None:
        for index, group in enumerate(self._sizes[chunk]):
            key = GroupKey(chunk, index)
            self._make_room(group.nbytes)
            self._take(group.nbytes)
            self._now_s += seconds[index]
            if key in self._keeps or group.nbytes == 0:
                self._at[key] = _At.HERE
            else:
                self._at[key] = _At.LEAVING
                self._left.add(key)
                self._spills.append(key)
                self._moved_bytes += group.nbytes
                self._link.issue(D2H, key, group.nbytes, self._now_s)
            if index == len(seconds) - 1:
                self._open_passes.add(self._passes[chunk].popleft())
            self._fetch()

    def read(self, at: int, chunk: ChunkKey, seconds: Sequence[float]) -> None:
        groups = self._sizes[chunk]
        # of the region that is being read, the compute that its reads come before
        last, region, owed_s = True, 0, 0.0
        while self._next_read < len(self._reads) and self._reads[self._next_read].action_index == at:
            _, key, last = self._reads[self._next_read]
            if groups[key.position].region != region:
                self._now_s += owed_s
                region, owed_s = groups[key.position].region, 0.0
            nbytes = self._read_bytes[self._next_read]
            if self._at[key] is _At.AWAY:
                self._make_room(nbytes)
                self._restore(key, nbytes)
            if self._at[key] is _At.BACK:
                waited_s = max(0.0, self._link.finish(H2D, key) - self._now_s)
                self._restore_stall_s += waited_s
                self._now_s += waited_s
            if region:
                owed_s += seconds[key.position]
            else:
                self._now_s += seconds[key.position]
            if last:
                self._free(key, nbytes)
            self._next_read += 1
            self._next_fetch = max(self._next_fetch, self._next_read)
            self._fetch()
        self._now_s += owed_s
        if not last:
            self._drop_clean(chunk)
            self._open_passes.add(self._passes[chunk].popleft())
            self._fetch()

    def result(self, compute_s: float) -> Simulation:
        return Simulation(
            step_s=self._now_s,
            compute_s=compute_s,
            peak_bytes=self._peak_bytes,
            moved_bytes=self._moved_bytes,
            restored_bytes=self._restored_bytes,
            spill_stall_s=self._spill_stall_s,
            restore_stall_s=self._restore_stall_s,
        )

    def _fetch(self) -> None:
        """Bring back what the window holds, as far as there is room."""
        while self._next_fetch < len(self._reads):
            read = self._reads[self._next_fetch]
            if (
                self._ahead_bytes[self._next_fetch + 1] - self._ahead_bytes[self._next_read]
                > self._window_bytes
            ):
                return
            if read.action_index not in self._open_passes:
                return
            where = self._at[read.group]
            if where is _At.LEAVING:
                self._at[read.group] = _At.HERE  # needed before its room is: not dropped any more
            elif where is _At.AWAY:
                nbytes = self._read_bytes[self._next_fetch]
                if not self._make_room(nbytes):
                    return
                self._restore(read.group, nbytes)
            self._next_fetch += 1

    def _restore(self, key: GroupKey, nbytes: int) -> None:
        self._take(nbytes)
        self._at[key] = _At.BACK
        self._restored_bytes += nbytes
        self._link.issue(H2D, key, nbytes, self._now_s)

    def _make_room(self, nbytes: int) -> bool:
        """Compute waits for the oldest spills until `nbytes` fit; False if they do not although nothing is in
        flight."""
        while self._device_bytes + nbytes > self._limit_bytes and self._spills:
            key = self._spills.popleft()
            where = self._at[key]
            if where is not _At.LEAVING and where is not _At.READ_LEAVING:
                continue
            waited_s = max(0.0, self._link.finish(D2H, key) - self._now_s)
            self._spill_stall_s += waited_s
            self._now_s += waited_s
            self._device_bytes -= self._sizes[key.chunk][key.position].nbytes
            self._at[key] = _At.AWAY if where is _At.LEAVING else _At.GONE
        return self._device_bytes + nbytes <= self._limit_bytes

    def _free(self, key: GroupKey, nbytes: int) -> None:
        if self._at[key] is not _At.BACK and key in self._left:
            self._at[key] = _At.READ_LEAVING
            # a second entry if the first is still there: the earlier one frees it, the later finds it gone
            self._spills.append(key)
        else:
            self._at[key] = _At.GONE
            self._device_bytes -= nbytes

    def _drop_clean(self, chunk: ChunkKey) -> None:
        for index, group in enumerate(self._sizes[chunk]):
            key = GroupKey(chunk, index)
            if self._at[key] is _At.BACK:
                self._at[key] = _At.AWAY
                self._device_bytes -= group.nbytes

    def _take(self, nbytes: int) -> None:
        self._device_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._device_bytes)


def _spread(seconds: float, groups: Sequence[GroupSize]) -> list[float]:
    """An action's compute over its groups, by their bytes; evenly where there are none."""
    total_bytes = sum(group.nbytes for group in groups)
    if total_bytes == 0:
        return [seconds / len(groups)] * len(groups)
    return [seconds * group.nbytes / total_bytes for group in groups]
