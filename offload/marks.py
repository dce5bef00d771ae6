"""The functions that a model calls, short names and long ones; each is an identity where nothing is to be
offloaded.

    x = group_start(x, "core_attn")             # opens a group
    with offload_hooks(): y = attention(x)      # what autograd saves in here belongs to the group
    y = group_commit(y, "core_attn")            # the group's bytes start to leave

One invariant: a mark returns the tensor that it was given, and adds no node to autograd's graph, so gradients
add up in the order that they have without it.

How the backward is noticed: `group_commit` registers a hook on the node that made its tensor (`grad_fn`).
autograd calls it just before that node's backward runs. The hook makes the group's chunk the one that is
being read, and lets the prefetch fetch more. Where there is no such node, or it never runs, the first read of
a saved tensor does the same. `group_start` does nothing in a backward.

The process's manager is looked up here and passed on: the engine and the groups never look it up.

A CUDA graph ends with its copies, and what its stream is given next waits for the whole graph. So a graph
that copies is replayed on a stream of its own, and records an external event where its compute ends
(S2-88, S2-89, S2-91): the main stream waits for the event and runs beside the copies.

    with torch.cuda.graph(forward):
        y = layer(x)
        forward_record(event)                   # event = torch.cuda.Event(external=True)
    ...
    with torch.cuda.stream(side): forward.replay()
    torch.cuda.current_stream().wait_event(event)

The backward's graph is replayed on the same stream: it reads what the forward's copies write.

torch.compile: a mark is a Python side effect. Each mark breaks the graph, and nothing of it is traced; under
fullgraph=True torch raises an error that names the way out. A `with` that is entered inside a compiled
function makes all of that function eager; use `group_start(..., hooks=True)` there instead. What a compiled
function keeps where no hook sees it stays on the device, and so does what lies in CUDA graphs that
torch.compile records. One warning names the group and the graph (offload/compile).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch

from offload.checkpoint.kept import Operator
from offload.checkpoint.selective import Contexts, contexts_for
from offload.compile import untraced
from offload.config import OffloadConfig, checked_config, naming_near
from offload.engine import OffloadEngine, default_engine, replace_engine
from offload.errors import GroupOrderError
from offload.groups.chunk import ChunkGroups
from offload.groups.manager import GroupsManager
from offload.groups.release import without_output
from offload.memory.budget import HostBudget, SharedHostBudget, default_host_limit_bytes, shared_by_store
from offload.saved.hooks import InstalledScope
from offload.telemetry.records import StepStats
from offload.transfer.captures import CapturedRegion

process_manager: GroupsManager | None = None
"""The process-wide one. Written by `put_manager` alone."""


def existing_manager() -> GroupsManager | None:
    """The process-wide manager, None if none was built."""
    return process_manager


def default_manager() -> GroupsManager:
    """The process-wide manager; built with the default config on first use."""
    if process_manager is None:
        put_manager(GroupsManager())
    assert process_manager is not None
    return process_manager


def put_manager(new: GroupsManager | None) -> None:
    """`new` is the process-wide manager from now on; the old one is not closed."""
    global process_manager
    process_manager = new


def close_manager() -> None:
    """Close the process-wide manager, if there is one. Its engine closes too, unless a HybridDeviceOptimizer
    is attached to it. Raises PoolError, and leaves the manager in its place, while a pool or an
    FSDPGPUOptimizerWrapper has host memory of an engine that would close."""
    if process_manager is not None:
        process_manager.close()
        put_manager(None)


@naming_near
def configure(
    config: OffloadConfig | None = None,
    *,
    device: str | None = None,
    store: Any = None,
    host_key: str | None = None,
    print_summary: bool = True,
    process_group: Any = None,
) -> GroupsManager:
    """Give the process-wide engine these limits, and its groups a new manager. Other clients, such as an
    optimizer, stay attached: the limits hold for them too, and their state and host memory stay as they are.
    Free host memory beyond host_reserve_bytes goes back to the system.

    device: "cuda", "cuda:N" or "sim"; None takes CUDA where there is a GPU, else the simulated device. store:
    a torch.distributed Store: the host limit is then one number for all ranks whose host_key (None: the
    host's name) is the same. print_summary: print the rank table when warm-up ends; it gathers over
    process_group, so all its ranks must step. Where step ends are inferred (`offload.apply`) none is printed:
    `offload.report` has more. Blocks the host while host_reserve_bytes are pinned. Raises
    ValueError for an unknown device, HostBudgetError if they, or what an optimizer holds, are beyond the
    limit, and PoolError while a pool has host memory of the old manager on loan; nothing has changed then.
    """
    config = checked_config(config)
    budget: HostBudget | None = None
    if store is not None:
        limit = config.host_limit_bytes if config.host_limit_bytes is not None else default_host_limit_bytes()
        budget = shared_by_store(store, host_key if host_key is not None else socket.gethostname(), limit)
    if process_manager is not None:
        process_manager.prepare_close()  # raises while a buffer is on loan
    engine = default_engine(device, config, budget)
    return _new_manager(engine, print_summary, process_group)


def change_limits(config: OffloadConfig) -> GroupsManager:
    """`configure`, for the engine that the process-wide manager has: its device, the budget that it shares
    with other ranks, and the group that its summary is gathered over stay. Raises ValueError for another
    host_limit_bytes where the budget is shared; else as `configure`."""
    if process_manager is None:
        return configure(config)
    engine = process_manager.engine
    budget = engine.arena.budget
    shared = budget if isinstance(budget, SharedHostBudget) and budget.is_named else None
    if shared is not None and config.host_limit_bytes != engine.config.host_limit_bytes:
        raise ValueError(
            f"host_limit is {config.host_limit_bytes!r}, and the ranks of this host share a limit of "
            f"{shared.limit_bytes:,} bytes; give the new one to configure(store=...) on every rank"
        )
    process_manager.prepare_close()
    engine.reconfigure(config, shared)
    return _new_manager(engine, process_manager.print_summary, process_manager.process_group)


def _new_manager(engine: OffloadEngine, print_summary: bool, process_group: Any) -> GroupsManager:
    new = GroupsManager(engine, print_summary=print_summary, process_group=process_group)
    before = None if process_manager is None else process_manager.engine
    if process_manager is not None:
        new.ledgers.take_over(process_manager.ledgers)
    close_manager()
    put_manager(new)
    replace_engine(before, engine)
    # pieces go whole, and what was reserved stays
    engine.arena.trim(engine.config.host_reserve_bytes + engine.arena.registration_bytes - 1)
    return new


T = TypeVar("T", torch.Tensor, tuple[Any, ...], list[Any])


@untraced
@naming_near
def init_chunk_handler(
    vp_size: int | None = None,
    vp_stage: int | None = None,
    min_offloaded_tensor_size: int | None = None,
    *,
    pp_rank: int | None = None,
    delta_offload_bytes_across_pp_ranks: int | None = None,
    activation_offload_fraction: float | None = None,
    max_inflight_offloads: int | None = None,
) -> None:
    """The forward of the next microbatch of virtual stage `vp_stage` begins. Call it at the start of every
    microbatch's forward.

    min_offloaded_tensor_size: elements, not bytes; None takes the config's. The keywords set the plan's
    fields (OffloadConfig has their meaning); one left out stays as it is. Raises ValueError for a stage
    outside 0..vp_size-1, a negative size, a fraction outside 0..1. Blocks the host: never, but once for a
    plan that has settled, where cached device memory goes back (`trim_device`).
    """
    manager = default_manager()
    given = {
        "pp_rank": pp_rank,
        "delta_offload_bytes_across_pp_ranks": delta_offload_bytes_across_pp_ranks,
        "activation_offload_fraction": activation_offload_fraction,
        "max_inflight_offloads": max_inflight_offloads,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    settings = replace(manager.settings, **changes) if changes else manager.settings
    manager.begin_forward(vp_size, vp_stage, min_offloaded_tensor_size)
    manager.settings = settings


def check_mark(function: str, value: object, name: object) -> None:
    """ValueError unless `value` is a tensor and `name` can be a group's."""
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"{function} with name {name!r}: a group's name must be a non-empty string such as 'core_attn'"
        )
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"{function}(..., {name!r}) got a {type(value).__name__}, must be a tensor that the layer works "
            "on"
        )


@untraced
def group_start(tensor: torch.Tensor, name: str, *, hooks: bool = False) -> torch.Tensor:
    """Open group `name` in the current chunk. Returns `tensor`.

    tensor: any shape and dtype; an input of the group's layers.
    hooks: install the hooks as well, until this group's commit; for a layer that torch.compile takes whole.
    After an exception in between they stay until step_end() or reset(). Blocks the host: never. Raises
    CaptureError in a CUDA graph captured outside of `capturing()`.
    """
    handler = chunk_to_start_in(tensor, name)
    if handler is not None:
        handler.on_group_start_forward(name)
    if hooks and process_manager is not None:
        process_manager.scopes.open_until_commit(name)
    return tensor


def chunk_to_start_in(tensor: torch.Tensor, name: str) -> ChunkGroups | None:
    """The chunk in which a start of group `name` opens it; None where nothing leaves, which is noted. Raises
    as `group_start`."""
    if type(name) is not str or not name or not isinstance(tensor, torch.Tensor):
        check_mark("group_start", tensor, name)
    manager = process_manager
    if manager is None:
        return None
    handler = manager.scopes.active_handler()
    if handler is None:
        muted = manager.scopes.muted_handler()
        if muted is not None:
            muted.mute(name)
        elif manager.tracker.do_offload and torch.is_grad_enabled():
            report, task = manager.tracker.mark_report, torch._C._current_graph_task_id()
            (report.not_announced if task == -1 else report.recomputed)(name)
    else:
        transfers = manager.engine.transfers
        if transfers.capture is None and transfers.device.is_capturing():
            transfers.refuse_unwatched(f"group {name!r}")
    return handler


@untraced
def group_commit(
    tensor: T,
    name: str,
    forced_released_tensors: list[torch.Tensor] | None = None,
    delay_offload: bool = False,
) -> T:
    """Close the innermost open group called `name`: what it saved leaves, unless the plan keeps it. Returns
    `tensor`, on whose `grad_fn` it registers a hook.

    tensor: an output of the group's layers, whose gradient begins their backward; or a tuple or list whose
        first element is one. An empty one passes through.
    forced_released_tensors: freed once they are copied, although Python still holds them; compute waits for
        the copy. One that anything else still needs stays, with a warning; an operator on one that was freed
        raises OffloadError.
    delay_offload: send at `flush_delayed_groups` instead of now.
    Raises GroupOrderError if no such group is open. Blocks the host: never.
    """
    output: Any = tensor
    while isinstance(output, (tuple, list)):
        if not output:
            return tensor
        output = output[0]
    if type(name) is not str or not name or not isinstance(output, torch.Tensor):
        check_mark("group_commit", output, name)
    manager = process_manager
    if manager is None:
        return tensor
    manager.scopes.close_at_commit(name)
    handler = manager.scopes.muted_handler()
    if handler is None:
        return tensor
    if forced_released_tensors is not None:
        forced_released_tensors = without_output(forced_released_tensors, output, name)
    try:
        group = handler.close(name)
    except GroupOrderError:
        if manager.scopes.active_handler() is None:
            return tensor  # started before the chunk was announced, or switched off in between
        raise
    if group is None:
        return tensor
    manager.commit(handler, group, forced_released_tensors, delay_offload, output)
    node = output.grad_fn
    if node is not None:
        node.register_prehook(handler.output_has_gradient)
    return tensor


class offload_hooks(ContextDecorator):  # noqa: N801 - to its callers a function, as contextlib's own are
    """Give what autograd saves inside to the innermost open group at entry."""

    def __init__(self) -> None:
        self._entered: list[tuple[GroupsManager | None, InstalledScope | None]] = []

    def __enter__(self) -> None:
        manager = process_manager
        self._entered.append((manager, None if manager is None else manager.scopes.open_scope()))

    def __exit__(self, *exception: object) -> None:
        manager, installed = self._entered.pop()
        if manager is not None:
            manager.scopes.close_scope(installed)


@untraced
def flush_delayed_groups() -> None:
    """Send every delayed group, in the order of their commits. In a capture, those that were delayed in
    it."""
    if process_manager is not None:
        process_manager.flush_delayed_groups()


@untraced
def disable_offload() -> None:
    """From now on nothing more leaves; what has left comes back as usual."""
    default_manager().disable_offload()


@untraced
def enable_offload() -> None:
    """Undo `disable_offload`."""
    default_manager().enable_offload()


@untraced
def mark_not_offloadable(tensor: torch.Tensor | None) -> None:
    """`tensor` stays on the device for good; None is accepted."""
    default_manager().mark_not_offloadable(tensor)


def capturing() -> AbstractContextManager[CapturedRegion]:
    """Groups may be captured into CUDA graphs inside: `with capturing() as region:` around the captures and
    their warm-up.

    With torch.cuda.graph, torch.cuda.make_graphed_callables, or anything else that captures by
    torch.cuda.CUDAGraph. A forward and the backward that reads it belong in one region, in one graph or in
    two, with no step_end() between their captures. Replays come after, of a forward and its backward in turn,
    on one stream or on streams that the caller orders. They copy between device and host as the captured
    program did, through blocks that `region` holds until region.release().

    Host memory must be there before: `reserve_host` the bytes of every capture together, since no two share a
    block. What was decided, was decided at the capture: the plan, the window of the prefetch, the caps. The
    step's figures count it once; `StepStats.replays` and `replayed_bytes` count what runs. Blocks the host at
    each capture's begin. Raises CaptureError if a region is open.
    """
    return default_manager().engine.capturing()


@untraced
def forward_record(event: Any) -> None:
    """Record `event` on the current stream, and order what comes next there after the spills so far; in a
    capture, end its copies here.

    event: in a capture, torch.cuda.Event(external=True). Another stream that waits for it runs beside the
    copies that are still under way, which the graph itself ends with.
    """
    check_event("forward_record", event)
    record_event(default_manager().engine, event, "d2h")


@untraced
def backward_record(tensor: torch.Tensor, event: Any) -> torch.Tensor:
    """In the backward, when the gradient of `tensor` is ready, record `event` on the current stream, and
    order what comes next there after the restores so far. Returns `tensor`, of a leaf a view.

    event: as `forward_record` takes it.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"backward_record got a {type(tensor).__name__}, must be a tensor that the layer works on"
        )
    check_event("backward_record", event)
    if tensor.is_leaf and tensor.requires_grad and torch.is_grad_enabled():
        tensor = tensor.view_as(tensor)  # a node that the hook lives on
    if tensor.grad_fn is not None:
        tensor.grad_fn.register_prehook(lambda _: record_event(default_manager().engine, event, "h2d"))
    return tensor


@untraced
def selective_contexts(
    keep_ops: Collection[Operator | tuple[Operator, int]] | Callable[..., Any], *, group: str = "selective"
) -> Callable[[], Contexts]:
    """A context_fn for torch.utils.checkpoint (use_reentrant=False): outputs of `keep_ops` are kept, and
    leave for the host.

    keep_ops: operators, such as {torch.ops.aten.mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default}; or single calls, as pairs of an
        operator and the call's number in the checkpointed function, from 0; or a policy as torch's
        create_selective_checkpoint_contexts takes it: policy(ctx, op, *args, **kwargs) -> bool or
        CheckpointPolicy, of which the SAVE and CPU_OFFLOAD members keep.
    group: where kept outputs belong that are made while no group is open: a group of this name for each
        checkpointed forward. Inside a group they belong to that one. The input of the checkpoint leaves only
        under `offload_hooks()` around it.
    Kept outputs follow the plan, the limits and min_offloaded_tensor_size like every saved tensor. Without a
    current chunk they stay, which is said once, and so are operators of which none is ever called. What a
    recompute has read is autograd's until its node has run, like what it recomputes: a region's worth outside
    device_limit_bytes. Raises ValueError for an operator that writes to its inputs or returns a view. The
    context_fn raises OffloadError where torch.compile traces the checkpoint itself: compile the function
    inside.
    """
    return contexts_for(keep_ops, group, default_manager, compares=True)


@untraced
def step_end() -> StepStats | None:
    """End the step, once its gradients are final. Returns its figures; None where no manager has been
    built."""
    return None if process_manager is None else process_manager.step_end()


reset = step_end
"""`step_end` under the name that Megatron users know."""


def is_graph_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph. False without CUDA; never raises."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def check_event(function: str, event: Any) -> None:
    """ValueError unless `event` can be recorded."""
    if not callable(getattr(event, "record", None)):
        raise ValueError(
            f"{function} got a {type(event).__name__}, must be an event with record(), such as "
            "torch.cuda.Event()"
        )


def record_event(engine: OffloadEngine, event: Any, lane: Literal["d2h", "h2d"]) -> None:
    """Record `event` on the current stream, and order what comes next there after the copies on `lane` so
    far. Blocks the host: never."""
    engine.transfers.check_capture("an event record")
    event.record()
    with engine.lock:
        if engine.transfers.capture is not None:
            # the lanes that are part of it; to wait for another would end the capture
            engine.transfers.join()
        else:
            device = engine.device
            copies, order = (device.d2h, "settle") if lane == "d2h" else (device.h2d, "read")
            device.wait(device.compute, device.record(copies), order)
