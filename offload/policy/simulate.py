"""What a step would cost: the engine's rules played on numbers, in program order.

The host never learns where the device is. So room on the device can only be made by letting compute wait for
the oldest spill, and a restore can only start when compute has got to the point that issued it. One
invariant: saved bytes on the device, in any state, stay within the limit unless a single save or read cannot
go on otherwise; `peak_bytes` says so.

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
    claim     what a recompute makes again takes room within the limit from before its region is read to the
              end of the region's compute, and with it what the region has read
    drop      while a save, a read or a claim still does not fit, what the window holds and nobody has read
              makes room: what is still on its way out, the oldest first, then what was fetched, the latest
              first. It is fetched ahead again only in the chunk that the backward reads
    free      after the last read, at the end of the group's compute; if it was on its way out, when room is
              needed and the copy has ended
    halves    an I reads all but `passed_bytes` of each group, and its W `w_bytes`. Of what was brought back,
              the I leaves on the device what its W reads first, up to `half_room_bytes`, and brings back with
              it what it passed; the rest is dropped without a copy, and the W fetches only what it reads. A
              group that never left is whole until the W: the graph holds it. Of what an I computes again
              `left_bytes` stay from the end of the region's compute to that of the W

Compute is spread over an action's groups by their weights, or by their bytes where no group has one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate

from offload.policy.actions import (
    Action,
    ChunkKey,
    ChunkSizes,
    GroupSize,
    Keeps,
    Rates,
    reads_of,
    require_times,
)
from offload.policy.link_model import D2H, H2D, Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What one step would take."""

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
    ends_s: tuple[float, ...]
    """When each action ended."""
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
    most_s: float = float("inf"),
) -> Simulation | None:
    """Play one step; None as soon as it is seen to take longer than `most_s` seconds.

    actions, compute_s: this rank's order, and the seconds that each action computes.
    keeps: groups that stay; every other group leaves as soon as it is made.
    restoring_room_bytes: how far ahead of the reader the window goes; 0 fetches only what is being read.
    half_room_bytes: of a chunk, so many bytes that its I brought back stay for its W, those that it reads
        first.
    """
    require_times(actions, compute_s)
    step = _Step(actions, sizes, rates, limit_bytes, keeps, restoring_room_bytes, half_room_bytes)
    ends_s: list[float] = []
    peaks_bytes: list[int] = []
    # what is still to compute, but for what was computed again
    left_s = sum(compute_s) + step.least_recompute_s
    for action, seconds in zip(actions, compute_s, strict=True):
        peaks_bytes.append(step.do(action, seconds))
        ends_s.append(step.now_s)
        left_s -= seconds
        if step.now_s + left_s - step.recompute_s > most_s:
            return None
    return Simulation(
        step_s=step.now_s,
        compute_s=sum(compute_s),
        recompute_s=step.recompute_s,
        peak_bytes=max(peaks_bytes, default=0),
        moved_bytes=step.moved_bytes,
        restored_bytes=step.restored_bytes,
        spill_stall_s=step.stall_s[D2H],
        restore_stall_s=step.stall_s[H2D],
        host_peak_bytes=step.host_peak_bytes,
        ends_s=tuple(ends_s),
        peaks_bytes=tuple(peaks_bytes),
    )


class _At(Enum):
    """Where a group's bytes are, as the host knows it."""

    HERE = auto()  # on the device, and never left
    LEAVING = auto()  # queued on d2h, or there: the host does not know
    WANTED = auto()  # as LEAVING, but it is read before its room is needed: not dropped any more
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
        window_bytes: int,
        half_room_bytes: int,
    ) -> None:
        self.now_s = self.recompute_s = 0.0
        self.stall_s = [0.0, 0.0]  # by direction
        self.moved_bytes = self.restored_bytes = self.host_peak_bytes = 0
        self._sizes = sizes
        self._limit_bytes = limit_bytes
        self._window_bytes = window_bytes
        self._half_room_bytes = half_room_bytes
        self._link = Link(rates)
        self._reads = reads_of(actions, {chunk: self._with_left(own) for chunk, own in sizes.items()})
        # a group is a number, chunk by chunk: most of the time of a search is here
        self._first: dict[ChunkKey, int] = {}
        num_groups = 0
        for chunk, own in sizes.items():
            self._first[chunk] = num_groups
            num_groups += len(own)
        self._keys = [self._first[read.group.chunk] + read.group.position for read in self._reads]
        self._keeps = {self._first[key.chunk] + key.position for key in keeps}
        self.least_recompute_s = sum(
            sizes[read.group.chunk][read.group.position].again_s for read in self._reads
        )
        self._ahead_bytes = [0, *accumulate(read.nbytes for read in self._reads)]
        self._num_reads = Counter(read.action_index for read in self._reads)
        self._num_ended = self._next_read = self._next_fetch = self._device_bytes = 0
        self._again_bytes = self._host_bytes = self._peak_bytes = 0
        self._at: dict[int, _At] = {}
        self._here: dict[int, int] = {}  # bytes on the device, while there are any
        self._half_runs = False
        self._staying: frozenset[int] = frozenset()  # from the I that runs, or ran last, to its W
        self._left: Counter[ChunkKey] = Counter()  # bytes that an I has computed again and left
        self._spills: deque[int] = deque()
        # of what the window holds, with the places of the reads
        self._wanted: deque[tuple[int, int]] = deque()
        self._ahead: list[tuple[int, int]] = []
        self._dropped: dict[ChunkKey, int] = {}  # the first of those of each chunk that made room
        self._reading: ChunkKey | None = None

    def do(self, action: Action, seconds: float) -> int:
        """The next action of the step. Returns the most bytes that it had on the device."""
        self._peak_bytes = self._device_bytes
        groups = self._sizes[action.chunk]
        if action.kind == "F" and groups:
            self._forward(action.chunk, groups, _spread(seconds, groups, [group.nbytes for group in groups]))
        elif action.kind != "F" and self._num_reads[self._num_ended]:
            self._read(action, groups, seconds)
        else:
            self.now_s += seconds
        if action.kind in ("B", "W"):
            self._end(action.chunk, groups)
        self._num_ended += 1
        self._fetch()
        return self._peak_bytes

    def _forward(self, chunk: ChunkKey, groups: Sequence[GroupSize], seconds: Sequence[float]) -> None:
        first = self._first[chunk]
        for index, group in enumerate(groups):
            key = first + index
            self._make_room(group.nbytes)
            self._take(group.nbytes)
            self._here[key] = group.nbytes
            self.now_s += seconds[index]
            if key in self._keeps or group.nbytes == 0:
                self._at[key] = _At.HERE
            else:
                self._at[key] = _At.LEAVING
                self._spills.append(key)
                self.moved_bytes += group.nbytes
                self._host_bytes += group.nbytes
                self.host_peak_bytes = max(self.host_peak_bytes, self._host_bytes)
                self._link.issue(D2H, key, group.nbytes, self.now_s)
            self._fetch()

    def _read(self, action: Action, groups: Sequence[GroupSize], seconds: float) -> None:
        # of the region that is being read, the compute that its reads come before
        region, owed_s = 0, 0.0
        self._half_runs, self._reading = action.kind == "I", action.chunk
        self._staying = self._stays_between(action.chunk, groups) if self._half_runs else frozenset()
        reads = self._reads[self._next_read : self._next_read + self._num_reads[self._num_ended]]
        own = [groups[read.group.position] for read in reads]
        spread = _spread(seconds, own, [read.nbytes for read in reads])
        claims: Counter[int] = Counter()
        leaves: Counter[int] = Counter()
        for group in own:
            claims[group.region] += group.again_bytes
            if self._half_runs:
                leaves[group.region] += group.left_bytes
        for read, group, read_s in zip(reads, own, spread, strict=True):
            key = self._keys[self._next_read]
            if group.region != region:
                self.now_s += owed_s
                self._leave(action.chunk, leaves[region])
                region, owed_s = group.region, 0.0
                self._claim(claims[region])
            if self._at[key] is _At.AWAY:
                self._make_room(read.nbytes)
                self._restore(key, read.nbytes)
            if self._at[key] is _At.BACK:
                self._wait(H2D, key)
            self.recompute_s += group.again_s
            if region:
                owed_s += read_s + group.again_s
            else:
                self.now_s += read_s + group.again_s
            self._has_read(key, group, read.last)
            self._next_read += 1
            self._next_fetch = max(self._next_fetch, self._next_read)
            self._fetch()
        self.now_s += owed_s
        self._leave(action.chunk, leaves[region])
        self._claim(0)
        self._reading = None

    def _leave(self, chunk: ChunkKey, nbytes: int) -> None:
        """Of what was claimed so many bytes stay for the W of this chunk."""
        if nbytes == 0:
            return
        self._left[chunk] += nbytes
        self._device_bytes += nbytes
        self._again_bytes = max(0, self._again_bytes - nbytes)
        self._see_peak()

    def _claim(self, nbytes: int) -> None:
        """From here on a recompute has so many bytes, and what it reads from then on."""
        self._again_bytes = nbytes
        if nbytes:
            self._make_room(0)
            self._see_peak()

    def _end(self, chunk: ChunkKey, groups: Sequence[GroupSize]) -> None:
        """The graph of a chunk is gone."""
        self._device_bytes -= self._left.pop(chunk, 0)
        for key, group in enumerate(groups, self._first[chunk]):
            if self._at[key] is _At.HERE:
                self._at[key] = _At.GONE
                self._device_bytes -= group.nbytes
            if key not in self._keeps:
                self._host_bytes -= group.nbytes

    def _stays_between(self, chunk: ChunkKey, groups: Sequence[GroupSize]) -> frozenset[int]:
        """The groups of a chunk of which its W finds on the device what its I brought back: as many of the
        first as there is room for, since the W reads them first and the I last."""
        ends = accumulate(group.w_bytes for group in groups)
        return frozenset(
            key for key, end in enumerate(ends, self._first[chunk]) if end <= self._half_room_bytes
        )

    def _with_left(self, groups: Sequence[GroupSize]) -> Sequence[GroupSize]:
        """As their I brings them back: those that it leaves, whole."""
        ends = accumulate(group.w_bytes for group in groups)
        return [
            group._replace(passed_bytes=0) if group.passed_bytes and end <= self._half_room_bytes else group
            for group, end in zip(groups, ends, strict=True)
        ]

    def _has_read(self, key: int, group: GroupSize, last: bool) -> None:
        """A read has ended."""
        where, left_bytes = self._at[key], 0 if last else group.w_bytes
        if where is _At.HERE and self._half_runs:
            return  # the graph holds it until its W ends
        if where is _At.LEAVING or where is _At.WANTED:
            if left_bytes == 0:
                self._at[key] = _At.READ_LEAVING
                # twice in the queue if still there: the earlier one frees it, the later one finds it gone
                self._spills.append(key)
            return
        if left_bytes == 0:
            self._at[key] = _At.GONE
        elif key not in self._staying:
            self._at[key] = _At.AWAY
            left_bytes = 0
        freed_bytes = self._here[key] - left_bytes
        self._here[key] = left_bytes
        self._device_bytes -= freed_bytes
        self._again_bytes += freed_bytes if self._again_bytes else 0

    def _fetch(self) -> None:
        """Bring back what the window holds, as far as there is room."""
        if self._reading is not None and self._reading in self._dropped:
            self._next_fetch = max(self._next_read, min(self._next_fetch, self._dropped.pop(self._reading)))
        while self._next_fetch < len(self._reads):
            read, key = self._reads[self._next_fetch], self._keys[self._next_fetch]
            if read.after > self._num_ended:
                return  # as of most: while forwards run
            if (
                self._ahead_bytes[self._next_fetch + 1] - self._ahead_bytes[self._next_read]
                > self._window_bytes
            ):
                return
            if read.after == self._num_ended:
                # the I that runs leaves it there for its W
                if key not in self._staying:
                    return
                self._next_fetch += 1
                continue
            where = self._at[key]
            if where is _At.LEAVING:
                self._at[key] = _At.WANTED
                self._wanted.append((self._next_fetch, key))
            elif where is _At.AWAY:
                if not self._make_room(read.nbytes, ahead=True):
                    return
                self._restore(key, read.nbytes)
                self._ahead.append((self._next_fetch, key))
            self._next_fetch += 1

    def _restore(self, key: int, nbytes: int) -> None:
        self._take(nbytes)
        self._here[key] = nbytes
        self._at[key] = _At.BACK
        self.restored_bytes += nbytes
        self._link.issue(H2D, key, nbytes, self.now_s)

    def _make_room(self, nbytes: int, ahead: bool = False) -> bool:
        """Compute waits for the oldest spills until `nbytes` fit; False if they do not although nothing is in
        flight. ahead: they are fetched ahead, for which nothing else that was is dropped."""
        limit_bytes = self._limit_bytes - self._again_bytes
        while self._device_bytes + nbytes > limit_bytes and self._spills:
            key = self._spills.popleft()
            where = self._at[key]
            if where is not _At.LEAVING and where is not _At.READ_LEAVING:
                continue
            self._wait(D2H, key)
            self._device_bytes -= self._here[key]
            self._at[key] = _At.AWAY if where is _At.LEAVING else _At.GONE
        while not ahead and self._device_bytes + nbytes > limit_bytes and (self._wanted or self._ahead):
            was, lane, (place, key) = (
                (_At.WANTED, D2H, self._wanted.popleft())
                if self._wanted
                else (_At.BACK, H2D, self._ahead.pop())
            )
            if place >= self._next_read and self._at[key] is was:
                self._wait(lane, key)
                self._at[key] = _At.AWAY
                self._device_bytes -= self._here[key]
                chunk = self._reads[place].group.chunk
                self._dropped[chunk] = min(place, self._dropped.get(chunk, place))
        return self._device_bytes + nbytes <= limit_bytes

    def _wait(self, direction: int, key: int) -> None:
        waited_s = max(0.0, self._link.finish(direction, key) - self.now_s)
        self.stall_s[direction] += waited_s
        self.now_s += waited_s

    def _take(self, nbytes: int) -> None:
        self._device_bytes += nbytes
        self._see_peak()

    def _see_peak(self) -> None:
        self._peak_bytes = max(self._peak_bytes, self._device_bytes + self._again_bytes)


def _spread(seconds: float, groups: Sequence[GroupSize], nbytes: Sequence[int]) -> list[float]:
    """An action's compute over its groups, by their weights, or by their bytes; evenly where there are
    neither."""
    total = sum(group.weight for group in groups)
    if total > 0:
        return [seconds * group.weight / total for group in groups]
    total_bytes = sum(nbytes)
    if total_bytes == 0:
        return [seconds / len(nbytes)] * len(nbytes)
    return [seconds * of_one / total_bytes for of_one in nbytes]
