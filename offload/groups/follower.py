"""Ends of the groups' steps, called, inferred or guessed; what the step that ended was seen to do; the plan
that the next steps follow; and captures.

One invariant: it decides and moves no bytes itself. What remains of a step at its end is dropped; of an
inferred end, all but what graphs still hold.
"""

from __future__ import annotations

from collections.abc import Callable

from offload.client import Client
from offload.groups.chunk import ChunkGroups
from offload.groups.scopes import Scopes
from offload.groups.seen import GroupLedgers, SeenStep
from offload.ids import ChunkId
from offload.policy.mixture import MixedPlan
from offload.saved.handles import SavedChunk
from offload.telemetry.records import ClientStats, StepStats

# of inferred ends, by what a step has saved: a generator's graph outlives the discriminator's step
_ENDS_OUTLIVED = 2


class Follower(Client):
    """The engine's client "groups".

    scopes: of the groups whose steps it ends. warmed_up: called when a plan was made of the first step and
        somebody called that end.
    """

    name = "groups"

    def __init__(self, scopes: Scopes, ledgers: GroupLedgers, warmed_up: Callable[[], None]) -> None:
        self._scopes = scopes
        self._tracker = scopes.tracker
        self._engine = scopes.tracker.engine
        self.planner = scopes.planner
        self._ledgers = ledgers
        self._warmed_up = warmed_up
        self.before_end: Callable[[], None] | None = None  # of compat, before anything of a step ends
        self.ended: SeenStep | None = None  # what the step that ends was seen to do
        self.last_step: SeenStep | None = None  # the same of the one that has ended
        self.ends_by_hand = 0  # calls of `step_end` since `infer_ends`
        self._inferred_ends = 0
        self._infers_end = False  # the end under way is an inferred one
        # the end under way, from what is alive: other ranks may at another moment
        self.end_was_guessed = False
        self.guesses_ends = False  # steps are inferred, and no optimizer has ended one so far
        self._tracker.drop_step = self.drop_step
        self._engine.attach(self)

    # -- ends ------------------------------------------------------------------------------------------------
    def begin_chunk(self, stage: int, microbatch: int) -> None:
        """Begin a chunk that a stage announces. While ends are guessed, one that begins again and finds
        nothing alive ends the step before it."""
        if self.guesses_ends:
            handler = self._tracker.handlers.get(ChunkId(stage, microbatch))
            if handler is not None and handler.begun and next(self._tracker.living_blocks(), None) is None:
                self.end_inferred_step(guessed=True)
        self._tracker.begin_chunk(stage, microbatch)

    def begin_step(self) -> None:
        """Give cached device memory back, once a plan is final."""
        self.planner.trimmer.step_begins()

    def step_end(self) -> StepStats:
        """End the step, once its gradients are final: drop leftovers with one warning, settle every transfer,
        count, and plan after warm-up. From the first call on no end is inferred, until `infer_ends`.

        Blocks the host: never (the summary after warm-up gathers over the process group, once). Raises
        CaptureError in a capture.
        """
        self.ends_by_hand += 1
        was_inferred = self._inferred_ends and not self._tracker.forward_order
        if self.ends_by_hand == 1 and was_inferred and next(self._tracker.living_blocks(), None) is None:
            return self._engine.last_stats
        return self._engine.end_step()

    def infer_ends(self) -> None:
        """A model is applied: its steps' ends are inferred, whatever was called before."""
        self.ends_by_hand = self._inferred_ends = 0

    def end_inferred_step(self, *, guessed: bool = False) -> None:
        """Something happened after which gradients are no longer added to: the step ends, if a forward has
        begun in it and nobody calls `begin_forward` or `step_end`. guessed: it is only that nothing is alive.
        What its graphs still hold is carried over; two such ends later it is dropped. In a capture nothing
        happens. Blocks the host: as `step_end`."""
        by_hand = self.ends_by_hand or self._tracker.forwards_by_hand
        if self.ends_by_hand and not guessed:
            self._tracker.mark_report.optimizer_stepped(len(self._tracker.forward_order))
        if not (self._tracker.forward_order or guessed):
            self._ledgers.step_is_whole()
        if by_hand or not self._tracker.forward_order or self._engine.device.is_capturing():
            return
        self._infers_end, self.end_was_guessed = True, guessed
        self._inferred_ends += 1
        try:
            self._engine.end_step()
        finally:
            self._infers_end = self.end_was_guessed = False

    def drop_step(self) -> None:
        """End a step that nobody ends, as far as the groups go: in a loop that never calls `step_end` what is
        noted of it would grow for ever."""
        self.end_step()
        self._tracker.forget_step()

    def end_step(self) -> ClientStats:
        """End the step of the groups: what is still open is closed, what nobody read is dropped."""
        if self.before_end is not None:
            self.before_end()
        tracker = self._tracker
        if self._scopes.until_commit:
            self._scopes.end_step()
        self._scopes.delayed.clear()
        self._scopes.leaving.step_ends()
        handlers = [handler for handler in tracker.handlers.values() if handler.begun]
        if tracker.do_offload:
            by_hand = tracker.forwards_by_hand or tracker.announced
            models = {handler: None if by_hand else handler.id.stage for handler in handlers}
            tracker.mark_report.end_step(models, self._ledgers.survey, is_warmup=self.planner.is_warmup)
            for handler in tracker.backward_order:  # others were cut short by an exception
                for saved in handler.open_groups():
                    tracker.mark_report.not_committed(saved.id.name)
        for handler in handlers:
            self._ledgers.count(handler.groups)
        seconds = tracker.clock.end_step()
        figures = self._engine.end_saves(self._ending(handlers))
        for handler in handlers:
            handler.end_recording()
        for handler in tracker.captured:
            handler.groups.clear()
        self.ended = tracker.seen(seconds)
        return figures

    def _ending(self, handlers: list[ChunkGroups]) -> list[SavedChunk]:
        """The chunks whose tensors are dropped at this end: all, less what an inferred one carries over."""
        tracker, ending = self._tracker, list[SavedChunk]()
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
        with self._engine.lock:
            seen, self.ended = self.ended, None
            assert seen is not None
            self.last_step = seen
            planned = self._tracker.do_offload and self.planner.after_step(seen)
            live_bytes = self.planner.live_peak_bytes if self._tracker.do_offload else None
            self._ledgers.write(stats, live_bytes, ran=bool(seen.forward_order), guessed=self.end_was_guessed)
            self._tracker.forget_step()
        # where ends are inferred nobody asked for a table, and one rank's end waits for no other rank's
        if planned and not self._infers_end:
            self._warmed_up()

    # -- the plan --------------------------------------------------------------------------------------------
    def limits_changed(self) -> None:
        """Between steps: the engine's device limit is another one now, so a plan is made anew from what the
        last steps were seen to do."""
        with self._engine.lock:
            self.planner.limits_changed(self.last_step)

    def start_from(self, plan: MixedPlan | None, most_kept_bytes: int = 0) -> None:
        """Between steps: the plan of the steps that come, which they follow until their times are known, and
        from which groups search then; None: of no more. most_kept_bytes: that may stay at once until one of
        them was seen. Takes no lock."""
        self.planner.start_from(plan, most_kept_bytes)
        for handler in list(self._tracker.handlers.values()):
            handler.first_leave_bytes = None if plan is None else plan.first_leave_bytes(handler.id)
            if plan is None:  # what stays was its choice: until a step was seen without it all leaves
                handler.stays, handler.stays_from = frozenset(), {}

    # -- captures --------------------------------------------------------------------------------------------
    def capture_begins(self) -> None:
        """Send what is open: no piece reaches across the begin of a capture. A chunk whose reads have ended,
        in the warm-up of this capture, starts anew, so that what the capture saves is fetched in its own
        order."""
        self._commit_open_groups()
        forward = self._tracker.forward
        if forward is None or not forward.begun or any(forward.open_groups()):
            return
        if next(forward.saved.living(), None) is None:
            forward.reset()
            if self._tracker.backward is forward:
                self._tracker.backward = None
            self._tracker.look_ahead()

    def capture_ends(self) -> None:
        """Send what was saved in the capture: it leaves before the capture ends, or never."""
        self._scopes.flush_delayed_groups()
        self._commit_open_groups()

    def _commit_open_groups(self) -> None:
        for handler in self._tracker.handlers.values():
            for saved in handler.open_groups():
                self._engine.store.commit(saved)
