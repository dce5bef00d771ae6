"""Which blocks are alike: blocks of one kind, called on inputs of one make, share a profile.

One invariant: what changes the calls of a forward or their sizes, as far as a module shows it, makes another
kind.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

__all__ = ["kind_of", "make_of"]


def kind_of(module: nn.Module) -> Hashable:
    """Of a block: the class, training and settings of each module inside, the make of each parameter and
    buffer, and whether it is compiled. Numbers among settings are left out: a layer's own index is one."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None,
        tuple((name, type(part), part.training, _settings(part)) for name, part in module.named_modules()),
        tuple((name, _make(tensor)) for name, tensor in module.named_parameters()),
        tuple((name, _make(tensor)) for name, tensor in module.named_buffers()),
    )


def make_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Of a call: the make of each tensor, where it stands, and whether and in what dtype autocast casts."""
    leaves, spec = tree_flatten((args, kwargs))
    devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
    casts = tuple(
        (device, torch.get_autocast_dtype(device))
        for device in sorted(devices)
        if torch.is_autocast_enabled(device)
    )
    return spec, tuple(map(_make_of_leaf, leaves)), casts


def _make_of_leaf(leaf: object) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return _make(leaf)
    return leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf).__qualname__


def _make(tensor: torch.Tensor) -> Hashable:
    return type(tensor), tensor.size(), tensor.dtype, tensor.requires_grad, tensor.device


def _settings(module: nn.Module) -> Hashable:
    """Plain attributes: switches and words, and of the rest whether it is there."""
    return tuple(
        (name, value if isinstance(value, bool) or _is_word(value) else type(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name != "training"
    )


def _is_word(value: object) -> bool:
    """A name with a number in it may be the layer's own."""
    return isinstance(value, str) and not any(letter.isdigit() for letter in value)
