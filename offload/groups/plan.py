"""After warm-up: which groups stay, and what the summary says. Glue between the recorded chunks and the pure
policies.

One invariant: a plan only says what stays and how far ahead to fetch; a step that is unlike the planned one
runs all the same.

Under a device limit there are more plans. The first, after the first step, knows sizes and order only and
keeps an equal part of every chunk. After the third step it is also known how long each action computes and
what the link carries: timed.py simulates the step and tries the best plans, a step each.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from offload.config import OffloadConfig
from offload.engine import OffloadEngine
from offload.groups.chunk import ChunkGroups
from offload.groups.timed import TimedPlan, Trial, timed_plans
from offload.groups.units import Stays
from offload.policy.actions import Action, ChunkKey, GroupSize, Keeps
from offload.policy.keeps import (
    all_of,
    fraction_keeps,
    kept_peak_bytes,
    limit_keeps,
    margin_keeps,
    summary_bytes,
)
from offload.transfer.admission import DEFAULT_IN_FLIGHT_BYTES

__all__ = ["PlanSettings", "SeenStep", "StepPlanner"]

logger = logging.getLogger(__name__)

_LEAST_PIECES = 2  # in flight in one direction: one that is copied, one that waits behind it

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
        return [(chunk.id, _sizes(chunk)) for chunk in self.backward_order]

    def schedule(self) -> tuple[list[Action], dict[ChunkKey, list[GroupSize]]]:
        """The actions of the chunks that were read, and their sizes."""
        sizes = dict(self.sizes_in_backward_order())
        known = _once_each(self.actions, sizes)
        return known, {action.chunk: sizes[action.chunk] for action in known}


class StepPlanner:
    """Plans when the shape of a step is new, and once more when its times are known."""

    def __init__(self, engine: OffloadEngine, settings: PlanSettings) -> None:
        self.settings = settings
        self.is_warmup = True
        self.summary: dict[str, int] = {}
        self._engine = engine
        self._signature: object = None
        self._trial: Trial | None = None
        self._steady_steps = 0
        self._actions: tuple[Action, ...] = ()  # of the planned step
        self._looked_cut_short: object = None
        self._trimmed = self._trimmed_shape = False  # ever, and since the shape of the step is this one
        # device memory that is cached: at the next step's begin, and since the plan
        self._release_due = self._released_shape = False
        self._wanted_bytes = 0  # on the host, by a step since some were given back for the first time
        self._steps_since_wanted = 0

    def after_step(self, seen: SeenStep) -> bool:
        """Look at a step that has ended. Returns whether warm-up ends with it; a step without a backward
        plans nothing."""
        self.pass_over(seen)
        if self._trimmed:
            self._remember(self._engine.last_stats.host_bytes_wanted_peak)
        if not seen.backward_order:
            return False
        # nothing in it depends on what the plan kept, or each plan would look like a new shape to the next
        shapes = tuple(
            (chunk.id, tuple((group.name, group.logical_bytes) for group in chunk.groups))
            for chunk in seen.chunks
        )
        # another order has other chunks alive together
        signature = (self.settings, shapes, tuple(seen.schedule()[0]))
        if signature != self._signature:
            if self._cut_short(seen, signature):
                return False
            self._signature = signature
            self._actions = tuple(seen.actions)
            self._trial = None
            self._trimmed_shape = self._released_shape = self._release_due = False
            self._steady_steps = 0
            first, self.is_warmup = self.is_warmup, False
            self._install(seen, self._untimed(seen))
            return first
        self._looked_cut_short = None
        self._steady_steps += 1
        trial = self._trial
        if trial is None:
            if self._steady_steps >= 2 and self._try_timed(seen):
                self._trimmed_shape = self._released_shape = False  # another plan needs another amount
                self._steady_steps = 2
                return False
        elif (plan := trial.whole_step_ended()) is not None:
            self._follow(seen, plan)
            self._steady_steps = 2
            return False
        if self._steady_steps >= (4 if trial is None else 3):
            if self._engine.config.trim_host and not self._trimmed_shape:
                self._trim()
            if self._engine.config.trim_device and not self._released_shape:
                self._release_due = self._released_shape = True
        return False

    def before_step(self) -> None:
        """A step begins. Once the plan has settled, device memory is given back that the allocator has cached
        in sizes that the steps before wanted: only now, when the gradients of the last step may be gone, are
        there whole segments to give back.

        Source: W1 of the benchmarks, 3 GB of saved bytes on the device, one H200: without, reserved over
            active was 1.08 to 1.15.
        """
        if not self._release_due or self._engine.device.is_capturing():
            return
        self._release_due = False
        released = self._engine.device.release_cached(_WORTH_A_RELEASE)
        if released:
            logger.info("%s bytes of cached device memory given back, once for this plan", f"{released:,}")

    def pass_over(self, seen: SeenStep) -> None:
        """A step has ended that says nothing of the plan, but for the stall of the one before it, which may
        have been on trial."""
        if self._trial is not None:
            self._trial.stall_of_step_before(
                self._engine.last_stats.stall_ms if seen.seconds is not None else None
            )

    def _cut_short(self, seen: SeenStep, signature: object) -> bool:
        """Whether the step looks like the planned one, ended early by an exception: it did the first of its
        actions and no others.

        A plan for it would keep more than the next whole step has room for, and a step that ran out of memory
        would do so again. A step with fewer microbatches may look the same: it is planned when it comes twice
        in a row, if all of its chunks were read.
        """
        actions = tuple(seen.actions)
        if len(actions) >= len(self._actions) or actions != self._actions[: len(actions)]:
            return False
        again = signature == self._looked_cut_short
        self._looked_cut_short = signature
        return not again or len(seen.chunks) > len(seen.backward_order)

    def _remember(self, wanted_bytes: int) -> None:
        """Count what a step wanted on the host. The most that a step has wanted is forgotten if none has come
        near it for REMEMBERED_STEPS; the next settled step gives the difference back."""
        self._steps_since_wanted += 1
        if wanted_bytes >= self._wanted_bytes - self._wanted_bytes // _ALMOST:
            wanted_bytes = max(wanted_bytes, self._wanted_bytes)
        elif self._steps_since_wanted > REMEMBERED_STEPS:
            self._trimmed_shape = False
        else:
            return
        self._wanted_bytes = wanted_bytes
        self._steps_since_wanted = 0

    def _trim(self) -> None:
        """Give back what neither a steady step of this shape uses nor any of the last steps has wanted. Given
        back each time, it would be pinned, and the tensors that want it refused, each time that the longer
        shape returns. Not while a step lacks any."""
        arena, stats = self._engine.arena, self._engine.last_stats
        if stats.refused:
            return
        # pieces go whole: with one to spare, what a step needs stays and is not pinned again
        arena.trim(max(self._wanted_bytes, stats.host_bytes_wanted_peak) + arena.registration_bytes)
        self._trimmed = self._trimmed_shape = True

    def plan_now(self, seen: SeenStep) -> None:
        """End warm-up with what this step was seen to do so far."""
        self.is_warmup = False
        self._trial = None
        self._install(seen, self._untimed(seen))

    def _install(self, seen: SeenStep, held: Keeps, parts: Mapping[ChunkKey, Stays] | None = None) -> None:
        """held: whole groups that stay whatever the settings say. parts: what stays of groups that leave in
        part."""
        settings = self.settings
        parts = parts if parts is not None else {}
        keeps = fraction_keeps(
            seen.sizes_in_backward_order(),
            settings.fraction,
            held=held,
            pp_rank=settings.pp_rank,
            delta_bytes=settings.delta_bytes,
        )
        for chunk in seen.chunks:
            chunk.stays = frozenset(key.position for key in keeps if key.chunk == chunk.id)
            chunk.stays_from = dict(parts[chunk.id].from_slot) if chunk.id in parts else {}
        forward = [
            (chunk.id, _sizes(chunk, parts.get(chunk.id))) for chunk in dict.fromkeys(seen.forward_order)
        ]
        self.summary = summary_bytes(forward, seen.backward_order[0].id, keeps) if seen.backward_order else {}

    def _untimed(self, seen: SeenStep) -> Keeps:
        """Without a device limit the margin: the last group of each name in the first chunk to run backward,
        whose fetch could not be hidden. With one, as much of every chunk's end as fits beside the rooms for
        what is leaving and coming back."""
        limits = self._engine.limits
        known, sizes = seen.schedule()
        if limits.device_limit_bytes is None:
            self._fit_windows(kept_peak_bytes(known, sizes, all_of(sizes)))
            return margin_keeps(seen.sizes_in_backward_order())
        spilling = (
            limits.max_spilling_bytes
            if limits.max_spilling_bytes is not None
            else limits.device_limit_bytes // 4
        )
        return limit_keeps(known, sizes, limits.device_limit_bytes, spilling, limits.max_restoring_bytes)

    def _fit_windows(self, live_peak_bytes: int) -> None:
        """Where caps were left to the engine and there is no device limit: an eighth of what is live at once
        for each direction, but a few pieces at least and the default at most. A step that saves less than the
        defaults would otherwise never let go of anything."""
        config, limits = self._engine.config, self._engine.limits
        window_bytes = max(
            _LEAST_PIECES * config.piece_bytes, min(DEFAULT_IN_FLIGHT_BYTES, live_peak_bytes // 8)
        )
        if config.max_spilling_bytes is None:
            limits.max_spilling_bytes = window_bytes
        if config.max_restoring_bytes is None:
            limits.max_restoring_bytes = window_bytes

    def _try_timed(self, seen: SeenStep) -> bool:
        """Simulate the step with its measured times and begin a trial of the best plans; False where
        something is not known."""
        limits, rates = self._engine.limits, self._engine.rates
        if limits.device_limit_bytes is None or rates is None or seen.seconds is None:
            return False
        known, _ = seen.schedule()
        times = [seen.seconds.get(action) for action in known]
        compute_s = [seconds for seconds in times if seconds is not None]
        if len(compute_s) != len(known) or sum(compute_s) <= 0:
            return False
        piece_bytes = self._engine.config.piece_bytes
        self._trial = Trial(
            timed_plans(seen.backward_order, known, compute_s, rates, limits.device_limit_bytes, piece_bytes)
        )
        self._follow(seen, self._trial.plan)
        return True

    def _follow(self, seen: SeenStep, plan: TimedPlan) -> None:
        if self._engine.config.max_restoring_bytes is None:
            self._engine.limits.max_restoring_bytes = plan.restoring_room_bytes
        self._install(seen, plan.keeps, plan.parts)


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


def _sizes(chunk: ChunkGroups, stays: Stays | None = None) -> list[GroupSize]:
    """The groups' eligible bytes, less what stays of those that leave in part."""
    part_bytes = {} if stays is None else stays.part_bytes
    return [
        GroupSize(group.name, group.total_offload_bytes - part_bytes.get(at, 0))
        for at, group in enumerate(chunk.groups)
    ]
