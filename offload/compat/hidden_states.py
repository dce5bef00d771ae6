"""A drop-in for torch.utils.checkpoint, both variants, whose input waits on the host: for code that calls it
and cannot be changed.

One invariant: what runs is torch's own function, so results, random state, buffers and errors are its own.
Only where one tensor is kept differs: the first argument that may leave.

Nobody announces forwards to a patch. Where no chunk is current, or the one that was begun here has been read
from, a call begins the next one; a step ends where that finds no saved tensor alive. Several forwards before
their first backward are one chunk. Whoever announces forwards, by `init_chunk_handler`, a pipeline stage or
`offload.apply`, is believed instead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import signature
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, noop_context_fn

from offload import marks
from offload.checkpoint.hidden_states import HIDDEN_STATES, InputGroup
from offload.errors import OffloadError
from offload.groups.manager import GroupsManager
from offload.saved.handles import SavedChunk
from offload.saved.hooks import admits_hooks, as_it_is
from offload.telemetry.speaker import speaker

logger = speaker(__name__)

_FUNCTION, _GENERATOR = "CheckpointFunction", "_checkpoint_without_reentrant_generator"
if hasattr(torch_checkpoint, f"{_GENERATOR}_impl"):  # since torch 2.14, whose former one calls it
    _GENERATOR += "_impl"


_begun: WeakKeyDictionary[Any, SavedChunk] = WeakKeyDictionary()
"""By manager, the chunk that was begun here last."""

_replaced: dict[str, tuple[Any, Any]] = {}
"""By name in torch.utils.checkpoint, while the patch is on: what was there, and what is there instead."""


def patch_hidden_states_offload(model: nn.Module | None = None) -> None:
    """From now on every `torch.utils.checkpoint.checkpoint` of this process, reentrant or not, leaves its
    input on the host: the first tensor on the device among its arguments by position, in a group called
    `hidden_states` of the process's manager. What it computes is torch's own.

    It is for code that checkpoints and cannot be changed; `offload.apply(model, mode="hidden_states")` is for
    one model and needs no checkpoints, and `hidden_states_offload()` is for a stretch of code. Buffers are as
    torch's checkpoints leave them: what a block writes in its forward, such as a batch norm's statistics, is
    written a second time in its recompute. Idempotent.

    model: looked at only. Raises ValueError if a part of its weights is frozen; warns if it has an adapter.
    Raises OffloadError where this torch saves the input of its checkpoints elsewhere than those tested.
    """
    if model is not None:
        _check_model(model)
    if _replaced:
        return
    if admits_hooks():
        _check_torch()
    _replace(marks.default_manager)


def _replace(manager: Callable[[], GroupsManager]) -> None:
    for name, wrap in ((_FUNCTION, _function), (_GENERATOR, _generator)):
        original = getattr(torch_checkpoint, name)
        _replaced[name] = original, wrap(original, manager)
        setattr(torch_checkpoint, name, _replaced[name][1])


@cache
def _check_torch() -> None:
    """Once a process, run a checkpoint of each variant, and see whether autograd saves its input while the
    group is open. torch 2.14 moved the place: what replaced the former one was there, and nobody called
    it."""
    is_open: list[torch.Tensor] = []
    saved: list[torch.Tensor] = []
    group = SimpleNamespace(open=is_open.extend, send=is_open.clear, close=id)
    asked = SimpleNamespace(active_handler=lambda: None, needs_chunk=bool, input_group=lambda *_, **__: group)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.extend(is_open)
        return tensor

    _replace(cast("Callable[[], GroupsManager]", lambda: asked))
    try:
        for reentrant in (True, False):
            saved.clear()
            with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(pack, as_it_is):
                x = torch.zeros(1, device="cpu", requires_grad=True)
                checkpoint(torch.neg, x, use_reentrant=reentrant, preserve_rng_state=False)
            if not saved:
                raise OffloadError(
                    f"torch {torch.__version__} saves the input of a {'' if reentrant else 'non-'}reentrant "
                    "checkpoint elsewhere, and hidden_states_offload() would move nothing: take "
                    "offload.apply(model, mode='hidden_states'), an older torch or a newer offload"
                )
    finally:
        unpatch_hidden_states_offload()


def unpatch_hidden_states_offload() -> None:
    """Undo `patch_hidden_states_offload`: torch's own functions are restored. A backward that is still to
    come finds its tensors. Idempotent; what somebody else has put in our place since stays, with a
    warning."""
    for name, (original, ours) in _replaced.items():
        if getattr(torch_checkpoint, name) is ours:
            setattr(torch_checkpoint, name, original)
        else:
            logger.warning(
                f"torch.utils.checkpoint.{name} was replaced by somebody else after "
                "patch_hidden_states_offload(), and stays as it is; undo the latest patch first"
            )
    _replaced.clear()


@contextmanager
def hidden_states_offload() -> Iterator[None]:
    """`patch_hidden_states_offload` for the forwards inside a `with`; their backward may come after it. What
    was patched before stays so."""
    before = bool(_replaced)
    patch_hidden_states_offload()
    try:
        yield
    finally:
        if not before:
            unpatch_hidden_states_offload()


def _check_model(model: nn.Module) -> None:
    """Raises ValueError for a model with frozen weights that are not an adapter's base: reentrant checkpoints
    return no gradient where no input requires one. Warns for one with an adapter."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}, must be a torch.nn.Module")
    parameters = list(model.parameters())
    frozen = sum(not parameter.requires_grad for parameter in parameters)
    if not 0 < frozen < len(parameters):
        return
    if not hasattr(model, "peft_config"):
        raise ValueError(
            f"{frozen:,} of the {len(parameters):,} parameters of {type(model).__name__} are frozen: a "
            "reentrant checkpoint of a block whose input requires no gradient gives its weights none. Use "
            "offload.apply(model, mode='hidden_states'), which has no such limit"
        )
    logger.warning(
        f"{type(model).__name__} has an adapter: checkpoints compute its frozen layers twice. "
        "offload.apply(model, mode=True) offloads instead of recomputing, which is faster where the link "
        "keeps up"
    )


# -- one checkpoint ------------------------------------------------------------------------------------------
def _opened(manager: GroupsManager, arguments: tuple[Any, ...], alone: bool = True) -> InputGroup:
    """The group of a checkpoint's input. alone: as `input_group`."""
    _announce(manager)
    group = manager.input_group(HIDDEN_STATES, alone=alone)
    group.open([argument for argument in arguments if isinstance(argument, torch.Tensor)])
    return group


def _announce(manager: GroupsManager) -> None:
    handler = manager.active_handler()
    if handler is None:
        if not manager.needs_chunk():
            return  # switched off, or a recompute
    else:
        if handler.saved is not _begun.get(manager) or not handler.saved.readable:
            return
        if next(manager.tracker.living_blocks(), None) is None:
            manager.follower.end_inferred_step()
    manager.tracker.begin_inferred_forward(0, None)
    handler = manager.active_handler()
    if handler is not None:
        _begun[manager] = handler.saved


def _function(original: Any, manager: Callable[[], GroupsManager]) -> type:
    """In place of the Function of reentrant checkpoints. Its input is saved when the function has run, so its
    copy runs beside the next block."""

    class CheckpointFunction(original):  # type: ignore[misc]
        @classmethod
        def apply(cls, run: Any, preserve_rng_state: Any, *arguments: Any) -> Any:
            trains = (isinstance(argument, torch.Tensor) and argument.requires_grad for argument in arguments)
            if not (torch.is_grad_enabled() and any(trains)):
                return original.apply(run, preserve_rng_state, *arguments)
            group, output = _opened(manager(), arguments), None
            try:
                output = original.apply(run, preserve_rng_state, *arguments)
            finally:
                group.send()
                group.close(output)
            return output

    return CheckpointFunction


def _generator(
    original: Any, manager: Callable[[], GroupsManager]
) -> Callable[..., Generator[None, None, None]]:
    """In place of what runs before and after the function of a non-reentrant checkpoint."""

    parameters, run = signature(original), contextmanager(original)

    def around(*arguments: Any, **keywords: Any) -> Generator[None, None, None]:
        if not torch.is_grad_enabled():
            yield from original(*arguments, **keywords)
            return
        given = parameters.bind(*arguments, **keywords).arguments
        alone = given.get("context_fn", noop_context_fn) is noop_context_fn
        group = _opened(manager(), given.get("args", ()), alone)
        try:
            with run(*arguments, **keywords):
                group.send()
                yield
        finally:
            group.send()
            group.close(None)

    return around
