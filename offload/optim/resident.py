"""Parameters stepped where they are: those that stay on the device, and those that are on the host while the
device is a GPU.

One invariant: what the optimizer class is given is the parameter itself, or its float32 master, so any class
does here what it does alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.optim.classes import step_alone
from offload.optim.groups import UserGroup, follow_groups
from offload.optim.parts import HostOptions, Part
from offload.params.view import ParamView, laid_like, local_of, update_master

__all__ = ["ResidentPart"]


class ResidentPart(Part):
    """One optimizer over parameters in place."""

    def __init__(
        self,
        cls: type[Optimizer],
        kwargs: Mapping[str, Any],
        options: HostOptions,
    ) -> None:
        super().__init__()
        self._new_optimizer: Callable[..., Optimizer] = functools.partial(cls, **kwargs)
        self._options = options
        self.optimizer: Optimizer | None = None
        self._inner: dict[int, Tensor] = {}  # by index: the parameter, or its float32 master

    def add(self, members: Sequence[ParamView]) -> None:
        for member in members:
            self.members[member.index] = member
            dtype = self._options.master_dtype(member)
            self._inner[member.index] = (
                member.parameter if dtype == member.dtype else member.parameter.detach().to(dtype, copy=True)
            )

    def regroup(self, groups: Sequence[UserGroup]) -> None:
        if self._inner:
            tensors = {index: [inner] for index, inner in self._inner.items()}
            self.optimizer = follow_groups(self.optimizer, self._new_optimizer, tensors, groups, live=True)

    def has_master(self, member: ParamView) -> bool:
        return self._inner[member.index] is not member.parameter

    def master(self, member: ParamView) -> Tensor:
        return self._inner[member.index]

    @torch.no_grad()
    def step(self, gradients: Mapping[int, Tensor]) -> None:
        """gradients: by parameter, in its shape; one that is missing is not stepped."""
        if self.optimizer is None:
            return
        replaced: list[tuple[Tensor, Tensor | None]] = []
        for index, inner in self._inner.items():
            gradient = gradients.get(index)
            if gradient is not None and gradient.layout is torch.strided:
                gradient = laid_like(inner, gradient.to(inner.dtype))
                self.refresh_master(self.members[index])
            if inner.grad is not gradient:
                replaced.append((inner, inner.grad))
                inner.grad = gradient
        try:
            step_alone(self.optimizer)
        finally:
            for inner, before in replaced:
                inner.grad = before
        for index, member in self.members.items():
            if self.has_master(member) and index in gradients:
                member.parameter.copy_(self._inner[index])

    @torch.no_grad()
    def refresh_master(self, member: ParamView) -> None:
        if self.has_master(member):
            update_master(local_of(self._inner[member.index]), local_of(member.parameter).detach())

    def reorder(self, member: ParamView, before: tuple[int, ...]) -> None:
        """As Part: a master, and its state, lie as the weights lie now. Where the parameter itself is stepped
        its class decides what becomes of the state."""
        if self.has_master(member):
            inner = self._inner[member.index]
            assert self.optimizer is not None
            state = self.optimizer.state.get(inner, {})
            inner.data = laid_like(member.parameter, inner.data)
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == inner.shape:
                    state[name] = laid_like(inner, value)

    def inside(self) -> list[tuple[Optimizer, list[tuple[ParamView, Tensor]]]]:
        if self.optimizer is None:
            return []
        return [(self.optimizer, [(self.members[index], inner) for index, inner in self._inner.items()])]

    def forget(self, member: ParamView) -> None:
        super().forget(member)
        inner = self._inner.pop(member.index)
        if self.optimizer is not None:
            self.optimizer.state.pop(inner, None)
