"""A chunk's handler and its groups under Megatron-core's names: tensors by tag, groups in bulk, events and
sizes of a group, single tensors by hand, and queries of what was recorded (S2-23 to S2-27).

The engine's own marks and hooks call none of these methods; code written for Megatron-core does. One
invariant: they keep no state of a tensor of their own, and change nothing of what marks and saves recorded.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, cast

import torch

from offload.compat.tensor_pool import GPUTensorPool
from offload.device import Device, Event, Lane
from offload.device.cuda import CudaLane
from offload.engine import OffloadEngine, default_engine
from offload.errors import GroupOrderError, StaleHandleError
from offload.groups.chunk import ChunkGroups
from offload.groups.group import Group
from offload.groups.manager import GroupsManager
from offload.groups.release import checked_tensors, without_output
from offload.ids import ChunkId, Owner
from offload.saved.filters import is_plain
from offload.saved.handles import Handle, Passed
from offload.transfer.block import BlockState, ViewLayout, empty_at, place_of
from offload.transfer.copier import Priority

DYNAMIC_SHAPE_GROUPS = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})
"""Groups whose shapes change with the routing of tokens: a pool keyed by exact shape would grow with them.
The engine's own path lends blocks by the byte and needs no such rule; `ChunkOffloadHandler.offload`, called
directly, follows it."""


class OffloadTensorGroup(Group):
    """One group of a chunk.

    use_cpu_pool: whether a pool keyed by shape may serve it; None: unless its name is one of
        DYNAMIC_SHAPE_GROUPS. device: whose lanes its events are recorded on; None takes that of the default
        engine. Its methods take lanes of the device, or torch's streams on a GPU.
    total_offload_bytes, total_tensor_count: what was eligible to leave in the last step, one count a storage.
    """

    def __init__(self, name: str, use_cpu_pool: bool | None = None, *, device: Device | None = None) -> None:
        super().__init__(name)
        self.begin_names(use_cpu_pool, device)

    def begin_names(self, use_cpu_pool: bool | None, device: Device | None) -> None:
        """Add what the sources' names need, beside what every group has."""
        self.use_cpu_pool = self.name not in DYNAMIC_SHAPE_GROUPS if use_cpu_pool is None else use_cpu_pool
        self._device = device
        self._tensors: dict[object, torch.Tensor] = {}
        self._offload_event: Event | None = None
        self._reload_event: Event | None = None

    @property
    def offload(self) -> bool:
        """Predicate: the group leaves."""
        return not self.stays

    # -- tensors by tag --------------------------------------------------------------------------------------
    def push_tensor(self, tag: object, tensor: torch.Tensor) -> None:
        """Keep `tensor` under `tag`. Raises KeyError if the tag is taken."""
        if tag in self._tensors:
            raise KeyError(f"group {self.name!r} already holds a tensor under tag {tag!r}; pop it first")
        self._tensors[tag] = tensor

    def pop_tensor(self, tag: object) -> torch.Tensor:
        """Remove and return the tensor under `tag`. Raises KeyError if there is none."""
        if tag not in self._tensors:
            raise KeyError(
                f"group {self.name!r} holds no tensor under tag {tag!r}; it holds {len(self._tensors)} others"
            )
        return self._tensors.pop(tag)

    # -- events ----------------------------------------------------------------------------------------------
    def record_offload_event(self, stream: Lane | torch.Stream) -> None:
        """The group's spill is complete at this point of `stream`."""
        self._offload_event = self._on_device().record(_lane(stream))

    def wait_offload_event(self, stream: Lane | torch.Stream) -> None:
        """Order `stream` after the group's spill. Never blocks the host; nothing to wait for where none was
        recorded."""
        if self._offload_event is not None:
            self._on_device().wait(_lane(stream), self._offload_event, "restore")

    def record_reload_event(self, stream: Lane | torch.Stream) -> None:
        """The group's restore is complete at this point of `stream`."""
        self._reload_event = self._on_device().record(_lane(stream))

    def wait_reload_event(self, stream: Lane | torch.Stream) -> None:
        """Order `stream` after the group's restore. Never blocks the host; nothing to wait for where none was
        recorded."""
        if self._reload_event is not None:
            self._on_device().wait(_lane(stream), self._reload_event, "read")

    def _on_device(self) -> Device:
        return self._device or default_engine().device

    # -- sizes -----------------------------------------------------------------------------------------------
    def update_offload_info(self, tensor: torch.Tensor) -> None:
        """Count one more eligible tensor."""
        nbytes = tensor.numel() * tensor.element_size()
        self.total_offload_bytes += nbytes
        self.logical_bytes += nbytes
        self.total_tensor_count += 1

    def __repr__(self) -> str:
        return (
            f"OffloadTensorGroup({self.name!r}, {self.total_offload_bytes:,} bytes, "
            f"{'stays' if self.stays else 'leaves'})"
        )


def _lane(stream: Lane | torch.Stream) -> Lane:
    return CudaLane("by hand", stream) if isinstance(stream, torch.cuda.Stream) else cast(Lane, stream)


class TensorTag(NamedTuple):
    """A tensor pushed by hand: the index of its group in the chunk, and its position in that group. Never
    used twice."""

    group_index: int
    position: int


class OffloadState(NamedTuple):
    """A tensor copied to the host by hand with `offload`, and what `reload` needs."""

    device: torch.device
    cpu_tensor: torch.Tensor
    use_cpu_pool: bool
    stride: tuple[int, ...]
    lead: int  # its place (`place_of`)
    event: Event
    step: int


class ChunkOffloadHandler(ChunkGroups):
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
        manager: GroupsManager | None = None,
    ) -> None:
        engine = engine if engine is not None else default_engine()
        cursor = None if manager is None else manager.tracker
        super().__init__(min_offloaded_tensor_size, engine=engine, chunk_id=chunk_id, cursor=cursor)
        self.begin_names(cpu_tensor_pool, manager)
        self.d2h_stream: Lane = d2h_stream if d2h_stream is not None else engine.device.d2h
        self.h2d_stream: Lane = h2d_stream if h2d_stream is not None else engine.device.h2d

    def begin_names(self, cpu_tensor_pool: GPUTensorPool | None, manager: GroupsManager | None) -> None:
        """Add what the sources' names need, beside what every chunk has."""
        engine = self.engine
        if cpu_tensor_pool is None:
            cpu_tensor_pool = GPUTensorPool("cpu", pin_memory=True, arena=engine.arena)
        # the end of a step takes back the buffers of the manager's pool
        self._ends_with_step = cpu_tensor_pool is getattr(manager, "cpu_tensor_pool", None)
        cpu_tensor_pool.ask(engine.device)
        self.cpu_tensor_pool = cpu_tensor_pool
        self.d2h_stream, self.h2d_stream = engine.device.d2h, engine.device.h2d
        self._copies = engine.copier.of(Owner("by hand", str(self.id)))
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

    def _new_group(self, name: str) -> OffloadTensorGroup:
        return OffloadTensorGroup(name, device=self.engine.device)

    # -- looking at the recorded groups ----------------------------------------------------------------------
    def find_group_with_name(self, name: str, start_index: int = 0) -> Group | None:
        """The first recorded group of that name at or after `start_index`."""
        return next((group for group in self.groups[start_index:] if group.name == name), None)

    def find_next_group(self, name: str | None = None) -> Group | None:
        """The next group to be started, of that name if one is given."""
        return next((group for group in self.groups[self._index :] if name in (None, group.name)), None)

    def finish_all_groups(self, name: str | None = None) -> bool:
        """Predicate: every recorded group has been started, or none of that name remains. Needs a name while
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
        output: torch.Tensor | None = None,
    ) -> None:
        """Close the innermost open group of that name; send it, or leave it to the manager's
        `flush_delayed_groups`. output: of the group's layers, which is not released."""
        if forced_released_tensors is not None and output is not None:
            forced_released_tensors = without_output(forced_released_tensors, output, name)
        if self._queue is None:
            self.on_group_commit_forward(forced_released_tensors, name=name)
            return
        group = self.close(name)
        if group is not None:
            self._queue.commit(self, group, forced_released_tensors, delay_offload, output)

    def on_group_commit_forward(
        self, forced_released_tensors: list[torch.Tensor] | None = None, *, name: str | None = None
    ) -> None:
        """Close the innermost open group (of that name) and send what has not left yet. Blocks the host:
        never."""
        forced = checked_tensors(forced_released_tensors)
        with self.engine.lock:
            group = self.close(name)
            if group is not None:
                self.send(group, forced)

    def on_group_commit_backward(self, name: str) -> None:
        """The backward reaches the end of a group."""
        self.output_has_gradient(None)

    def on_group_start_backward(self) -> None:
        """The backward has passed a group: room for the next ones."""
        if self._queue is not None:
            with self.engine.lock:
                self._queue.tracker.pump()

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

    def tensor_pop(self, tensor_tag: TensorTag) -> torch.Tensor:
        """The tensor of that tag, on the device; once. Raises KeyError for a tag that is unknown or popped
        already, ValueError for what is no tag."""
        if not isinstance(tensor_tag, tuple):
            raise ValueError(
                f"tensor_pop of a {type(tensor_tag).__name__}, must be the tag that tensor_push gave"
            )
        with self.engine.lock:
            if tensor_tag not in self._tags:
                raise KeyError(
                    f"{self.id} holds no tensor under tag {tuple(tensor_tag)}; it holds {len(self._tags)} "
                    "others"
                )
            packed = self._tags.pop(tensor_tag)
            return packed.read() if isinstance(packed, Passed) else self.engine.store.read(packed)

    # -- by hand: groups -------------------------------------------------------------------------------------
    def should_bulk_offload(self) -> bool:
        """Predicate: the innermost open group leaves. Not while offloading is off, nor when the plan keeps
        it, nor, after warm-up, the last of its name in the chunk that is read next: it would have to come
        back at once."""
        group = self.innermost_open()
        if group is None or not self.do_offload or group.stays:
            return False
        manager = self._queue
        if manager is None or manager.is_warmup or manager.tracker.queue.front(group.name) is not self:
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
        if not self.bulk_reload_group() and self._queue is not None:
            with self.engine.lock:
                self._queue.tracker.pump()

    # -- by hand: one tensor, outside of every group. Calls return with compute ordered behind their copy ----
    def offload(
        self, src_tensor: torch.Tensor, pin_memory: bool = True, use_cpu_pool: bool = True
    ) -> OffloadState:
        """Copy one tensor to the host on the d2h lane. Blocks the host only where the host side is not
        pinned.

        The source must live until the copy is done; compute waits for it here, so that the caller need not
        know when. Raises ValueError for a tensor of another device.
        """
        device = self.engine.device
        self.engine.refuse_in_capture("offload of a tensor by hand")
        check_plain_bytes(src_tensor, device)
        with torch.no_grad():
            values = src_tensor.detach().resolve_conj().resolve_neg().contiguous()
            source = values.view(-1).view(torch.uint8)
        if use_cpu_pool:
            host = self.cpu_tensor_pool.allocate(src_tensor.shape, src_tensor.dtype)
        else:
            host = torch.empty(
                src_tensor.shape, dtype=src_tensor.dtype, pin_memory=pin_memory and device.pins
            )
        compute = device.compute
        device.note_write(compute, source)
        device.wait(self.d2h_stream, device.record(compute), "spill")
        event = self._copies.send([(host.view(-1).view(torch.uint8), source)], self.d2h_stream)
        device.wait(compute, event, "settle")
        return OffloadState(
            src_tensor.device,
            host,
            use_cpu_pool,
            src_tensor.stride(),
            place_of(src_tensor.untyped_storage(), int(src_tensor.storage_offset()) * src_tensor.itemsize),
            event,
            self.engine.step,
        )

    def reload(self, state: OffloadState, non_blocking: bool | None = None) -> torch.Tensor:
        """A new device tensor with the bytes and strides that `offload` saw, at the same place (`place_of`);
        the host buffer goes back to the pool.

        non_blocking: None means: iff the host side is pinned; False makes the host wait for the copy.
        """
        if not isinstance(state, OffloadState):
            raise ValueError(f"reload of a {type(state).__name__}, must be what offload returned")
        self.engine.refuse_in_capture("reload of a tensor by hand")
        device = self.engine.device
        host = state.cpu_tensor
        # step_end has taken the pool's buffers back
        if state.use_cpu_pool and self._ends_with_step and state.step != self.engine.step:
            raise StaleHandleError(
                f"{self.id}: a tensor of shape {tuple(host.shape)} was offloaded by hand in step "
                f"{state.step}, and its host buffer went "
                f"back to the pool before step {self.engine.step}; reload it in its own step, or offload it "
                "with use_cpu_pool=False"
            )
        home = device.empty(host.numel() * host.element_size())
        compute = device.compute
        device.wait(self.h2d_stream, device.record(compute), "allocate")
        device.wait(self.h2d_stream, state.event, "restore")
        event = self._copies.fetch([(home, host.view(-1).view(torch.uint8))], self.h2d_stream)
        device.wait(compute, event, "read")
        device.note_read(compute, home)
        if non_blocking is False:
            device.synchronize(event)
        if state.use_cpu_pool:
            self.cpu_tensor_pool.free(host, after=event)
        return placed(home.view(host.dtype).view(host.shape), state.stride, state.lead)


def check_plain_bytes(tensor: object, device: Device) -> None:
    """Raises ValueError for anything but a tensor on the device that its bytes determine."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"offload of a {type(tensor).__name__}, must be a tensor on {device.name}")
    if tensor.is_quantized or tensor.is_nested or tensor.layout is not torch.strided or not is_plain(tensor):
        raise ValueError(
            f"offload of a {type(tensor).__name__} of {tensor.dtype} and {tensor.layout}, "
            "whose bytes alone do not make it again; offload its parts, such as int_repr() and q_scale()"
        )
    if not device.owns(tensor):
        raise ValueError(
            f"offload of a tensor on {tensor.device}, but the engine's device is {device.name}; "
            "move it there first"
        )


def placed(packed: torch.Tensor, stride: tuple[int, ...], lead: int) -> torch.Tensor:
    """The elements with these strides, as far behind an address as they were."""
    if packed.stride() == stride and not lead:
        return packed
    with torch.no_grad():
        # an expanded dimension holds one element
        one = packed[tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)]
        layout = ViewLayout(one.shape, stride, lead // packed.itemsize, packed.dtype)
        spread = empty_at(layout, packed.device).copy_(one)
        return spread.as_strided(packed.shape, stride)
