"""Mode "auto": which blocks of which chunks are kept, moved or recomputed, so that a step fits a total of
device memory and takes the least time.

    step 1      every block is recomputed whole, so the total holds from the start; one block of each kind is
                profiled in its forward
    step 2      the same, without profiles: what a step needs beside saved tensors is measured
    its end     a linear program and a simulation (policy/mixture.py) choose a level for each block of each
                chunk. What waits for the backward under these levels is kept or moved by the groups' own plan
    later       times and memory are measured under the plan, and it is made anew where they differ

How a call runs under the plan is in offload/modules/block_calls.py; here is what happens between steps.

There is one plan for all models of a process that the mode is applied to: they share the device. Ranks whose
blocks communicate follow one plan (offload/planner/agreement.py).

One invariant: a plan changes what is kept, moved and computed again, never a result. It changes between steps
only, and a step that is unlike the planned one runs all the same.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from offload.client import Client
from offload.engine import OffloadEngine
from offload.errors import HostBudgetError
from offload.groups.group import Cost
from offload.groups.manager import GroupsManager
from offload.modules.block_calls import BlockCalls, Chosen
from offload.modules.root import ModelRoot
from offload.planner.agreement import Agreement, Room, is_point, peers_of
from offload.planner.explained import Explanation
from offload.planner.recent import RecentSteps
from offload.planner.total import TotalMemory
from offload.planner.work import Ran, StepWork
from offload.policy.actions import Action, ChunkKey, GroupSize, Rates
from offload.policy.keeps import all_of, kept_peak_bytes
from offload.policy.mixture import MixedPlan, cheapest_mixture, choose_mixture, scaled
from offload.telemetry.records import StepStats
from offload.telemetry.summary import bytes_text
from offload.transfer.link import LINK_TEST_BYTES

__all__ = ["Auto"]

logger = logging.getLogger(__name__)

_PLANS = 3
"""Plans of one shape of step: the first from the profile, the others from what was measured under the one
before."""


_BLOCKS, _HEAD = "blocks", "head"
"""Phases of a step: forwards and backwards of blocks, and what comes between the two."""

_GUESSED_ENDS = 3
"""So many before the first step of an optimizer are the microbatches of one step, maybe."""

_GUESSES = 16
"""Guessed ends that are passed over: before the first optimizer step they may be ends of microbatches."""

_PATIENCE = 10
"""Whole steps without a plan after which that is said."""

_NO_LINK = Rates(d2h_bytes_per_s=1e15, h2d_bytes_per_s=1e15)
"""Of the simulated device, which has no link to measure."""


_WORTH_A_CLAIM = 0.005
"""Of the total: a head that needs less beyond a block has no room of its own."""


class Auto(BlockCalls, Client):
    """Of all models of one engine. manager: asked at each forward. total_bytes: of device memory; None:
    whatever makes a step at most a hundredth longer and frees most.

    Steps that it still plans for reset torch's memory peaks at their begin.
    """

    name = "auto"
    listens_only = True

    def __init__(self, manager: Callable[[], GroupsManager], total_bytes: int | None) -> None:
        super().__init__(manager)
        self.models = 0  # that it is applied to
        self.total_bytes = total_bytes
        self.total = None if total_bytes is None else TotalMemory(total_bytes)
        self.plan: MixedPlan | None = None
        self._made_for = weakref.ref(manager().engine)
        self._engine: weakref.ref[OffloadEngine] | None = None
        self._planned_names: Mapping[ChunkKey, list[str]] = {}
        self._agreement: Agreement | None = None
        self._announced_ends = self._guessed_ends = 0
        self._recent = RecentSteps()
        self._parts = 0  # of steps, that were passed over
        self._is_rest = False  # a part of the step under way has ended
        self._steps = 0  # whole ones, since the shape changed
        self._plans_left = _PLANS
        self._said: set[str] = set()
        self._measures = self.total is not None
        self._since_plan = 1
        self._head_bytes = 0  # that the head and the loss need beyond what a block needs
        self._phase = ""  # in the step that is measured before the first plan
        self._phase_held = 0  # saved bytes at its begin
        self._rests: dict[str, int] = {}  # by phase: active bytes beside saved ones, at most
        self._peak_bytes = 0  # of the phases before
        self._fitted = False  # the step before, in its forwards and backwards
        self._limited = False
        self._limit_before: int | None = None
        self._planned_shape: object = ()
        self._shape_before: object = None
        self._planned_lengths: Mapping[int, float] = {}

    # -- a forward -------------------------------------------------------------------------------------------
    def choose(
        self, root: ModelRoot, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Chosen:
        """How this call of block `name` of `root` runs. Blocks the host: never."""
        manager = self._manager()
        self._follow(manager)
        manager.engine.transfers.claim(0)
        self._phase_begins(_BLOCKS)
        chosen = self._chosen(manager, root, name, module, args, kwargs)
        before_again = chosen.before_again
        if before_again is None:
            return chosen
        return replace(chosen, before_again=partial(self._begin_again, before_again))

    def _begin_again(self, claim: Callable[[], None]) -> None:
        self._phase_begins(_BLOCKS)
        claim()

    def blocks_end(self, root: ModelRoot) -> None:
        """The last block of a forward of `root` is over. What the head and the loss need beyond a block gets
        its room: the group without bytes tells the plan."""
        self._phase_begins(_HEAD)
        if self._head_bytes:
            engine = self._manager().engine
            with engine.lock:
                engine.transfers.claim(self._head_bytes)
            group = root.open_group(_HEAD, cost=Cost(0.0, self._head_bytes))
            if group is not None:
                group.close(None, False)

    def plain_is_read(self, gradients: object) -> None:
        """The backward has come to a block that makes nothing again."""
        self._phase_begins(_BLOCKS)
        engine = None if self._engine is None else self._engine()
        if engine is not None:
            with engine.lock:
                engine.transfers.claim(0)

    def end(self) -> None:
        """The hooks of a model are gone. After the last one the engine has the limit again that its config
        had before."""
        self.models -= 1
        if self.models:
            return
        engine = None if self._engine is None else self._engine()
        if engine is not None:
            engine.detach(self)
            engine.transfers.claim(0)
            if self._limited:
                self._set_limit(engine, self._limit_before)

    def is_of(self, engine: OffloadEngine) -> bool:
        """Whether it plans for this engine, or will."""
        return (self._made_for if self._engine is None else self._engine)() is engine

    # -- steps -----------------------------------------------------------------------------------------------
    def _follow(self, manager: GroupsManager) -> None:
        """Attach to the engine that is used now, after the groups: their step has ended before this one."""
        engine = manager.engine
        if self._engine is None or self._engine() is not engine:
            self._engine = weakref.ref(engine)
            engine.attach(self)
            self.begin_step()

    def begin_step(self) -> None:
        """As Client."""
        engine = None if self._engine is None else self._engine()
        if engine is None or self.total is None or engine.device.is_capturing():
            return
        found = engine.device.allocator_bytes()
        if found is None:
            return
        if found[1] > self.total.total_bytes and self._measures and self._fitted:
            self._say_once(
                "optimizer",
                "active memory was at most %s between the end of a step's backward and the next forward, "
                "and device_total is %s: mode='auto' does not lower the optimizer's step. Give a larger "
                "total, or use a HybridDeviceOptimizer",
                bytes_text(found[1]),
                bytes_text(self.total.total_bytes),
            )
        elif found[1] > self.total.total_bytes and not self._measures:
            self._measures = True  # a step has passed it although the plan was settled
            self.total.restart()
        if self._measures:
            engine.device.reset_allocator_peak()
            self._peak_bytes, self._phase, self._rests = 0, "", {}

    def _phase_begins(self, phase: str) -> None:
        """In the step before the first plan: what the phase that ends has needed beside saved tensors."""
        engine = None if self._engine is None else self._engine()
        if phase == self._phase or self.plan is not None or not self._measures or engine is None:
            return
        found = engine.device.allocator_bytes()
        if found is None:
            return
        if self._phase:
            self._phase_ends(engine, found[1])
            engine.device.reset_allocator_peak()
        self._phase, self._phase_held = phase, engine.transfers.device_bytes

    def _phase_ends(self, engine: OffloadEngine, peak_bytes: int) -> None:
        held = engine.transfers.counts.device_bytes_peak if self._phase == _BLOCKS else self._phase_held
        self._rests[self._phase] = max(self._rests.get(self._phase, 0), peak_bytes - held)
        self._peak_bytes = max(self._peak_bytes, peak_bytes)

    def step_ended(self, stats: StepStats) -> None:
        """As Client: plan, once enough is known. Blocks the host at the end of the first step, until the
        device is done with what was profiled; where host memory has to be pinned for a new plan; and for
        ranks that are to follow the same one."""
        manager = self._manager()
        self._take_profiles(manager.engine)
        agrees = self._agree_on_profiles(manager)
        has_run = self._look_at_step(manager, stats)
        if agrees:
            self._agree_on_plan(manager.engine)
        elif has_run and not self._peers:
            self._plan_if_wanted(manager.engine)
            if self.plan is None and self._steps == _PATIENCE and "no room" not in self._said:
                self._say_no_plan(manager)

    def _look_at_step(self, manager: GroupsManager, stats: StepStats) -> bool:
        """Learn from the step that ended. Returns whether it had a backward."""
        seen = manager.last_step
        ran: dict[ChunkKey, list[Ran]] = {
            chunk: [self._known(call) for call in calls] for chunk, (_, calls) in self._ran.items()
        }
        self._ran = {}
        if seen is None or not seen.backward_order or not any(ran.values()) or self._is_part(manager):
            return False
        self._steps += 1
        self._since_plan += 1
        if self._steps > 1:
            self._see_memory(manager, stats)
        known, _ = seen.schedule()
        self._recent.ended(known, ran, seen.seconds, head_bytes=self._head_bytes)
        self._look_at_shape(known)
        return True

    def _is_part(self, manager: GroupsManager) -> bool:
        """Whether what has ended may be a part of a step: where ends are guessed."""
        was_rest, self._is_rest = self._is_rest, manager.end_was_guessed and self._parts < _GUESSES
        self._parts += self._is_rest
        return was_rest or self._is_rest

    def _take_profiles(self, engine: OffloadEngine) -> None:
        waiting = [(kind, profiler) for kind, profiler in self._profilers.items() if profiler is not None]
        if not waiting:
            return
        device = engine.device
        device.synchronize(device.record(device.compute))
        for kind, profiler in waiting:
            self._profilers[kind] = None
            timings = self._timings.pop(kind, [])
            device_s = [seconds for timing in timings if (seconds := timing.device_s()) is not None]
            if device_s:
                # the least: a full queue of launches, and what runs for the first time, hold some up
                profiler.note_plain(min(timing.host_s for timing in timings if timing.host_s), min(device_s))
            if profiler.ready():  # else its forward raised, and the next call is profiled
                profile = self._own[kind] = profiler.profile()
                self._peers |= peers_of(profile.collectives)
                for call, why in profile.why_not.items():
                    logger.debug("auto: %s is not kept: %s", call, why)

    def _agree_on_profiles(self, manager: GroupsManager) -> bool:
        """Follow what was seen here; or, with ranks that blocks communicate with, what all of them saw.
        Returns whether they are at a point where they agree on a plan, too. Note: [Where ranks agree]."""
        self._guessed_ends += manager.end_was_guessed
        self._announced_ends += not manager.end_was_guessed
        if not self._peers:
            self.profiles |= self._own
            self._input_bytes |= self._own_input_bytes
            return False
        if manager.end_was_guessed:
            if self._guessed_ends > _GUESSED_ENDS and not self._announced_ends:
                self._say_once(
                    "guessed",
                    "blocks communicate with ranks %s, which are to follow one plan, and no optimizer's "
                    "step() ends a step: its end is guessed, at moments that may differ by rank. "
                    "mode='auto' recomputes every block until all of these ranks call offload.step_end() "
                    "after each step",
                    sorted(self._peers),
                )
            return False
        if not is_point(self._announced_ends):
            return False
        if self._agreement is None:
            self._agreement = Agreement.of_process()
        members = self._agreement.members
        own = [
            (self._own[kind], self._own_input_bytes[kind]) if kind in self._own else None
            for kind in self._profilers
        ]
        common = self._agreement.profiles(self._announced_ends, self._peers, own)
        if members != self._agreement.members:
            self._levels = None  # of fewer ranks, which may have had other menus
        self._scaled.clear()
        for kind, found in zip(self._profilers, common, strict=True):
            if found is not None:
                self.profiles[kind], self._input_bytes[kind] = found
        return True

    def _agree_on_plan(self, engine: OffloadEngine) -> None:
        """Follow the plan of the rank that has the least room, if any rank wants another one."""
        agreement, work = self._agreement, self._recent.step()
        assert agreement is not None
        room = None
        if work is not None:
            lengths = self._recent.lengths
            wanted = self._plans_left > 0 or (lengths.vary and lengths.drifted(self._planned_lengths))
            limit_bytes = None if self.total is None else self.total.limit_bytes or 0
            room = Room(work.shape, limit_bytes, wanted and self._since_plan > 1)
        rooms = agreement.rooms(room)
        found = {rank: room for rank, room in rooms.items() if room is not None}
        if work is None or len(found) < len(rooms) or not any(room.wants_plan for room in found.values()):
            return  # as every member sees
        if len({room.shape for room in found.values()}) > 1:
            self._plans_left, self._levels = 0, None
            self._say_once(
                "shapes",
                "blocks of ranks %s communicate, and the ranks run other forwards or in another order: no "
                "plan is for all of them, and mode='auto' recomputes every block",
                sorted(found),
            )
            return
        least = {rank: room.limit_bytes for rank, room in found.items() if room.limit_bytes is not None}
        planner = min(least or found, key=lambda rank: (least.get(rank, 0), rank))
        if planner in agreement.hears:
            plan = agreement.hear_plan(planner)
            self._plans_left = max(0, self._plans_left - 1)
        else:
            plan = agreement.tell_plan(lambda: self._new_plan(engine, work))
        if plan is not None:
            self._follow_plan(engine, plan)
        elif room is not None and room.limit_bytes == 0:
            self._no_room(engine)
        else:  # another rank has none
            self.plan = self._levels = None
            self._plans_left = 0

    def _look_at_shape(self, known: list[Action]) -> None:
        """A shape that comes twice in a row is planned for, and so are steps that vary."""
        lengths = self._recent.lengths
        shape = None if lengths.vary else (tuple(known), tuple(lengths.last.items()))
        if shape != self._planned_shape and (shape is None or shape == self._shape_before):
            self._planned_shape = shape
            self._plans_left, self._measures = _PLANS, self.total is not None
        self._shape_before = shape

    def _plan_if_wanted(self, engine: OffloadEngine) -> None:
        if self._since_plan < 2:
            return
        lengths = self._recent.lengths
        if self._plans_left:
            work = self._recent.step()
        elif not lengths.vary or self.plan is None or not lengths.drifted(self._planned_lengths):
            return
        else:
            work = self._recent.step()
            if work is not None and len(work.actions) <= len(self.plan.problem.actions):
                self._scale_plan(engine, self.plan, work)
                return
            self._plans_left = 1
        if work is not None:
            self._make_plan(engine, work)

    def _scale_plan(self, engine: OffloadEngine, plan: MixedPlan, work: StepWork) -> None:
        """The steps that come are longer or shorter than the planned one was, for long enough."""
        typical = self._recent.lengths.typical()
        problem = plan.problem
        if self.total is not None:
            limit_bytes = self.total.limit_bytes
            if limit_bytes is None:
                self._no_room(engine)
                return
            problem = replace(problem, limit_bytes=limit_bytes)
        factors = {
            chunk: typical[chunk[0]] / self._planned_lengths[chunk[0]]
            for chunk in problem.blocks
            if chunk[0] in typical and chunk[0] in self._planned_lengths
        }
        self._follow_plan(engine, scaled(replace(plan, problem=problem), factors))

    def _make_plan(self, engine: OffloadEngine, work: StepWork) -> None:
        """Choose the levels of the next steps."""
        plan = self._new_plan(engine, work)
        if plan is None:
            self._no_room(engine)
        else:
            self._follow_plan(engine, plan)

    def _new_plan(self, engine: OffloadEngine, work: StepWork) -> MixedPlan | None:
        """None where the total leaves no choice."""
        self._plans_left = max(0, self._plans_left - 1)
        self._since_plan = 0
        self._measure_link(engine)
        rates = engine.rates if engine.rates is not None else _NO_LINK
        began_s = time.perf_counter()
        if self.total is None:
            plan = cheapest_mixture(work.actions, work.blocks, rates, rest_s=work.rest_s, host=work.host)
        else:
            limit_bytes = self.total.limit_bytes
            if limit_bytes is None:
                return None
            plan = choose_mixture(
                work.actions, work.blocks, rates, limit_bytes, rest_s=work.rest_s, host=work.host
            )
        logger.info(
            "auto: planned in %.0f ms: step %.1f ms, of which %.1f plain compute; bound %.1f ms",
            (time.perf_counter() - began_s) * 1e3,
            plan.predicted.step_s * 1e3,
            plan.bound.compute_s * 1e3,
            plan.bound.step_s * 1e3,
        )
        return plan

    def _measure_link(self, engine: OffloadEngine) -> None:
        if engine.rates is None and engine.device.pins:
            engine.reserve_host(max(LINK_TEST_BYTES, engine.config.host_reserve_bytes))

    def _follow_plan(self, engine: OffloadEngine, plan: MixedPlan) -> None:
        """Follow its levels from the next step on, within the room that this rank has."""
        self._since_plan = 0
        self._planned_lengths = self._recent.lengths.typical()
        self._planned_names = {chunk: list(names) for chunk, names in self._names.items()}
        self.plan, self._levels = plan, plan.levels
        limit_bytes = plan.problem.limit_bytes
        if self.total is not None:
            limit_bytes = max(limit_bytes, self.total.limit_bytes or 0)
            self.total.restart()
        self._measure_link(engine)
        self._set_limit(engine, limit_bytes)
        self._leave_room(engine, plan)
        self._reserve(engine, plan)

    def _leave_room(self, engine: OffloadEngine, plan: MixedPlan) -> None:
        """Until the groups have seen a step of these levels and planned what stays: no more than leaves room
        for the largest recompute of the longest chunk."""
        limits, longer = engine.limits, self._recent.lengths.window_factor()
        if limits.device_limit_bytes is not None and limits.kept_limit_bytes is not None:
            left_bytes = limits.device_limit_bytes - round(plan.most_again_bytes * longer)
            limits.kept_limit_bytes = max(0, min(limits.kept_limit_bytes, left_bytes))

    def _reserve(self, engine: OffloadEngine, plan: MixedPlan) -> None:
        """Pin what may wait on the host under the plan, as far as the budget goes: a block that is missing
        stays on the device, beyond the limit."""
        sizes = {
            chunk: [
                GroupSize("", block.menu[level].saved_bytes)
                for block, level in zip(blocks, plan.levels[chunk], strict=True)
            ]
            for chunk, blocks in plan.problem.blocks.items()
        }
        live_bytes = kept_peak_bytes(plan.problem.actions, sizes, all_of(sizes))
        if engine.device.pins and live_bytes > engine.arena.held_bytes:
            try:
                engine.reserve_host(min(live_bytes, engine.arena.budget.limit_bytes))
            except HostBudgetError as error:  # other ranks hold it; what finds no block is counted and said
                logger.info("auto: not all host memory of the plan is pinned: %s", error)

    # -- memory ----------------------------------------------------------------------------------------------
    def _no_room(self, engine: OffloadEngine) -> None:
        """The total is less than a step takes that recomputes every block: that is what is done."""
        assert self.total is not None
        self.plan, self._levels = None, None
        self._plans_left = 0
        self._measures = False
        if self._limited:
            self._set_limit(engine, self._limit_before)
        self._say_once(
            "no room",
            "device_total is %s, and a step takes %s with every block recomputed and its input on the host, "
            "which is what is done now: nothing is chosen. Give more than that, or fewer tokens a forward",
            bytes_text(self.total.total_bytes),
            bytes_text(self.total.least_peak_bytes),
        )

    def _see_memory(self, manager: GroupsManager, stats: StepStats) -> None:
        """Correct the limit by the peaks of the step that ended."""
        if self.total is None or not self._measures:
            return
        engine, total = manager.engine, self.total
        counted_bytes = stats.device_bytes_peak
        found = engine.device.allocator_bytes()
        # of the simulated device no more is known
        peak_bytes = counted_bytes if found is None else max(found[1], self._peak_bytes)
        limit_bytes = engine.limits.device_limit_bytes
        logger.info(
            "auto: active peak %s of %s, %s of it saved or made again, under a limit of %s",
            bytes_text(peak_bytes),
            bytes_text(total.total_bytes),
            bytes_text(counted_bytes),
            limit_bytes if limit_bytes is None else bytes_text(limit_bytes),
        )
        self._fitted = peak_bytes <= total.total_bytes
        vary = self._recent.lengths.vary
        if self._levels is None or limit_bytes is None:
            if self._rests and found is not None:
                self._rests[_BLOCKS] = max(self._rests.get(_BLOCKS, 0), found[1] - counted_bytes)
                self._head_bytes = max(0, self._rests.get(_HEAD, 0) - self._rests[_BLOCKS])
                if self._head_bytes < _WORTH_A_CLAIM * total.total_bytes:
                    self._head_bytes = 0
            rest_bytes = self._rests[_BLOCKS] if self._head_bytes else peak_bytes - counted_bytes
            total.measured(peak_bytes, counted_bytes, rest_bytes, vary=vary)
        elif total.followed(peak_bytes, counted_bytes, limit_bytes, vary=vary):
            limit_bytes = total.limit_bytes
            if limit_bytes is None and not self._peers:
                self._no_room(engine)
            else:
                if limit_bytes is None:
                    self._plans_left = 1  # one for all, where ranks agree next
                self._set_limit(engine, limit_bytes or 0)
                manager.limits_changed()
        elif self._plans_left == 0:  # a step of lengths that vary may be the highest so far
            self._measures = not total.is_settled or vary

    def _set_limit(self, engine: OffloadEngine, limit_bytes: int | None) -> None:
        if not self._limited:
            self._limited, self._limit_before = True, engine.config.device_limit_bytes
        engine.follow(replace(engine.config, device_limit_bytes=limit_bytes))

    def explain(self) -> Explanation:
        """What is followed now."""
        engine = None if self._engine is None else self._engine()
        if "no room" in self._said:
            state = "device_total leaves no choice: every block is recomputed, and its input moved"
        elif self.plan is None:
            state = (
                f"no plan yet: {self._steps} of at least 2 steps that it is made from have ended; every "
                "block is recomputed meanwhile"
            )
        else:
            state = "the plan is settled" if self._plans_left == 0 else "planned; it is still measured"
        stages = {stage for stage, _ in self._planned_names}
        return Explanation(
            state=state,
            names={
                chunk: tuple(f"{name} of stage {chunk[0]}" if len(stages) > 1 else name for name in names)
                for chunk, names in self._planned_names.items()
            },
            total_bytes=self.total_bytes,
            rest_bytes=None if self.total is None else self.total.rest_bytes,
            limit_bytes=None if engine is None else engine.limits.device_limit_bytes,
            plan=self.plan,
            rates=None if engine is None else engine.rates,
        )

    def _say_no_plan(self, manager: GroupsManager) -> None:
        timed = manager.last_step is not None and manager.last_step.seconds is not None
        self._say_once(
            "no plan",
            "mode='auto' has no plan after %d steps, and recomputes every block: %s",
            self._steps,
            "no two steps were alike; mode='selective' and mode='hidden_states' need no plan"
            if timed
            else "its forwards and backwards are not timed, as where chunks are marked by hand; leave "
            "init_chunk_handler() out, or use mode='hidden_states'",
        )

    def _say_once(self, what: str, text: str, *values: object) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning(text, *values)
