"""A step that may fail half-way, taken back.

Not every class writes its state where torch's do: it lies in lists (SOAP), in objects (Shampoo), in inner
optimizers (SAM) and in the optimizer's own attributes. So all that the object holds is looked through before
the step. One invariant: after an error everything found is the same object with the same contents, and what
cannot be put back is named in the error.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.errors import OffloadError
from offload.optim.parts import parts_of
from offload.params.view import is_writable, local_of

_FIXED = (
    *(bool, int, float, complex, str, bytes, range, slice, type, Enum, types.NoneType, types.ModuleType),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, weakref.ref),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""Types whose objects no step changes, as far as can be seen: what a function closes over cannot be."""


@contextmanager
def undone_on_error(optimizer: Optimizer, not_ours: Sequence[BaseException]) -> Iterator[None]:
    """The optimizer steps all or nothing: an exception puts back weights, gradients, state, groups and
    attributes. An error that is not the closure's is raised as an OffloadError. not_ours: what the closure
    has raised."""
    undo, unseen = _remembered(vars(optimizer))
    try:
        yield
    except BaseException as error:
        with torch.no_grad():
            for put_back in undo:
                put_back()
        if not isinstance(error, Exception) or any(error is each for each in not_ours):
            raise
        but = f", but for what these hold, which was not put back: {', '.join(unseen)}" if unseen else ""
        raise OffloadError(
            f"the step failed in {type(optimizer).__name__} ({type(error).__name__}: {error}); weights "
            f"and state are those of the last whole step{but}"
        ) from error


@torch.no_grad()
def _remembered(root: dict[str, Any]) -> tuple[list[Callable[[], object]], list[str]]:
    """What puts back all that can be reached, and the names of what cannot be looked into."""
    undo: list[Callable[[], object]] = []
    unseen: list[str] = []
    seen: dict[int, Any] = {}
    left: list[tuple[str, Any]] = [("", root)]
    while left:
        name, value = left.pop()
        if isinstance(value, _FIXED) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            held = vars(value) if parts_of(value) else None
            left += [(name, value.grad if value.is_leaf else None), (name, held)]
            undo += [functools.partial(_write, value, value.data, value.clone())] if held is None else []
        elif isinstance(value, MutableMapping):
            undo.append(functools.partial(_refill, value, {**value}))
            left += [(key if isinstance(key, str) else name, each) for key, each in value.items()]
        elif isinstance(value, (MutableSequence, set, tuple, frozenset)):
            undo += [functools.partial(_refill, value, [*value])] if hasattr(value, "clear") else []
            left += [(name, each) for each in value]
        elif hasattr(value, "__dict__") and not isinstance(value, nn.Module):
            left.append((name, vars(value)))
        else:
            unseen.append(f"{name} ({type(value).__name__})")
    return undo, list(dict.fromkeys(unseen))


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, MutableSequence) else container.update)(contents)


def _write(tensor: Tensor, memory: Tensor, saved: Tensor) -> None:
    strided = tensor.layout is torch.strided
    if strided and local_of(tensor).data_ptr() != local_of(memory).data_ptr():
        tensor.data = memory  # which the class may have exchanged
    if not strided or is_writable(local_of(tensor)):
        tensor.copy_(saved)
