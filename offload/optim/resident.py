"""Parameters stepped where they are: those that stay on the device, and those that live on the host while the
device is a GPU.

One invariant: what the optimizer class is given is the parameter itself, or its float32 master, so any class
does here what it does alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.optim.parameters import Managed, local_of

__all__ = ["ResidentPart"]


class ResidentPart:
    """One optimizer over parameters in place. masters: keep float32 masters of half-precision parameters and
    step those."""

    def __init__(self, cls: type[Optimizer], kwargs: Mapping[str, Any], *, masters: bool) -> None:
        self._cls = cls
        self._kwargs = dict(kwargs)
        self._masters = masters
        self.optimizer: Optimizer | None = None
        self.members: list[Managed] = []
        self.inner: dict[int, Tensor] = {}  # by parameter

    def add(self, members: Sequence[Managed], values: Mapping[str, Any]) -> dict[str, Any]:
        """Take over parameters of one param group; the sub-optimizer's own group for them."""
        inner = [self._inner(member) for member in members]
        self.members.extend(members)
        self.inner.update((member.index, tensor) for member, tensor in zip(members, inner, strict=True))
        group = {**values, "params": inner}
        if self.optimizer is None:
            self.optimizer = self._cls([group], **self._kwargs)
        else:
            self.optimizer.add_param_group(group)
        return self.optimizer.param_groups[-1]

    def _inner(self, member: Managed) -> Tensor:
        if self._masters and member.dtype in (torch.bfloat16, torch.float16):
            return member.parameter.detach().clone().float()
        return member.parameter

    def has_master(self, member: Managed) -> bool:
        return self.inner[member.index] is not member.parameter

    @torch.no_grad()
    def step(self, gradients: Mapping[int, Tensor], factor: Tensor | None) -> None:
        """gradients: by parameter, in its shape; one that is missing is not stepped. factor: scales them, in
        place. Blocks the host only if that lies elsewhere.
        """
        if self.optimizer is None:
            return
        used: list[Tensor] = []
        lent: list[tuple[Tensor, Tensor | None]] = []
        for member in self.members:
            inner, gradient = self.inner[member.index], gradients.get(member.index)
            if gradient is not None:
                gradient = gradient.to(inner.dtype)
                used.append(gradient)
            if inner.grad is not gradient:
                lent.append((inner, inner.grad))
                inner.grad = gradient
        if factor is not None and used:
            torch._foreach_mul_(used, factor.to(local_of(used[0]).device))
        try:
            self.optimizer.step()
        finally:
            for inner, before in lent:
                inner.grad = before
        for member in self.members:
            if self.has_master(member) and member.index in gradients:
                member.parameter.copy_(self.inner[member.index])

    @torch.no_grad()
    def refresh(self, member: Managed) -> None:
        """The weights were changed by somebody else: masters follow, unless their rounding is the weights
        already. Blocks the host."""
        if self.has_master(member):
            inner = self.inner[member.index]
            if not torch.equal(local_of(inner).to(member.dtype), local_of(member.parameter)):
                inner.copy_(member.parameter)
