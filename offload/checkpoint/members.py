"""What the modules of a block are bound to around one forward, for a recompute after somebody changed it.

`torch.func.functional_call` puts other tensors in the places of parameters for one forward; loops evaluate
between a forward and its backward, set an attribute for each of two live forwards, or exchange a submodule;
and a forward binds attributes itself. One invariant: a recompute finds the very objects that its forward
found, and at its end those are bound that were bound at its begin. What was written into objects is not
known: of parameters an error says it, buffers have copies (buffers.py), the net finds the rest (net.py).

DTensors are left alone: FSDP2 exchanges shards and gathered parameters of one value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._pytree import tree_leaves

from offload.checkpoint.buffers import BuffersBefore
from offload.saved.filters import is_dtensor

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
    """Whether any parameter of them requires a gradient."""
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
    """Whether FSDP2 gathers parameters of theirs for each recompute: they are gone with the recompute's end,
    so nothing that was saved of them may be read later."""
    return any(hasattr(type(inner), "_get_fsdp_state") for inner in modules)


def has_lazy(modules: Sequence[nn.Module]) -> bool:
    """Whether a parameter or a buffer of them has no shape yet, which the next forward will give it."""
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
        """Whether as many objects are bound, and the very same ones in the same order. Most calls do no more,
        three times each, so no step of it is Python's."""
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
