"""A chunk's handler under S2's names: tensors by tag, groups in bulk, single tensors by hand, and looks at
what was recorded.

The engine's own path, marks and hooks, calls none of these methods; callers of the source do. One invariant:
they add ways in, and no state of a tensor: what they save are the chunk's own records.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, Protocol

import torch

from offload.compat.manual_copies import ManualCopies
from offload.compat.tensor_pool import GPUTensorPool
from offload.device import Lane
from offload.engine import OffloadEngine, default_engine
from offload.errors import GroupOrderError
from offload.groups.chunk import ChunkGroups, Cursor
from offload.groups.group import OffloadTensorGroup
from offload.groups.release import checked_tensors
from offload.ids import ChunkId
from offload.saved.handles import Handle, Passed
from offload.transfer.admission import Priority
from offload.transfer.block import BlockState

__all__ = ["ChunkOffloadHandler", "TensorTag"]


class TensorTag(NamedTuple):
    """A tensor pushed by hand: the index of its group in the chunk, and its position in that group. Never
    used twice."""

    group_index: int
    position: int


class Queued(Cursor, Protocol):
    """A manager with the queue of backwards."""

    cpu_tensor_pool: GPUTensorPool

    @property
    def is_warmup(self) -> bool: ...

    def front_backward_chunk(self, name: str | None = None) -> ChunkOffloadHandler | None: ...


class ChunkOffloadHandler(ChunkGroups, ManualCopies):
    """Groups of one chunk.

    min_offloaded_tensor_size: elements. cpu_tensor_pool: host buffers for `offload` and `reload` called by
        hand; the hooks' own path takes blocks from the engine's arena. engine: whose lanes and store it uses;
        None takes the default one.
    """

    def __init__(
        self,
        min_offloaded_tensor_size: int,
        cpu_tensor_pool: GPUTensorPool | None = None,
        d2h_stream: Lane | None = None,
        h2d_stream: Lane | None = None,
        *,
        engine: OffloadEngine | None = None,
        chunk_id: ChunkId = ChunkId(0, 0),
        manager: Queued | None = None,
    ) -> None:
        engine = engine if engine is not None else default_engine()
        ChunkGroups.__init__(
            self, min_offloaded_tensor_size, engine=engine, chunk_id=chunk_id, manager=manager
        )
        ends_with_step = manager is not None and cpu_tensor_pool is manager.cpu_tensor_pool
        ManualCopies.__init__(
            self, engine, chunk_id, cpu_tensor_pool, d2h_stream, h2d_stream, ends_with_step=ends_with_step
        )
        self._queue = manager
        self._tags: dict[TensorTag, Handle | Passed] = {}
        self._pushed: Counter[int] = Counter()
        self._reload_index = 0

    def reset(self) -> None:
        """Forget this step's tensors; the recorded groups stay."""
        super().reset()
        self._tags.clear()
        self._pushed.clear()
        self._reload_index = 0

    # -- looking at the recorded groups ----------------------------------------------------------------------
    def find_group_with_name(self, name: str, start_index: int = 0) -> OffloadTensorGroup | None:
        """The first recorded group of that name at or after `start_index`."""
        return next((group for group in self.groups[start_index:] if group.name == name), None)

    def find_next_group(self, name: str | None = None) -> OffloadTensorGroup | None:
        """The next group to be started, of that name if one is given."""
        if name is None:
            return self.groups[self._index] if self._index < len(self.groups) else None
        return self.find_group_with_name(name, self._index)

    def is_empty_chunk(self, name: str | None = None) -> bool:
        """Whether the chunk has no group, or none of that name."""
        return not self.groups if name is None else self.find_group_with_name(name) is None

    def finish_all_groups(self, name: str | None = None) -> bool:
        """Whether every recorded group has been started, or none of that name remains. Needs a name while
        some remain."""
        if self.groups and self._index >= len(self.groups):
            return True
        assert name is not None, (
            f"{self.id}: {len(self.groups) - self._index} of {len(self.groups)} groups remain; say of which "
            "name"
        )
        return self.find_group_with_name(name, self._index) is None

    def get_max_deduplicated_groups(self) -> int:
        """Distinct group names."""
        return len({group.name for group in self.groups})

    # -- what the sources' autograd Functions call -----------------------------------------------------------
    def commit(
        self,
        name: str,
        forced_released_tensors: list[torch.Tensor] | None = None,
        delay_offload: bool = False,
    ) -> None:
        """Close the innermost open group of that name; send it, or leave it to the manager's
        `flush_delayed_groups`."""
        if self._manager is None:
            self.on_group_commit_forward(forced_released_tensors, name=name)
            return
        group = self.close(name)
        if group is not None:
            self._manager.commit(self, group, forced_released_tensors, delay_offload)

    def on_group_commit_backward(self, name: str) -> None:
        """The backward reaches the end of a group."""
        self.output_has_gradient(None)

    def on_group_start_backward(self) -> None:
        """The backward has passed a group: room for the next ones."""
        if self._manager is not None:
            with self.engine.lock:
                self._manager.pump()

    # -- by hand: tensors ------------------------------------------------------------------------------------
    tensor_need_offloading_checker = ChunkGroups.may_leave

    def tensor_push(self, tensor: torch.Tensor) -> TensorTag:
        """Save `tensor` in the innermost open group; a fake or functional one is passed through. Returns its
        tag for `tensor_pop`."""
        with self.engine.lock:
            group = self.innermost_open()
            if group is None or group.saved is None:
                raise GroupOrderError(
                    f"chunk {self.id}: tensor_push of shape {tuple(tensor.shape)}, but no group is open; "
                    "call on_group_start_forward first"
                )
            group.hooked = True
            place = group.saved.id.place
            tag = TensorTag(place, self._pushed[place])
            self._pushed[place] += 1
            if self.do_offload and self.tensor_need_offloading_checker(tensor):
                self._tags[tag] = self.engine.store.save(tensor, self.saved, group.saved)
            else:
                self._tags[tag] = Passed(tensor)
            return tag

    def tensor_pop(self, tag: TensorTag) -> torch.Tensor:
        """The tensor of that tag, on the device; once. Raises KeyError for a tag that is unknown or popped
        already."""
        with self.engine.lock:
            if tag not in self._tags:
                raise KeyError(
                    f"{self.id} holds no tensor under tag {tuple(tag)}; it holds {len(self._tags)} others"
                )
            packed = self._tags.pop(tag)
            return packed.read() if isinstance(packed, Passed) else self.engine.store.read(packed)

    # -- by hand: groups -------------------------------------------------------------------------------------
    def should_bulk_offload(self) -> bool:
        """Whether the group at hand leaves: not while offloading is off, nor when the plan keeps it, nor,
        after warm-up, the last of its name in the chunk that is read next: it would have to come back at
        once."""
        group = self.innermost_open()
        if group is None or not self.do_offload or not group.offload:
            return False
        manager = self._queue
        if manager is None or manager.is_warmup or manager.front_backward_chunk(group.name) is not self:
            return True
        return self.find_next_group(group.name) is not None

    def bulk_offload_group(self) -> None:
        """Send every eligible tensor of the innermost open group; small ones stay."""
        with self.engine.lock:
            group = self.innermost_open()
            if group is not None and group.saved is not None and self.should_bulk_offload():
                self.engine.store.commit(group.saved)

    def bulk_offload(self, forced_released_tensors: list[torch.Tensor] | None = None) -> None:
        """Send the innermost open group and free the listed tensors' storage."""
        forced = checked_tensors(forced_released_tensors)
        with self.engine.lock:
            group = self.innermost_open()
            if group is not None and self.should_bulk_offload():
                self.send(group, forced)

    def bulk_reload_group(self) -> bool:
        """Fetch the group back that is read next: the last one not fetched yet. False if none is left."""
        with self.engine.lock:
            while self._reload_index < len(self.groups):
                group = self.groups[len(self.groups) - 1 - self._reload_index]
                self._reload_index += 1
                if group.saved is None:
                    continue
                for transfer in group.saved.transfers:
                    self.engine.transfers.settle_spill(transfer)
                blocks = [block for block in group.saved.living() if block.state is BlockState.SPILLED]
                if blocks:
                    self.engine.transfers.restore(blocks, Priority.REQUIRED)
                    return True
            return False

    def pre_reload_last_layer(self) -> None:
        """Start fetching the chunk's last group, which its backward reads first."""
        if self._reload_index == 0:
            self.bulk_reload_group()

    def bulk_reload(self) -> None:
        """Fetch the next group back, or, where this chunk has none left, what the next chunk's backward reads
        first."""
        if not self.bulk_reload_group() and self._manager is not None:
            with self.engine.lock:
                self._manager.pump()
