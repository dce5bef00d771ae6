"""Parameters stepped where they are: those that stay on the device, and those that live on the host while the
device is a GPU.

One invariant: what the optimizer class is given is the parameter itself, or its float32 master, so any class
does here what it does alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.optim.parts import Groups, group_values, set_groups
from offload.params.view import ParamView, laid_like, local_of, sharded_like, weights_win

__all__ = ["ResidentPart"]


class ResidentPart:
    """One optimizer over parameters in place. masters: keep float32 masters of half-precision parameters and
    step those."""

    def __init__(self, cls: type[Optimizer], kwargs: Mapping[str, Any], *, masters: bool) -> None:
        self._cls = cls
        self._kwargs = dict(kwargs)
        self._masters = masters
        self.optimizer: Optimizer | None = None
        self.members: list[ParamView] = []
        self.inner: dict[int, Tensor] = {}  # by parameter
        self._values: list[tuple[dict[str, Any], Mapping[str, Any]]] = []

    def add(self, members: Sequence[ParamView]) -> None:
        """Take over parameters. `regroup` makes the optimizer."""
        self.members.extend(members)
        self.inner.update((member.index, self._inner(member)) for member in members)

    def regroup(self, groups: Groups) -> None:
        """The user's param groups are these now."""
        tensors = [(member.index, self.inner[member.index]) for member in self.members]
        if not tensors:
            return
        if self.optimizer is None:
            self.optimizer = self._cls([tensor for _, tensor in tensors], **self._kwargs)
        self._values = set_groups(self.optimizer, tensors, groups)

    def refresh(self) -> None:
        """Take over what the user's groups say now."""
        for values, original in self._values:
            values.update(group_values(original))

    def _inner(self, member: ParamView) -> Tensor:
        if self._masters and member.dtype in (torch.bfloat16, torch.float16):
            return member.parameter.detach().clone().float()
        return member.parameter

    def has_master(self, member: ParamView) -> bool:
        return self.inner[member.index] is not member.parameter

    @torch.no_grad()
    def step(self, gradients: Mapping[int, Tensor]) -> None:
        """gradients: by parameter, in its shape; one that is missing is not stepped."""
        if self.optimizer is None:
            return
        lent: list[tuple[Tensor, Tensor | None]] = []
        for member in self.members:
            inner, gradient = self.inner[member.index], gradients.get(member.index)
            if gradient is not None:
                self._relay(member)
                gradient = laid_like(inner, gradient.to(inner.dtype))
                self.refresh_master(member)
            if inner.grad is not gradient:
                lent.append((inner, inner.grad))
                inner.grad = gradient
        try:
            self.optimizer.step()
        finally:
            for inner, before in lent:
                inner.grad = before
        for member in self.members:
            if self.has_master(member) and member.index in gradients:
                member.parameter.copy_(self.inner[member.index])

    def _relay(self, member: ParamView) -> None:
        """A master, and state, lie as the weights lie now."""
        inner, parameter = self.inner[member.index], member.parameter
        if self.has_master(member) and inner.stride() != parameter.stride():
            inner.data = laid_like(parameter, inner.data)
            assert self.optimizer is not None
            state = self.optimizer.state.get(inner, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == inner.shape:
                    state[name] = laid_like(inner, value)

    @torch.no_grad()
    def refresh_master(self, member: ParamView) -> None:
        """Make the master follow weights that somebody else wrote."""
        if self.has_master(member):
            weights_win(local_of(self.inner[member.index]), local_of(member.parameter).detach())

    def load(self, member: ParamView, state: Mapping[Any, Any]) -> None:
        """Replace the state of one parameter, in its dtype and on its device, but for the count where torch
        keeps that on the host."""
        assert self.optimizer is not None
        optimizer, inner = self.optimizer, self.inner[member.index]
        if not state:
            optimizer.state.pop(inner, None)
            return
        chosen = (group for group in optimizer.param_groups if any(p is inner for p in group["params"]))
        group = next(chosen, {})
        on_device = bool(group.get("fused") or group.get("capturable"))
        placed: dict[Any, Any] = {}
        for key, value in state.items():
            if not isinstance(value, Tensor):
                placed[key] = deepcopy(value)
            elif key == "step":
                where = inner.device if on_device else "cpu"
                placed[key] = value.detach().to(device=where, dtype=torch.float32, copy=True)
            elif value.is_floating_point():
                shard = sharded_like(inner, value.detach())
                placed[key] = shard.to(dtype=inner.dtype, device=inner.device, copy=True)
            else:
                placed[key] = value.detach().to(device=inner.device, copy=True)
        optimizer.state[inner] = placed
