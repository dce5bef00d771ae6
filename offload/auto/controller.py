"""Mode "auto": which blocks of which chunks run plain, are recomputed, or move what they save, so that a step
fits a total of device memory and takes the least time.

    step 1      the first block of each kind runs plain and is profiled, and all that it saves leaves. The
                others are recomputed whole, where that is right, so the total holds from the start
    step 2      recomputes all of these: what that takes, at each block's boundary
    step 3      one block of each kind runs plain, without a hook of autograd: its seconds and its bytes
    step 4      the rule: as many whole blocks plain as fit, the others recomputed
    later       what is finer is tried in real steps, and followed where these are faster

Here is what is done at a forward and at the end of a step. calls.py has how a call runs, policy/rule.py how
many blocks fit, ladder.py what the next step does, memory.py what a step takes, plan.py the search's plan
and its thread, ranks.py how ranks whose blocks communicate do the same.

There is one plan for all models of a process that the mode is applied to: they share the device. A device
without an allocator and a clock, as the simulated one, measures nothing: there the plan is followed as it is.

One invariant: what is chosen changes what is kept, moved and computed again, never a result. It changes
between steps only, and a step that is unlike the measured one runs all the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from torch import nn

from offload.auto.calls import BlockCalls, Chosen
from offload.auto.kinds import Kinds
from offload.auto.ladder import Ended, Ladder, State, Tried
from offload.auto.memory import BLOCKS, AutoMemory, pin_free
from offload.auto.plan import AutoPlan, measure_link
from offload.auto.ranks import AutoRanks
from offload.auto.rests import Rests
from offload.checkpoint.hidden_states import BeforeAgain
from offload.client import Client
from offload.device import Device, Event
from offload.engine import OffloadEngine
from offload.groups.group import HEAD, Cost
from offload.groups.manager import GroupsManager
from offload.groups.step_planner import Trimmer
from offload.modules.hooks import output_tensors
from offload.modules.root import ModelRoot
from offload.params.view import local_of
from offload.planner.explained import Explanation
from offload.policy.actions import ChunkKey
from offload.policy.mixture import MixedPlan
from offload.policy.rule import NO_GROWTH, Rule, Trace, probes
from offload.telemetry.records import StepStats
from offload.telemetry.speaker import speaker

logger = speaker(__name__)

_GUESSES = 16
"""Guessed ends that are passed over: before the first optimizer step they may be ends of microbatches."""

_FAR_OVER = 1.05
"""Share of the total: a step that passes it by more makes and keeps something else than the measured one."""

_OF_DEVICE = 0.95
"""Where no total was asked for: of what the device has."""

_PINNED_A_STEP = 0.1
"""Of a step's time, what pinning takes of it."""

_PINNED_BYTES_PER_S = 17e9

_MOST_PIECES = 12
"""Steps that a plan's memory is pinned beside, at most: it is to be judged by step 24."""

_WORTH_A_TRIAL = 0.99
"""Share of the rule's seconds below which a plan has to be predicted."""

_MOST_LAUNCHES = 0.3
"""Host's seconds of a block in the first steps over the device's, up to which a plan is tried: each operator
of a block that is recomputed in part, and each tensor that leaves, takes the host five to six times as long
(W1 within 17 GB: 170 ms a step of 29; `bench_stage.py --workload W1 --rows nothing,ours_auto`). One H200,
2026-11-28: 0.012 for the blocks of README's example and 0.12 to 0.13 for those of W1 and W2, whose plans win;
0.67 for Whisper's. Of plans that were predicted below the rule, ModernBERT's took 1.36 of it, Gemma 3's 1.42,
and another model's 2.7."""

_USUAL_LINK = 50e9  # bytes a second, where none was measured

_PATIENCE = 10
"""Whole steps without a plan after which that is said."""


class Auto(Client):
    """Mode "auto" of all models of one engine. manager: asked at each forward. total_bytes: of device memory;
    None: whatever makes a step at most a hundredth longer and frees most. models: that it is applied to.

    Steps that are still compared reset torch's memory peaks at their begin, and the first two inside, too.
    """

    name = "auto"
    listens_only = True

    def __init__(self, manager: Callable[[], GroupsManager], total_bytes: int | None) -> None:
        self.models = 0
        self.total_bytes = total_bytes
        self.calls = BlockCalls(manager)
        self.memory = AutoMemory(total_bytes)
        self.plan = AutoPlan(self.calls, self.memory)
        self._ranks = AutoRanks(self.calls, self.memory, self.plan)
        self._manager = manager
        self._made_for = weakref.ref(manager().engine)
        self._engine: weakref.ref[OffloadEngine] | None = None
        self._trimmer: weakref.ref[Trimmer] | None = None  # that waits, or keeps
        self._parts = 0  # of steps, that were passed over
        self._is_rest = False  # a part of the step under way has ended
        self._roots = weakref.WeakSet[ModelRoot]()
        self.ladder: Ladder | None = None  # None where a device measures nothing
        self._measured = 0  # steps, of those that the rule is made from
        self._input_bytes = 0  # of the blocks of the last step
        self._begin_bytes = 0  # active before a forward's first block, the most in the last measured step
        self._shape: object = ()  # that the ladder is for
        self._shape_before: object = None
        self._clock = _Clock()
        self._offers = 0  # ends at which ranks had no plan
        self.rests = Rests(self.calls.resting.clear)
        self._unmeasured = 0  # steps with a forward, one after the other, until a rule is known
        self._asks_rest = False  # the next forward: whether what is there between steps is within the total
        self.kinds: Kinds | None = None  # None where all but activations stays where it is

    # -- a forward -------------------------------------------------------------------------------------------
    def choose(
        self, root: ModelRoot, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Chosen:
        """How this call of block `name` of `root` runs. Blocks the host: never. Raises DeviceTotalError once,
        after a step that has shown that none fits."""
        manager = self._manager()
        engine = manager.engine
        if self._asks_rest:
            self._asks_rest = False
            self.memory.check_rest(engine.device.active_bytes() - self._gradient_bytes())
        self.memory.raise_refusal()
        self._roots.add(root)
        before = self._attached()
        if before is not engine:
            if before is not None:
                self._end_plan()
                self.memory.share.end()
                self._measured, self._clock = 0, _Clock()
                self.rests.wake()
            # after the groups: their step has ended before this one
            self._engine = weakref.ref(engine)
            engine.attach(self)
            self.memory.attach(engine)
            self.ladder = self._new_ladder(engine)
            self.begin_step()
        with engine.lock:
            engine.transfers.claim(0)
        self._phase_begins(engine, BLOCKS)
        chosen = self.calls.chosen(manager, root, name, module, args, kwargs)
        before_again = chosen.before_again
        if before_again is None:
            return chosen
        return chosen._replace(before_again=partial(self._begin_again, before_again))

    def _new_ladder(self, engine: OffloadEngine) -> Ladder | None:
        if engine.device.allocator_bytes() is None:
            return None
        if self.total_bytes is not None:
            ladder = Ladder(self.total_bytes)
            ladder.waits = self.kinds is not None and self.kinds.is_open and not self.calls.peers
            return ladder
        free_bytes = engine.device.free_bytes() or 0
        return Ladder(round(_OF_DEVICE * (free_bytes + engine.device.active_bytes())), is_asked=False)

    def _phase_begins(self, engine: OffloadEngine, phase: str) -> None:
        head_bytes = self.memory.phase_begins(engine, phase)
        if head_bytes is not None and self.calls.trace is not None:
            self.calls.trace.head_ended(head_bytes)

    def _begin_again(self, begin: BeforeAgain) -> Callable[[], None] | None:
        engine = self._attached()
        if engine is not None:
            self._phase_begins(engine, BLOCKS)
        return begin()

    def blocks_end(self, root: ModelRoot, output: Any) -> None:
        """The last block of a forward of `root` is over, and has returned `output`. What the head and the
        loss need beyond a block gets its room: the group without bytes tells the plan. Under a rule it says
        when the backward begins, and nothing else does."""
        manager = self._manager()
        engine, head_bytes = manager.engine, self.memory.head_bytes
        self._phase_begins(engine, HEAD)
        made = next(output_tensors(output), None) if self.memory.is_measured else None
        if made is not None and made.grad_fn is not None:
            made.grad_fn.register_prehook(partial(self.memory.backward_begins, engine.device))
        if self.plan.followed is None and self.ladder is not None:
            group = root.open_group(HEAD)
        elif head_bytes:
            with engine.lock:
                engine.transfers.claim(head_bytes)
            group, output = root.open_group(HEAD, cost=Cost(0.0, head_bytes)), None
        else:
            return
        if group is not None:
            group.close(output, False)

    def forward_ended(self, place: tuple[ChunkKey, int]) -> None:
        """Note what is beside saved tensors at the end of a block's forward, in a step that is measured.
        place: of the call."""
        engine, trace = self._attached(), self.calls.trace
        if engine is not None and trace is not None:
            trace.forward_ended(*place, engine.device.active_bytes() - engine.transfers.device_bytes)

    def plain_is_read(self, place: tuple[ChunkKey, int] | None, gradients: object) -> None:
        """The backward has come to a block that makes nothing again. place: of the call."""
        engine = self._attached()
        if engine is not None:
            if place is not None and self.calls.trace is not None:
                to_come_bytes = self.calls.moved_bytes(place)
                self.calls.backward_reads(engine, place, engine.device.active_bytes(), to_come_bytes)
            self._phase_begins(engine, BLOCKS)
            with engine.lock:
                if place is not None and self.calls.levels is not None:
                    engine.transfers.grow(self.calls.grown_at(place))
                engine.transfers.claim(0)

    def end(self, root: ModelRoot) -> None:
        """The hooks of a model are gone. After the last one the engine has the limit again that its config
        had before."""
        self.models -= 1
        if self.kinds is not None and not self.models:
            self.kinds.end()
        self.rests.drop(root)
        engine = self._attached()
        if not self.models and engine is not None:
            engine.detach(self)
            engine.transfers.claim(0)
            self._end_plan()
            self.memory.share.bound("max_spilling_bytes", None)

    def _end_plan(self) -> None:
        """Leave the engine as it would plan by itself."""
        self.plan.end()
        trimmer = None if self._trimmer is None else self._trimmer()
        if trimmer is not None:  # the manager of now may be another one
            trimmer.waits = trimmer.keeps_host = False

    def is_of(self, engine: OffloadEngine) -> bool:
        """Return True if this mode plans for the engine, or will."""
        return (self._made_for if self._engine is None else self._engine)() is engine

    def _attached(self) -> OffloadEngine | None:
        return None if self._engine is None else self._engine()

    # -- steps -----------------------------------------------------------------------------------------------
    def begin_step(self) -> None:
        """Begin the step's memory figures and, where there is a ladder, its clock (`Client.begin_step`)."""
        engine = self._attached()
        if engine is not None:
            self.memory.begin_step(engine)
            if self.kinds is not None:
                self.kinds.take_unused()
            if self.memory.is_measured:
                self._begin_bytes = 0
            if self.ladder is not None:
                self._clock.begins(engine.device)

    def step_ended(self, stats: StepStats) -> None:
        """Plan, once enough is known (`Client.step_ended`). Blocks the host at the end of the first step,
        until the device is done with what was profiled; where a plan is made or followed, as AutoPlan says;
        and for ranks that are to follow the same one."""
        manager = self._manager()
        engine, plan = manager.engine, self.plan
        self.calls.take_profiles(engine.device)
        agrees = self._ranks.agree_on_profiles(end_was_guessed=manager.follower.end_was_guessed)
        peak_bytes = self.memory.take_peak(engine)
        seconds_before = None if self.ladder is None else self._clock.ends(engine.device)
        has_run = self._look_at_step(manager, stats)
        if self.ladder is not None:
            if has_run and (agrees or not self.calls.peers):
                self._climb(manager, self.ladder, peak_bytes, seconds_before)
                if self.ladder.state is not State.MEASURE:
                    self._unmeasured = 0
        elif agrees:
            self._ranks.agree_on_plan(manager)
        elif has_run and not self.calls.peers:
            plan.make_if_wanted(manager)
            has_reason = plan.is_searched or self.memory.has_no_room
            if plan.followed is None and plan.num_steps == _PATIENCE and not has_reason:
                self._say_no_plan(manager)

    def _look_at_step(self, manager: GroupsManager, stats: StepStats) -> bool:
        """Learn from the step that ended. Returns whether it was a whole one with a backward."""
        seen, ran, plan = manager.follower.last_step, self.calls.take_ran(), self.plan
        is_alone = self.ladder is not None and not self.calls.peers  # others agree when all are there
        if is_alone and any(ran.values()) and not manager.follower.end_was_guessed:
            self._unmeasured += 1
            if self._unmeasured == _PATIENCE:
                self._say_no_plan(manager)
        if seen is None or not seen.backward_order or not any(ran.values()) or self._is_part(manager):
            return False
        self._input_bytes = sum(call.input_bytes for calls in ran.values() for call in calls)
        ladder = self.ladder
        is_compared = ladder is None or self._measured == 1 or plan.followed is not None
        if (
            plan.num_steps > 0
            and is_compared
            and not self.memory.step_ended(
                manager,
                stats,
                is_planned=self.calls.levels is not None,
                is_final=plan.is_final,
                vary=plan.recent.lengths.vary,
            )
        ):
            if self.calls.peers:
                plan.plans_left = 1  # one for all, where ranks agree next
            elif ladder is None:
                plan.follow(manager, None)
            else:
                plan.follow_none()
                ladder.plan_fails()
        plan.step_ended(manager, ran)
        # not by what was read: that depends on the rule
        shape = tuple((chunk, sum(call.input_bytes for call in calls)) for chunk, calls in ran.items())
        is_again, self._shape_before = shape == self._shape_before, shape
        is_other = is_again and shape not in (self._shape, ())
        is_other, self._shape = is_other and bool(self._shape), shape if is_again else self._shape
        if ladder is not None and (is_other or (ladder.has_no_room and not self.memory.has_no_room)):
            plan.follow_none()
            self._measured = 0
            self.rests.wake()
            self.ladder = self._new_ladder(manager.engine)
        return True

    # -- the ladder ------------------------------------------------------------------------------------------
    def _climb(
        self, manager: GroupsManager, ladder: Ladder, peak_bytes: int, seconds_before: float | None
    ) -> None:
        """Decide how the next step runs, by the one that has ended. Blocks the host for ranks that decide
        together, and for a tenth of a step while it pins."""
        engine, calls, plan = manager.engine, self.calls, self.plan
        if self._measured < 3:  # what was looked at is read
            engine.device.synchronize(engine.device.record(engine.device.compute))
        if self._measured == 2 and ladder.trace is not None:
            measure_link(engine)
            rate = _USUAL_LINK if engine.rates is None else engine.rates.d2h_bytes_per_s
            ladder.bytes_per_s = rate
            ladder.costs = calls.costs(_kinds_of(ladder.trace), rate)
            ladder.launches = calls.launches()
            logger.info("auto: a block takes the host %.3f of the device's time", ladder.launches)
            ladder.pins = partial(_pins, weakref.ref(engine), weakref.ref(ladder))
            calls.end_looks()
            gc.collect()  # what was measured has left many objects: a full collection falls in this step
        is_final = plan.is_final and manager.follower.planner.is_settled
        unused = 0 if self.kinds is None else self.kinds.take_unused()
        step = Ended(peak_bytes, self._input_bytes, seconds_before, plan.is_new, is_final, unused)
        facts = self._ranks.common(ladder.facts(step))
        was_measured, trimmer = self._measured == 3, manager.follower.planner.trimmer
        self._trimmer, trimmer.keeps_host = weakref.ref(trimmer), True
        if not was_measured and not self._measure(engine, ladder, unused, is_over=facts.is_over):
            return
        is_far_over = peak_bytes > _FAR_OVER * ladder.total_bytes
        if is_far_over and calls.growth.most and calls.levels is not None:  # it does not come as was measured
            self._forget_growth()
            plan.follow_none()
            ladder.plan_fails()
        ladder.ended(step, facts)
        if self.kinds is not None and not calls.peers:  # which would have to move alike
            self.kinds.step_ended(ladder, self._clock.whole_s, self._shift)
        if ladder.follows_plan:
            self._ranks.agree_on_plan(manager) if calls.peers else plan.make_if_wanted(manager)
        elif plan.followed is not None:
            plan.follow_none()
        elif ladder.wants_plan:
            self._offer_plan(manager, ladder)
        ends_plan = ladder.ran_plan and not ladder.follows_plan  # its peaks would hide those of the rule
        trimmer.keeps_host = ladder.state not in (State.SETTLED, State.REFUSED)
        trimmer.waits = trimmer.keeps_host and not ladder.follows_plan
        if not was_measured:  # what the measured steps made goes back before a step is compared
            trimmer.release_soon()
        if ladder.state is not State.SETTLED or ladder.follows_plan or ends_plan:
            self.memory.is_measured |= ladder.state is not State.SETTLED or ends_plan
            self.rests.wake()
        elif not self.rests.any:
            self.memory.is_measured = False
            self._rest(engine, ladder)

    def _rule_for(self, factor: float, chunk: ChunkKey) -> Rule:
        """Rule of a forward that begins."""
        ladder = self.ladder
        if ladder is None:
            return Rule()
        if self.calls.peers:  # others run it, too
            return ladder.rule
        rule = ladder.rule_for(factor, self._more_bytes(ladder, chunk))
        if rule is not ladder.rule:
            self.rests.wake()
        return rule

    def _more_bytes(self, ladder: Ladder, chunk: ChunkKey) -> int:
        """Bytes on the device before a forward, less the most before one of the steps that were measured, and
        a block's where weights come and go. 0 for a chunk that had others before it in these, too."""
        engine, chunks = self._attached(), () if ladder.trace is None else list(ladder.trace.kinds)
        is_measured = self.memory.is_measured and chunk in chunks
        if engine is None or (chunk in chunks[1:] and not is_measured):
            return 0
        active_bytes = engine.device.active_bytes()
        if is_measured:
            self._begin_bytes = max(self._begin_bytes, active_bytes)
        return active_bytes - self._most_before(0.0) if self._begin_bytes else 0

    def _most_before(self, free_bytes: float) -> int:
        """Bytes on the device before a forward at most, where a step leaves so many of the total."""
        weights_bytes = 0 if self.kinds is None else self.kinds.first_bytes
        return self._begin_bytes + weights_bytes + round(free_bytes)

    def _rest(self, engine: OffloadEngine, ladder: Ladder) -> None:
        """Blocks that run plain, under the rule that is settled, lose their hooks."""
        calls, trace = self.calls, ladder.trace
        assert trace is not None
        plain: dict[int, set[str]] = {}
        others: dict[int, set[str]] = {}
        # of the traced step: `names` knows chunks of longer ones, too
        ran = {chunk: calls.names.get(chunk, []) for chunk in trace.kinds}
        for chunk, names in ran.items():
            for place, name in enumerate(names):
                is_plain = ladder.rule.is_plain(chunk, place)
                (plain if is_plain else others).setdefault(chunk[0], set()).add(name)
        alone = {stage: frozenset(names - others.get(stage, set())) for stage, names in plain.items()}
        most_bytes: float | None = None  # before a forward, of a model that has no other hook
        if ladder.keeps_all and self.total_bytes is not None:
            most_bytes = self._most_before(ladder.free_bytes()) if self._begin_bytes else inf
        resting = self.rests.rest(alone, most_bytes, engine.device.active_bytes)
        for chunk, names in ran.items():
            calls.resting[chunk[0]] = {
                place: (name, kind, ladder.costs[kind].given_bytes)
                for place, (name, kind) in enumerate(zip(names, trace.kinds[chunk], strict=False))
                if name in resting
            }

    def _measure(self, engine: OffloadEngine, ladder: Ladder, unused: int, *, is_over: bool) -> bool:
        """Begin the next of the steps that the rule is made from; True once all have run. unused: bytes that
        other kinds may yet take. is_over: the step that has ended passed the total."""
        calls, memory, trace = self.calls, self.memory, self.calls.trace
        self._measured += 1
        is_unknown = trace is not None and any(kind not in calls.profiles for kind in _kinds_of(trace))
        if self._measured == 2 and (is_unknown or (is_over and not ladder.rule.moves)):
            ladder.rule, self._measured = Rule(moves=ladder.rule.moves or is_over), 1
        elif self._measured == 1:
            # peers would wait for a rank that raises alone
            self._asks_rest = self.kinds is None and not calls.peers
            ladder.rule = Rule(moves=bool(calls.peers) or not self._inputs_fit(engine, ladder))
            calls.rule_for = self._rule_for
        if self._measured == 1:
            memory.by_phase = True
            calls.begin_trace(Trace(ladder.rule.moves))
            calls.growth = NO_GROWTH
            for root in self._roots:
                root.given_bytes, root.looks_at_given = 0, True
        elif self._measured == 2:
            assert trace is not None
            memory.by_phase, calls.trace = False, None
            for root in self._roots:
                root.looks_at_given = False
            trace.peak_bytes = memory.peaks.get(BLOCKS, 0)
            trace.head_bytes = memory.peaks.get(HEAD, 0)
            trace.input_bytes = self._input_bytes
            if is_over and self.kinds is not None and self.kinds.shrinks():
                self._measured, ladder.rule = 0, Rule()
                return False
            if is_over:
                ladder.refuse()
                ladder.has_no_room = memory.total is not None
                if ladder.has_no_room:
                    memory.no_room(of_any_rank=bool(calls.peers))
                return False
            trace.shift(unused)
            if not calls.peers:  # whose plan has one limit for all
                calls.growth = memory.count_growth(trace)
            memory.shift(unused)
            ladder.trace = trace
            if not calls.peers:  # which have other room
                ladder.rule = probes(trace, calls.costs(_kinds_of(trace), _USUAL_LINK), ladder.total_bytes)
        return self._measured == 3

    def _shift(self, nbytes: int, changes_gradients: bool) -> None:
        """Count what other kinds take from the next step on: so many bytes more. changes_gradients: what a
        backward makes and keeps is another amount then."""
        if changes_gradients:
            self._forget_growth()
        growth = self.calls.growth
        self.calls.growth = growth._replace(resident=growth.resident + nbytes)
        self.memory.shift(nbytes)

    def _forget_growth(self) -> None:
        """Count what a backward makes in the rest of each step again, from its begin on."""
        if self.memory.total is not None and self.calls.growth.most:
            self.memory.total.grows(-self.calls.growth.most)
        self.calls.growth = NO_GROWTH

    def _gradient_bytes(self) -> int:
        weights = (weight for root in self._roots for weight in root.parameters())
        return sum(local_of(own.grad).nbytes for own in weights if own.grad is not None)

    def _inputs_fit(self, engine: OffloadEngine, ladder: Ladder) -> bool:
        """Return True if a step has memory for its blocks' inputs as well, before an optimizer has made its
        state, counted as Adam's: twice what is trained."""
        found = engine.device.allocator_bytes()
        peak_bytes = max(self.memory.peaks.values(), default=0 if found is None else found[1])
        weights = (weight for root in self._roots for weight in root.parameters() if weight.requires_grad)
        trained = sum(own.numel() * own.element_size() for own in map(local_of, weights))
        if self.kinds is not None and self.kinds.loads.state:  # it is on the host
            trained = 0
        return peak_bytes + self._input_bytes + 2 * trained <= ladder.total_bytes

    def _offer_plan(self, manager: GroupsManager, ladder: Ladder) -> None:
        """Follow the search's plan, once it is there and has its memory on the host, if it is said to be
        faster than the rule."""
        plan = self.plan
        if self.calls.peers:
            self._ranks.agree_on_plan(manager)
            self._offers += 1
            if plan.followed is not None:
                ladder.plan_begins()
            elif self._offers == _PATIENCE:
                ladder.no_plan()
            return
        if ladder.launches > _MOST_LAUNCHES and self.total_bytes is not None:
            why = f"no plan: launch-bound, a block takes the host {ladder.launches:.2f} of the device's time"
            ladder.tried["plan"] = Tried(why, [])
            ladder.no_plan()
            return
        rule_s = ladder.seconds()
        found = None if rule_s is None else plan.ready(manager, _MOST_PIECES * _pinned_in(rule_s))
        if found is None or rule_s is None:
            if not plan.is_searched:
                self._offers += 1
                if self._offers == _PATIENCE:
                    ladder.no_plan()
            return
        if not found or not found.fits:
            why = "no plan fits the total and the host memory that is pinned in time"
            ladder.tried["plan"] = Tried(why, [])
            plan.follow_none()
            ladder.no_plan()
            return
        engine, held_bytes = manager.engine, manager.engine.arena.held_bytes
        compared_s = _seconds_under(ladder.rule, found) if plan.recent.lengths.vary else rule_s
        is_slower = self.total_bytes is not None and found.predicted_step_s >= _WORTH_A_TRIAL * compared_s
        has_host = plan.has_host(engine, found)
        if has_host and not is_slower:
            if plan.pin(engine, found, _pinned_in(rule_s)):
                plan.make_if_wanted(manager)
                if plan.followed is not None:
                    ladder.plan_begins()
                return
            if engine.arena.held_bytes > held_bytes:
                return  # the rest is pinned beside the next step
            has_host = False  # others hold it
        without = "" if has_host or is_slower else "; the host has no memory for it, or pins it for too long"
        ladder.tried["plan"] = Tried(f"plan, as it is predicted{without}", [(0, found.predicted_step_s)])
        plan.follow_none()
        ladder.no_plan()

    def _is_part(self, manager: GroupsManager) -> bool:
        """Return True if what has ended may be a part of a step: where ends are guessed."""
        was_rest, self._is_rest = self._is_rest, manager.follower.end_was_guessed and self._parts < _GUESSES
        self._parts += self._is_rest
        return was_rest or self._is_rest

    def explain(self) -> Explanation:
        """Explain what is followed now."""
        engine, plan, total = self._attached(), self.plan, self.memory.total
        is_ended = plan.followed is None or not self.models
        is_final = plan.is_final and (is_ended or self._manager().follower.planner.is_settled)
        is_final = is_final and (self.ladder is None or self.ladder.state is State.SETTLED)
        if self.memory.has_no_room:
            state = "device_total leaves no choice: every block is recomputed, and its input moved"
        elif self.ladder is not None and plan.followed is None:
            state = self.ladder.text()
            is_final = self.ladder.state in (State.SETTLED, State.REFUSED)
        elif plan.followed is None:
            state = (
                f"no plan yet: {plan.num_steps} of at least 2 steps that it is made from have ended; "
                "meanwhile a block is recomputed, or moved whole if a recompute would give it other bits"
            )
        else:
            state = "the plan is settled" if is_final else "planned; it is still measured"
        stages = {stage for stage, _ in plan.names}
        return Explanation(
            state=state,
            is_final=is_final,
            names={
                chunk: tuple(f"{name} of stage {chunk[0]}" if len(stages) > 1 else name for name in names)
                for chunk, names in plan.names.items()
            },
            total_bytes=self.total_bytes,
            rest_bytes=None if total is None else total.rest_bytes,
            limit_bytes=None if engine is None else engine.limits.device_limit_bytes,
            plan=plan.followed,
            moved_bytes=self._manager().stats.spill_bytes if self.models else None,
            step_s=self.ladder.seconds("plan")
            if self.ladder is not None and plan.followed is not None
            else None,
            kinds=() if self.kinds is None else tuple(self.kinds.shares(self.ladder)),
        )

    def _say_no_plan(self, manager: GroupsManager) -> None:
        timed = manager.follower.last_step is not None and manager.follower.last_step.seconds is not None
        if self.ladder is not None:
            why = (
                "no step could be measured, as where blocks run inside reentrant checkpoints, or an "
                "optimizer steps between the backwards of one forward; mode='hidden_states' measures nothing"
            )
        elif timed:
            why = "no two steps were alike; mode='selective' and mode='hidden_states' need no plan"
        else:
            why = (
                "its forwards and backwards are not timed, as where chunks are marked by hand; leave "
                "init_chunk_handler() out, or use mode='hidden_states'"
            )
        steps = self.plan.num_steps if self.ladder is None else self._unmeasured
        logger.warning(f"mode='auto' has no plan after {steps} steps, and recomputes every block: {why}")


def _pins(of: Callable[[], OffloadEngine | None], by: Callable[[], Ladder | None], nbytes: int) -> bool:
    """Pin host memory for so many bytes of inputs, a part of it beside each step: `Ladder.pins`."""
    engine, ladder = of(), by()
    if engine is None or ladder is None or not engine.device.pins:
        return True
    arena = engine.arena
    is_all = pin_free(engine, nbytes, _pinned_in(ladder.seconds() or 0.0))
    return is_all and arena.held_bytes - arena.lent_bytes >= nbytes


def _pinned_in(step_s: float) -> int:
    """Bytes that are pinned beside a step."""
    return round(_PINNED_A_STEP * step_s * _PINNED_BYTES_PER_S)


def _seconds_under(rule: Rule, plan: MixedPlan) -> float:
    """Seconds under the rule of the step that the plan is for, by the same calculation: where lengths vary,
    no step that was measured is as long."""
    again = (
        block.menu[-1].recompute_s
        for chunk, blocks in plan.problem.blocks.items()
        for place, block in enumerate(blocks)
        if not rule.is_plain(chunk, place)
    )
    return plan.plain_s + sum(again)


def _kinds_of(trace: Trace) -> list[Any]:
    return list(dict.fromkeys(kind for kinds in trace.kinds.values() for kind in kinds))


class _Clock:
    """Seconds of steps on the device, from the first forward to the end of the last backward. whole_s: from
    the begin of the step before the one that has ended to the begin of that one, None where that is not
    known. Blocks the host: never."""

    def __init__(self) -> None:
        self.whole_s: float | None = None
        self._start: Event | None = None
        self._start_before: Event | None = None
        self._before: tuple[Event, Event] | None = None

    def begins(self, device: Device) -> None:
        self._start = None if device.is_capturing() else device.record(device.compute, timed=True)

    def ends(self, device: Device) -> float | None:
        """A step has ended. Returns the seconds of the one before it, None where they are not known."""
        before, start = self._before, self._start
        both = self._start_before, start
        self.whole_s = None
        if both[0] is not None and both[1] is not None and device.poll(both[1]):
            self.whole_s = device.elapsed_ms(both[0], both[1]) / 1e3
        self._start, self._start_before = None, start
        self._before = None if start is None else (start, device.record(device.compute, timed=True))
        if before is None or not device.poll(before[1]):
            return None
        return device.elapsed_ms(*before) / 1e3
