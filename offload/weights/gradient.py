"""One parameter's gradient that waits on the host: the tensor that is `p.grad`, and its bytes there.

One invariant: a gradient's tensor is held weakly, so `p.grad = None` ends it as without this. Its host bytes
are the parameter's, for the next gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from offload.device import Device, Lane
from offload.transfer.block import is_dense
from offload.weights.weight import BlockWeights, Holder, Weight, nobody


class Gradient(Weight):
    """Gradient of the parameter that a module has by a name, its owner. It comes and goes alone, so its block
    has one weight: itself, or none where the parameter has no gradient that is known here.

    index: of the owner among those whose gradients wait on the host.
    """

    is_gradient = True

    def __init__(self, model: nn.Module, name: str, index: int, device: Device) -> None:
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        super().__init__(getattr(module, attribute), name, module, attribute)
        self._tensor: Callable[[], Tensor | None] = nobody
        self.returned: Callable[[], object] = nobody
        self.let_go: Callable[[], Tensor | None] = nobody  # that stays until a backward has added to it
        self.norm: tuple[object, Lane, Tensor] | None = None
        """What `torch._foreach_norm` was asked, the lane, and its answer, until the gradient is written."""
        self.block = BlockWeights(index, name, device, [])

    @property
    def owner(self) -> Tensor | None:
        """The parameter that the module has now; None where the module is gone, or has none."""
        module = self.module()
        return None if module is None else module._parameters.get(self.attribute)

    @property
    def now(self) -> Tensor | None:
        """Its `grad`."""
        return None if (owner := self.owner) is None else owner.grad

    @property
    def parameter(self) -> Tensor:
        """The gradient; where nobody has it the owner, which is as large."""
        found = self._tensor()
        found = self.owner if found is None else found
        return torch.empty(0) if found is None else found

    @parameter.setter
    def parameter(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)

    @property
    def known(self) -> bool:
        """Predicate: there is a gradient whose bytes come and go."""
        return bool(self.block.weights)

    @property
    def tensors(self) -> list[Tensor]:
        """The gradient, if somebody has it, and what was made of it."""
        found = self._tensor()
        return self.aliases() if found is None else [found, *self.aliases()]

    @property
    def is_owners(self) -> bool:
        """Predicate: it is the parameter's gradient still, and not what was that before."""
        return self.known and (found := self.now) is not None and found is self._tensor()

    def take(self, tensor: Tensor, lane: Lane) -> None:
        """`tensor`, made on `lane`, is the gradient, and on the device."""
        block = self.block
        self.parameter = tensor
        self.rest()
        block.weights[:] = [self]
        block.present, block.pinned, block.home = True, False, lane
        block.readers = {id(lane): lane}
        block.arrived = block.device.record(lane)

    def await_return(self) -> None:
        """Before the host bytes change: who has borrowed them has read them, for the current lane."""
        returned, self.returned = self.returned, nobody
        returned()

    def forget(self) -> None:
        """It comes and goes no more."""
        self.block.weights.clear()
        self._aliases.clear()
        self.block.present, self.dirty, self.norm = False, False, None
        del self.storage, self.on_device


class GradientHolder(Holder, Protocol):
    """Who keeps gradients on the host."""

    def let_go(self, weight: Gradient) -> None:
        """The gradient is on the device, and torch's own, until the next backward has added to it."""

    def lend(self, weight: Gradient, returned: Callable[[], None]) -> Tensor:
        """Lend the gradient's elements in host memory until `returned` is called (`Watched.lend`)."""

    def take_norm(self, weight: Gradient, tensor: Tensor, asked: object) -> Tensor | None:
        """The norm that was taken of the gradient as it left, for the current lane; None where it was not, or
        is no more."""


def may_leave(gradient: Tensor, device: Device) -> bool:
    """Return True if a gradient is plain and dense, part of no graph, and on the device."""
    plain = type(gradient) is Tensor and not (gradient.requires_grad or gradient.is_inference())
    return plain and is_dense(gradient) and device.owns(gradient)


def is_whole(gradient: Tensor) -> bool:
    """Return True if the gradient's storage has no byte more."""
    return gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
