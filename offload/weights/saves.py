"""What autograd's graph keeps instead of a streamed weight, or a view of one: which weight, and its layout.

One invariant: it keeps no bytes and no alias, so a block leaves while its backward is still to come, and any
read, in whatever order the backward makes it, loads first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offload.errors import OffloadError
from offload.saved.handles import modified
from offload.weights.weight import Weight

__all__ = ["pack"]


def pack(tensor: Tensor, *, weight: Weight, use: Callable[[Weight], None]) -> _WeightSave | None:
    """What to keep of a tensor over the weight's storage; None for one that is not its plain elements. use:
    has the weight's block on the device, for the current lane."""
    plain = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    return _WeightSave(tensor, weight, use) if plain else None


class _WeightSave:
    """A save."""

    __slots__ = ("_dtype", "_generation", "_layout", "_use", "_version", "_weight")

    def __init__(self, tensor: Tensor, weight: Weight, use: Callable[[Weight], None]) -> None:
        self._weight = weight
        self._use = use
        self._dtype = tensor.dtype
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._version = tensor._version
        self._generation = weight.generation

    def read(self) -> Tensor:
        """As autograd unpacks a saved tensor: raises its error where the weight was written since, and
        OffloadError where it was given other memory, whose bytes torch would not have read. Blocks the host:
        never."""
        weight = self._weight
        if weight.generation != self._generation:
            raise OffloadError(
                f"{weight.name} was replaced, converted, or its .data set, between a forward that used it "
                "and that forward's backward: the bytes that the backward needs are gone; do it after the "
                "backward, or write in place"
            )
        with torch._C.DisableTorchFunctionSubclass():
            found = weight.parameter._version
        if found != self._version:
            raise modified(self._dtype, self._layout[1], found, self._version)
        with torch._C.DisableTorchFunctionSubclass():
            alias = weight.parameter.detach()  # so that no other thread's use takes the bytes away meanwhile
        self._use(weight)
        storage = alias.untyped_storage()
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._layout)
