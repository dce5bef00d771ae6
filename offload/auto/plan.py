"""Mode "auto": which plan the next steps follow: made from what the last ones were seen to do, and made anew
where that changed.

A plan is searched for beside the steps, and followed from the end of the first step at which it is ready,
if it is still for the steps that come. Ranks that follow one plan wait for it.

The search rests three times as long as it worked. Python runs one thread at a time, and operators are issued
at two fifths of their rate beside a search that never rests; beside one that does, at four fifths, and a host
that is ahead of its device by more than that loses nothing.

One invariant: a plan is followed from the end of a step only. What its search raised is raised there, and a
process that ends waits for the part that is under way at most.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

from offload.auto.calls import BlockCalls
from offload.auto.memory import AutoMemory, pin_free
from offload.engine import OffloadEngine
from offload.groups.manager import GroupsManager
from offload.planner.work import Ran, RecentSteps, StepWork, with_halves
from offload.policy.actions import ChunkKey, GroupSize, Rates
from offload.policy.keeps import all_of, kept_peak_bytes
from offload.policy.mixture import MixedPlan, cheapest_mixture, choose_mixture, scaled
from offload.telemetry.speaker import speaker
from offload.transfer.copier import LINK_TEST_BYTES

logger = speaker(__name__)

_PLANS = 2
"""Plans of one shape of step: the first, and another from what was measured under it."""

_STEPS_A_PLAN = 2
"""Before the next one is made: in the first step the groups are new, so all of their saves are looked at; the
second is what comes again, and its times are known at the end of the third."""

_PATIENCE = 4
"""Of a search beside steps that follow a plan. By calculation, over the 42 steps of
tests/unit/policy/test_mixture.py, 4 rather than 1 makes plans faster by 0.35% in the mean and by 2.3% at
most, for 0.6 to 5.0 s of host time where 1 takes 0.3 to 1.2."""

_NO_LINK = Rates(d2h_bytes_per_s=1e15, h2d_bytes_per_s=1e15)
"""Of the simulated device, which has no link to measure."""


_LESS_ROOM = 0.99
"""Of the limit that a plan was made for: what is measured beside saved tensors is not the same in every
step."""

_OTHER_ROOM = (0.95, 1.1)
"""Of the limit that the last plan was made for: outside of it the plan moves what it should recompute, or the
other way round. Two H200s under ZBV within 118 GB: levels of which a rank moved 51.6 GB waited 1.0 s for
copies once 11 GB were left for saved tensors; the step took 3005 ms, and 2589 by a plan for these 11 GB
(November 2026)."""

_MORE_PLANS = 2
"""Of one shape of step, for the room that there came to be under the plan before."""

_HOST_ROOM = 1.2
"""Of what is on the host at once by a plan, what is pinned for it: blocks of one size do not serve another
(on an H200 W1 within 17 GB held 1.12 times what was lent), and the groups' search may move a little more."""

Calculation = Callable[[Callable[[], object]], MixedPlan]
"""A search, which calls what it is given between its parts."""


class _Search(NamedTuple):
    """Under way. shape, lengths: of the steps that it is for."""

    plan: Beside
    shape: object
    lengths: Mapping[int, float]


class AutoPlan:
    """Plan of one engine. followed: None: every block is recomputed that may be. names: of the blocks that it
    is for. num_steps: whole ones with a backward, so far. plans_left: of this shape of step. is_new: no step
    has ended under it."""

    def __init__(self, calls: BlockCalls, memory: AutoMemory) -> None:
        self.followed: MixedPlan | None = None
        self.names: Mapping[ChunkKey, list[str]] = {}
        self.recent = RecentSteps()
        self.num_steps = 0
        self.plans_left = _PLANS
        self._more_plans_left = _MORE_PLANS
        self._calls = calls
        self._memory = memory
        self._search: _Search | None = None
        self._started: weakref.ref[GroupsManager] | None = None  # that searches from what the plan keeps
        self._since_plan = 1  # steps
        self._shape: object = ()
        self._shape_before: object = None
        self._lengths: Mapping[int, float] = {}  # that the plan is for, by stage
        self._host_limit_bytes: int | None = None  # of plans that are searched for
        self._most_held_bytes = 0  # pinned, for the one that was

    def step_ended(self, manager: GroupsManager, ran: Mapping[ChunkKey, Sequence[Ran]]) -> None:
        """A step with a backward has ended. A shape that comes twice in a row is planned for, and so are
        steps that vary. Where these had no room, they are once the typical length is another."""
        seen = manager.follower.last_step
        assert seen is not None
        self.num_steps += 1
        self._since_plan += 1
        known, _ = seen.schedule()
        ran = {chunk: with_halves(calls, seen.halves.get(chunk, ())) for chunk, calls in ran.items()}
        self.recent.ended(known, ran, seen.seconds, head_bytes=self._memory.head_bytes)
        lengths, memory = self.recent.lengths, self._memory
        shape = None if lengths.vary else (tuple(known), tuple(lengths.last.items()))
        is_new = shape != self._shape and (shape is None or shape == self._shape_before)
        self._shape_before = shape
        if is_new or (memory.has_no_room and self._is_too_old):
            self._shape, self.plans_left = shape, _PLANS
            self._more_plans_left = _MORE_PLANS
            memory.measure()

    @property
    def is_new(self) -> bool:
        return self._since_plan <= 1

    @property
    def is_searched(self) -> bool:
        """Predicate: a search is under way."""
        return self._search is not None

    @property
    def is_final(self) -> bool:
        """Predicate: no other plan will be made for steps like the last ones."""
        return self.plans_left == 0 and self._search is None and not self._has_other_room

    @property
    def is_wanted(self) -> bool:
        """Predicate: a plan shall be made now."""
        is_time = self._since_plan > _STEPS_A_PLAN and self._memory.is_known
        has_reason = self.plans_left > 0 or self._has_other_room
        return is_time and (has_reason or self._is_too_old)

    @property
    def _has_other_room(self) -> bool:
        """Predicate: the plan was made for another limit than its steps have come to. Of ranks that follow
        one plan only the one with the least room has a plan of its own limit: the others have more."""
        plan, limit_bytes = self.followed, self._memory.limit_bytes if self._memory.is_known else None
        if plan is None or limit_bytes is None or not self._more_plans_left:
            return False
        least, most = (share * plan.problem.limit_bytes for share in _OTHER_ROOM)
        return limit_bytes < least or (limit_bytes > most and not self._calls.peers)

    @property
    def _is_too_old(self) -> bool:
        lengths = self.recent.lengths
        return lengths.vary and lengths.drifted(self._lengths)

    def make_if_wanted(self, manager: GroupsManager) -> None:
        """Choose the levels of the next steps, if there is a reason to. Blocks the host as `follow` does, and
        at the first search for 30 ms, to measure the link; where there is no link, for as long as a search
        takes."""
        search = self._search
        if search is not None and (not search.plan.is_over or self._follow_found(manager, search)):
            return
        plan = self.followed
        work = self.recent.step() if self.is_wanted and (self.plans_left or plan is not None) else None
        if work is None:
            return
        is_like = plan is not None and len(work.actions) <= len(plan.problem.actions)
        if plan is not None and is_like and not (self.plans_left or self._has_other_room):
            self._scale(manager, plan)
        else:
            engine = manager.engine
            choose = self._choice(engine, work, patience=1 if plan is None else _PATIENCE)
            if choose is None:
                self.follow(manager, None)
                return
            # a device without a link is simulated: its programs are to run alike each time
            found = Beside(choose, waits=not engine.device.pins)
            self._search = _Search(found, self._shape, self.recent.lengths.typical())
            if found.is_over:
                self._follow_found(manager, self._search)

    def _follow_found(self, manager: GroupsManager, search: _Search) -> bool:
        """Follow what was searched for; False if it is not for the steps that come, and another one is to
        be."""
        self._search = None
        plan, memory, lengths = search.plan.result(), self._memory, self.recent.lengths
        fits = self._shape == search.shape and not (lengths.vary and lengths.drifted(search.lengths))
        if memory.total is not None:
            fits = fits and (memory.limit_bytes or 0) >= _LESS_ROOM * plan.problem.limit_bytes
        if fits:
            self.follow(manager, plan)
        else:
            self.plans_left = max(self.plans_left, 1)
        return fits

    def ready(self, manager: GroupsManager, most_new_bytes: int) -> MixedPlan | Literal[False] | None:
        """Result of the search, not followed yet; False where the total leaves no choice, None where it is
        not known yet. Begins a search where none is under way, for a plan that needs at most so many pinned
        bytes more than are held. Blocks the host as `make_if_wanted` does, but for what `follow` does."""
        search = self._search
        if search is None:
            work = self.recent.step() if self._memory.is_known else None
            if work is None:
                return None
            engine = manager.engine
            if engine.device.pins:
                self._most_held_bytes = engine.arena.held_bytes + most_new_bytes
                most_bytes = min(engine.arena.budget.limit_bytes, self._most_held_bytes)
                self._host_limit_bytes = max(0, round((most_bytes - engine.arena.lent_bytes) / _HOST_ROOM))
            choose = self._choice(engine, work, patience=1)
            if choose is None:
                return False
            found = Beside(choose, waits=not engine.device.pins)
            search = self._search = _Search(found, self._shape, self.recent.lengths.typical())
        return search.plan.result() if search.plan.is_over else None

    def _scale(self, manager: GroupsManager, plan: MixedPlan) -> None:
        """The steps that come are longer or shorter than the planned one was, for long enough."""
        typical = self.recent.lengths.typical()
        problem = plan.problem
        if self._memory.total is not None:
            limit_bytes = self._memory.limit_bytes
            if limit_bytes is None:
                self.follow(manager, None)
                return
            problem = replace(problem, limit_bytes=limit_bytes)
        factors = {
            chunk: typical[chunk[0]] / self._lengths[chunk[0]]
            for chunk in problem.blocks
            if chunk[0] in typical and chunk[0] in self._lengths
        }
        self.follow(manager, scaled(replace(plan, problem=problem), factors))

    def choose(self, engine: OffloadEngine, work: StepWork) -> MixedPlan | None:
        """The plan for this work; None where the total leaves no choice. Blocks the host for as long as a
        search takes; on a GPU also for 30 ms, once, to measure the link."""
        self._stop_search()
        choose = self._choice(engine, work, patience=1)
        return None if choose is None else choose(int)

    def _choice(
        self, engine: OffloadEngine, work: StepWork, patience: int
    ) -> Callable[[Callable[[], object]], MixedPlan] | None:
        """The search of a plan for this work, with all that it needs; None where the total leaves no
        choice."""
        self.count_plan()
        self._since_plan = 0
        measure_link(engine)
        rates = engine.rates if engine.rates is not None else _NO_LINK
        step = (work.actions, work.blocks, rates)
        if self._memory.total is None:
            return _timed(partial(cheapest_mixture, *step, patience=patience), work)
        limit_bytes = self._memory.limit_bytes
        if limit_bytes is None:
            return None
        host_bytes = self._host_limit_bytes
        choose = partial(choose_mixture, *step, limit_bytes, host_limit_bytes=host_bytes, patience=patience)
        return _timed(choose, work)

    def count_plan(self) -> None:
        """One of the plans of this shape of step is made, here or on another rank."""
        if self.plans_left == 0 and self._has_other_room:
            self._more_plans_left -= 1
        self.plans_left = max(0, self.plans_left - 1)

    def _stop_search(self) -> None:
        if self._search is not None:
            self._search.plan.stop()
            self._search = None

    def follow(self, manager: GroupsManager, plan: MixedPlan | None) -> None:
        """From the next step on, within the room that this rank has; None: there is no room for any. Blocks
        the host on a GPU only: where the plan needs more pinned memory than is held, for 1 ms for each 17 MB
        more, and 30 ms where the link was not measured yet."""
        engine, memory = manager.engine, self._memory
        self._stop_search()  # other ranks may have planned meanwhile
        self._since_plan = 0
        self._lengths = self.recent.lengths.typical()
        if plan is None:
            self.follow_none()
            memory.no_room()
            return
        self.names = {chunk: list(names) for chunk, names in self._calls.names.items()}
        self.followed, self._calls.levels = plan, plan.levels
        limit_bytes = plan.problem.limit_bytes
        if memory.total is not None:
            limit_bytes = limit_bytes if memory.limit_bytes is None else memory.limit_bytes
            memory.total.restart()
            memory.measure()
        measure_link(engine)
        memory.set_limit(limit_bytes)
        memory.share.bound("again_room_bytes", plan.again_room_bytes)
        manager.follower.start_from(plan, self._most_kept_bytes(plan, limit_bytes))
        self._started = weakref.ref(manager)
        self.pin(engine, plan, engine.arena.budget.limit_bytes)

    def follow_none(self) -> None:
        """From the next step on every block that may be is recomputed, under the engine's own limit."""
        self.followed = self._calls.levels = None
        self.plans_left = 0
        self.end()
        self._memory.share.bound("again_room_bytes", 0)

    def end(self) -> None:
        """Restore what a plan has changed of the engine. Takes no lock."""
        self._stop_search()
        self._memory.give_limit_back()
        self._memory.share.bound("again_room_bytes", None)
        manager = None if self._started is None else self._started()
        if manager is not None:
            manager.follower.start_from(None)
            self._started = None

    def _most_kept_bytes(self, plan: MixedPlan, limit_bytes: int) -> int:
        """That may stay at once until the groups have seen a step of these levels: what leaves room for the
        largest recompute of the longest chunk, and for what input halves leave; or what the plan keeps, where
        the steps that come are those that it was made for."""
        lengths = self.recent.lengths
        beside_bytes = plan.most_again_bytes + plan.left_peak_bytes
        most_bytes = max(0, limit_bytes - round(beside_bytes * lengths.window_factor()))
        if lengths.vary or plan.predicted.peak_bytes > limit_bytes:
            return most_bytes
        kept = {chunk: [GroupSize("", round(nbytes))] for chunk, nbytes in plan.kept_bytes.items()}
        kept_bytes = kept_peak_bytes(plan.problem.actions, kept, all_of(kept))
        return max(most_bytes, kept_bytes, min(limit_bytes, kept_bytes + plan.problem.grown_bytes))

    def pin(self, engine: OffloadEngine, plan: MixedPlan, most_bytes: int) -> bool:
        """Pin what may wait on the host under the plan, as `pin_free`."""
        return pin_free(engine, self._host_bytes(plan), most_bytes)

    def has_host(self, engine: OffloadEngine, plan: MixedPlan) -> bool:
        """Return True if the host's budget holds what may wait there under the plan, and it is no more than
        there could be when its search began, whatever was given back since: what finds no memory would stay
        on the device."""
        wanted_bytes = self._host_bytes(plan) + engine.arena.lent_bytes
        most_bytes = min(engine.arena.budget.limit_bytes, self._most_held_bytes)
        return not engine.device.pins or wanted_bytes <= most_bytes

    def _host_bytes(self, plan: MixedPlan) -> int:
        """Bytes that may wait on the host at once: all that blocks save at their levels, and less where the
        steps that come keep what the plan does."""
        sizes = {
            chunk: [
                GroupSize("", block.menu[level].saved_bytes)
                for block, level in zip(blocks, plan.levels[chunk], strict=True)
            ]
            for chunk, blocks in plan.problem.blocks.items()
        }
        all_bytes = kept_peak_bytes(plan.problem.actions, sizes, all_of(sizes))
        if self.recent.lengths.vary or not plan.fits:
            return all_bytes
        return min(all_bytes, round(_HOST_ROOM * plan.predicted.host_peak_bytes))


def measure_link(engine: OffloadEngine) -> None:
    """Once. Blocks the host for 30 ms then."""
    if engine.rates is None and engine.device.pins:
        engine.reserve_host(max(LINK_TEST_BYTES, engine.config.host_reserve_bytes))


def _timed(choose: Callable[..., MixedPlan], work: StepWork) -> Calculation:
    """`choose` with the rest of its arguments, which says how long it took."""

    def chosen(rest: Callable[[], object]) -> MixedPlan:
        began_s = time.perf_counter()
        plan = choose(rest_s=work.rest_s, rest=rest)
        logger.info(
            f"auto: planned in {(time.perf_counter() - began_s) * 1e3:.0f} ms: step "
            f"{plan.predicted.step_s * 1e3:.1f} ms, of which {plan.plain_s * 1e3:.1f} plain compute"
        )
        return plan

    return chosen


_REST = 3.0
"""Seconds for each that it worked, waiting for the interpreter not counted."""

_STOPS_WITHIN_S = 0.01


class _Stopped(BaseException):
    """Nobody wants the result any more."""


class Beside:
    """A search on a thread of its own. calculate: issues nothing to the device. waits: it runs here and
    now, without rests. Blocks the host then, else never but in `result`."""

    def __init__(self, calculate: Calculation, *, waits: bool = False) -> None:
        self._calculate = calculate
        self._is_stopped = False
        self._began_s = 0.0  # to work
        self._found: list[MixedPlan] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if waits:
            self._found.append(calculate(int))
            return
        self._thread = threading.Thread(target=self._run, name="offload-search", daemon=True)
        _running.add(self)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def result(self) -> MixedPlan:
        """What was calculated. Blocks the host until it is. Raises what the calculation raised."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found[0]

    def stop(self) -> None:
        """There will be no result: it ends at its next rest. Takes no lock."""
        self._is_stopped = True

    def _run(self) -> None:
        self._began_s = time.thread_time()
        try:
            self._found.append(self._calculate(self._rest))
        except _Stopped:
            pass
        except BaseException as error:  # the thread that takes the result raises it
            self._error = error

    def _rest(self) -> None:
        until_s = time.monotonic() + _REST * (time.thread_time() - self._began_s)
        while not self._is_stopped and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _STOPS_WITHIN_S))
        self._began_s = time.thread_time()
        if self._is_stopped:
            raise _Stopped


_running = weakref.WeakSet[Beside]()


@atexit.register
def _stop_all() -> None:
    """A thread that is inside a library when the interpreter goes would take the process with it."""
    for beside in list(_running):
        beside.stop()
    for beside in list(_running):
        if beside._thread is not None:
            beside._thread.join()
