"""Mode "auto": whether what a plan was made from still holds: what the link carries, and how long blocks
compute. Another clock of the GPU changes the one; ranks that copy on the same host, the other.

    margin  how many times over the link could carry what blocks save while they compute. A plan depends on
            times by this alone: with all of them longer by one factor it is the same plan
    look    a comparison of the margin that was seen with the planned one. Copies are timed in few steps

One invariant: nothing here blocks the host, and a look that differs once changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from offload.engine import OffloadEngine
from offload.planner.recent import RecentSteps
from offload.planner.work import StepWork
from offload.policy.actions import Rates
from offload.policy.mixed_bound import action_seconds
from offload.telemetry.speaker import speaker
from offload.transfer.link_watch import LinkWatch

__all__ = ["AutoDrift"]

logger = speaker(__name__)

_MOST = 0.08
"""Of a margin. Simulated on sixteen steps with links of other rates, a plan that is kept takes longer than a
new one by 0.7% at the median where the link carries 5% less, 2.0% at 10%, 5.3% at 20%; by 0.5, 0.6 and 1.1%
where it carries that much more. A simulated step is itself 2% or more off."""

_LOOK_EVERY = 8
"""Steps, once no plan is expected."""

_LOOKS = 2
"""In a row that differ: one may be of a step that something else held up."""

_PLAN_EVERY = 64
"""Steps at least from one plan to the next: the search and the steps in which a new plan comes into force
cost about a third of a step."""

_PART_OF_PIECE = 2
"""A copy of half a piece or more is counted."""


class _Margin(NamedTuple):
    """By direction."""

    out: float
    back: float

    @classmethod
    def of(cls, work: StepWork, rates: Rates) -> _Margin:
        seconds = sum(action_seconds(work.actions, work.blocks, work.rest_s))
        saved = sum(block.menu[0].saved_bytes for own in work.blocks.values() for block in own)
        passes = seconds / max(saved, 1)
        return cls(rates.d2h_bytes_per_s * passes, rates.h2d_bytes_per_s * passes)

    def differs(self, other: _Margin) -> bool:
        return any(abs(mine - its) > _MOST * its for mine, its in zip(self, other, strict=True))


class AutoDrift:
    """Of one engine, whose `rates` it keeps to what was seen."""

    def __init__(self) -> None:
        self._watch: LinkWatch | None = None
        self._planned: _Margin | None = None
        self._steps = 0  # since the plan
        self._differed = 0  # looks in a row

    def planned(self, work: StepWork | None, rates: Rates | None) -> None:
        """A plan is followed from now on that was made with these; None: with none."""
        self._planned = None if work is None or rates is None else _Margin.of(work, rates)
        self._steps = self._differed = 0

    def begin_step(self, engine: OffloadEngine, *, plans_more: bool) -> None:
        """A step begins. plans_more: another plan is to come anyway, so every step is looked at."""
        is_due = plans_more or self._steps % _LOOK_EVERY == 0
        if self._planned is None or not is_due or not engine.device.pins:  # no other device has a link
            return
        if self._watch is None:
            self._watch = LinkWatch(engine.copier, engine.config.piece_bytes // _PART_OF_PIECE)
        self._watch.begin()

    def step_ended(self, engine: OffloadEngine, recent: RecentSteps, *, plans_more: bool) -> None:
        self._steps += 1
        watch, rates = self._watch, engine.rates
        if watch is None or rates is None:
            return
        seen = watch.rates(rates)  # of the step before, if that was watched: this one's copies are under way
        watch.end()
        if seen is None or self._planned is None or (work := recent.last_timed) is None:
            return
        differs = _Margin.of(work, seen).differs(self._planned)
        self._differed = self._differed + 1 if differs else 0
        if plans_more or self.is_too_much:
            logger.info(
                "auto: the link carries %.3g GB/s out and %.3g back, of %.3g and %.3g that were thought",
                *(rate / 1e9 for one in (seen, rates) for rate in (one.d2h_bytes_per_s, one.h2d_bytes_per_s)),
            )
            engine.rates = seen

    @property
    def is_too_much(self) -> bool:
        """Whether a new plan is worth its search."""
        return self._differed >= _LOOKS and self._steps >= _PLAN_EVERY

    def end(self) -> None:
        """Look no more."""
        self._planned = None
        if self._watch is not None:
            self._watch.end()
            self._watch = None
