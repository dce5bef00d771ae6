"""The one pair of saved-tensor hooks, and the stack of scopes that it asks.

torch shows a saved tensor to the innermost pair of hooks only, so there is one pair for all features, and the
stack of scopes says which group owns a tensor. One invariant: `pop` removes the hooks and the scope that its
`push` installed, whatever was switched on or off in between.

A pair of the user's own around the scope is shown each save first, as without the scope (`_InsideUsers`).

A pack inside a backward is a recomputation (a checkpoint around the hooks): what it saves is read at once, so
it always stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, wraps
from inspect import unwrap
from typing import Any, Protocol

import torch

from offload.device import Device
from offload.saved.filters import ExternalStorages, Verdict, is_parameter, is_plain, is_wrapper, judge, waited
from offload.saved.handles import Handle, Passed, is_read, modified
from offload.saved.store import TensorStore
from offload.sizes import bytes_text
from offload.telemetry.speaker import Once, speaker

logger = speaker(__name__)

_graph_task = torch._C._current_graph_task_id
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks

_CHECKPOINTS = ("torch.utils.checkpoint", "offload.checkpoint.region")
"""Modules whose hooks compute again what was saved."""


class Scope(Protocol):
    """Who owns the tensors saved while it is innermost."""

    @property
    def min_elements(self) -> int: ...

    def take(self, tensor: torch.Tensor) -> Handle | None:
        """Take an eligible tensor; None passes it on to the scope outside this one."""

    def note_replayed(self, tensor: torch.Tensor) -> None:
        """A tensor stays because a CUDA graph that torch.compile recorded owns its memory."""


class LoadedAtRead(Protocol):
    """Stand-in in autograd's graph for a tensor whose bytes come and go with its owner."""

    def read(self) -> torch.Tensor: ...


class PackObserver(Protocol):
    """Who is told of every save, in steps that are looked at closely."""

    def opened(self, scope: Scope) -> None:
        """The pair is installed for this scope."""

    def closed(self, scope: Scope) -> None:
        """And removed."""

    def packed(
        self, scope: Scope, tensor: torch.Tensor, packed: Handle | Passed, verdict: Verdict | None
    ) -> None:
        """scope: the innermost one. packed: what autograd's graph keeps. verdict: why the tensor can never
        leave; None for one that a group has taken, or that no group wanted."""


@dataclass(slots=True, eq=False)
class InstalledScope:
    """A scope that the pair is installed for. stays: predicate over tensors: never offload this one,
    whichever scope owns it."""

    scope: Scope
    stays: Callable[[torch.Tensor], bool] | None = None


def admits_hooks() -> bool:
    """Predicate: torch admits saved-tensor hooks here: not inside a transform of torch.func, nor where they
    are disabled."""
    is_enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return torch._C._functorch.peek_interpreter_stack() is None and is_enabled


def inside_checkpoint() -> str:
    """The module of the innermost saved-tensor hooks if they are those of a non-reentrant checkpoint; "" if
    not. Its recompute must save exactly what its forward saved, tensor by tensor, so nobody may take one away
    from it in the forward."""
    top = _top_hooks(True)
    module = "" if top is None else getattr(top[0], "__module__", "")
    return module if module in _CHECKPOINTS else ""


Pair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]
"""A pack and its unpack."""


def users_pair() -> Pair | None:
    """The user's own saved-tensor hooks that would be shown what is saved now without those of this package;
    None without such, and in a checkpoint, which is shown it then."""
    top = _top_hooks(True)
    owner = None if top is None else getattr(unwrap(top[0]), "__self__", None)
    if top is None or type(owner) is SavedTensorHooks:
        return None
    if type(owner) is _InsideUsers:
        return owner.users
    if getattr(top[0], "__qualname__", "").startswith("save_on_cpu."):  # it only moves, and so do we
        return None
    module = getattr(top[0], "__module__", None) or ""
    return None if module in _CHECKPOINTS or module.startswith("offload.") else top


def pair_without_users() -> Pair:
    """The innermost pair as it is without one of the user's around it, for what is saved beside the model."""
    owner = getattr(unwrap(_top_hooks(True)[0]), "__self__", None)
    return (owner.pack_ours, owner.unpack_ours) if type(owner) is _InsideUsers else (as_it_is, as_it_is)


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Pack, or unpack, of a pair that changes nothing."""
    return tensor


class _InsideUsers:
    """A pair inside the user's own: what theirs makes of a save is saved, and goes back through theirs.

    That may leave if it is the save itself, or a tensor whose bytes nobody else has. All else stays theirs,
    in a tuple of one.
    """

    def __init__(
        self,
        users: Pair,
        pair: Pair,
        lock: AbstractContextManager[object],
        alias_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.users = users
        self.pack_ours, self.unpack_ours = pair
        self._lock = lock
        self._alias_of = alias_of

    def pack(self, tensor: torch.Tensor) -> Any:
        tensor = self._alias_of(tensor)
        with self._lock:  # operators inside are none of the model's, for who counts those
            made = self.users[0](tensor)
        return self.pack_ours(made) if made is tensor or _may_move(made, tensor) else (made,)

    def unpack(self, packed: Any) -> Any:
        return self.users[1](packed[0] if type(packed) is tuple else self.unpack_ours(packed))


def _may_move(made: Any, tensor: torch.Tensor) -> bool:
    """Return True if `made` is a tensor with the bytes of the save, or one that alone has its storage."""
    if any(type(part) is not torch.Tensor or part.layout is not torch.strided for part in (made, tensor)):
        return False
    storage = made.untyped_storage()
    is_of_save = storage._cdata == tensor.untyped_storage()._cdata
    return is_of_save or bool(torch._C._storage_Use_Count(storage._cdata) <= 2)  # the tensor, and this object


class WrapperHandle:
    """A wrapper subclass (DTensor, float8): how to put its inner tensors together again. Members that are no
    tensors stay as they are."""

    __slots__ = ("context", "inner", "kind", "probe", "size", "stride", "version")

    def __init__(self, tensor: Any, pack: Callable[[torch.Tensor], Any]) -> None:
        names, self.context = tensor.__tensor_flatten__()
        self.kind = type(tensor)
        self.size = tensor.size()
        self.stride = tensor.stride()
        members = [(name, getattr(tensor, name)) for name in names]
        self.inner = {
            name: pack(member) if isinstance(member, torch.Tensor) else member for name, member in members
        }
        self.probe = wrapper_probe(tensor)
        self.version = 0 if self.probe is None else self.probe._version


def wrapper_probe(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor that shares the version counter of a wrapper and holds none of its members, whose own counters
    an in-place change does not move. Its class is asked for nothing: the alias that a class makes may share
    what holds the members, or be the wrapper itself."""
    if tensor.is_inference():
        return None
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


class _Scopes(threading.local):
    """Stack of scopes, one for each thread, as torch's stack of hooks is."""

    def __init__(self) -> None:
        self.stack: list[InstalledScope] = []


class SavedTensorHooks:
    """pack and unpack. unpack may run on autograd's own thread; both take the engine's lock.

    readers: callables that run after each read of a record, still under the lock; the prefetcher is pumped by
    one. Of the reads of a piece that stays they run after the first and the last.
    """

    def __init__(
        self,
        store: TensorStore,
        externals: ExternalStorages,
        lock: AbstractContextManager[object],
        device: Device,
        readers: Sequence[Callable[[Handle], None]],
    ) -> None:
        self._store = store
        self._externals = externals
        self._lock = lock
        self._device = device
        self._readers = readers
        # told of saves in scopes that are opened from then on; with one, every save costs some calls more
        self.observers: list[PackObserver] = []
        # by storage: packs what is saved of a weight that is streamed. Also for what is saved in a backward
        self.streamed: dict[int, Callable[[torch.Tensor], LoadedAtRead | None]] = {}
        self.input_half = False  # of a split backward runs: some of what torch unpacks only the W reads
        self.passed = 0  # of such, since whoever sets `input_half` has set this
        self._here = _Scopes()
        self._said = Once()

    # -- scopes ----------------------------------------------------------------------------------------------
    def push(self, scope: Scope, stays: Callable[[torch.Tensor], bool] | None = None) -> InstalledScope:
        """Make `scope` the innermost and install the pair. Give what this returns to `pop`.

        stays: predicate, asked of each tensor saved while the scope is innermost, and of a wrapper and its
            members. True keeps the tensor on the device.
        """
        installed = InstalledScope(scope, stays)
        pack, unpack = self._observed_pack if self.observers else self.pack, self.unpack
        users = users_pair()
        if users is not None:
            inside = _InsideUsers(users, (pack, unpack), self._lock, self.alias_of)
            pack, unpack = inside.pack, inside.unpack
        _push_hooks(pack, unpack)  # torch.autograd.graph.saved_tensors_hooks, without its object
        self._here.stack.append(installed)
        for observer in self.observers:
            observer.opened(scope)
        return installed

    def pop(self, installed: InstalledScope) -> None:
        """Take out exactly what `push` put in."""
        scopes = self._here.stack
        if installed in scopes:  # not after a `pop` of the same
            scopes.remove(installed)
        _pop_hooks()
        for observer in self.observers:
            observer.closed(installed.scope)

    def sees_saves(self) -> bool:
        """Return True if this pair would be shown what the calling thread saves now."""
        top = _top_hooks(True)
        owner = None if top is None else getattr(unwrap(top[0]), "__self__", None)
        return owner is self or type(owner) is _InsideUsers

    def push_aliases(self) -> Callable[[], object] | None:
        """Where the innermost pair is of a recompute of torch's checkpoint, which keeps a frozen parameter as
        it is: have it keep an alias of one that is streamed. What undoes that; None where it is not."""
        top = _top_hooks(True)
        if top is None or not getattr(top[0], "__qualname__", "").startswith("_recomputation_hook."):
            return None
        pack: Callable[[torch.Tensor], Any] = top[0]

        @wraps(pack)  # so that it is known for a checkpoint's
        def pack_alias(tensor: torch.Tensor) -> Any:
            return pack(self.alias_of(tensor))

        _push_hooks(pack_alias, top[1])
        return _pop_hooks

    def alias_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """An alias of a parameter that is streamed, which shows its owner that somebody will read the bytes;
        any other tensor as it is."""
        if not self.streamed or type(tensor) is not torch.nn.Parameter:
            return tensor
        if tensor.untyped_storage()._cdata not in self.streamed:
            return tensor
        return torch.nn.Parameter(tensor.detach(), tensor.requires_grad)

    def innermost(self) -> Scope | None:
        scopes = self._here.stack
        return scopes[-1].scope if scopes else None

    # -- the pair --------------------------------------------------------------------------------------------
    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd keeps instead of `tensor`. Parameters and small tensors are about half of what
        it saves; they are recognised here, without a further call."""
        if self.streamed and (packed := self._pack_streamed(tensor)) is not None:
            return packed
        if _graph_task() != -1:
            return Passed(tensor)
        scopes = self._here.stack
        if not scopes or type(tensor) is not torch.Tensor or scopes[-1].stays is not None:
            return self._pack_other(tensor, scopes, self.pack)
        scope = scopes[-1].scope
        if tensor.numel() < scope.min_elements or type(tensor._base) is torch.nn.Parameter:
            return Passed(tensor)
        with self._lock:
            verdict = judge(tensor, self._device, self._externals, scope.min_elements)
            if verdict is Verdict.ELIGIBLE:
                handle = scope.take(tensor)
                return handle if handle is not None else self._pack_judged(tensor, scopes[:-1], verdict)
            return self._pack_judged(tensor, scopes, verdict)

    def _pack_streamed(self, tensor: torch.Tensor) -> LoadedAtRead | None:
        """Return what to keep of a streamed weight, or of a view of one; None for another tensor."""
        try:
            with torch._C.DisableTorchFunctionSubclass():  # its class may be one that watches
                pack = self.streamed.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # a wrapper has no storage
            return None
        return None if pack is None else pack(tensor)

    def _observed_pack(self, tensor: torch.Tensor) -> Any:
        """`pack`, and who looks at the step closely is told of it."""
        packed = self.pack(tensor)
        scopes = self._here.stack
        if scopes and _graph_task() == -1:
            installed = scopes[-1]
            with self._lock:
                self._tell(installed, tensor, packed)
        return packed

    def _tell(self, installed: InstalledScope, tensor: torch.Tensor, packed: Any) -> None:
        if type(packed) is WrapperHandle:
            for part in packed.inner.values():
                if type(part) is Passed:
                    self._tell(installed, part.tensor, part)
            return
        verdict = None
        if type(packed) is not Handle and type(packed) is not Passed:  # of a streamed weight
            packed, verdict = Passed(tensor), Verdict.PARAMETER
        elif type(packed) is Passed:
            if installed.stays is not None and installed.stays(tensor):
                verdict = getattr(installed.stays, "verdict", Verdict.OPTED_OUT)
            elif is_parameter(tensor):  # a wrapper too
                verdict = Verdict.PARAMETER
            else:
                verdict = judge(tensor, self._device, self._externals, installed.scope.min_elements)
        for observer in list(self.observers):
            observer.packed(installed.scope, tensor, packed, None if verdict is Verdict.ELIGIBLE else verdict)

    def pack_for(self, scope: Scope, tensor: torch.Tensor) -> Any:
        """`pack`, for a tensor that `scope` owns whatever pair is innermost: an operator's output that
        autograd never saves."""
        if _graph_task() != -1:
            return Passed(tensor)
        return self._pack_other(tensor, [InstalledScope(scope)], partial(self.pack_for, scope))

    def _pack_other(
        self, tensor: torch.Tensor, scopes: Sequence[InstalledScope], pack: Callable[[torch.Tensor], Any]
    ) -> Any:
        """pack: for the members of a wrapper."""
        tensor = waited(tensor)
        stays = scopes[-1].stays if scopes else None
        if stays is not None and stays(tensor):
            return Passed(tensor)
        if not is_plain(tensor) and is_wrapper(tensor):
            if is_parameter(tensor):  # asked of the wrapper: its members know neither base nor grad_fn
                return Passed(tensor)
            return WrapperHandle(tensor, partial(self._pack_member, pack) if tensor.is_nested else pack)
        if not scopes:
            return Passed(tensor)
        with self._lock:
            verdict = judge(tensor, self._device, self._externals, scopes[-1].scope.min_elements)
            return self._pack_judged(tensor, scopes, verdict)

    @staticmethod
    def _pack_member(pack: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        """Pack a member of a wrapper. The offsets of a jagged tensor stay, because torch compares two ragged
        sizes by the offsets object."""
        return pack(tensor) if tensor.is_floating_point() else Passed(tensor)

    def _pack_judged(
        self, tensor: torch.Tensor, scopes: Sequence[InstalledScope], verdict: Verdict
    ) -> Handle | Passed:
        if verdict is Verdict.ELIGIBLE:
            for installed in reversed(scopes):
                handle = installed.scope.take(tensor)
                if handle is not None:
                    return handle
        elif verdict is Verdict.REPLAYED:
            scopes[-1].scope.note_replayed(tensor)
        elif verdict is Verdict.SUBCLASS and self._said.first(type(tensor)):
            logger.warning(
                f"saved tensors of type {type(tensor).__qualname__} stay on the device (the first: "
                f"{bytes_text(tensor.numel() * tensor.element_size())}): the type has no __tensor_flatten__, "
                "so its bytes cannot be found; keep such tensors outside offload_hooks(), or give the type "
                "that method"
            )
        return Passed(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is Handle:
            block, alias = packed.record.block, packed.probe
            with self._lock:
                if (
                    self.input_half
                    and block.holders is None
                    and block.capture is None
                    and not is_read(packed, SavedTensorHooks)
                ):
                    self.passed += 1
                    return self._store.read(packed, passed=True)
                if (
                    block.storages > 1
                    and 1 < block.unread < block.readers
                    and packed.pass_no != block.pass_no
                    and alias is not None
                    and alias._version == packed.version
                ):
                    # `read` in the midst of a piece that stays, of which nobody need know; autograd, which
                    # alone has the handle, aliases it
                    packed.pass_no = block.pass_no
                    block.unread -= 1
                    return alias
                tensor = self._store.read(packed)
                for reader in self._readers:
                    reader(packed)
                return tensor
        if type(packed) is Passed:
            tensor, version = packed.tensor, packed.version
            return tensor if version is None or tensor._version == version else packed.read()
        if type(packed) is not WrapperHandle:
            assert hasattr(packed, "read"), f"unpack of a {type(packed).__name__}; give it what pack returned"
            loaded: LoadedAtRead = packed
            return loaded.read()
        if packed.probe is not None and packed.probe._version != packed.version:
            raise modified(packed.probe.dtype, packed.size, packed.probe._version, packed.version)
        inner = {
            name: self.unpack(part) if isinstance(part, (Handle, Passed, WrapperHandle)) else part
            for name, part in packed.inner.items()
        }
        rebuilt: torch.Tensor = packed.kind.__tensor_unflatten__(
            inner, packed.context, packed.size, packed.stride
        )
        return rebuilt
