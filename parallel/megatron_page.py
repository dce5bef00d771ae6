"""What stands in place of Megatron-core's offload module: its names, for both generations of callers, over
this engine.

Up to core 0.18 a group is committed by a static `group_commit(tensor, name)`, from 0.19 on by
`group_offload(tensor)` of the object that opened it; the order of the arguments that begin a microbatch
differs too.

One invariant: what a name answers depends on the arguments of the call; only a call that both generations
would accept is read by the version of Megatron that is loaded. What the engine cannot do is refused: a group
inside a CUDA graph that is captured outside of `offload.capturing()` raises GraphCaptureError.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

import offload
import offload.fine_grained_activation_offload as engine_page
from offload import OffloadError, PipelineOffloadManager

PAGE = "megatron.core.pipeline_parallel.fine_grained_activation_offload"

logger = logging.getLogger(__name__)

T = TypeVar("T", torch.Tensor, tuple[Any, ...], list[Any])
Tensors = Sequence[torch.Tensor] | None


class GraphCaptureError(OffloadError):
    """A group was opened in a CUDA graph that no region owns: its replays would copy to pinned blocks that
    the engine has lent again."""


def megatron_version() -> tuple[int, int] | None:
    """(major, minor) of the Megatron-core that this process has loaded; None if it has none, or one that does
    not say."""
    # the second gets its version late in its own import
    for module in ("megatron.core.package_info", "megatron.core"):
        found = re.match(r"(\d+)\.(\d+)", str(getattr(sys.modules.get(module), "__version__", "")))
        if found:
            return int(found[1]), int(found[2])
    return None


# ---- a microbatch begins ----

NEWER_KEYWORDS = frozenset({"pp_rank", "delta_offload_bytes_across_pp_ranks", "activation_offload_fraction"})


def init_chunk_handler(*arguments: Any, **keywords: Any) -> None:
    """The forward of a virtual stage's next microbatch begins; in either generation's order of arguments.

    0.16 and 0.17: (vp_size, vp_stage, min_offloaded_tensor_size). 0.18: max_inflight_offloads as the fourth.
    From 0.19: (pp_rank, vp_size, vp_stage, min_offloaded_tensor_size, delta_offload_bytes_across_pp_ranks,
    activation_offload_fraction, max_inflight_offloads). A fifth position or a keyword that only 0.19 has
    tells the newer order. Other positions are read by the loaded version; where there is none a fourth tells
    the newer order and fewer the older one.
    min_offloaded_tensor_size: elements, not bytes. Raises ValueError for values outside their ranges,
    TypeError for unknown arguments. Blocks the host: never.
    """
    version = megatron_version()
    newer = (
        len(arguments) > 4
        or not NEWER_KEYWORDS.isdisjoint(keywords)
        or (arguments and version is not None and version >= (0, 19))
    )
    capped = "max_inflight_offloads" in keywords or (len(arguments) == 4 and version == (0, 18))
    begin = (
        _begin_newer
        if newer
        else _begin_0_18
        if capped
        else _begin_newer
        if len(arguments) == 4
        else _begin_0_16
    )
    begin(*arguments, **keywords)


def _begin_0_16(
    vp_size: int | None = None, vp_stage: int | None = None, min_offloaded_tensor_size: int | None = None
) -> None:
    PipelineOffloadManager.get_instance()  # by Megatron's names from here on
    offload.init_chunk_handler(vp_size, vp_stage, min_offloaded_tensor_size)


def _begin_0_18(
    vp_size: int | None = None,
    vp_stage: int | None = None,
    min_offloaded_tensor_size: int | None = None,
    max_inflight_offloads: int | None = None,
) -> None:
    offload.init_chunk_handler(
        vp_size, vp_stage, min_offloaded_tensor_size, max_inflight_offloads=max_inflight_offloads
    )
    _take_cap_back(max_inflight_offloads)


def _begin_newer(
    pp_rank: int,
    vp_size: int | None = None,
    vp_stage: int | None = None,
    min_offloaded_tensor_size: int | None = None,
    delta_offload_bytes_across_pp_ranks: int = 0,
    activation_offload_fraction: float = 1.0,
    max_inflight_offloads: int | None = None,
) -> None:
    offload.init_chunk_handler(
        vp_size,
        vp_stage,
        min_offloaded_tensor_size,
        pp_rank=pp_rank,
        delta_offload_bytes_across_pp_ranks=delta_offload_bytes_across_pp_ranks,
        activation_offload_fraction=activation_offload_fraction,
        max_inflight_offloads=max_inflight_offloads,
    )
    _take_cap_back(max_inflight_offloads)


def _take_cap_back(max_inflight_offloads: int | None) -> None:
    """To Megatron None is no cap, to the engine "as it was"."""
    manager = PipelineOffloadManager.get_instance()
    if max_inflight_offloads is None and manager.settings.max_inflight_offloads is not None:
        manager.settings = replace(manager.settings, max_inflight_offloads=None)


# ---- groups ----


def is_tagged_to_stay(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or a member of one that TransformerEngine has quantized (`get_data_tensors`), carries
    one of the attributes that Megatron's own engine respects. Up to 0.18 the first, from 0.19 on the
    others."""
    members: Sequence[Any] = ()
    if (of := getattr(tensor, "get_data_tensors", None)) is not None:
        with suppress(Exception):  # of somebody else's wrapper, which may have no data at the moment
            members = of()
    return any(
        getattr(one, "offloading_activation", True) is False
        or bool(getattr(one, "_TE_do_not_offload", False))
        or bool(getattr(one, "_do_not_offload", False))
        for one in (tensor, *members)
    )


def _close_nothing() -> None:
    return None


def _open_scope(manager: PipelineOffloadManager | None) -> Callable[[], None]:
    """Install the hooks for the innermost open group; returns what removes exactly them, whatever is switched
    in between."""
    installed = None if manager is None else manager.scopes.open_scope(is_tagged_to_stay)
    if manager is None or installed is None:
        return _close_nothing
    owner = manager
    return lambda: owner.scopes.close_scope(installed)


@contextmanager
def _hooks() -> Iterator[None]:
    close = _open_scope(PipelineOffloadManager.get_instance())
    try:
        yield
    finally:
        close()


def get_context(flag: bool) -> AbstractContextManager[Any]:
    """The hooks of the innermost open group if `flag`, else a null context."""
    return _hooks() if flag else nullcontext()


def group_start(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Open group `name`: an identity. tensor: an input of the group's layers, any shape and dtype.

    Raises GraphCaptureError in a capture outside of `offload.capturing()`, unless offloading is switched off;
    ValueError for no name. Blocks the host: never.
    """
    manager = PipelineOffloadManager.OFFLOAD_MGR
    if (
        manager is not None
        and manager.tracker.do_offload
        and engine_page.is_graph_capturing()
        and not manager.is_capturing
    ):
        raise GraphCaptureError(
            f"group {name!r} is opened while a CUDA graph is captured, and no region holds the host memory "
            "that its replays would copy to; "
            "make the graphs inside `with offload.capturing():`, around Megatron's create_cudagraphs(), with "
            "host memory reserved for them "
            f"(OffloadConfig.host_reserve_bytes); or take the module of {name!r} out of the captured ones "
            "(cuda_graph_modules, or "
            "cuda_graph_scope) or out of offload_modules"
        )
    return offload.group_start(tensor, name)  # type: ignore[arg-type]


def group_commit(
    tensor: T, name: str, forced_released_tensors: Tensors = None, delay_offload: bool = False
) -> T:
    """Close group `name`, as callers up to 0.18 do: delay_offload always waits for `flush_delayed_groups`.

    tensor: an output of the group's layers, or a tuple or list whose first element is one.
    forced_released_tensors: freed once copied. Raises GroupOrderError if no such group is open. Blocks the
        host: never.
    """
    forced = None if forced_released_tensors is None else list(forced_released_tensors)
    return offload.group_commit(tensor, name, forced, delay_offload)


def group_offload(
    tensor: T, name: str, forced_released_tensors: Tensors = None, delay_offload: bool = False
) -> T:
    """Close group `name`, as callers of 0.19 do: `group_commit`, but delay_offload counts only while a
    captured graph runs."""
    manager = PipelineOffloadManager.OFFLOAD_MGR
    replaying = delay_offload and manager is not None and _replay_of(manager).running
    return group_commit(tensor, name, forced_released_tensors, replaying)


class _GroupOffload:
    """`Interface.group_offload(tensor, name, ...)`; of an instance, which knows its name,
    `group_offload(tensor, ...)`."""

    def __get__(
        self, instance: FineGrainedActivationOffloadingInterface | None, owner: type
    ) -> Callable[..., Any]:
        return group_offload if instance is None else instance.offload_group


# ---- CUDA graphs ----


@dataclass
class _Replay:
    """Replays of one manager: whether a captured graph runs now, and the stream and event that order graphs
    against copies."""

    running: bool = False
    stream: Any = None
    event: Any = None


_replays: WeakKeyDictionary[PipelineOffloadManager, _Replay] = WeakKeyDictionary()


def _replay_of(manager: PipelineOffloadManager | None = None) -> _Replay:
    return _replays.setdefault(
        manager if manager is not None else PipelineOffloadManager.get_instance(), _Replay()
    )


def _graph_tools() -> _Replay:
    replay = _replay_of()
    if replay.stream is None:
        if not torch.cuda.is_available():
            raise OffloadError(
                "the stream and event of CUDA graphs were asked for, and torch sees no GPU; set "
                "cuda_graph_impl to 'none'"
            )
        replay.stream, replay.event = torch.cuda.Stream(), torch.cuda.Event(external=True)
    return replay


def forward_record(event: Any = None) -> None:
    """Order the current stream after the spills so far and record `event` there; without one, the process's
    own graph event."""
    engine_page.fine_grained_offloading_forward_record(_graph_tools().event if event is None else event)


def backward_record(tensor: torch.Tensor, event: Any = None) -> torch.Tensor:
    """An identity whose backward records `event`, or the process's own graph event, ordered after the
    restores so far."""
    return offload.backward_record(tensor, _graph_tools().event if event is None else event)


# ---- the step and its table ----


def reset(process_group: Any = None) -> None:
    """The step ends, its gradients final. process_group: the ranks whose table is printed after warm-up; None
    leaves it as it was."""
    if process_group is not None:
        PipelineOffloadManager.get_instance().process_group = process_group
    offload.reset()


def print_offload_summary_table(
    total_offload_bytes: dict[str, int], duplicates: Any = None, process_group: Any = None
) -> None:
    """The table of all ranks, bytes by group. duplicates: by group, bytes that another engine copied twice,
    or its copies and their bytes; this one copies a storage once, so they are logged, not printed. A second
    position that is no mapping is the process group. Blocks the host: as the engine's."""
    if duplicates is not None and not isinstance(duplicates, Mapping):
        duplicates, process_group = None, duplicates
    if duplicates:
        logger.warning(
            "the summary table has no column for duplicate copies, left out: %s bytes",
            f"{sum(one[-1] if isinstance(one, tuple) else one for one in duplicates.values()):,}",
        )
    offload.print_offload_summary_table(total_offload_bytes, process_group=process_group)


# ---- the class that Megatron's models import ----


class FineGrainedActivationOffloadingInterface:
    """`with Interface(offload, tensor, name) as tensor:` opens a group and installs the hooks; a no-op,
    arguments unread, unless `offload`.

    The group is closed by `group_commit(tensor, name, ...)` of the class or `group_offload(tensor, ...)` of
    the object.
    """

    def __init__(self, offload: bool, tensor: torch.Tensor, name: str) -> None:
        self.offload = offload
        self.tensor = tensor
        self.name = name
        self._close = _close_nothing

    def __enter__(self) -> torch.Tensor:
        if self.offload:
            self.tensor = group_start(self.tensor, self.name)
            self._close = _open_scope(PipelineOffloadManager.OFFLOAD_MGR)
        return self.tensor

    def __exit__(self, *exception: object) -> None:
        close, self._close = self._close, _close_nothing
        close()

    def offload_group(
        self, tensor: T, forced_released_tensors: Tensors = None, delay_offload: bool = False
    ) -> T:
        """Close this object's group; `tensor` itself unless `offload`."""
        return (
            group_offload(tensor, self.name, forced_released_tensors, delay_offload)
            if self.offload
            else tensor
        )

    group_offload = _GroupOffload()
    init_chunk_handler = staticmethod(init_chunk_handler)
    get_context = staticmethod(get_context)
    group_commit = staticmethod(group_commit)
    mark_not_offload = staticmethod(offload.mark_not_offloadable)
    mark_not_offloadable = staticmethod(offload.mark_not_offloadable)
    forward_record = staticmethod(forward_record)
    backward_record = staticmethod(backward_record)
    reset = staticmethod(reset)
    flush_delayed_groups = staticmethod(offload.flush_delayed_groups)
    disable_offload = staticmethod(offload.disable_offload)
    enable_offload = staticmethod(offload.enable_offload)

    @staticmethod
    def cuda_graph_stream() -> Any:
        """The stream that Transformer Engine captures on. Raises OffloadError without a GPU."""
        return _graph_tools().stream

    @staticmethod
    def cuda_graph_event() -> Any:
        """The external event that orders graphs against copies. Raises OffloadError without a GPU."""
        return _graph_tools().event

    @staticmethod
    def enter_replay() -> None:
        """A captured graph runs from now on: `group_offload(delay_offload=True)` waits for
        `flush_delayed_groups`."""
        _replay_of().running = True

    @staticmethod
    def exit_replay() -> None:
        """The graph is over; commits send at once again."""
        _replay_of().running = False

    @staticmethod
    def reset_instance() -> None:
        """A new engine; the old one returns its pinned memory."""
        PipelineOffloadManager.reset_instance()


def names_of(page: ModuleType) -> dict[str, Any]:
    """What PAGE offers: the engine's names, the long ones that differ here, and those that only one
    generation of Megatron has."""

    def debug_rank(message: str) -> None:
        initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
        if page.DEBUG and (torch.distributed.get_rank() if initialised else 0) == page.DEBUG_RANK:
            print(message)  # noqa: T201 - what the name promises

    names: dict[str, Any] = {name: getattr(engine_page, name) for name in engine_page.__all__}
    names.update(
        FineGrainedActivationOffloadingInterface=FineGrainedActivationOffloadingInterface,
        OffloadTensorPool=offload.GPUTensorPool,
        debug_rank=debug_rank,
        fine_grained_offloading_backward_record=backward_record,
        fine_grained_offloading_forward_record=forward_record,
        fine_grained_offloading_group_commit=group_commit,
        fine_grained_offloading_group_offload=group_offload,
        fine_grained_offloading_group_start=group_start,
        fine_grained_offloading_init_chunk_handler=init_chunk_handler,
        fine_grained_offloading_reset=reset,
        get_fine_grained_offloading_context=get_context,
        logger=logging.getLogger(PAGE),
        print_offload_summary_table=print_offload_summary_table,
    )
    return names
