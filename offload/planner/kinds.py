"""Which blocks are alike: blocks of one kind share a profile.

One invariant: what changes the calls of a forward or their sizes, as far as a module shows it, makes another
kind.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from types import BuiltinFunctionType

import torch
from torch import nn


def kind_of(module: nn.Module) -> Hashable:
    """Of a block: the class, training and settings of each module inside, the make of each parameter and
    buffer, and whether it is compiled.

    Of a fraction among the settings it counts whether it is 0: a dropout of 0 saves nothing, and rates that
    rise from layer to layer save alike. Whole numbers of the model's own modules are left out: a layer's own
    index is one. Those of torch's modules count, and those in tuples: strides and sizes.
    """
    return (
        getattr(module, "_compiled_call_impl", None) is not None,
        tuple((name, type(part), part.training, _settings(part)) for name, part in module.named_modules()),
        tuple((name, _make(tensor)) for name, tensor in module.named_parameters()),
        tuple((name, _make(tensor)) for name, tensor in module.named_buffers()),
    )


def look_of(module: nn.Module) -> Hashable:
    """What may change of a block between two steps, at a tenth of the price of its kind: its parts, what is
    frozen, switches, and whether a rate is 0."""
    found: list[object] = []
    parts, seen = [module], {id(module)}
    for part in parts:
        found += [value != 0 for value in vars(part).values() if type(value) in (bool, float)]
        for tensor in part._parameters.values():
            found += (None,) if tensor is None else (tensor.requires_grad, tensor.numel())
        for child in part._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                parts.append(child)
    return (*map(id, parts), *map(type, parts), *found)


def _make(tensor: torch.Tensor) -> Hashable:
    return type(tensor), tensor.size(), tensor.dtype, tensor.requires_grad, tensor.device


def _settings(module: nn.Module) -> Hashable:
    """Plain attributes: switches, words and functions, fractions as switches, and of the rest whether it is
    there."""
    of_torch = type(module).__module__.startswith("torch.nn.")
    return tuple(
        (name, value if of_torch and isinstance(value, int) else _setting(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name != "training"
    )


def _setting(value: object) -> object:
    if isinstance(value, (bool, Enum, torch.dtype)) or _is_word(value):
        return value
    if isinstance(value, float):
        return float, value != 0.0
    if isinstance(value, tuple):
        return tuple(part if isinstance(part, int) else _setting(part) for part in value)
    if isinstance(value, BuiltinFunctionType):
        return value
    return getattr(value, "__code__", type(value))


def _is_word(value: object) -> bool:
    """A name with a number in it may be the layer's own."""
    return isinstance(value, str) and not any(letter.isdigit() for letter in value)
