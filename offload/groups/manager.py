"""The manager: what a user of groups talks to. The plan, the end of a step.

One invariant: it decides and never moves bytes itself. Its tracker (tracker.py) knows which chunk is
current and what is read next; its scopes (scopes.py) install hooks and send groups. A caller on a hot path
holds the part itself, or calls the part's method, which a public name of the manager is bound to.
"""

from __future__ import annotations

from typing import Any

import torch

from offload.client import Client
from offload.compile import import_compiler
from offload.config import OffloadConfig, check_bytes
from offload.engine import OffloadEngine, default_engine
from offload.errors import PoolError
from offload.groups.chunk import ChunkGroups
from offload.groups.scopes import Scopes
from offload.groups.seen import GroupLedgers, SeenStep
from offload.groups.step_planner import StepPlanner
from offload.groups.tracker import ChunkTracker
from offload.ids import ChunkId
from offload.policy.mixture import MixedPlan
from offload.saved.handles import SavedChunk
from offload.telemetry.figures import Ledger
from offload.telemetry.records import ClientStats, StepStats
from offload.telemetry.summary import print_offload_summary_table

# of inferred ends, by what a step has saved: a generator's graph outlives the discriminator's step
_ENDS_OUTLIVED = 2


class GroupsManager(Client):
    """Chunks, plan and prefetch over one engine, as its client "groups".

    engine: None takes the default one. process_group: whose ranks the summary is printed for.
    """

    name = "groups"

    def __init__(
        self, engine: OffloadEngine | None = None, *, print_summary: bool = True, process_group: Any = None
    ) -> None:
        if engine is not None and not isinstance(engine, OffloadEngine):
            raise ValueError(
                f"engine is a {type(engine).__name__}, must be an OffloadEngine, or None for one with the "
                "default config"
            )
        import_compiler()
        self.engine = engine = engine if engine is not None else default_engine()
        self.ledgers = GroupLedgers(engine)
        self.tracker = tracker = ChunkTracker(engine, self.ledgers, self._drop_step)
        self._planner = StepPlanner(engine)
        self.scopes = scopes = Scopes(tracker, self._planner)
        self.mark_report = tracker.mark_report
        self.set_order, self.living_blocks = tracker.set_order, tracker.living_blocks
        self.begin_forward, self.end_forward = tracker.begin_forward, tracker.end_forward
        self.begin_backward, self.end_backward = tracker.begin_backward, tracker.end_backward
        self.active_handler, self.needs_chunk = scopes.active_handler, scopes.needs_chunk
        self.open_scope, self.close_scope = scopes.open_scope, scopes.close_scope
        self.commit, self.flush_delayed_groups = scopes.commit, scopes.flush_delayed_groups
        self.kept_group, self.input_group = scopes.kept_group, scopes.input_group
        engine.attach(self)
        self.print_summary = print_summary
        self.process_group = process_group
        self._ended: SeenStep | None = None  # what the step that ends was seen to do
        self.last_step: SeenStep | None = None  # the same of the one that has ended
        self.ledger = self.new_ledger()  # since the manager was built
        self.ends_by_hand = 0  # calls of `step_end` since `infer_ends`
        self._inferred_ends = 0
        self._infers_end = False  # the end under way is an inferred one
        # the end under way, from what is alive: other ranks may at another moment
        self.end_was_guessed = False
        self.guesses_ends = False  # steps are inferred, and no optimizer has ended one so far

    def prepare_close(self) -> None:
        """Release what the manager has lent by hand. Called before anything else of it is closed."""

    def close(self) -> None:
        """Drop everything; the engine closes and unpins, unless another client uses it. Blocks the host until
        the copies in flight have passed. The manager must not be used after."""
        self.prepare_close()
        with self.engine.lock:
            self.end_step()
            self.engine.detach(self)
            try:
                self.engine.close_unused()
            except PoolError:
                self.engine.attach(self)
                raise
            self.engine.off_read(self.tracker.on_read)
            self._planner.windows.end()
            self.scopes.leaving.bounds.end()
        self._ended = self.last_step = None
        self.tracker.forget_step()
        self.tracker.handlers.clear()

    # -- properties ------------------------------------------------------------------------------------------
    @property
    def do_offload(self) -> bool:
        """Predicate: what is saved may leave."""
        return self.tracker.do_offload

    @property
    def is_warmup(self) -> bool:
        """Predicate: no step with a backward has ended yet."""
        return self._planner.is_warmup

    @property
    def settings(self) -> OffloadConfig:
        """Config fields that the plan follows: activation_offload_fraction, pp_rank, max_inflight_offloads
        and delta_offload_bytes_across_pp_ranks. A change takes effect when the step ends."""
        return self._planner.settings

    @settings.setter
    def settings(self, settings: OffloadConfig) -> None:
        before, self._planner.settings = self._planner.settings, settings
        if before.max_inflight_offloads != settings.max_inflight_offloads:
            self.scopes.leaving.bound(settings.max_inflight_offloads)

    @property
    def stats(self) -> StepStats:
        """Figures of the last step that ended."""
        return self.engine.last_stats

    @property
    def offload_summary_bytes(self) -> dict[str, int]:
        """Bytes by group that leave up to the end of the first chunk to run backward, after warm-up; {}
        before. About what a steady step has on the host at once. Without what found no host memory in the
        step that the plan was made from."""
        return dict(self._planner.summary)

    @property
    def step_offload_bytes(self) -> dict[str, int]:
        """Bytes by group that leave in a whole step that follows the plan: together, its
        `StepStats.spill_bytes`. {} before warm-up has ended. Without what found no host memory, as
        `offload_summary_bytes`."""
        return dict(self._planner.leaving)

    @property
    def what_stays_is_settled(self) -> bool:
        """Predicate: steps like the last ones will keep and move what the last one did."""
        return self._planner.is_settled

    def limits_changed(self) -> None:
        """Between steps: the engine's device limit is another one now, so a plan is made anew from what the
        last steps were seen to do."""
        with self.engine.lock:
            self._planner.limits_changed(self.last_step)

    def start_from(self, plan: MixedPlan | None, most_kept_bytes: int = 0) -> None:
        """Between steps: the plan of the steps that come, which they follow until their times are known, and
        from which groups search then; None: of no more. most_kept_bytes: that may stay at once until one of
        them was seen. Takes no lock."""
        self._planner.start_from(plan, most_kept_bytes)
        for handler in list(self.tracker.handlers.values()):
            handler.first_leave_bytes = None if plan is None else plan.first_leave_bytes(handler.id)
            if plan is None:  # what stays was its choice: until a step was seen without it all leaves
                handler.stays, handler.stays_from = frozenset(), {}

    def new_ledger(self) -> Ledger:
        """Figures of the steps that end from now on, for as long as the caller holds it. The next step is
        looked at closely, to say why tensors can never leave: each of its saves is judged twice."""
        return self.ledgers.new()

    # -- set up ----------------------------------------------------------------------------------------------
    def reserve_host(self, nbytes: int, *, measure: bool = True) -> None:
        """Pin before step 1, and unless `measure` is False measure the link. Blocks the host. Raises
        HostBudgetError beyond the budget."""
        check_bytes("reserve_host", nbytes)
        self.engine.reserve_host(nbytes, measure=measure)

    def register_parameters(self, module: torch.nn.Module) -> None:
        """Parameters of `module`, their views and casts never leave, recognised even behind `detach()`."""
        if not isinstance(module, torch.nn.Module):
            raise ValueError(
                f"register_parameters got a {type(module).__name__}, must be a torch.nn.Module; "
                "mark_not_offloadable takes tensors"
            )
        self.engine.register_parameters(module)

    def register_external(self, tensor: torch.Tensor) -> None:
        """A receive buffer: saves of it never share one copy."""
        _check_tensor("register_external", tensor)
        self.engine.register_external(tensor)

    def mark_not_offloadable(self, tensor: torch.Tensor | None) -> None:
        """`tensor` stays on the device for good. None is accepted, for an optional bias."""
        if tensor is not None:
            _check_tensor("mark_not_offloadable", tensor)
            self.engine.mark_not_offloadable(tensor)

    def disable_offload(self) -> None:
        """From now on nothing more leaves; what has left comes back as usual."""
        self.tracker.switch(False)

    def enable_offload(self) -> None:
        self.tracker.switch(True)

    # -- captures --------------------------------------------------------------------------------------------
    @property
    def is_capturing(self) -> bool:
        """Predicate: a graph is being captured in a region: its groups leave at every replay."""
        return self.engine.transfers.capture is not None

    def capture_begins(self) -> None:
        """Send what is open: no piece reaches across the begin of a capture. A chunk whose reads have ended,
        in the warm-up of this capture, starts anew, so that what the capture saves is fetched in its own
        order."""
        self._commit_open_groups()
        forward = self.tracker.forward
        if forward is None or not forward.begun or any(forward.open_groups()):
            return
        if next(forward.saved.living(), None) is None:
            forward.reset()
            if self.tracker.backward is forward:
                self.tracker.backward = None
            self.tracker.look_ahead()

    def capture_ends(self) -> None:
        """Send what was saved in the capture: it leaves before the capture ends, or never."""
        self.scopes.flush_delayed_groups()
        self._commit_open_groups()

    def _commit_open_groups(self) -> None:
        for handler in self.tracker.handlers.values():
            for saved in handler.open_groups():
                self.engine.store.commit(saved)

    # -- step ------------------------------------------------------------------------------------------------
    def begin_chunk(self, stage: int, microbatch: int) -> None:
        """Begin a chunk that a stage announces. While ends are guessed, one that begins again and finds
        nothing alive ends the step before it."""
        if self.guesses_ends:
            handler = self.tracker.handlers.get(ChunkId(stage, microbatch))
            if handler is not None and handler.begun and next(self.tracker.living_blocks(), None) is None:
                self.end_inferred_step(guessed=True)
        self.tracker.begin_chunk(stage, microbatch)

    def begin_step(self) -> None:
        """Give cached device memory back, once a plan is final."""
        self._planner.trimmer.step_begins()

    def step_end(self) -> StepStats:
        """End the step, once its gradients are final: drop leftovers with one warning, settle every transfer,
        count, and plan after warm-up. From the first call on no end is inferred, until `infer_ends`.

        Blocks the host: never (the summary after warm-up gathers over the process group, once). Raises
        CaptureError in a capture.
        """
        self.ends_by_hand += 1
        was_inferred = self._inferred_ends and not self.tracker.forward_order
        if self.ends_by_hand == 1 and was_inferred and next(self.tracker.living_blocks(), None) is None:
            return self.stats
        return self.engine.end_step()

    def infer_ends(self) -> None:
        """A model is applied: its steps' ends are inferred, whatever was called before."""
        self.ends_by_hand = self._inferred_ends = 0

    def end_inferred_step(self, *, guessed: bool = False) -> None:
        """Something happened after which gradients are no longer added to: the step ends, if a forward has
        begun in it and nobody calls `begin_forward` or `step_end`. guessed: it is only that nothing is alive.
        What its graphs still hold is carried
        over; two such ends later it is dropped. In a capture nothing happens. Blocks the host: as
        `step_end`."""
        by_hand = self.ends_by_hand or self.tracker.forwards_by_hand
        if self.ends_by_hand and not guessed:
            self.mark_report.optimizer_stepped(len(self.tracker.forward_order))
        if not (self.tracker.forward_order or guessed):
            self.ledgers.step_is_whole()
        if by_hand or not self.tracker.forward_order or self.engine.device.is_capturing():
            return
        self._infers_end, self.end_was_guessed = True, guessed
        self._inferred_ends += 1
        try:
            self.engine.end_step()
        finally:
            self._infers_end = self.end_was_guessed = False

    def _drop_step(self) -> None:
        self.end_step()
        self.tracker.forget_step()

    def end_step(self) -> ClientStats:
        """End the step of the groups: what is still open is closed, what nobody read is dropped."""
        tracker = self.tracker
        if self.scopes.until_commit:
            self.scopes.end_step()
        self.scopes.delayed.clear()
        self.scopes.leaving.step_ends()
        handlers = [handler for handler in tracker.handlers.values() if handler.begun]
        if tracker.do_offload:
            by_hand = tracker.forwards_by_hand or tracker.announced
            models = {handler: None if by_hand else handler.id.stage for handler in handlers}
            self.mark_report.end_step(models, self.ledgers.survey, is_warmup=self._planner.is_warmup)
            for handler in tracker.backward_order:  # others were cut short by an exception
                for saved in handler.open_groups():
                    self.mark_report.not_committed(saved.id.name)
        for handler in handlers:
            self.ledgers.count(handler.groups)
        seconds = tracker.clock.end_step()
        figures = self.engine.end_saves(self._ending(handlers))
        for handler in handlers:
            handler.end_recording()
        for handler in tracker.captured:
            handler.groups.clear()
        self._ended = tracker.seen(seconds)
        return figures

    def _ending(self, handlers: list[ChunkGroups]) -> list[SavedChunk]:
        """The chunks whose tensors are dropped at this end: all, less what an inferred one carries over."""
        tracker, ending = self.tracker, list[SavedChunk]()
        chunks = [*tracker.carried, *((0, chunk) for chunk in tracker.retired)]
        chunks += [(0, handler.saved) for handler in handlers]
        tracker.carried = []
        for ends, chunk in chunks:
            if self._infers_end and ends < _ENDS_OUTLIVED and next(chunk.living(), None) is not None:
                tracker.carried.append((ends + 1, chunk))
            else:
                ending.append(chunk)
        return ending

    def step_ended(self, stats: StepStats) -> None:
        """Plan the next step from what was seen of this one, and print the summary once."""
        with self.engine.lock:
            seen, self._ended = self._ended, None
            assert seen is not None
            self.last_step = seen
            planned = self.tracker.do_offload and self._planner.after_step(seen)
            live_bytes = self._planner.live_peak_bytes if self.tracker.do_offload else None
            self.ledgers.write(stats, live_bytes, ran=bool(seen.forward_order), guessed=self.end_was_guessed)
            self.tracker.forget_step()
        # where ends are inferred nobody asked for a table, and one rank's end waits for no other rank's
        if planned and self.print_summary and not self._infers_end:
            print_offload_summary_table(self.step_offload_bytes, process_group=self.process_group)


def _check_tensor(function: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{function} got a {type(tensor).__name__}, must be a tensor")
