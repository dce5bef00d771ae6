"""The one pair of saved-tensor hooks, and the stack of scopes that it asks.

torch shows a saved tensor to the innermost pair of hooks only, so there is one pair for all features; which group owns a tensor is
the scope stack's business. One invariant: what a scope pushed is what leaves with it, whatever was switched on or off in between.

A pack inside a backward is a recomputation (a checkpoint around the hooks): what it saves is read at once, so it always stays.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from offload.device import Device
from offload.saved.externals import ExternalStorages
from offload.saved.filters import Verdict, is_plain, is_wrapper, judge, waited
from offload.saved.store import Handle, Passed, TensorStore

__all__ = ["InstalledScope", "SavedTensorHooks", "Scope", "WrapperHandle"]


class Scope(Protocol):
    """Who owns the tensors saved while it is innermost."""

    def min_elements(self) -> int: ...

    def take(self, tensor: torch.Tensor) -> Handle | None:
        """Take an eligible tensor; None passes it on to the scope outside this one."""


class InstalledScope:
    """A scope and the pair installed for it."""

    __slots__ = ("pair", "scope")

    def __init__(self, scope: Scope, pair: torch.autograd.graph.saved_tensors_hooks) -> None:
        self.scope = scope
        self.pair = pair


class WrapperHandle:
    """A wrapper subclass (DTensor, float8): how to put its inner tensors together again."""

    __slots__ = ("context", "inner", "kind", "size", "stride")

    def __init__(self, tensor: Any, pack: Callable[[torch.Tensor], Any]) -> None:
        names, self.context = tensor.__tensor_flatten__()
        self.kind = type(tensor)
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.inner = {name: pack(getattr(tensor, name)) for name in names}


class SavedTensorHooks:
    """pack and unpack. unpack may run on autograd's own thread; both take the engine's lock.

    on_read: called after each read of a record, still under the lock; where the prefetcher is pumped.
    """

    def __init__(
        self,
        store: TensorStore,
        externals: ExternalStorages,
        lock: AbstractContextManager[object],
        device: Device,
        on_read: Callable[[Handle], None],
    ) -> None:
        self._store = store
        self._externals = externals
        self._lock = lock
        self._device = device
        self._on_read = on_read
        self._scopes: list[InstalledScope] = []

    # -- scopes ---------------------------------------------------------------------------------------------------
    def push(self, scope: Scope) -> InstalledScope:
        """Make `scope` the innermost and install the pair. Give what this returns to `pop`."""
        installed = InstalledScope(scope, torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack))
        installed.pair.__enter__()
        self._scopes.append(installed)
        return installed

    def pop(self, installed: InstalledScope) -> None:
        """Take out exactly what `push` put in."""
        for position in range(len(self._scopes) - 1, -1, -1):
            if self._scopes[position] is installed:
                del self._scopes[position]
                break
        installed.pair.__exit__()

    def innermost(self) -> Scope | None:
        return self._scopes[-1].scope if self._scopes else None

    # -- the pair -------------------------------------------------------------------------------------------------
    def pack(self, tensor: torch.Tensor) -> Any:
        if torch._C._current_graph_task_id() != -1:
            return Passed(tensor)
        tensor = waited(tensor)
        if not is_plain(tensor) and is_wrapper(tensor) and not isinstance(tensor._base, torch.nn.Parameter):
            if isinstance(tensor, torch.nn.Parameter):
                return Passed(tensor)
            return WrapperHandle(tensor, self.pack)
        with self._lock:
            return self._pack_plain(tensor)

    def _pack_plain(self, tensor: torch.Tensor) -> Handle | Passed:
        scopes = self._scopes
        if not scopes:
            return Passed(tensor)
        if judge(tensor, self._device, self._externals, scopes[-1].scope.min_elements()) is Verdict.ELIGIBLE:
            for installed in reversed(scopes):
                handle = installed.scope.take(tensor)
                if handle is not None:
                    return handle
        return Passed(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is Handle:
            with self._lock:
                tensor = self._store.read(packed)
                self._on_read(packed)
                return tensor
        if type(packed) is Passed:
            return packed.read()
        assert type(packed) is WrapperHandle
        inner = {name: self.unpack(part) for name, part in packed.inner.items()}
        rebuilt: torch.Tensor = packed.kind.__tensor_unflatten__(inner, packed.context, packed.size, packed.stride)
        return rebuilt
