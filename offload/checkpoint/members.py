"""Objects that the modules of a block are bound to around one forward, their buffers' values and the
arguments of the call, for a recompute after somebody changed them.

`torch.func.functional_call` puts other tensors in the places of parameters for one forward; loops evaluate
between a forward and its backward, set an attribute for each of two live forwards, or exchange a submodule;
and a forward binds attributes itself. One invariant: a recompute finds the very objects that its forward
found, and at its end those are bound that were bound at its begin. What was written into objects is not
known: of parameters an error says it, buffers have copies, the net finds the rest (net.py). DTensors are left
alone: FSDP2 exchanges shards and gathered parameters of one value.

Buffers end as after one forward: a recompute starts from the values that its forward had, and writes into
copies of its own. Small buffers are copied before every forward: the kernels of batch norm write their
statistics and move no version, and a call may do so that none before did. Which of the large ones a forward
writes is learned in the first one, which compares values: that blocks the host, once for each and each of
training and evaluation.

Arguments that are another thing after the forward are refused by name; of a tensor the second run gets the
very object that the forward got, if it lives and its bytes have stayed, and else another one, with the
attributes that the forward found on it either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from offload.checkpoint.kept import looks_of, storages_of
from offload.errors import OffloadError
from offload.saved.filters import is_dtensor, is_plain, is_wrapper
from offload.telemetry.speaker import speaker
from offload.transfer.block import ViewLayout, empty_at, overlaps_itself, place_of

logger = speaker(__name__)

_SMALL_BYTES = 1 << 16
"""Bytes that a small buffer has at most: the statistics of 16,384 channels."""

_writes: WeakKeyDictionary[nn.Module, dict[tuple[str, bool], bool]] = WeakKeyDictionary()
"""By module, then by large buffer and whether the module trains: whether a forward writes it."""


class BuffersBefore:
    """Buffers of `modules` before one forward: built just before, and `learn` called just after.

    Blocks the host: in the first forward, see above; in a CUDA graph's capture never.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.clones: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the tensor, which lives
        self._owners = [owner for owner in modules if owner._buffers]
        self._large: list[tuple[nn.Module, str, torch.Tensor, int]] = []
        for owner in self._owners:
            for name, tensor in owner._buffers.items():
                if tensor is None:
                    continue
                if tensor.numel() * tensor.element_size() > _SMALL_BYTES:
                    self._large.append((owner, name, tensor, _version(tensor)))
                    if _writes.get(owner, {}).get((name, owner.training)) is False:
                        continue
                if id(tensor) not in self.clones:
                    self.clones[id(tensor)] = tensor, _copy(tensor)

    def learn(self) -> None:
        """The forward is over: let go of large buffers that it did not write."""
        large, self._large = self._large, []
        learns = not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        for owner, name, tensor, version in large:
            known, which = _writes.setdefault(owner, {}), (name, owner.training)
            is_written = _version(tensor) != version
            if id(tensor) not in self.clones:
                if is_written:  # earlier forwards left it alone, so there is no clone of it
                    known[which] = True
                    logger.warning(
                        f"buffer {name!r} of a {type(owner).__name__} was written in a forward that is "
                        "recomputed, and in none before: this one recompute starts from its value in the "
                        "backward, and writes it again; later ones do not"
                    )
            elif learns and not known.get(which):
                known[which] = is_written or not _are_equal(*self.clones[id(tensor)])
                if not known[which]:
                    del self.clones[id(tensor)]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The recompute runs inside, and finds copies, which go with its end: a second backward starts from
        the clones too."""
        copies: dict[int, torch.Tensor] = {}
        found = []
        try:
            for owner in self._owners:
                for name, tensor in list(owner._buffers.items()):
                    if id(tensor) in self.clones:
                        if id(tensor) not in copies:
                            copies[id(tensor)] = _copy(self.clones[id(tensor)][1])
                        found.append((owner, name, tensor))
                        owner._buffers[name] = copies[id(tensor)]
            yield
        finally:
            for owner, name, tensor in found:
                owner._buffers[name] = tensor


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy for which kernels are chosen as for the tensor."""
    with _disable_current_modes(), torch.no_grad():  # who counts the block's calls does not see this one
        copy = tensor.detach().clone()
        if is_plain(tensor) and tensor.layout is torch.strided and not tensor.is_quantized:
            start = int(tensor.storage_offset()) * tensor.itemsize
            place = place_of(tensor.untyped_storage(), start) // tensor.itemsize
            layout = ViewLayout(tensor.size(), tensor.stride(), place, tensor.dtype)
            if (place or copy.stride() != layout.stride) and not overlaps_itself(layout):
                copy = empty_at(layout, tensor.device).copy_(copy)
    return copy.requires_grad_(tensor.requires_grad)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _are_equal(tensor: torch.Tensor, clone: torch.Tensor) -> bool:
    try:
        return torch.equal(tensor, clone)
    except (NotImplementedError, RuntimeError):  # a layout or a device that cannot be compared
        return False


_ANY = object()
"""A mark in the place of a value that is left as it is found."""


def inner_modules(module: nn.Module) -> list[nn.Module]:
    """`module` and all modules inside, each once, level by level. `module.modules()` is a generator inside a
    generator for each level, for which every call of a block would pay."""
    found = [module]
    known = {id(module)}
    for owner in found:
        for inner in owner._modules.values():
            if inner is not None and id(inner) not in known:
                known.add(id(inner))
                found.append(inner)
    return found


def is_trained(modules: Sequence[nn.Module]) -> bool:
    """Predicate: a parameter of these modules requires a gradient."""
    return any(
        parameter is not None and parameter.requires_grad
        for owner in modules
        for parameter in owner._parameters.values()
    )


@contextmanager
def no_hooks_added(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Take off the gradient hooks that a recompute puts on these tensors: its forward has put them on, and
    torch would run both, also where a tensor is another one of the same node of autograd."""
    before = _hooks_of(tensors).keys()
    try:
        yield
    finally:
        hooks = _hooks_of(tensors)
        for at in hooks.keys() - before:
            hooks[at].pop(at[1], None)  # once, also of a tensor that is given twice


def _hooks_of(tensors: Sequence[torch.Tensor]) -> dict[tuple[int, int], dict[int, Any]]:
    """By place and number, each with the dictionary that it is in."""
    with torch._C.DisableTorchFunctionSubclass():
        kinds: Any = [one._backward_hooks for one in tensors]
        kinds += [one._post_accumulate_grad_hooks for one in tensors]
    return {(place, key): hooks for place, hooks in enumerate(kinds) if hooks for key in hooks}


def is_sharded(modules: Sequence[nn.Module]) -> bool:
    """Predicate: FSDP2 gathers parameters of these modules for each recompute. They are gone with the
    recompute's end, so nothing that was saved of them may be read later."""
    return any(hasattr(type(inner), "_get_fsdp_state") for inner in modules)


def has_lazy(modules: Sequence[nn.Module]) -> bool:
    """Predicate: a parameter or a buffer of these modules has no shape yet, which the next forward will give
    it."""
    return any(isinstance(owner, LazyModuleMixin) and owner.has_uninitialized_params() for owner in modules)


class MembersBefore:
    """Attributes, parameters, buffers and submodules of `modules`: built just before a forward, and `learn`
    called just after. Blocks the host: in a first forward, as BuffersBefore."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._places: list[dict[str, Any]] = [
            place
            for owner in modules
            if type(owner._modules) is dict  # not of TorchScript, whose modules cannot be changed
            for place in (owner._modules, owner._parameters, owner._buffers, vars(owner))
        ]
        self._before = _Bound(self._places)
        self._buffers = BuffersBefore(modules)
        self._parameters: list[torch.Tensor] = []
        self._requires: list[bool] = []
        self._versions: list[int] = []

    def learn(self) -> None:
        """The forward is over."""
        self._buffers.learn()
        self._parameters = [
            parameter
            for owner in self._modules
            for parameter in owner._parameters.values()
            if parameter is not None and not parameter.is_inference()
        ]
        self._requires = [parameter.requires_grad for parameter in self._parameters]
        self._versions = [parameter._version for parameter in self._parameters]
        if not self._before.is_still_in(self._places):
            self._learn_bound()

    def _learn_bound(self) -> None:
        """The forward bound something. Where it made submodules or parameters, a recompute starts from what
        it left: it would make others. No graph is held, of the call before or of this one."""
        for at in range(0, len(self._places), 4):
            places = self._places[at : at + 4]
            is_grown = any(place.keys() - self._before[at + n].keys() for n, place in enumerate(places[:2]))
            if is_grown:
                self._before[at : at + 4] = map(dict.copy, places)
            for place, before in zip(places, self._before[at : at + 4], strict=True):
                for name, value in before.items():
                    is_new = is_grown or place.get(name, _ANY) is not value
                    if is_new and any(getattr(x, "grad_fn", None) is not None for x in tree_leaves(value)):
                        before[name] = _ANY
        self._before = _Bound(self._before)

    def written(self) -> torch.Tensor | None:
        """A parameter that was written in place after the forward. None without one, under FSDP2, and of a
        view that FSDP puts in a parameter's place while it is gathered; nor of one that peft adapts by
        itself, which it takes out and puts back in every call."""
        if self._versions != [parameter._version for parameter in self._parameters]:
            wrappers: Any = [wrapper for wrapper in self._modules if hasattr(wrapper, "parameter_name")]
            adapted = {
                id(own) for wrapper in wrappers for own in wrapper.get_base_layer()._parameters.values()
            }
            for parameter, version in zip(self._parameters, self._versions, strict=True):
                is_plain = parameter.is_leaf and not is_dtensor(parameter) and id(parameter) not in adapted
                if parameter._version != version and is_plain:
                    return None if is_sharded(self._modules) else parameter
        return None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The recompute runs inside; at the end, by an exception too, all is as it was found."""
        found, places = self._before, self._places
        if not found.is_still_in(places):
            found = _Bound(places)
        required = [parameter.requires_grad for parameter in self._parameters]
        try:
            self._require(self._requires, required)
            if found is not self._before:
                _put(places, self._before)
            with self._buffers.in_place(), no_hooks_added(self._parameters):
                yield
        finally:
            self._require(required, self._requires)
            if not found.is_still_in(places):
                _put(places, found)

    def _require(self, wanted: Sequence[bool], found: Sequence[bool]) -> None:
        if wanted != found:
            for parameter, required in zip(self._parameters, wanted, strict=True):
                parameter.requires_grad_(required)


class _Bound(list[dict[str, Any]]):
    """Copies of these dictionaries as they are now."""

    def __init__(self, places: Sequence[dict[str, Any]]) -> None:
        super().__init__(map(dict.copy, places))
        self._bound = list(chain.from_iterable(map(dict.values, places)))

    def is_still_in(self, places: Sequence[dict[str, Any]]) -> bool:
        """Predicate: as many objects are bound, and the very same ones in the same order. Most calls do no
        more, three times each, so no step of it is Python's."""
        bound = chain.from_iterable(map(dict.values, places))
        return list(map(len, places)) == list(map(len, self)) and all(map(is_, bound, self._bound))


def _put(places: Sequence[dict[str, Any]], values: Sequence[dict[str, Any]]) -> None:
    """Change what is bound to `values`, and nothing else: other threads may look."""
    for place, wanted in zip(places, values, strict=True):
        for name in place.keys() - wanted.keys():
            del place[name]
        for name, value in wanted.items():
            now = place.get(name, _ANY)
            if now is not value and value is not _ANY and not is_dtensor(now) and not is_dtensor(value):
                place[name] = value


class Given:
    """The tensors of a call, none of which this holds. Built before the forward, with their attributes of
    then: none of a wrapper, where they may be its members, nor of a parameter, which its owners mark."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._objects = [TensorWeakRef(tensor) for tensor in tensors]
        self._attributes = [
            None if is_wrapper(one) or isinstance(one, nn.Parameter) else dict(vars(one)) for one in tensors
        ]

    @contextmanager
    def again(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """tensors: what autograd gives for them now. Yields what a recompute is given. At the end all have
        the attributes and hooks that they were found with."""
        given = [_object_of(*pair) for pair in zip(self._objects, tensors, strict=True)]
        changed = [
            (tensor, wanted, vars(tensor))
            for tensor, wanted in zip(given, self._attributes, strict=True)
            if wanted is not None and _bound(wanted) != _bound(vars(tensor))
        ]
        try:
            for tensor, wanted, _ in changed:
                tensor.__dict__ = dict(wanted)
            with no_hooks_added(given):
                yield given
        finally:
            for tensor, _, found in changed:
                tensor.__dict__ = found


def _bound(attributes: dict[str, Any]) -> list[tuple[str, int]]:
    return [(name, id(value)) for name, value in attributes.items()]


def _object_of(reference: TensorWeakRef, tensor: torch.Tensor) -> torch.Tensor:
    """The object itself if it lives, and is as it was with the bytes that it had."""
    found: torch.Tensor | None = reference()
    return found if found is not None and (found is tensor or _looks(found) == _looks(tensor)) else tensor


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        # other layouts have neither, and never leave
        places = (tensor.stride(), tensor.storage_offset()) if tensor.layout is torch.strided else ()
        looks = tensor.size(), tensor.dtype, tensor.requires_grad
        return *looks, *places, *(storage._cdata for storage in storages_of(tensor))


def refuse_written(module: nn.Module, given: Iterable[tuple[torch.Tensor, int]]) -> None:
    """The forward of `module` is over: raise OffloadError if it has written to a tensor that it was `given`
    with that version."""
    for tensor, version in given:
        if tensor._version != version:
            raise OffloadError(
                f"the forward of a {type(module).__name__} that is recomputed has written to its argument "
                f"{looks_of(tensor)} in place, from which its "
                "recompute would start: use mode='groups', which recomputes nothing, or leave the block out "
                "with blocks=. mode='auto' recomputes no block whose first forward does that"
            )


def is_cache(value: object) -> bool:
    """Predicate: the value is a cache of keys and values, as transformers has them."""
    kind = type(value)  # an object that answers to any name, as torch.fx's proxies, is none
    return hasattr(kind, "get_seq_length") and hasattr(kind, "update")


def cache_written(module: nn.Module, arguments: Any) -> object | None:
    """Among the arguments of a call of `module` one to which its forward adds what it has computed; None
    without one."""
    if getattr(module, "_can_checkpoint_with_cache", False):
        return None  # it only reads it
    leaves: list[object] = tree_leaves(arguments, is_leaf=is_cache)
    return next((leaf for leaf in leaves if is_cache(leaf)), None)


def refuse_cache(module: nn.Module, arguments: Any) -> None:
    """Raise OffloadError for such an argument."""
    cache = cache_written(module, arguments)
    if cache is not None:
        raise OffloadError(
            f"a {type(module).__name__} that is recomputed was called with a {type(cache).__name__}, to "
            "which its forward adds keys and values, and its recompute would add them again. Call the model "
            "with use_cache=False, or without gradients; where the cache trains, as in prefix "
            "tuning, use mode='groups', True or 'auto'"
        )


def refuse_nested(module: nn.Module, arguments: Iterable[torch.Tensor]) -> None:
    """Raise OffloadError for an argument that torch cannot save for a recompute."""
    if any(tensor.is_nested and tensor.layout is torch.strided for tensor in arguments):
        raise OffloadError(
            f"a {type(module).__name__} that is recomputed was given a nested tensor of strided layout, "
            "which torch cannot save for that: make it with layout=torch.jagged, or use mode='groups'"
        )
