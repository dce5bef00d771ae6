"""The manager under Megatron-core's names: the queue of virtual stages, groups pushed by hand, and the
process-wide instance; the class around the marks; and the marks as autograd Functions (S2-90), which the long
names of offload/fine_grained_activation_offload.py apply.

One invariant: a process has one manager, whoever built it. One that was built without these names gets them
when it is first asked for by them, and stays the object that it is, in the middle of a step too.

The engine's own marks are hooks on nodes (offload/marks.py). The Functions return a view of their input, and
add one node to the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self, TypeVar, cast

import torch

from offload import marks
from offload.compat.handler import ChunkOffloadHandler, OffloadTensorGroup
from offload.compat.tensor_pool import GPUTensorPool
from offload.device import Lane
from offload.engine import OffloadEngine
from offload.groups.manager import GroupsManager
from offload.groups.release import checked_tensors
from offload.marks import record_event
from offload.saved.handles import Handle, Passed
from offload.saved.hooks import InstalledScope
from offload.telemetry.records import StepStats

T = TypeVar("T")


class _ProcessWide(type):
    """`OFFLOAD_MGR` of the class is the manager that the marks ask for."""

    @property
    def OFFLOAD_MGR(cls) -> PipelineOffloadManager | None:  # noqa: N802 - S2's name
        manager = marks.existing_manager()
        return None if manager is None else _adopted(manager)

    @OFFLOAD_MGR.setter
    def OFFLOAD_MGR(cls, manager: PipelineOffloadManager | None) -> None:  # noqa: N802
        marks.put_manager(manager)


class PipelineOffloadManager(GroupsManager, metaclass=_ProcessWide):
    """A `GroupsManager` of `ChunkOffloadHandler`s. `get_instance()` gives the process-wide one."""

    def __init__(
        self, engine: OffloadEngine | None = None, *, print_summary: bool = True, process_group: Any = None
    ) -> None:
        super().__init__(engine, print_summary=print_summary, process_group=process_group)
        self.begin_names()

    def begin_names(self) -> None:
        """Add what the sources' names need, beside what every manager has."""
        self.cpu_tensor_pool = GPUTensorPool("cpu", pin_memory=True, arena=self.engine.arena)
        self.tracker.new_chunk = partial(
            ChunkOffloadHandler, cpu_tensor_pool=self.cpu_tensor_pool, engine=self.engine, manager=self
        )
        self.follower.before_end = self._before_end
        self.init_model_chunk_offload_handler = self.begin_forward
        self._cached_forward: list[ChunkOffloadHandler] = []  # of the step that ended warm-up
        self._walk = 0
        self._entered: list[InstalledScope | None] = []

    # -- the process-wide instance ---------------------------------------------------------------------------
    @classmethod
    def get_instance(cls) -> PipelineOffloadManager:
        """The process-wide manager; built with the default config on first use."""
        return _adopted(marks.default_manager())

    @classmethod
    def reset_instance(cls, manager: PipelineOffloadManager | None = None) -> PipelineOffloadManager:
        """Close the old instance, which returns its pinned memory to the system, and put a new one (or
        `manager`) in its place."""
        if manager is None or marks.existing_manager() is not manager:
            marks.close_manager()
        marks.put_manager(manager if manager is not None else cls())
        return cls.get_instance()

    close_instance = staticmethod(marks.close_manager)

    def prepare_close(self) -> None:
        """Release the buffers of copies by hand."""
        self.cpu_tensor_pool.clear()

    # -- the hooks, and figures ------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        """Install the hooks, if a chunk is current and offloading is on."""
        self._entered.append(self.scopes.open_scope())
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove exactly what `__enter__` installed, whatever was switched in between."""
        self.scopes.close_scope(self._entered.pop())

    def on_save_for_backward(self, tensor: torch.Tensor) -> Any:
        """The object that autograd's graph keeps instead of `tensor`. Asserts that it is called inside the
        offload context."""
        assert self.engine.hooks.innermost() is not None, (
            "Must be inside offload context: use `with manager:` around the save"
        )
        return self.engine.hooks.pack(tensor)

    def on_get_saved_tensor(self, saved_state: Handle | Passed) -> torch.Tensor:
        """The tensor, fetched back from the host if it has left."""
        return self.engine.hooks.unpack(saved_state)

    @property
    def d2h_stream(self) -> Lane:
        return self.engine.device.d2h

    @property
    def h2d_stream(self) -> Lane:
        return self.engine.device.h2d

    @property
    def offload_summary_total_bytes(self) -> int:
        """The sum of `offload_summary_bytes`."""
        return sum(self.offload_summary_bytes.values())

    # -- chunks ----------------------------------------------------------------------------------------------
    def cur_forward_chunk(self) -> ChunkOffloadHandler | None:
        """The chunk whose forward runs."""
        return cast("ChunkOffloadHandler | None", self.tracker.forward)

    def cur_backward_chunk(self) -> ChunkOffloadHandler | None:
        """The chunk that is being read."""
        return cast("ChunkOffloadHandler | None", self.tracker.backward)

    # -- queue (S2's names) ----------------------------------------------------------------------------------
    def flush(self) -> None:
        """Move staged chunks to the backward queue, last stage first, once the first and the last stage have
        equally many."""
        self.tracker.queue.flush()

    def push(self, handler: ChunkOffloadHandler) -> None:
        """Append to the backward queue, and in warm-up to the order of backwards that the plan is made
        from."""
        if not isinstance(handler, ChunkOffloadHandler):
            raise ValueError(
                f"push of a {type(handler).__name__}, must be a ChunkOffloadHandler such as "
                "cur_forward_chunk() returns"
            )
        self.tracker.queue.chunks.append(handler)
        if self.is_warmup:
            self.tracker.backward_order.setdefault(handler)

    def pop_backward_chunk(self, name: str | None = None) -> ChunkOffloadHandler:
        """Advance to the next queued chunk that has a group (of that name) and make it current."""
        with self.engine.lock:
            handler = cast(ChunkOffloadHandler, self.tracker.queue.pop(name))
            self.tracker.start_reading(handler, "B")
            return handler

    def pop_forward_chunk(self, name: str | None = None) -> ChunkOffloadHandler | None:
        """The chunk of the next group: the current one in warm-up, then a walk over the recorded ones; None
        when they are exhausted."""
        if not self.tracker.do_offload:
            return None
        if self.is_warmup:
            return self.cur_forward_chunk()
        while self._walk < len(self._cached_forward):
            handler = self._cached_forward[self._walk]
            if handler.find_next_group(name) is not None:
                return handler
            self._walk += 1
        return None

    def front_backward_chunk(self, name: str | None = None) -> ChunkOffloadHandler | None:
        """The next queued chunk that has a group (of that name), not consumed; None if there is none."""
        return cast("ChunkOffloadHandler | None", self.tracker.queue.front(name))

    # -- delayed groups, and the step ------------------------------------------------------------------------
    def push_offload_groups(
        self,
        group_hook: Callable[[list[torch.Tensor]], None],
        forced_released_tensors: list[torch.Tensor] | None = None,
    ) -> None:
        """Queue a delayed offload: `group_hook(forced_released_tensors)` runs at the flush."""
        if not callable(group_hook):
            raise ValueError(
                f"push_offload_groups got a {type(group_hook).__name__}, must be a function of the tensors "
                "to release"
            )
        self.scopes.delayed.append(
            (self.engine.transfers.capture, partial(group_hook, checked_tensors(forced_released_tensors)))
        )

    def _before_end(self) -> None:
        """A step ends: the buffers of copies by hand are taken back."""
        self.cpu_tensor_pool.reset()
        if self.is_warmup or not self._cached_forward:
            self._cached_forward = cast(list[ChunkOffloadHandler], self.tracker.forward_order)
        self._walk = 0

    def reset(self, process_group: Any = None) -> StepStats:
        """A new iteration begins: the same as `step_end`. process_group: the ranks whose table is printed;
        None leaves it as it was."""
        self.process_group = self.process_group if process_group is None else process_group
        return self.step_end()

    def post_warmup_callback(self, process_group: Any = None) -> None:
        """End warm-up: choose what stays from what this step was seen to do, and print the summary.
        process_group: as of `reset`."""
        self.process_group = self.process_group if process_group is None else process_group
        with self.engine.lock:
            forwards, backwards = len(set(self.tracker.forward_order)), len(self.tracker.backward_order)
            assert forwards == backwards, (
                f"{forwards} forward chunks and {backwards} backward chunks are cached, must be as many; run "
                "the backward of every "
                "forward first, or call step_end(), which plans from what it has seen"
            )
            self._cached_forward = cast(list[ChunkOffloadHandler], list(self.tracker.forward_order))
            self._planner.plan_now(self.tracker.seen(None))
        self._print_summary()


def _adopted(manager: GroupsManager) -> PipelineOffloadManager:
    """The manager, which has the sources' names from now on, and so have its chunks and their groups."""
    if isinstance(manager, PipelineOffloadManager):
        return manager
    with manager.engine.lock:
        if isinstance(manager, PipelineOffloadManager):  # by another thread meanwhile
            return manager
        adopted = _renamed(manager, PipelineOffloadManager)
        adopted.begin_names()
        for chunk in adopted.tracker.handlers.values():
            handler = _renamed(chunk, ChunkOffloadHandler)
            handler.begin_names(adopted.cpu_tensor_pool, adopted)
            for group in chunk.groups:
                _renamed(group, OffloadTensorGroup).begin_names(None, adopted.engine.device)
    return adopted


def _renamed(found: object, kind: type[T]) -> T:
    found.__class__ = kind
    return cast(T, found)


OffloadManager = PipelineOffloadManager


class FineGrainedActivationOffloadingInterface:
    """`with Interface(offload, tensor, name) as tensor:` opens a group and installs the hooks, iff
    `offload`."""

    def __init__(self, offload: bool, tensor: torch.Tensor, name: str) -> None:
        marks.check_mark(type(self).__name__, tensor, name)
        self.offload = offload
        self.tensor = tensor
        self.name = name
        self._manager: GroupsManager | None = None
        self._installed: InstalledScope | None = None

    def __enter__(self) -> torch.Tensor:
        if self.offload:
            self.tensor = marks.group_start(self.tensor, self.name)
            self._manager = marks.existing_manager()
            self._installed = None if self._manager is None else self._manager.scopes.open_scope()
        return self.tensor

    def __exit__(self, *exception: object) -> None:
        if self._manager is not None:
            self._manager.scopes.close_scope(self._installed)
        self._manager = self._installed = None

    init_chunk_handler = staticmethod(marks.init_chunk_handler)
    group_commit = staticmethod(marks.group_commit)
    mark_not_offloadable = staticmethod(marks.mark_not_offloadable)
    forward_record = staticmethod(marks.forward_record)
    reset = staticmethod(marks.reset)

    @staticmethod
    def get_context(flag: bool) -> AbstractContextManager[Any]:
        """The manager's hooks, or a null context."""
        return PipelineOffloadManager.get_instance() if flag else nullcontext()

    @staticmethod
    def reset_instance() -> None:
        PipelineOffloadManager.reset_instance()


ActivationOffloadContext = FineGrainedActivationOffloadingInterface


class FineGrainedOffloadingGroupStartFunction(torch.autograd.Function):
    """Opens a group in the forward. In the backward it lets the prefetch fetch more."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, cpu_offload_handler: ChunkOffloadHandler, name: str
    ) -> torch.Tensor:
        ctx.cpu_offload_handler = cpu_offload_handler
        cpu_offload_handler.on_group_start_forward(name)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.cpu_offload_handler.on_group_start_backward()
        return grad_output, None, None


class FineGrainedOffloadingGroupCommitFunction(torch.autograd.Function):
    """Sends (or delays) a group in the forward; in the backward its chunk is the one being read."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        cur_forward_chunk: ChunkOffloadHandler,
        name: str,
        forced_released_tensors: list[torch.Tensor] | None,
        delay_offload: bool,
    ) -> torch.Tensor:
        ctx.backward_chunk = cur_forward_chunk
        ctx.group = name
        cur_forward_chunk.commit(name, forced_released_tensors, delay_offload, tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        ctx.backward_chunk.on_group_commit_backward(ctx.group)
        return grad_output, None, None, None, None


class FineGrainedOffloadingBackwardRecordFunction(torch.autograd.Function):
    """Its backward records `event` on the current lane, and orders what comes next there after the
    restores."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, event: Any) -> torch.Tensor:
        ctx.event = event
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        record_event(PipelineOffloadManager.get_instance().engine, ctx.event, "h2d")
        return grad_output, None
