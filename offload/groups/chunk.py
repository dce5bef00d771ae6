"""The handler of one chunk: which of its groups is open, which groups leave, and when their tensors are sent
and fetched; the scope that takes what autograd saves for a group; and the virtual-pipeline queue: from
the order in which chunks were announced, the order in which their backwards should come.

One invariant: every tensor that autograd hands back finds its own record through its handle; a handler is
never asked "which chunk is current" to read anything. Positions (`_index`, the recorded groups) serve the
plan and the prefetch only. What a scope is given after its chunk was begun again, or after its step, stays
on the device. The queue is a hint for the first step, when no schedule was given and no step has been seen.
Correctness never asks it.

A handler is built once for each (virtual stage, microbatch) and used again in every step. `saved` is what it
holds of this step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from offload.config import check_min_elements
from offload.device import Lane
from offload.engine import OffloadEngine
from offload.errors import GroupOrderError
from offload.groups.group import Cost, Group
from offload.groups.release import release
from offload.ids import ChunkId, GroupId
from offload.saved.filters import Verdict, judge
from offload.saved.handles import Handle, SavedChunk, SavedGroup
from offload.transfer.block import DeviceBlock


class Cursor(Protocol):
    """Receiver of a chunk's reports: it knows which chunk is current."""

    def living_blocks(self) -> Iterator[DeviceBlock]: ...

    def reading(self, handler: ChunkGroups) -> None: ...


class ChunkGroups:
    """Groups of one chunk.

    min_offloaded_tensor_size: elements. engine: whose lanes and store it uses. manager: None for a chunk that
        stands alone.
    """

    def __init__(
        self,
        min_offloaded_tensor_size: int,
        *,
        engine: OffloadEngine,
        chunk_id: ChunkId = ChunkId(0, 0),
        cursor: Cursor | None = None,
    ) -> None:
        check_min_elements(min_offloaded_tensor_size)
        self.id = chunk_id
        self.engine = engine
        self.cursor = cursor
        self.min_offloaded_tensor_size = min_offloaded_tensor_size
        self.do_offload = True
        self.groups: list[Group] = []
        self.stays: frozenset[int] = frozenset()
        # of groups that leave in part: the slot from which on their tensors stay
        self.stays_from: dict[int, int] = {}
        # of the step that comes, whose groups nobody has seen yet: of the bytes that it saves so many leave,
        # the first ones; None: as `stays` says
        self.first_leave_bytes: float | None = None
        self.saved = SavedChunk(chunk_id)
        self.begun = False
        self._index = 0
        self._regions = 0
        # not committed yet; None: started while nothing could leave
        self._started: list[tuple[str, Group | None]] = []

    # -- one step --------------------------------------------------------------------------------------------
    def reset(self) -> None:
        """Forget this step's tensors; the recorded groups stay."""
        self.saved = SavedChunk(self.id)
        for group in self.groups:
            group.saved = None
        self.begun = False
        self._index = 0
        self._regions = 0
        self._started.clear()
        self.first_leave_bytes = None

    def complete(self) -> None:
        """Its forward is over. Where no group was started, without gradients or offload, another forward of
        it may come in this step or the next."""
        if self.begun:
            self.saved.complete()

    def end_recording(self) -> None:
        """Groups that this step did not start are no longer part of the chunk. For one that was begun."""
        del self.groups[self._index :]

    # -- marks, forward --------------------------------------------------------------------------------------
    def _new_group(self, name: str) -> Group:
        return Group(name)

    def on_group_start_forward(self, name: str, *, required: bool = False, cost: Cost | None = None) -> Group:
        """Open the next group. Its tensors may leave from now on; `close` and `send` end it. required: no
        plan keeps it on the device. cost: of its block, where it is known."""
        with self.engine.lock:
            index = self._index
            if index < len(self.groups) and self.groups[index].name == name:
                group = self.groups[index]
            else:  # a new group, or another shape of step than the recorded one: record from here on
                del self.groups[index:]
                group = self._new_group(name)
                self.groups.append(group)
            self._index = index + 1
            self.begun = True
            by_place = self.first_leave_bytes is None
            group.required = required
            group.cost = cost
            group.stays = self._stays(index) and not required
            group.committed = group.sent = group.hooked = group.encloses = False
            outer = self.innermost_open()
            if outer is not None:
                outer.encloses = True
            group.total_offload_bytes = group.total_tensor_count = group.logical_bytes = 0
            group.slot_bytes = ()
            group.regions.clear()
            group.since = torch._C._autograd._get_sequence_nr()
            group.replayed.clear()
            leaves = self.do_offload and not group.stays
            group.saved = SavedGroup(
                GroupId(self.id, index, name),
                leaves=leaves,
                stays_from=self.stays_from.get(index) if by_place and not required else None,
                kept_by_plan=self.do_offload,
            )
            self._started.append((name, group))
            return group

    def _stays(self, index: int) -> bool:
        """Return True if the plan keeps the group that starts at this place."""
        if self.first_leave_bytes is None:
            return index in self.stays
        before = (group.saved for group in self.groups[:index])
        return sum(saved.nbytes for saved in before if saved is not None) >= self.first_leave_bytes

    def mute(self, name: str) -> None:
        """Note a group that is started while nothing may be offloaded, so that its commit finds a start."""
        self._started.append((name, None))

    def is_empty_chunk(self, name: str | None = None) -> bool:
        """Return True if the chunk has no group, or none of that name."""
        return not any(name in (None, group.name) for group in self.groups)

    def innermost_open(self) -> Group | None:
        return next((group for _, group in reversed(self._started) if group is not None), None)

    def open_groups(self) -> Iterator[SavedGroup]:
        """Saves of the groups that are started and not committed."""
        for _, group in self._started:
            if group is not None and group.saved is not None:
                yield group.saved

    def close(self, name: str | None) -> Group | None:
        """Take the innermost start (of that name) out of the open ones; its group, None if it was muted.
        Raises GroupOrderError if there is none."""
        started = self._started
        for position in range(len(started) - 1, -1, -1):
            of, group = started[position]
            if of == name or (name is None and group is not None):
                del started[position]
                if group is not None:
                    group.committed = True
                return group
        names = ", ".join(of for of, group in started if group is not None) or "none"
        raise GroupOrderError(
            f"chunk {self.id}: commit of group {name!r}, which has not been started; open: {names}. "
            f"Call group_start(tensor, {name!r}) before it, once for each commit, in the same forward: under "
            "offload.apply one begins where the model is called, unless init_chunk_handler() begins it before"
        )

    def close_own(self, group: Group) -> bool:
        """Take this very start out of the open ones: another thread's may have the same name. False where it
        is not open: its forward was begun again in between, or its step has ended."""
        for position, (_, started) in enumerate(self._started):
            if started is group:
                del self._started[position]
                group.committed = True
                return True
        return False

    def send(self, group: Group, forced: list[torch.Tensor]) -> None:
        """Send what has not left yet of a group that is closed, and release `forced`. Callers hold the
        engine's lock. Blocks the host: never."""
        saved = group.saved
        if saved is None:
            return  # its forward was begun again in between, or its step has ended
        self.engine.store.commit(saved)
        group.sent = True
        group.total_offload_bytes = saved.nbytes
        group.total_tensor_count = saved.slots
        group.logical_bytes = saved.logical_bytes
        group.slot_bytes = tuple(sorted(saved.slot_bytes.items()))
        # what the plan keeps is not released either, and that is nobody's mistake
        if forced and saved.leaves:
            blocks = self.saved.living() if self.cursor is None else self.cursor.living_blocks()
            release(forced, saved, blocks, self.engine.transfers)

    def read_together(self, blocks: Sequence[DeviceBlock]) -> None:
        """A recompute will read these saves of this chunk, first to last, before it computes."""
        self.saved.read_together(blocks)
        self._regions += 1
        for block in blocks:
            self.groups[block.group.place].regions[block.slot] = self._regions

    def may_leave(self, tensor: torch.Tensor) -> bool:
        """False below the size limit, for parameters and their views, and for tensors marked not
        offloadable."""
        verdict = judge(tensor, self.engine.device, self.engine.externals, self.min_offloaded_tensor_size)
        return verdict is Verdict.ELIGIBLE

    # -- marks, backward -------------------------------------------------------------------------------------
    def output_has_gradient(self, gradients: object) -> None:
        """Hook of the node that made a group's output: the backward has reached the end of the group, so this
        chunk is the one being read. Nothing waits here; each reader waits for its own bytes."""
        if self.cursor is not None:
            self.cursor.reading(self)


class GroupScope:
    """Takes what autograd saves for `group`, until it is committed; after that a save is passed on to the
    scope outside."""

    __slots__ = ("_group", "_handler", "_saved", "min_elements")

    def __init__(self, handler: ChunkGroups, group: Group) -> None:
        self._handler = handler
        self._group = group
        self._saved = group.saved
        self.min_elements = handler.min_offloaded_tensor_size

    @property
    def name(self) -> str:
        """Name of the group that owns what is saved."""
        return self._group.name

    @property
    def chunk(self) -> ChunkId:
        """Chunk of that group."""
        return self._handler.id

    def take(self, tensor: torch.Tensor) -> Handle | None:
        group, saved, handler = self._group, self._saved, self._handler
        if group.committed or saved is None or group.saved is not saved or not handler.do_offload:
            return None
        if not tensor.requires_grad:
            saved.unwritten_until = torch._C._autograd._get_sequence_nr()
        return handler.engine.store.save(tensor, handler.saved, saved)

    def note_replayed(self, tensor: torch.Tensor) -> None:
        self._group.replayed[tensor.untyped_storage().data_ptr()] = tensor.numel() * tensor.element_size()


class KeptScope(GroupScope):
    """Takes what an operator made while `group` was open, though by now the group may be committed and sent:
    the rest is sent after it.

    lane: the compute lane that the operator ran on; None for the current one at the save.
    """

    __slots__ = ("_lane",)

    def __init__(self, handler: ChunkGroups, group: Group, lane: Lane | None) -> None:
        super().__init__(handler, group)
        self._lane = lane

    def take(self, tensor: torch.Tensor) -> Handle | None:
        group, saved, handler = self._group, self._saved, self._handler
        if saved is None or group.saved is not saved or not handler.do_offload:
            return None
        # the region's dispatch mode would only hand on, at 10 microseconds a call
        with torch._C._DisableTorchDispatch():
            handle = handler.engine.store.save(tensor, handler.saved, saved, self._lane)
            if group.sent:
                handler.send(group, [])
        return handle


class VirtualPipelineQueue:
    def __init__(self) -> None:
        self.stages: list[list[ChunkGroups]] = [[]]
        self.chunks: list[ChunkGroups] = []

    def resize(self, num_stages: int) -> None:
        """Have at least `num_stages` virtual stages."""
        self.stages.extend([] for _ in range(num_stages - len(self.stages)))

    def stage(self, chunk: ChunkGroups, stage: int) -> None:
        """Take a chunk in. Reaching the last stage flushes, queues the chunk at once, and flushes again."""
        last = stage == len(self.stages) - 1
        if last:
            self._flush_if_even()
        self.stages[stage].append(chunk)
        if last:
            self.chunks.append(chunk)
            self._flush_if_even()

    def _flush_if_even(self) -> None:
        if len({len(staged) for staged in self.stages}) == 1:
            self._move()

    def flush(self) -> None:
        """Move the staged chunks to the queue, last stage first, once the first and the last stage have
        equally many.

        Raises AssertionError if the stages between them do not: callers that stage by hand have lost a chunk.
        """
        if len(self.stages[0]) == len(self.stages[-1]):
            counts = [len(staged) for staged in self.stages]
            assert len(set(counts)) == 1, f"All stages must have same chunk count, got {counts}"
            self._move()

    def _move(self) -> None:
        self.stages[-1].clear()  # these are in the queue already
        for staged in reversed(self.stages):
            self.chunks.extend(staged)
            staged.clear()

    def front(self, name: str | None = None) -> ChunkGroups | None:
        """The next chunk that has a group (of that name), not consumed; None if there is none."""
        return next((chunk for chunk in self.chunks if not chunk.is_empty_chunk(name)), None)

    def pop(self, name: str | None = None) -> ChunkGroups:
        """Drop chunks up to and including the next one that has a group (of that name), and return that one.

        Raises AssertionError "No non-empty chunk found" if there is none; nothing is dropped then.
        """
        chunk = self.front(name)
        assert chunk is not None, (
            f"No non-empty chunk found among {len(self.chunks)} queued chunks for group {name!r}"
        )
        del self.chunks[: self.chunks.index(chunk) + 1]
        return chunk

    def discard(self, chunk: ChunkGroups) -> None:
        """Its backward has begun, wherever it stands."""
        if chunk in self.chunks:
            self.chunks.remove(chunk)

    def clear(self) -> None:
        self.chunks.clear()
        for staged in self.stages:
            staged.clear()
