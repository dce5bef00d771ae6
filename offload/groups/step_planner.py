"""After warm-up: which groups stay, and what the summary says. Turns what steps were seen to do (seen.py)
into numbers for the pure policies, and gives back memory that a final plan does not use: pinned host memory
to the system, and device memory that torch's allocator has cached to the driver.

One invariant: a plan only says what stays and how far ahead to fetch; a step that is unlike the planned one
runs all the same. No host memory goes back that is on loan, and none while a step lacks host memory.

Under a device limit there are two plans. The first, after the first step, knows sizes and order only and
keeps an equal part of every chunk. After the third step it is also known how long each action computes and
what the link carries, and timed.py plans by simulated steps. Where mode "auto" has a plan, its amounts are
followed from the first step on, and the search begins with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from offload.engine import OffloadEngine
from offload.groups.reports import StepReport
from offload.groups.seen import SeenStep, leaving_of
from offload.groups.timed import (
    NO_PART,
    Stays,
    TimedPlan,
    Unit,
    VariedSteps,
    cut_into_units,
    plan_by,
    timed_plan,
)
from offload.policy.actions import Action, ChunkKey, GroupKey, GroupSize, Keeps
from offload.policy.keeps import (
    all_of,
    fraction_keeps,
    kept_peak_bytes,
    leaving_bytes,
    left_peak_bytes,
    limit_keeps,
    margin_keeps,
    summary_bytes,
)
from offload.policy.mixture import MixedPlan
from offload.telemetry.speaker import speaker
from offload.transfer.limits import DEFAULT, DEFAULT_IN_FLIGHT_BYTES, PLAN

logger = speaker(__name__)

REMEMBERED_STEPS = 1000
"""Steps that host memory is kept for after the last one that wanted it. An evaluation or a longest sequence
that comes more often finds its memory each time; one that came once holds it for a quarter of an hour of
usual steps, not for ever."""

_ALMOST = 8
"""A step that wants all of the remembered bytes but an eighth counts as wanting them: peaks of random lengths
differ by as much, and memory that was given back is refused to the first step that wants it again."""

_WORTH_A_RELEASE = 32
"""Part of the reserved device bytes: below it, blocks of the wrong sizes cost less than asking the driver for
all of them again."""


_TRIMMED_BYTES = 1 << 29
"""Host memory that goes back at once. While the host unpins it launches nothing: steps of mode "auto" on one
H200 took 33 ms longer for 1.2 GB of README's example, and 14 to 24 ms for 0.54 GB of BERT (docs/log.md,
November 2026)."""

_TRIM_STEPS = 4
"""Steps from one part that goes back to the next."""


class Trimmer:
    """Gives memory back once for each final plan, and again where a long shape is forgotten. waits: device
    memory only where `release_soon` asks for it. keeps_host: no host memory, since a plan to come may want
    it: unpinning waits for the device, and pinning again keeps the host from launching."""

    def __init__(self, engine: OffloadEngine) -> None:
        self.waits = self.keeps_host = False
        self._engine = engine
        self._trimmed = self._trimmed_plan = False  # host memory: ever, and all for this plan
        self._steps_to_trim = 0
        # device memory: at the next step's begin, and for this plan
        self._release_due = self._released_plan = False
        self._wanted_bytes = 0  # on the host, by a step since some were given back for the first time
        self._steps_since_wanted = 0

    def plan_changed(self) -> None:
        """Another plan needs another amount."""
        self._trimmed_plan = self._released_plan = self._release_due = False

    def plan_settled(self) -> None:
        """A step has ended under a plan that is final: give host memory back now, in parts, device memory at
        the next step's begin. Blocks the host once for each part.

        On the host goes what neither a steady step of this shape uses nor any of the last steps has wanted:
        given back each time, it would be pinned, and the tensors that want it refused, each time that the
        longer shape returns. Not while a step lacks any.
        """
        config, arena, stats = self._engine.config, self._engine.arena, self._engine.last_stats
        if config.trim_host and not (self._trimmed_plan or self.keeps_host or stats.refused):
            self._steps_to_trim -= 1
            if self._steps_to_trim <= 0:
                # pieces go whole: with one to spare, what a step needs stays and is not pinned again
                wanted_bytes = max(self._wanted_bytes, stats.host_bytes_wanted_peak)
                target_bytes = wanted_bytes + arena.registration_bytes
                released = arena.trim(max(target_bytes, arena.held_bytes - _TRIMMED_BYTES))
                self._trimmed = True
                self._trimmed_plan = arena.held_bytes <= target_bytes or not released
                self._steps_to_trim = 0 if self._trimmed_plan else _TRIM_STEPS
        if not (self._released_plan or self.waits):
            self._released_plan = True
            self.release_soon()

    def release_soon(self) -> None:
        """Give device memory back at the next step's begin."""
        self._release_due = self._engine.config.trim_device

    def step_ended(self) -> None:
        """Count what a step of any shape wanted on the host. The most that one has wanted is forgotten if
        none has come near it for REMEMBERED_STEPS; the next step under a final plan gives the difference
        back."""
        if not self._trimmed:
            return
        wanted_bytes = self._engine.last_stats.host_bytes_wanted_peak
        self._steps_since_wanted += 1
        if wanted_bytes >= self._wanted_bytes - self._wanted_bytes // _ALMOST:
            wanted_bytes = max(wanted_bytes, self._wanted_bytes)
        elif self._steps_since_wanted > REMEMBERED_STEPS:
            self._trimmed_plan = False
        else:
            return
        self._wanted_bytes = wanted_bytes
        self._steps_since_wanted = 0

    def step_begins(self) -> None:
        """Once the plan is final, give device memory back that the allocator has cached in sizes that the
        steps before wanted: only now, when the gradients of the last step may be gone, are there whole
        segments to give back.

        Source: W1 of the benchmarks, 3 GB of saved bytes on the device, one H200: without, reserved over
            active was 1.08 to 1.15.
        """
        if not self._release_due or self._engine.device.is_capturing():
            return
        self._release_due = False
        released = self._engine.device.release_cached(_WORTH_A_RELEASE)
        if released:
            logger.info("%s bytes of cached device memory given back, once for this plan", f"{released:,}")


_LEAST_PIECES = 2  # in flight in one direction: one that is copied, one that waits behind it


class StepPlanner:
    """Plans when the shape of a step is new, and once more when its times are known."""

    def __init__(self, engine: OffloadEngine) -> None:
        # of it only what `init_chunk_handler` may change between steps
        self.settings = engine.config
        self.is_warmup = True
        self.summary: dict[str, int] = {}
        self.leaving: dict[str, int] = {}  # bytes by group of a step that follows the plan
        self.windows = engine.limits.contributor(PLAN, self, is_plan=True)
        self._engine = engine
        self._shape: object = None
        self._is_last = False  # no other plan follows for steps like the last one
        self._steady_steps = 0
        self._actions: tuple[Action, ...] = ()  # of the planned step
        self._looked_cut_short: object = None
        self._room_bytes = 0  # that a step needs beside what stays, the most seen
        self._varied = VariedSteps(engine.config.piece_bytes)
        self.trimmer = Trimmer(engine)
        self._report = StepReport()
        self._start: MixedPlan | None = None
        self._start_kept_bytes = 0  # that may stay at once until a step was seen under it
        self._start_is_new = False  # no step has ended under it
        self.live_peak_bytes = 0  # of the planned step's saved tensors, if none left

    def after_step(self, seen: SeenStep) -> bool:
        """Look at a step that has ended. Returns whether warm-up ends with it; a step without a backward
        plans nothing."""
        self.trimmer.step_ended()
        if not seen.backward_order:
            return False
        self._room_bytes = max(self._room_bytes, _room_bytes(seen))
        shape = seen.shape(self.settings)
        if shape != self._shape and self._cut_short(seen, shape):
            self._varied.passed_over()
            return False
        self._varied.ended(seen)
        if shape != self._shape:
            self._shape = shape
            self._actions = tuple(seen.actions)
            self._is_last = False
            self.trimmer.plan_changed()
            self._steady_steps = 0
            self._look(replanned=True)
            first, self.is_warmup = self.is_warmup, False
            self._start_is_new = False
            if not self._follow_varied(seen):
                self._follow_untimed(seen)
            return first
        self._looked_cut_short = None
        if self._start_is_new:
            self._start_is_new = False
            self.limits_changed(seen)
        self._steady_steps += 1
        self._look(replanned=False)
        if not self._is_last:
            if self._follow_varied(seen):
                return False
            if self._steady_steps >= 2 and self._follow_timed(seen):
                self.trimmer.plan_changed()
                self._steady_steps = 2
                return False
        if self._steady_steps >= 2:
            self._report.look(self._engine.last_stats, self._engine.limits, self.live_peak_bytes)
        if self._is_steady:
            self.trimmer.plan_settled()
        return False

    @property
    def is_settled(self) -> bool:
        """Predicate: steps like the last ones will follow the plan of now: where lengths vary, any do."""
        return self._varied.lengths.vary or self._is_steady

    @property
    def _is_steady(self) -> bool:
        return self._steady_steps >= (3 if self._is_last else 4)

    def limits_changed(self, seen: SeenStep | None) -> None:
        """The device limit is another one, or what stays is to be found anew: once the next step has ended, a
        plan is searched for again. seen: the step that ended last; where it is one that the plan of mode
        "auto" is for, that holds from now on."""
        if self.is_warmup:
            return
        self._is_last = False
        self._steady_steps = min(self._steady_steps, 1)
        if seen is not None and seen.backward_order and seen.shape(self.settings) == self._shape:
            known = None if self._varied.lengths.vary else self._known(seen)
            if known is not None:
                self._follow(seen, known)
                return
        self._cap_by_start()

    def start_from(self, plan: MixedPlan | None, most_kept_bytes: int = 0) -> None:
        """Set what the steps that come are to follow; None: follow it no more, once its device limit is gone,
        with which its windows went. most_kept_bytes: that may stay at once until such a step was seen. Takes
        no lock."""
        self._start, self._start_is_new = plan, plan is not None
        self._start_kept_bytes = most_kept_bytes
        self._cap_by_start()
        if plan is None:  # what a step without it leaves free is not known yet
            self._fit_windows(0)

    def _cap_by_start(self) -> None:
        """Until such a step was seen: so much less stays as the limit is below what the plan takes."""
        start, limits = self._start, self._engine.limits
        if start is None or limits.device_limit_bytes is None:
            return
        most_bytes = self._start_kept_bytes - max(0, start.predicted_peak_bytes - limits.device_limit_bytes)
        self.windows.bound("kept_limit_bytes", max(0, most_bytes), replaces=(DEFAULT,))
        self._look_ahead(start.restoring_room_bytes, start.half_room_bytes)

    def _look(self, *, replanned: bool) -> None:
        """Warn of what the step that ended shows, if it shows anything."""
        engine, report = self._engine, self._report
        # where no step comes to follow a plan of its own
        if replanned and report.shapes_vary and engine.limits.device_limit_bytes is not None:
            report.look(engine.last_stats, engine.limits, self.live_peak_bytes)
        report.step(replanned=replanned, allocator=engine.device.allocator_bytes)

    def _cut_short(self, seen: SeenStep, shape: object) -> bool:
        """Return True if the step looks like the planned one, ended early by an exception: it did the first
        of its actions and no others.

        A plan for it would keep more than the next whole step has room for, and a step that ran out of memory
        would do so again. A step with fewer microbatches may look the same: it is planned when it comes twice
        in a row, if all of its chunks were read.
        """
        actions = tuple(seen.actions)
        if len(actions) >= len(self._actions) or actions != self._actions[: len(actions)]:
            return False
        again = shape == self._looked_cut_short
        self._looked_cut_short = shape
        return not again or len(seen.chunks) > len(seen.backward_order)

    def plan_now(self, seen: SeenStep) -> None:
        """End warm-up with what this step was seen to do so far."""
        self.is_warmup = False
        self._is_last = False
        self._follow_untimed(seen)

    def _install(self, seen: SeenStep, held: Keeps, parts: Mapping[ChunkKey, Stays] = {}) -> None:
        """held: whole groups that stay whatever the settings say. parts: what stays of groups that leave in
        part."""
        settings = self.settings
        keeps = fraction_keeps(
            seen.sizes_in_backward_order(),
            settings.activation_offload_fraction,
            held=held,
            pp_rank=settings.pp_rank,
            delta_bytes=settings.delta_offload_bytes_across_pp_ranks,
        )
        required = {
            GroupKey(chunk.id, at)
            for chunk in seen.chunks
            for at, group in enumerate(chunk.groups)
            if group.required
        }
        if required:
            keeps = frozenset(keeps - required)
            whole = {key.chunk for key in required}
            parts = {chunk: part for chunk, part in parts.items() if chunk not in whole}
        for chunk in seen.chunks:
            chunk.stays = frozenset(key.position for key in keeps if key.chunk == chunk.id)
            chunk.stays_from = dict(parts.get(chunk.id, NO_PART).from_slot)
        forward = [
            (chunk.id, leaving_of(chunk, parts.get(chunk.id, NO_PART).part_bytes))
            for chunk in dict.fromkeys(seen.forward_order)
        ]
        self.leaving = leaving_bytes(forward, keeps)
        self._limit_kept(seen, keeps, parts)
        self.summary = summary_bytes(forward, seen.backward_order[0].id, keeps) if seen.backward_order else {}

    def _limit_kept(self, seen: SeenStep, keeps: Keeps, parts: Mapping[ChunkKey, Stays]) -> None:
        """A longer step keeps no more than this one does, or than leaves room for what comes and goes."""
        limit_bytes = self._engine.limits.device_limit_bytes
        if limit_bytes is None:
            return
        known, sizes = seen.schedule()
        kept = {
            chunk: [
                GroupSize("", one.nbytes if GroupKey(chunk, at) in keeps else part_bytes.get(at, 0))
                for at, one in enumerate(own)
            ]
            for chunk, own in sizes.items()
            for part_bytes in (parts.get(chunk, NO_PART).part_bytes,)
        }
        most_bytes = limit_bytes - self._room_bytes - left_peak_bytes(known, sizes)
        if not self._varied.lengths.vary:  # this very step is expected again
            costs = (group.cost for chunk in seen.chunks for group in chunk.groups if group.cost is not None)
            kept_bytes = kept_peak_bytes(known, kept, all_of(kept))
            grown_bytes = sum(cost.grown_bytes for cost in costs)
            most_bytes = max(most_bytes, kept_bytes, min(limit_bytes, kept_bytes + grown_bytes))
        self.windows.bound("kept_limit_bytes", max(0, most_bytes), replaces=(DEFAULT,))

    def _follow_untimed(self, seen: SeenStep) -> None:
        """Until the times of such steps are known: follow the plan of mode "auto", if that still keeps within
        the limit."""
        keeps, known = self._untimed(seen), self._known(seen)
        if known is None:
            self._install(seen, keeps)
        else:
            self._follow(seen, known)

    def _known(self, seen: SeenStep) -> TimedPlan | None:
        """The plan of mode "auto" for the groups of this step; None where that was for another order of
        actions, or takes more than the limit of now."""
        start, limit_bytes = self._start, self._engine.limits.device_limit_bytes
        known, _ = seen.schedule()
        if start is None or limit_bytes is None or list(known) != list(start.problem.actions):
            return None
        plan, kept_bytes = plan_by(start, known, self._units(seen))
        return plan if max(kept_bytes, start.predicted_peak_bytes) <= limit_bytes else None

    def _units(self, seen: SeenStep) -> dict[ChunkKey, list[Unit]]:
        piece_bytes = self._engine.config.piece_bytes
        return {chunk.id: cut_into_units(chunk.groups, piece_bytes) for chunk in seen.backward_order}

    def _untimed(self, seen: SeenStep) -> Keeps:
        """Without a device limit the margin: the last group of each name in the first chunk to run backward,
        whose fetch could not be hidden. With one, all if that fits, else as much of every chunk's end as fits
        beside the rooms for what is leaving and coming back."""
        limits = self._engine.limits
        known, sizes = seen.schedule()
        self.live_peak_bytes = kept_peak_bytes(known, sizes, all_of(sizes))
        if limits.device_limit_bytes is None:
            self._fit_windows(self.live_peak_bytes)
            return margin_keeps(seen.sizes_in_backward_order())
        quarter = limits.device_limit_bytes // 4
        spilling = quarter if limits.max_spilling_bytes is None else min(limits.max_spilling_bytes, quarter)
        again_bytes = max(
            (group.cost.again_bytes for chunk in seen.chunks for group in chunk.groups if group.cost),
            default=0,
        )
        room_bytes = max(0, limits.device_limit_bytes - again_bytes)  # one recompute is under way at most
        if limit_keeps(known, sizes, room_bytes, 0, 0) == all_of(sizes):
            return all_of(sizes)  # nothing has to leave, so no room is needed for what does
        return limit_keeps(known, sizes, room_bytes, spilling, limits.max_restoring_bytes)

    def _fit_windows(self, live_peak_bytes: int) -> None:
        """Where caps were left to the engine and there is no device limit: an eighth of what is live at once
        for each direction, but a few pieces at least and the default at most. A step that saves less than the
        defaults would otherwise never settle a spill."""
        least_bytes = _LEAST_PIECES * self._engine.config.piece_bytes
        window_bytes = max(least_bytes, min(DEFAULT_IN_FLIGHT_BYTES, live_peak_bytes // 8))
        self.windows.bound("max_spilling_bytes", window_bytes, replaces=(DEFAULT,))
        self.windows.bound("max_restoring_bytes", window_bytes, replaces=(DEFAULT,))

    def _follow_timed(self, seen: SeenStep) -> bool:
        """Simulate the step with its measured times and follow the best plan; False where something is not
        known."""
        limits, rates = self._engine.limits, self._engine.rates
        if limits.device_limit_bytes is None or rates is None or seen.seconds is None:
            return False
        known, _ = seen.schedule()
        times = [seen.seconds.get(action) for action in known]
        compute_s = [seconds for seconds in times if seconds is not None]
        if len(compute_s) != len(known) or sum(compute_s) <= 0:
            return False
        limit_bytes = limits.device_limit_bytes
        plan = timed_plan(self._units(seen), known, compute_s, rates, limit_bytes, self._start)
        self._is_last = True
        self._follow(seen, plan)
        return True

    def _follow_varied(self, seen: SeenStep) -> bool:
        """Follow the plan for steps whose lengths vary; False where they do not, or something is not
        known."""
        limits, rates = self._engine.limits, self._engine.rates
        limit_bytes = limits.device_limit_bytes
        if limit_bytes is None or rates is None:
            return False
        plan = self._varied.plan(rates, limit_bytes, self._start)
        if plan is None:
            return False
        stays = self._varied.stays(plan)
        self._follow(
            seen,
            replace(
                plan,
                keeps=frozenset(GroupKey(chunk, at) for chunk, own in stays.items() for at in own.whole),
                parts=stays,
                restoring_room_bytes=self._varied.window_bytes(plan, limit_bytes),
            ),
        )
        return True

    def _follow(self, seen: SeenStep, plan: TimedPlan) -> None:
        self._look_ahead(plan.restoring_room_bytes, plan.half_room_bytes)
        self._install(seen, plan.keeps, plan.parts)

    def _look_ahead(self, restoring_room_bytes: int, half_room_bytes: int) -> None:
        """Look ahead as far as a plan says; a config that names the window stands in for it."""
        self.windows.bound("max_restoring_bytes", restoring_room_bytes, replaces=(DEFAULT,))
        self.windows.bound("half_room_bytes", half_room_bytes)


def _room_bytes(seen: SeenStep) -> int:
    """Bytes that a step needs on the device beside what stays: three of the largest tensor, which is saved,
    leaves and comes back, or the largest recompute with what it reads."""
    most = 0
    for chunk in seen.chunks:
        groups = chunk.groups
        largest = max((nbytes for group in groups for _, nbytes in group.slot_bytes), default=0)
        again = max(
            (
                group.cost.again_bytes + sum(near.total_offload_bytes for near in groups[at : at + 2])
                for at, group in enumerate(groups)
                if group.cost is not None and group.cost.again_bytes
            ),
            default=0,
        )
        most = max(most, 3 * largest, again + largest)
    return most
