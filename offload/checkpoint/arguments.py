"""Arguments of a forward that will be run a second time: what the forward does to them, and as which objects
the second run gets them.

One invariant: arguments that are another thing after the forward are refused by name; of a tensor the second
run gets the very object that the forward got, if it lives and its bytes have stayed, and else another one,
with the attributes that the forward found on it either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from offload.checkpoint.kept import storages_of
from offload.checkpoint.members import no_hooks_added
from offload.errors import OffloadError
from offload.saved.filters import is_wrapper


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
                f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} in place, from which its "
                "recompute would start: use mode='groups', which recomputes nothing, or leave the block out "
                "with blocks=. mode='auto' recomputes no block whose first forward does that"
            )


def is_cache(value: object) -> bool:
    """Whether it is a cache of keys and values, as transformers has them."""
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
