"""What a forward that will be run a second time does to its arguments, from which the second run starts.

One invariant: arguments that are another thing after the forward are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from offload.errors import OffloadError

__all__ = ["cache_written", "is_cache", "refuse_cache", "refuse_written"]


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
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


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
            "with use_cache=False, or without gradients"
        )
