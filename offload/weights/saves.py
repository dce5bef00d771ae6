"""What autograd's graph keeps instead of a streamed weight, or a view of one: which weight, and its layout.

One invariant: it keeps no bytes and no alias, so a block leaves while its backward is still to come, and any
read, in whatever order the backward makes it, loads first. What torch unpacks and does not read, it gets on
meta, where a read would raise.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from offload.errors import OffloadError
from offload.saved.handles import modified
from offload.saved.hooks import SavedTensorHooks, admits_hooks, inside_checkpoint
from offload.saved.unread import is_read
from offload.weights.weight import Close, Weight, nobody


class _TakesNothing:
    """A scope under which saves stay as they are, but for those of streamed weights."""

    min_elements = 1 << 62

    def take(self, tensor: Tensor) -> None:
        return None

    def note_replayed(self, tensor: Tensor) -> None:
        return None


def open_saves(hooks: SavedTensorHooks) -> tuple[Close, bool]:
    """What is saved of streamed weights from here on keeps no bytes, until the function that is returned is
    called. A checkpoint keeps none in its forward, and in its recompute an alias. And whether torch admits
    saved-tensor hooks here: the weights have to stay where it does not."""
    if hooks.sees_saves():
        return nobody, True
    if inside_checkpoint():
        return (hooks.pop_aliases if hooks.push_aliases() else nobody), True
    if admits_hooks():
        # also without gradients: they may be switched on inside
        return partial(hooks.pop, hooks.push(_TakesNothing())), True
    return nobody, not torch.is_grad_enabled()


def pack(tensor: Tensor, *, weight: Weight, expert: int | None = None) -> _WeightSave | None:
    """What to keep of a tensor over the weight's storage, or over that of one of its experts; None for one
    that is not its plain elements."""
    plain = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    return _WeightSave(tensor, weight, expert) if plain else None


class _WeightSave:
    """A save."""

    __slots__ = ("_by_expert", "_dtype", "_expert", "_generation", "_layout", "_version", "_weight")

    def __init__(self, tensor: Tensor, weight: Weight, expert: int | None) -> None:
        self._weight = weight
        self._dtype = tensor.dtype
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._expert = expert
        # saved by a Function of the user's, which goes through the weight's class; not inside torch's own
        self._by_expert = weight.experts is not None and not (weight.block.entered or tensor.requires_grad)
        self._version, self._generation = weight.parameter._version, weight.generation

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
        if (found := weight.parameter._version) != self._version:
            raise modified(self._dtype, self._layout[1], found, self._version)
        (offset, *rest), experts = self._layout, weight.experts
        if not is_read(self, SavedTensorHooks):
            size, stride = rest
            return torch.empty_strided(size, stride, dtype=self._dtype, device="meta")
        if experts is not None and self._by_expert:
            view: Tensor | None = experts.view_like((self._dtype, *self._layout))
            if view is not None:
                return view
        if experts is not None and self._expert is not None:
            alias: Tensor = experts.read(self._expert)
        else:
            with torch._C.DisableTorchFunctionSubclass():
                alias = weight.parameter.detach()  # so that no other thread's use takes the bytes away
            weight.use(weight)
            each = weight.nbytes // weight.parameter.shape[0]
            offset += (self._expert or 0) * each // self._dtype.itemsize
        storage = alias.untyped_storage()
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, offset, *rest)


class CopiedSave:
    """What the graph keeps of a gradient on the host: a copy, because the next backward writes the gradient,
    and clearing it gives its bytes up."""

    def __init__(self, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            self._copy = own.copy_(tensor)

    def read(self) -> Tensor:
        return self._copy
