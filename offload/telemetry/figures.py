"""The figures of a report: what one step saved, moved and kept, by reason and by group, and the same of many
steps together; and the words in which a report's first line and the title of a trace's picture say them.

One invariant: figures add up. Of every step, and so of any number of them, `saved_bytes` is `moved_bytes` and
`kept_bytes`, and each of the two is the sum of what became of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, TypeVar

from offload.sizes import bytes_text
from offload.telemetry.records import StepStats, Summed, level

V = TypeVar("V", bound=Summed)


def _by_key(one: Mapping[str, V], other: Mapping[str, V]) -> dict[str, V]:
    return {
        name: one[name] + other[name] if name in one and name in other else (one.get(name) or other[name])
        for name in [*one, *(name for name in other if name not in one)]
    }


def _map() -> Any:
    return field(default_factory=dict, metadata={"rule": _by_key})


@dataclass(frozen=True, slots=True, kw_only=True)
class Stayed(Summed):
    """Tensors that autograd saved in a group and that can never leave, for one reason."""

    tensors: int = 0
    """One count a save."""

    nbytes: int = 0
    """Bytes of those tensors, one count a save: two views of one storage count twice."""

    largest_elements: int = level()
    """Elements of the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFigures(Summed):
    """Figures of the groups of one name, in all chunks. Bytes of storage that may leave, one count a
    storage."""

    saved_bytes: int = 0
    moved_bytes: int = 0
    """Bytes copied to the host."""

    came_back_bytes: int = 0
    """Bytes of those that were copied back, however often."""

    read_here_bytes: int = 0
    """Bytes of those that were read on the device, and never copied back: the reader came before the copy had
    ended, or somebody else still held them."""

    by_plan_bytes: int = 0
    """Bytes that the plan kept on the device."""

    no_host_bytes: int = 0
    """Bytes that stayed because the host had no free block."""

    stayed: Mapping[str, Stayed] = _map()
    """What can never leave, by reason. Counted in the first step, and in the first after `apply`: looking
    costs the host time."""

    @property
    def kept_bytes(self) -> int:
        """Bytes that stayed on the device, whatever the reason."""
        return self.saved_bytes - self.moved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFigures(Summed):
    """Figures of what one kind held and waited for: "activations", "weights", "gradients", "optimizer"."""

    device_bytes: int = level()
    """Of saved tensors, the most at once; of others, what they had for their copies when the step ended."""

    host_bytes: int = level()
    out_bytes: int = 0
    """Bytes copied to the host."""

    in_bytes: int = 0
    stall_ms: float = 0.0
    """Device time in ms that compute waited for its copies, in the step before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures(Summed):
    """Figures of one step, or of several. Bytes are of saved tensors that may leave, one count a storage."""

    steps: int = 0
    """Steps in which offload was on."""

    saved_bytes: int = 0
    """Bytes that autograd saved: `moved_bytes` and `kept_bytes` together. What one step kept, and a watermark
    moves in a later one, is in both."""

    moved_bytes: int = 0
    """Bytes copied to the host: the three below together."""

    came_back_bytes: int = 0
    """Bytes of those that were copied back, however often."""

    read_here_bytes: int = 0
    """Bytes of those that were read on the device, and never copied back: the reader came before the copy had
    ended, or somebody else still held them."""

    unread_bytes: int = 0
    """Bytes of those that nobody has read when the step ends."""

    back_bytes: int = 0
    """Bytes copied back: `came_back_bytes` and `again_bytes`."""

    again_bytes: int = 0
    """Bytes copied back once more, after they were dropped for want of room or between two backwards, or for
    a tensor that an earlier step has saved."""

    kept_bytes: int = 0
    """Bytes that stayed on the device: the four below together."""

    by_plan_bytes: int = 0
    """Bytes that the plan kept: what is read soonest, or what the limit has room for."""

    no_host_bytes: int = 0
    """Bytes that should have left, and stayed because the host had no free block."""

    denied_bytes: int = 0
    """Bytes that admission denied (`max_spilling_bytes=0`), or that a captured graph could not take along."""

    freed_first_bytes: int = 0
    """Bytes that were read or freed before their piece was sent."""

    would_hold_bytes: int = level()
    """Largest number of these bytes that the device would have held at once if none had left: less than plain
    training holds where blocks are recomputed. At least `peak_bytes`; 0 where it is not known: until a step
    was planned for, and of what a watermark alone sends."""

    peak_bytes: int = level()
    """Largest number that it did hold at once, in any state."""

    over_limit_bytes: int = level()
    """Bytes by which that passed `device_limit_bytes`."""

    host_bytes: int = level()
    """Pinned host bytes that the engine held."""

    host_lent_bytes: int = level()
    """Largest number of them in use at once, by all clients."""

    disk_out_bytes: int = 0
    """Bytes that continued to the file of `disk_directory`."""

    disk_back_bytes: int = 0
    """Bytes read back from it."""

    disk_bytes: int = level()
    """Largest number of bytes in it at once."""

    disk_blocked_ms: float = 0.0
    """Time in ms that the host was blocked by reads of it."""

    stall_ms: float = 0.0
    """Device time in ms that compute waited for copies. It is read one step late: the last step's is that of
    the step before. In a report the last step's is always of one with offload."""

    stall_count: int = 0
    """Waits of compute in the step itself that found their copy not ended."""

    step_ms: float = 0.0
    """Time in ms of the step that `stall_ms` is of, on the host's clock from the end before it to its own,
    with whatever else the loop does. 0 where that is not known yet."""

    groups: Mapping[str, GroupFigures] = _map()
    kinds: Mapping[str, KindFigures] = _map()

    def __add__(self, other: Self) -> Self:
        """Both together. What the device would have held is not known where it is not of either: of a step
        that held more than that."""
        both = super(Figures, self).__add__(other)
        known = all(one.would_hold_bytes >= one.peak_bytes for one in (self, other))
        return both if known else replace(both, would_hold_bytes=0)

    @property
    def stayed(self) -> dict[str, Stayed]:
        """Saves that can never leave, by reason, of all groups."""
        found: dict[str, Stayed] = {}
        for group in self.groups.values():
            found = _by_key(found, group.stayed)
        return found

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, `stayed` included: plain values, for JSON."""
        found = asdict(self)
        for name, group in self.groups.items():
            found["groups"][name]["kept_bytes"] = group.kept_bytes
        return found | {"stayed": {reason: asdict(stayed) for reason, stayed in self.stayed.items()}}


def figures_of(
    stats: StepStats,
    groups: Mapping[str, GroupFigures],
    *,
    would_hold_bytes: int,
    device_limit_bytes: int | None,
) -> Figures:
    """The figures of a step with offload. groups: of all that it committed."""
    by_plan = sum(group.by_plan_bytes for group in groups.values())
    by_plan += sum(one.kept_bytes for one in stats.clients.values())
    no_host = sum(group.no_host_bytes for group in groups.values())
    clients = stats.clients.values()
    came_back = sum(group.came_back_bytes for group in groups.values())
    came_back += sum(client.came_back_bytes for client in clients)
    read_here = sum(group.read_here_bytes for group in groups.values())
    read_here += sum(client.read_here_bytes for client in clients)
    left = stats.kept_bytes - by_plan - no_host
    denied = max(0, min(left, stats.refused_bytes - no_host))
    limit = device_limit_bytes
    if not groups:
        would_hold_bytes = 0  # the plan is of other steps
    if would_hold_bytes or not stats.spill_bytes:
        would_hold_bytes = max(would_hold_bytes, stats.device_bytes_peak)
    return replace(
        figures_without_offload(stats),
        steps=1,
        saved_bytes=stats.saved_bytes,
        moved_bytes=stats.spill_bytes,
        came_back_bytes=came_back,
        read_here_bytes=read_here,
        unread_bytes=stats.spill_bytes - came_back - read_here,
        back_bytes=stats.restore_bytes,
        again_bytes=stats.restore_bytes - came_back,
        kept_bytes=stats.kept_bytes,
        by_plan_bytes=by_plan,
        no_host_bytes=no_host,
        denied_bytes=denied,
        freed_first_bytes=left - denied,
        would_hold_bytes=would_hold_bytes,
        peak_bytes=stats.device_bytes_peak,
        over_limit_bytes=0 if limit is None else max(0, stats.device_bytes_peak - limit),
        groups=dict(groups),
    )


def figures_without_offload(stats: StepStats) -> Figures:
    """Figures of a step in which saved tensors were not looked at: the stall is that of the step before, and
    the clients may have copied."""
    return Figures(
        host_bytes=stats.host_bytes_held,
        host_lent_bytes=stats.host_bytes_lent_peak,
        disk_out_bytes=stats.disk_write_bytes,
        disk_back_bytes=stats.disk_read_bytes,
        disk_bytes=stats.disk_bytes_peak,
        disk_blocked_ms=stats.disk_blocked_ms,
        stall_ms=stats.stall_ms,
        stall_count=stats.stall_count,
        kinds={
            kind: KindFigures(
                device_bytes=one.device_bytes,
                host_bytes=one.lent_bytes,
                out_bytes=one.out_bytes,
                in_bytes=one.in_bytes,
                stall_ms=one.stall_ms,
            )
            for kind, one in stats.by_kind.items()
        },
    )


class Ledger:
    """Figures since a point in time.

    total: of all steps since then. last: of the last one with offload, None before it has ended. kinds: of
    the last step, with saved tensors offloaded or not.
    An end that was guessed may be one of a microbatch. It counts as a step until an end comes that was not:
    then all since the last such end are parts of one step.
    """

    __slots__ = ("__weakref__", "_begun", "_offloaded", "_parts", "kinds", "last", "total")

    def __init__(self) -> None:
        self.total = Figures()
        self.last: Figures | None = None
        self.kinds: Mapping[str, KindFigures] = {}
        self._begun = False
        self._offloaded = False  # the step before
        self._parts = Figures()  # since the last end that was not guessed

    def add(self, step: Figures, *, guessed: bool = False) -> None:
        """A step has ended, or where that is guessed, what may be a part of one."""
        if not self._begun:  # its stall is that of a step before this point in time
            self._begun = True
            kinds = {name: replace(kind, stall_ms=0.0) for name, kind in step.kinds.items()}
            step = replace(step, stall_ms=0.0, step_ms=0.0, kinds=kinds)
        self.total += step
        self._parts += step
        self.kinds = step.kinds
        if step.steps:
            of = step if self._offloaded else self.last or Figures()
            self.last = replace(step, stall_ms=of.stall_ms, step_ms=of.step_ms)
        elif self._offloaded and self.last is not None:
            self.last = replace(self.last, stall_ms=step.stall_ms, step_ms=step.step_ms)
        self._offloaded = step.steps > 0
        if not guessed:
            self.step_is_whole()

    def step_is_whole(self) -> None:
        """Count as one step what has ended since the last end that was not guessed."""
        parts, self._parts = self._parts, Figures()
        self.kinds = parts.kinds or self.kinds
        if parts.steps > 1:
            self.last = replace(parts, steps=1)
            self.total = replace(self.total, steps=self.total.steps - parts.steps + 1)


def saved_text(held_bytes: int, without_bytes: int, moved_bytes: int) -> str:
    """held_bytes, without_bytes: saved tensors on the device at once, at most, and what they would be if none
    had left; 0 where that is not known. moved_bytes: copied to the host in the step."""
    share = f"{held_bytes / without_bytes:.0%}" if without_bytes else ""
    instead = share and f" instead of {bytes_text(without_bytes)} ({share})"
    return f"saved tensors at most {bytes_text(held_bytes)} at once{instead}, {bytes_text(moved_bytes)} moved"


def stall_text(stall_ms: float, step_ms: float) -> str:
    """Times that compute waited for copies, and the step's; 0 where that is not known."""
    share = f"{stall_ms / step_ms:.1%} of a step of {step_ms:,.1f} ms" if step_ms else "known a step later"
    return f"stalls {share}"
