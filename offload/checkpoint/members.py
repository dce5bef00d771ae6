"""The parameters and buffers that a block had in its forward, and whether it was in training, for a recompute
after either was changed.

`torch.func.functional_call` puts other tensors in their places, and takes them out when the forward is over;
autograd differentiates with respect to those. `model.train()` after a forward in evaluation, or the other way
round, comes before its backward in loops that evaluate in between. One invariant: a recompute computes with
the very tensors that its forward computed with, and in its mode.

DTensors are left alone: FSDP2 exchanges shards and gathered parameters of one value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from offload.saved.filters import is_dtensor

__all__ = ["MembersBefore", "has_lazy", "inner_modules", "is_trained"]

_Places = dict[str, torch.Tensor | None] | dict[str, nn.Parameter | None]


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


def has_lazy(modules: Sequence[nn.Module]) -> bool:
    """Whether a parameter or a buffer of them has no shape yet, which the next forward will give it."""
    return any(isinstance(owner, LazyModuleMixin) and owner.has_uninitialized_params() for owner in modules)


class MembersBefore:
    """Of the modules of a block, as they are before one forward of it. Blocks the host: never."""

    __slots__ = ("_members", "_training")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._training = [(owner, owner.training) for owner in modules]
        self._members: list[tuple[_Places, str, torch.Tensor, bool]] = [
            (places, name, tensor, tensor.requires_grad)
            for owner in modules
            for places in (owner._parameters, owner._buffers)
            for name, tensor in places.items()
            if tensor is not None
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The recompute runs inside; at the end, by an exception too, tensors and modes of now are back."""
        exchanged: list[tuple[_Places, str, torch.Tensor]] = []
        toggled = [tensor for _, _, tensor, required in self._members if tensor.requires_grad is not required]
        switched = [owner for owner, training in self._training if owner.training is not training]
        try:
            for owner in switched:
                owner.training = not owner.training
            for tensor in toggled:
                tensor.requires_grad_(not tensor.requires_grad)
            for places, name, tensor, _ in self._members:
                now = places.get(name)
                if now is None or now is tensor or is_dtensor(now) or is_dtensor(tensor):
                    continue
                exchanged.append((places, name, now))
                places[name] = tensor  # type: ignore[assignment]
            yield
        finally:
            for owner in switched:
                owner.training = not owner.training
            for tensor in toggled:
                tensor.requires_grad_(not tensor.requires_grad)
            for places, name, now in exchanged:
                places[name] = now  # type: ignore[assignment]
