"""What a step's groups saved and did not send, and why: the part of a report that only the groups know.

One invariant: it is looked at when a step ends, and costs a save nothing. Why a tensor can never leave is
looked up in the first step only, where every save is judged once more.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch

from offload.engine import OffloadEngine
from offload.groups.group import Group
from offload.groups.scope import GroupScope
from offload.saved.filters import Verdict
from offload.saved.hooks import Scope
from offload.telemetry.figures import GroupFigures, Ledger, Stayed, figures_of, figures_without_offload
from offload.telemetry.records import StepStats


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
        """One that begins empty; the next step is looked at closely."""
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
