"""Mode "auto": which blocks of which chunks are kept, moved or recomputed, so that a step fits a total of
device memory and takes the least time.

    step 1      the first block of each kind runs plain and is profiled, and all that it saves leaves. The
                others are recomputed whole, where that is right, so the total holds from the start
    step 2      recomputes all of these: what a step needs beside saved tensors is measured
    its end     a search over simulated steps (policy/mixture.py) chooses a level for each block of each
                chunk. What waits for the backward under these levels is kept or moved by the groups' own plan
    later       times and memory are measured under the plan, and it is made anew where they differ.
                One that is slower than no plan is given up

Here is what is done at a forward and at the end of a step. block_calls.py has how a call runs under the plan,
auto_memory.py the limit that the total leaves, auto_plan.py which plan is followed,
auto_guard.py whether it is slower than none, beside.py the search on a thread, auto_ranks.py how ranks whose
blocks communicate agree on one.

There is one plan for all models of a process that the mode is applied to: they share the device.

One invariant: a plan changes what is kept, moved and computed again, never a result. It changes between steps
only, and a step that is unlike the planned one runs all the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from offload.checkpoint.hidden_states import BeforeAgain
from offload.client import Client
from offload.engine import OffloadEngine
from offload.groups.group import Cost
from offload.groups.manager import GroupsManager
from offload.modules.auto_memory import BLOCKS, HEAD, AutoMemory
from offload.modules.auto_plan import AutoPlan
from offload.modules.auto_ranks import AutoRanks
from offload.modules.block_calls import BlockCalls, Chosen
from offload.modules.root import ModelRoot
from offload.planner.explained import Explanation
from offload.telemetry.records import StepStats
from offload.telemetry.speaker import speaker

__all__ = ["Auto"]

logger = speaker(__name__)

_GUESSES = 16
"""Guessed ends that are passed over: before the first optimizer step they may be ends of microbatches."""

_PATIENCE = 10
"""Whole steps without a plan after which that is said."""


class Auto(Client):
    """Of all models of one engine. manager: asked at each forward. total_bytes: of device memory; None:
    whatever makes a step at most a hundredth longer and frees most. models: that it is applied to.

    Steps that it still plans for reset torch's memory peaks at their begin.
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
        self._parts = 0  # of steps, that were passed over
        self._is_rest = False  # a part of the step under way has ended

    # -- a forward -------------------------------------------------------------------------------------------
    def choose(
        self, root: ModelRoot, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Chosen:
        """How this call of block `name` of `root` runs. Blocks the host: never."""
        manager = self._manager()
        engine = manager.engine
        before = self._attached()
        if before is not engine:
            if before is not None:
                self.plan.end()
            # after the groups: their step has ended before this one
            self._engine = weakref.ref(engine)
            engine.attach(self)
            self.memory.attach(engine)
            self.begin_step()
        with engine.lock:
            engine.transfers.claim(0)
        self.memory.phase_begins(engine, BLOCKS)
        chosen = self.calls.chosen(manager, root, name, module, args, kwargs)
        before_again = chosen.before_again
        if before_again is None:
            return chosen
        return chosen._replace(before_again=partial(self._begin_again, before_again))

    def _begin_again(self, begin: BeforeAgain) -> Callable[[float], None] | None:
        engine = self._attached()
        if engine is not None:
            self.memory.phase_begins(engine, BLOCKS)
        return begin()

    def blocks_end(self, root: ModelRoot) -> None:
        """The last block of a forward of `root` is over. What the head and the loss need beyond a block gets
        its room: the group without bytes tells the plan."""
        engine, head_bytes = self._manager().engine, self.memory.head_bytes
        self.memory.phase_begins(engine, HEAD)
        if head_bytes:
            with engine.lock:
                engine.transfers.claim(head_bytes)
            group = root.open_group(HEAD, cost=Cost(0.0, head_bytes))
            if group is not None:
                group.close(None, False)

    def plain_is_read(self, gradients: object) -> None:
        """The backward has come to a block that makes nothing again."""
        engine = self._attached()
        if engine is not None:
            self.memory.phase_begins(engine, BLOCKS)
            with engine.lock:
                engine.transfers.claim(0)

    def end(self) -> None:
        """The hooks of a model are gone. After the last one the engine has the limit again that its config
        had before."""
        self.models -= 1
        engine = self._attached()
        if not self.models and engine is not None:
            engine.detach(self)
            engine.transfers.claim(0)
            self.plan.end()

    def is_of(self, engine: OffloadEngine) -> bool:
        """Whether it plans for this engine, or will."""
        return (self._made_for if self._engine is None else self._engine)() is engine

    def _attached(self) -> OffloadEngine | None:
        return None if self._engine is None else self._engine()

    # -- steps -----------------------------------------------------------------------------------------------
    def begin_step(self) -> None:
        """As Client."""
        engine = self._attached()
        if engine is not None:
            self.memory.begin_step(engine)

    def step_ended(self, stats: StepStats) -> None:
        """As Client: plan, once enough is known. Blocks the host at the end of the first step, until the
        device is done with what was profiled; where a plan is made or followed, as AutoPlan says; and for
        ranks that are to follow the same one."""
        manager = self._manager()
        engine, plan = manager.engine, self.plan
        self.calls.take_profiles(engine.device)
        agrees = self._ranks.agree_on_profiles(end_was_guessed=manager.end_was_guessed)
        has_run = self._look_at_step(manager, stats)
        if agrees:
            self._ranks.agree_on_plan(manager)
        elif has_run and not self.calls.peers:
            plan.make_if_wanted(manager)
            has_reason = plan.is_searched or plan.gave_up or self.memory.has_no_room
            if plan.followed is None and plan.num_steps == _PATIENCE and not has_reason:
                self._say_no_plan(manager)

    def _look_at_step(self, manager: GroupsManager, stats: StepStats) -> bool:
        """Learn from the step that ended. Returns whether it was a whole one with a backward."""
        seen, ran, plan = manager.last_step, self.calls.take_ran(), self.plan
        if seen is None or not seen.backward_order or not any(ran.values()) or self._is_part(manager):
            return False
        if plan.num_steps > 0 and not self.memory.step_ended(
            manager,
            stats,
            is_planned=self.calls.levels is not None,
            is_final=plan.is_final,
            vary=plan.recent.lengths.vary,
        ):
            if self.calls.peers:
                plan.plans_left = 1  # one for all, where ranks agree next
            else:
                plan.follow(manager, None)
        plan.step_ended(manager, ran, stats.stall_ms / 1e3)
        return True

    def _is_part(self, manager: GroupsManager) -> bool:
        """Whether what has ended may be a part of a step: where ends are guessed."""
        was_rest, self._is_rest = self._is_rest, manager.end_was_guessed and self._parts < _GUESSES
        self._parts += self._is_rest
        return was_rest or self._is_rest

    def explain(self) -> Explanation:
        """What is followed now."""
        engine, plan, total = self._attached(), self.plan, self.memory.total
        is_ended = plan.followed is None or not self.models
        is_final = plan.is_final and (is_ended or self._manager().what_stays_is_settled)
        if self.memory.has_no_room:
            state = "device_total leaves no choice: every block is recomputed, and its input moved"
        elif plan.gave_up:
            state = "a step under the plan took longer than one that recomputes every block: that is done"
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
        )

    def _say_no_plan(self, manager: GroupsManager) -> None:
        timed = manager.last_step is not None and manager.last_step.seconds is not None
        logger.warning(
            "mode='auto' has no plan after %d steps, and recomputes every block: %s",
            self.plan.num_steps,
            "no two steps were alike; mode='selective' and mode='hidden_states' need no plan"
            if timed
            else "its forwards and backwards are not timed, as where chunks are marked by hand; leave "
            "init_chunk_handler() out, or use mode='hidden_states'",
        )
