"""Which chunk is current, what a step was seen to do, and which reads come next.

One invariant: all of it is a hint for the prefetch and the plan. A chunk that was not expected, a microbatch
more, an evaluation in between or an exception change time, not results.

A chunk becomes current in one of two ways: a pipeline stage announces it (`begin_chunk`, `end_forward`,
`begin_backward`, `end_backward`), or `begin_forward` is called at the start of each forward, and the first
commit's hook or the first read of a backward tells the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

import torch

from offload.client import Phase
from offload.config import check_index, check_min_elements
from offload.engine import OffloadEngine
from offload.groups.chunk import ChunkGroups, VirtualPipelineQueue
from offload.groups.halves import CallReads, HalfReads, RecomputedHalves
from offload.groups.reports import FORWARDS_WITHOUT_END, MarkReport
from offload.groups.seen import GroupLedgers, SeenStep, StepClock
from offload.ids import ChunkId
from offload.policy.actions import Action, Kind, Lookahead
from offload.saved.handles import Handle, SavedChunk
from offload.transfer.block import DeviceBlock
from offload.transfer.coming import ComingReads
from offload.versions import queue_callback

# chunks that a prefetch looks at: the one being read and what follows; more only cost host time
_CHUNKS_AHEAD = 3

_MOST_STAGES = 4096  # virtual ones of a rank: more than any model has layers


class ChunkTracker:
    """The chunks of one engine, by (virtual stage, microbatch), and the cursor over the step's actions.

    ledgers: count what the groups of a chunk saved before its forward begins again.
    """

    def __init__(self, engine: OffloadEngine, ledgers: GroupLedgers) -> None:
        self.engine = engine
        self.engine.on_read(self.on_read)
        self.do_offload = True
        self.mark_report = MarkReport()
        self.open_regions = 0  # checkpointed forwards that keep a part, running now
        self._ledgers = ledgers
        # of a step whose tensors have all been read, where nobody calls `step_end`
        self.drop_step: Callable[[], None] = self.forget_step
        # with the names of other libraries in compat
        self.new_chunk: Callable[..., ChunkGroups] = partial(ChunkGroups, engine=engine, cursor=self)
        self.clock = StepClock(engine.transfers)
        self.handlers: dict[ChunkId, ChunkGroups] = {}
        self.retired: list[SavedChunk] = []  # forwards of this step that were begun again
        # in this step, into graphs: no step to come runs their marks
        self.captured: set[ChunkGroups] = set()
        self._lookahead = Lookahead()
        self.queue = VirtualPipelineQueue()  # where neither a schedule nor an earlier step tells what comes
        self.forward: ChunkGroups | None = None
        self.backward: ChunkGroups | None = None
        self._kind = "B"
        self._coming: list[ComingReads] = []
        self.announced = False
        # who says when a forward begins: a stage, inside one; else who called `begin_forward`; else nobody
        self.inside_announced_forward = False
        self._inferred: Action | None = None  # that is under way, where nobody announces any
        self.forwards_by_hand = False
        # of earlier steps, with the number of step ends that they have outlived
        self.carried: list[tuple[int, SavedChunk]] = []
        self._counts: dict[int, int] = defaultdict(int)
        self.forward_order: list[ChunkGroups] = []
        self.backward_order: dict[ChunkGroups, None] = {}
        self._reads = 0
        self._read_bytes = 0  # since the prefetch was pumped last
        self._halves: defaultdict[int, HalfReads] = defaultdict(HalfReads)  # by stage
        self.again = RecomputedHalves(engine)
        self._log: list[DeviceBlock] = []
        self._weight_half_waits = False  # for something that the I under way will not leave there

    def set_order(self, actions: Sequence[tuple[str, int, int]] | None) -> None:
        """This rank's step as ("F"|"B"|"I"|"W", virtual stage, microbatch); None goes back to what the last
        step was seen to do."""
        self._lookahead.give(actions)

    def switch(self, on: bool) -> None:
        self.do_offload = on
        for handler in self.handlers.values():
            handler.do_offload = on

    # -- chunks, announced -----------------------------------------------------------------------------------
    def begin_chunk(self, stage: int, microbatch: int) -> None:
        """The forward of (virtual stage, microbatch) begins; its marks and hooks belong to this chunk from
        now on.

        Blocks the host: never, but once for a plan that has settled, where cached device memory goes back
        (`trim_device`).
        """
        check_index("stage", stage)
        check_index("microbatch", microbatch)
        with self.engine.lock:
            self.announced = self.inside_announced_forward = True
            self._begin(ChunkId(stage, microbatch), self.engine.config.min_offloaded_tensor_size)
            self.clock.start(Action("F", stage, microbatch))

    def end_forward(self, stage: int, microbatch: int) -> None:
        """That forward is complete: its bytes may be fetched back from now on."""
        with self.engine.lock:
            handler = self.handlers.get(ChunkId(stage, microbatch))
            self.inside_announced_forward = False
            self.clock.stop(Action("F", stage, microbatch))
            if handler is not None:
                handler.complete()
                if self._halves[stage].input_reads is False:
                    # its input half reads nothing: fetch for the weight half, when the input half is over
                    handler.saved.expect(())
                elif Action("I", stage, microbatch) in self._lookahead.actions and (
                    passed := self._halves[stage].passed_over(handler.saved)
                ):
                    handler.saved.expect_reverse(passed)
                self.look_ahead()
                self.pump()

    def begin_backward(self, stage: int, microbatch: int, kind: str) -> None:
        """A backward of that chunk begins. kind: "B" whole, "I" input half, "W" weight half."""
        _check_backward(kind)
        check_index("stage", stage)
        check_index("microbatch", microbatch)
        with self.engine.lock:
            handler = self.handlers.get(ChunkId(stage, microbatch))
            action = Action(cast(Kind, kind), stage, microbatch)
            self._lookahead.advance(action)
            self.clock.start(action)
            self.engine.hooks.input_half, self.engine.hooks.passed = kind == "I", 0
            if handler is not None and handler.begun:
                if kind == "I":
                    self._leave_for_weight_half(handler)
                elif kind == "W":
                    handler.saved.ends_here()
                # a W after an I that read nothing is a whole backward
                if kind == "I" or (kind == "W" and self._halves[stage].input_reads):
                    self.again.begin(kind, handler.id)
                self.start_reading(handler, kind)
                self.pump()

    def end_backward(self, stage: int, microbatch: int, kind: str) -> None:
        """That backward is over. After an input half, what was fetched and is clean is dropped: the weight
        half reads less."""
        _check_backward(kind)
        with self.engine.lock:
            handler = self.handlers.get(ChunkId(stage, microbatch))
            self.clock.stop(Action(cast(Kind, kind), stage, microbatch))
            self.engine.hooks.input_half = False
            if handler is None or not handler.begun:
                return
            halves = self._halves[stage]
            if kind != "B":
                self.again.end()
            if kind == "I" and self._reads + self.engine.hooks.passed > 0:
                halves.input_half_ended(handler.saved, self.engine.transfers, self._log)
                self._log.clear()
            elif kind == "I":
                halves.input_reads = False
                handler.saved.expect_reverse()
            elif kind == "W":
                halves.weight_half_ended(self._log, handler.groups, self.again.left(handler.id))
                for place, group in enumerate(handler.groups):
                    group.left_bytes = self.again.left_bytes(handler.id, place)
                self._log.clear()
            self.backward = None
            self.look_ahead()
            self.pump()

    # -- chunks, one call a forward --------------------------------------------------------------------------
    def begin_forward(
        self,
        vp_size: int | None = None,
        vp_stage: int | None = None,
        min_offloaded_tensor_size: int | None = None,
    ) -> None:
        """A forward of virtual stage `vp_stage` begins, of the next microbatch of that stage. Call at the
        start of every forward; from the first call on, none is inferred.

        A forward without gradients belongs to no chunk, and one inside a backward to the chunk that it
        recomputes: neither is counted.
        vp_size: virtual stages of this rank, None for 1. vp_stage: None for 0. min_offloaded_tensor_size:
        elements, None for the config's. Raises ValueError for a stage outside 0..vp_size-1. Blocks the host:
        as `begin_chunk`.
        """
        size = 1 if vp_size is None else vp_size
        stage = 0 if vp_stage is None else vp_stage
        check_index("vp_size", size)
        check_index("vp_stage", stage)
        if stage >= size:
            raise ValueError(
                f"vp_stage is {vp_stage!r} and vp_size {vp_size!r}; vp_stage must be in 0..vp_size-1, and "
                "vp_size 1 or more"
            )
        if size > _MOST_STAGES:
            raise ValueError(
                f"vp_size is {size:,}; it counts the virtual stages of one rank, at most {_MOST_STAGES:,}"
            )
        if min_offloaded_tensor_size is not None:
            check_min_elements(min_offloaded_tensor_size)
        self.forwards_by_hand = True
        self._begin_next(stage, min_offloaded_tensor_size)
        if self.forward is not None and torch._C._current_graph_task_id() == -1:
            self.queue.resize(size)
            self.queue.stage(self.forward, stage)

    def begin_inferred_forward(self, stage: int, min_elements: int | None) -> None:
        """A model whose forwards nobody announces begins one. Where somebody does, by `begin_chunk` or
        `begin_forward`, only the threshold is taken. stage: a virtual one, of its own for each model.
        min_elements: None for the config's. Blocks the host: as `begin_chunk`."""
        if not (self.inside_announced_forward or self.forwards_by_hand):
            # a loss beside a pipeline's stages, which have numbers of their own
            self._begin_next(stage + _MOST_STAGES if self.announced else stage, min_elements)
            if self.forward is not None and not self.announced and torch._C._current_graph_task_id() == -1:
                self._time_inferred(Action("F", *self.forward.id))
        elif min_elements is not None and self.forward is not None:
            self.forward.min_offloaded_tensor_size = min_elements

    def end_inferred_forward(self) -> None:
        """That forward is complete."""
        if self._inferred is not None and self._inferred.kind == "F":
            self._time_inferred(None)

    def _time_inferred(self, action: Action | None) -> None:
        """An action that nobody announces begins, and the one before it is over. A backward is over when
        autograd says so."""
        with self.engine.lock:
            if self._inferred is not None:
                self.clock.stop(self._inferred)
            self._inferred = action
            if action is not None:
                self.clock.start(action)
                if action.kind == "B":
                    queue_callback(partial(self._time_ends, action))

    def _time_ends(self, action: Action) -> None:
        if self._inferred == action:
            self._time_inferred(None)

    def _begin_next(self, stage: int, min_elements: int | None) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint runs a forward again
        with self.engine.lock:
            if self.forward is not None:
                self.forward.complete()
            if not torch.is_grad_enabled():
                self.forward = None  # an evaluation saves nothing, and is no microbatch of the step
                return
            if self._counts[stage] >= FORWARDS_WITHOUT_END and next(self.living_blocks(), None) is None:
                self.drop_step()
            microbatch = self._counts[stage]
            self._counts[stage] += 1
            self.mark_report.forwards(stage, self._counts[stage])
            least = self.engine.config.min_offloaded_tensor_size if min_elements is None else min_elements
            self._begin(ChunkId(stage, microbatch), least)
            self.pump()

    def _following(self) -> ChunkGroups | None:
        """The chunk that is probably read next, if neither a schedule nor an earlier step tells: the first
        of the queue; where nobody says when a forward begins, the one whose forward began last, among those
        without a backward so far."""
        if self.forwards_by_hand or self.announced:
            return self.queue.front()
        latest_first = reversed(self.forward_order)
        return next((chunk for chunk in latest_first if chunk not in self.backward_order), None)

    def _begin(self, chunk_id: ChunkId, min_elements: int) -> None:
        handler = self.handlers.get(chunk_id)
        if handler is None:
            handler = self.new_chunk(min_elements, chunk_id=chunk_id)
            handler.do_offload = self.do_offload
            self.handlers[chunk_id] = handler
        # the same forward again in one step: an exception was caught, or gradients are being verified
        elif handler.begun:
            self._ledgers.count(handler.groups)
            self.retired.append(handler.saved)
            self.mark_report.forwards(chunk_id.stage, len(self.retired))
            handler.reset()
        handler.min_offloaded_tensor_size = min_elements
        self.forward = handler
        if not self.forward_order:
            self.engine.begin_step()
        if (sees := self.engine.on_phase) is not None:
            sees(Phase.FORWARD)
        self.forward_order.append(handler)
        self._lookahead.advance(Action("F", *chunk_id))
        self.look_ahead()

    # -- reading ---------------------------------------------------------------------------------------------
    def reading(self, handler: ChunkGroups) -> None:
        """A hook of a commit ran, or a saved tensor was read: the chunk of `handler` is the one being
        read."""
        with self.engine.lock:
            if handler is not self.backward and handler.begun:
                if not self.announced:
                    action = Action("B", *handler.id)
                    self._lookahead.advance(action)
                    if not self.forwards_by_hand and torch._C._current_graph_task_id() != -1:
                        self._time_inferred(action)
                self.start_reading(handler, "B")
            self.pump()

    def _leave_for_weight_half(self, handler: ChunkGroups) -> None:
        """An I of this chunk begins: mark what it will leave on the device for its W."""
        limits, room_bytes = self.engine.limits, self.engine.limits.half_room_bytes
        following = next(self._lookahead.coming(), None)
        is_next = following is not None and following.kind == "W" and following.chunk == handler.id
        if room_bytes is None:
            room_bytes = limits.max_restoring_bytes if is_next else 0
        again_bytes = limits.again_room_bytes
        left = self.again.leave_for_weight_half(
            handler.id, room_bytes if again_bytes is None else again_bytes
        )
        halves = self._halves[handler.id.stage]
        leaves_all = halves.leave_for_weight_half(handler.saved, room_bytes, left)
        self._weight_half_waits = is_next and halves.is_known and not leaves_all

    def call_reads(self, handler: ChunkGroups, place: int) -> CallReads | None:
        """Reads of a recomputed call of this chunk that begins, whose input is the group at `place`; None
        where nothing says that the chunk's backward is split."""
        stage = handler.id.stage
        reads = self._halves[stage].input_reads
        if reads is None:
            reads = Action("I", *handler.id) in self._lookahead.actions
        return self.again.reads(handler.id, place) if reads else None

    def start_reading(self, handler: ChunkGroups, kind: str) -> None:
        if (sees := self.engine.on_phase) is not None:
            sees(Phase.BACKWARD)
        self.queue.discard(handler)
        handler.saved.complete()
        self.backward = handler
        self._kind = kind
        self._reads = 0
        self._log.clear()
        self.backward_order.setdefault(handler)
        self.look_ahead()

    def on_read(self, handle: Handle) -> None:
        block = handle.record.block
        chunk_id = block.group.chunk
        if self.backward is None or self.backward.id is not chunk_id:
            handler = self.handlers.get(chunk_id)
            if handler is None:
                return
            if handler is not self.backward:
                self.reading(handler)
        self._reads += 1
        if self._kind != "B":
            self._log.append(block)
        if block.unread == 0:
            self._read_bytes += block.nbytes
            # less cannot have made room for a piece
            if self._read_bytes >= self.engine.prefetch.stride_bytes:
                self.pump()

    def look_ahead(self) -> None:
        """The chunks that backwards will read next, soonest first; one whose forward runs is among them
        before it has saved anything."""
        coming = [] if self.backward is None else [self.backward.saved.coming]
        # behind an I whose W fetches, what is read later would be fetched first
        behind = self._kind == "I" and self.backward is not None and self._weight_half_waits
        for action in () if behind else self._lookahead.coming():
            handler = self.handlers.get(ChunkId(*action.chunk))
            if (
                handler is not None
                and (handler.begun or handler is self.forward)
                and handler.saved.coming not in coming
            ):
                coming.append(handler.saved.coming)
                if len(coming) == _CHUNKS_AHEAD:
                    break
        following = None if coming else self._following()
        if following is not None:
            coming.append(following.saved.coming)
        self._coming = coming

    def living_blocks(self) -> Iterator[DeviceBlock]:
        """Every saved tensor of this step, or carried into it, that a graph still holds."""
        chunks = [*self.retired, *(handler.saved for handler in self.handlers.values())]
        for chunk in [*(chunk for _, chunk in self.carried), *chunks]:
            yield from chunk.living()

    def pump(self) -> None:
        """Keep the h2d lane supplied with what the coming reads want. Blocks the host: never."""
        self._read_bytes = 0
        if self._coming:
            if self.engine.transfers.dropped and self.backward is not None:
                self.engine.prefetch.look_back(self.backward.saved.coming)
            self.engine.prefetch.pump(self._coming)

    # -- step ------------------------------------------------------------------------------------------------
    def seen(self, seconds: dict[Action, float] | None) -> SeenStep:
        left_out = self.captured
        return SeenStep(
            chunks=[each for each in self.handlers.values() if each.begun and each not in left_out],
            forward_order=[handler for handler in self.forward_order if handler not in left_out],
            backward_order=[handler for handler in self.backward_order if handler not in left_out],
            actions=self._lookahead.seen,
            seconds=seconds,
            idle=[stage for stage, halves in self._halves.items() if halves.input_reads is False],
            halves=self.again.seen(),
        )

    def forget_step(self) -> None:
        """The step is over: what was seen of it becomes the hint for the next one."""
        for handler in self.handlers.values():
            if handler.begun:
                handler.reset()
        self.retired.clear()
        self.captured.clear()
        self.again.end_step()
        self._lookahead.end_step()
        self.queue.clear()
        self.forward = self.backward = None
        self._inferred = None
        self._coming = []
        self._counts.clear()
        self.forward_order = []
        self.backward_order = {}


def _check_backward(kind: str) -> None:
    if kind not in ("B", "I", "W"):
        raise ValueError(
            f"backward kind is {kind!r}, must be 'B' (whole), 'I' (input half) or 'W' (weight half)"
        )
