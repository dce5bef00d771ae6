"""What a step was seen to do: the chunks that it began, their groups' sizes, the order of its actions, and
how long each action computed; for a report, what its groups saved and did not send, and why.

One invariant: it is what the next plan is made from, and nothing in it depends on the last plan. Nothing here
blocks the host or costs a save anything: a step is looked at when it ends, its times are read when a later
step ends, and only if all of its events have passed. Why a tensor can never leave is looked up in the first
step only, where every save is judged once more.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import torch

from offload.config import OffloadConfig
from offload.device import Event
from offload.engine import OffloadEngine
from offload.groups.chunk import ChunkGroups, GroupScope
from offload.groups.group import Group
from offload.policy.actions import Action, ChunkKey, GroupSize
from offload.saved.filters import Verdict
from offload.saved.hooks import Scope
from offload.telemetry.figures import GroupFigures, Ledger, Stayed, figures_of, figures_without_offload
from offload.telemetry.records import StepStats
from offload.transfer.copier import Stall, all_passed
from offload.transfer.engine import TransferEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenStep:
    """Observations of one step.

    chunks: all that were begun. forward_order, backward_order: in the order of their begin. actions: as they
        were announced.
    seconds: compute by action of an earlier step of this kind, where it was timed. idle: stages whose I reads
    nothing. halves: as `RecomputedHalves.seen`.
    """

    chunks: Sequence[ChunkGroups]
    forward_order: Sequence[ChunkGroups]
    backward_order: Sequence[ChunkGroups]
    actions: Sequence[Action]
    seconds: dict[Action, float] | None
    idle: Collection[int] = ()
    halves: Mapping[ChunkKey, Sequence[tuple[int, int, bool]]] = field(default_factory=dict)

    def sizes_in_backward_order(self) -> list[tuple[ChunkKey, list[GroupSize]]]:
        return [(chunk.id, sizes_of(chunk)) for chunk in self.backward_order]

    def shape(self, settings: OffloadConfig) -> object:
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
        known = _once_each(self.actions, sizes, self.idle)
        return known, {action.chunk: sizes[action.chunk] for action in known}


def _once_each(seen: Sequence[Action], sizes: Collection[ChunkKey], idle: Collection[int]) -> list[Action]:
    """Schedule of what was seen: of a chunk the forward that its backward read, and that backward. A forward
    that was run again, a backward that was taken up twice and a chunk that was never read would only confuse
    a plan, and so would an I that reads nothing. idle: stages of those."""
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
        halves = ("W",) if chunk[0] in idle else ("I", "W")
        wanted = ("B",) if "B" in kinds else halves
        if chunk in sizes and all(kind in kinds for kind in wanted):
            places += [forwards[chunk], *(kinds[kind] for kind in wanted)]
    return [seen[at] for at in sorted(places)]


def sizes_of(chunk: ChunkGroups) -> list[GroupSize]:
    """The groups' eligible bytes."""
    return [
        GroupSize(
            group.name,
            group.total_offload_bytes,
            half_bytes=half_bytes_of(group, group.slot_bytes),
            left_bytes=group.left_bytes,
            passed_bytes=passed_bytes_of(group, group.slot_bytes),
        )
        for group in chunk.groups
    ]


def leaving_of(chunk: ChunkGroups, part_bytes: Mapping[int, int]) -> list[GroupSize]:
    """Sizes of what leaves of the groups, if all do. part_bytes: by position, what stays of those that leave
    in part. What should have left in the step and found no host memory does not count."""
    return [
        GroupSize(group.name, max(0, group.total_offload_bytes - part_bytes.get(at, 0) - group.refused_bytes))
        for at, group in enumerate(chunk.groups)
    ]


def half_bytes_of(group: Group, slot_bytes: Iterable[tuple[int, int]]) -> int | None:
    """Bytes that a weight half was seen to read of these (slot, bytes) of a group; None where none was
    seen."""
    slots = group.half_slots
    return None if slots is None else sum(nbytes for slot, nbytes in slot_bytes if slot in slots)


def passed_bytes_of(group: Group, slot_bytes: Iterable[tuple[int, int]]) -> int:
    """Bytes of these that the weight half alone was seen to read."""
    return sum(nbytes for slot, nbytes in slot_bytes if slot in group.passed_slots)


@dataclass(slots=True)
class _Timed:
    action: Action
    start: Event
    first_stall: int
    last_stall: int = 0
    end: Event | None = None


class StepClock:
    """Times the announced actions of a step: the time between timed events at the two ends of each, less the
    stalls in between. Actions do not nest."""

    def __init__(self, transfers: TransferEngine) -> None:
        self._transfers = transfers
        self._device = transfers.device
        self._timed: list[_Timed] = []
        self._before: tuple[list[_Timed], list[Stall]] = ([], [])

    def start(self, action: Action) -> None:
        if self._device.is_capturing():
            return  # a captured event has no time
        start = self._device.record(self._device.compute, timed=True)
        self._timed.append(_Timed(action, start, len(self._transfers.stalls)))

    def stop(self, action: Action) -> None:
        timed = self._timed[-1] if self._timed and not self._device.is_capturing() else None
        if timed is not None and timed.action == action and timed.end is None:
            timed.end = self._device.record(self._device.compute, timed=True)
            timed.last_stall = len(self._transfers.stalls)

    def end_step(self) -> dict[Action, float] | None:
        """Seconds of compute by action of the step BEFORE the one that ends; None if there was none or it is
        not over on the device. Called before the transfers begin their next list of stalls."""
        timed, old_stalls = self._before
        self._before = (self._timed, self._transfers.stalls)
        self._timed = []
        device = self._device
        ends = [entry.end for entry in timed if entry.end is not None]
        # maybe on more than one lane
        over = all(device.poll(event) for event in ends) and all_passed(device, old_stalls)
        if not ends or len(ends) != len(timed) or not over:
            return None
        seconds: dict[Action, float] = {}
        for entry in timed:
            assert entry.end is not None
            waited_ms = sum(stall.ms(device) for stall in old_stalls[entry.first_stall : entry.last_stall])
            own_s = max(0.0, (device.elapsed_ms(entry.start, entry.end) - waited_ms) / 1000)
            seconds[entry.action] = seconds.get(entry.action, 0.0) + own_s  # it may be taken up again
        return seconds


def group_figures(groups: Iterable[Group]) -> dict[str, GroupFigures]:
    """By name. Groups that were counted before are passed over, so a forward that outlives its step counts
    once."""
    found: dict[str, GroupFigures] = {}
    for group in groups:
        saved = group.saved
        if saved is None or saved.in_figures:
            continue
        saved.in_figures = True
        total = by_plan = no_host = came_back = read_here = 0
        for block in saved.blocks:
            total += block.nbytes
            if block.copies > 1:
                came_back += block.nbytes
            elif block.copies and block.unread < block.readers:
                read_here += block.nbytes
            if block.slot >= saved.first_kept:
                by_plan += block.nbytes
            elif block.refused:
                no_host += block.nbytes
        group.refused_bytes = no_host
        figures = GroupFigures(
            saved_bytes=total,
            moved_bytes=saved.moved_bytes,
            came_back_bytes=came_back,
            read_here_bytes=read_here,
            by_plan_bytes=by_plan,
            no_host_bytes=no_host,
        )
        found[group.name] = found[group.name] + figures if group.name in found else figures
    return found


class Survey:
    """Counts the tensors that a step saves and that can never leave, by group name and reason.

    As an observer of the hooks from its construction to `end`.
    """

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        # by virtual stage and group name
        self._counts: defaultdict[tuple[int, str], dict[str, Stayed]] = defaultdict(dict)
        engine.hooks.observers.append(self)

    def end(self) -> None:
        """Look at no further tensor."""
        if self in self._engine.hooks.observers:
            self._engine.hooks.observers.remove(self)

    def largest_small(self, stage: int | None, name: str | None = None) -> int:
        """Elements of the largest tensor that is too small to leave, in groups of that virtual stage and
        name; None for all of them. 0 if there is none."""
        reason = Verdict.SMALL.value
        return max(
            (
                one[reason].largest_elements
                for (of, named), one in self._counts.items()
                if stage in (None, of) and name in (None, named) and reason in one
            ),
            default=0,
        )

    def added_to(self, groups: dict[str, GroupFigures]) -> dict[str, GroupFigures]:
        """`groups`, with what of theirs can never leave."""
        found = dict(groups)
        for (_, name), stayed in self._counts.items():
            found[name] = found.get(name, GroupFigures()) + GroupFigures(stayed=stayed)
        return found

    def opened(self, scope: Scope) -> None:
        """Nothing: saves alone count."""

    closed = opened

    def packed(self, scope: Scope, tensor: torch.Tensor, packed: Any, verdict: Verdict | None) -> None:
        """Count a tensor that was saved in a group and can never leave."""
        if verdict is None or not isinstance(scope, GroupScope):
            return
        counts = self._counts[scope.chunk.stage, scope.name]
        one = Stayed(
            tensors=1, nbytes=tensor.numel() * tensor.element_size(), largest_elements=tensor.numel()
        )
        reason = verdict.value
        counts[reason] = counts[reason] + one if reason in counts else one


class GroupLedgers:
    """The ledgers that somebody holds: each gets the figures of every step that ends.

    survey: of the step under way, where it is looked at closely.
    """

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self._ledgers: WeakSet[Ledger] = WeakSet()
        self._groups: dict[str, GroupFigures] = {}  # of the step that ends
        self._ended_s, self._step_ms = time.monotonic(), 0.0  # the last end, and the step before it
        self.survey: Survey | None = None

    def new(self) -> Ledger:
        """Figures of the steps that end from now on, for as long as the caller holds it. The next step is
        looked at closely, to say why tensors can never leave: each of its saves is judged twice."""
        ledger = Ledger()
        self._ledgers.add(ledger)
        if self.survey is None:
            self.survey = Survey(self._engine)
        return ledger

    def take_over(self, other: GroupLedgers) -> None:
        """Whoever holds one of `other` gets the figures of steps of these groups from now on."""
        self._ledgers |= other._ledgers

    def __contains__(self, ledger: Ledger) -> bool:
        return ledger in self._ledgers

    def count(self, groups: Iterable[Group]) -> None:
        """Add what these groups have saved to the step that ends."""
        for name, figures in group_figures(groups).items():
            before = self._groups.get(name)
            self._groups[name] = figures if before is None else before + figures

    def step_is_whole(self) -> None:
        """Tell each ledger that what has ended is one step."""
        for ledger in list(self._ledgers):
            ledger.step_is_whole()

    def write(self, stats: StepStats, live_peak_bytes: int | None, *, ran: bool, guessed: bool) -> None:
        """The step has ended. live_peak_bytes: what its saved tensors would take of the device at once; None
        for a step without offload, which is none of the figures' but for the stall of the step before.
        ran: whether a forward began in it. guessed: as of `Ledger.add`."""
        groups, self._groups = self._groups, {}
        if live_peak_bytes is None:
            figures = figures_without_offload(stats)
        else:
            if self.survey is not None and ran:
                groups = self.survey.added_to(groups)
                self.survey.end()
                self.survey = None
            figures = figures_of(
                stats,
                groups,
                would_hold_bytes=live_peak_bytes,
                device_limit_bytes=self._engine.limits.device_limit_bytes,
            )
        figures = replace(figures, step_ms=self._step_ms)
        now_s = time.monotonic()
        self._step_ms, self._ended_s = (now_s - self._ended_s) * 1e3, now_s
        for ledger in list(self._ledgers):
            ledger.add(figures, guessed=guessed)
