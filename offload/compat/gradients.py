"""Gradients on the host as soon as a backward has made them, under the names of an engine for torchtitan.

    hook = GradientOffloadHook(TensorOffloader())
    hook.register(model.parameters())
    for batch in microbatches: loss(model, batch).backward()    # each p.grad is None afterwards
    hook.reload_all()                                           # or optimizer.step(), which does it first

One invariant: what `reload_all` puts into `p.grad` is what torch would have there, bit for bit. Where an
earlier sum is on the host, it comes back and the new gradient is added to it on the device, by the operator
with which torch adds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offload.client import weakly
from offload.compat.tensors import OffloadHandle, TensorOffloader
from offload.errors import OffloadError


class GradientOffloadHook:
    """Copies gradients out. release_gpu_grad: `p.grad` is None after a backward; else it stays, and the host
    has a copy of it.

    The begin of an optimizer's `step()` brings back what it steps. `clip_grad_norm_`, a GradScaler and code
    of the loop's own read `p.grad` themselves: `reload_all()` first. `zero_grad()` does not reach the host:
    `clear()` drops what it has.
    """

    def __init__(self, offloader: TensorOffloader, release_gpu_grad: bool = True) -> None:
        self._offloader, self._release = offloader, release_gpu_grad
        self._held: dict[int, tuple[Tensor, OffloadHandle]] = {}
        self._hooks: list[Any] = [register_optimizer_step_pre_hook(weakly(self._before_step))]

    def register(self, params: Iterable[Tensor]) -> None:
        """Watch those parameters that require gradients now."""
        for parameter in params:
            if parameter.requires_grad:
                hook = weakly(self._accumulated)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _accumulated(self, parameter: Tensor) -> None:
        if (grad := parameter.grad) is None:
            return
        if grad.requires_grad or grad.layout is not torch.strided:
            what = "is sparse" if not grad.requires_grad else "has a graph of its own (create_graph=True)"
            raise OffloadError(
                f"a gradient of shape {tuple(grad.shape)} {what}, which cannot be copied to the host: "
                "register other parameters alone, or call remove_hooks() for such a backward"
            )
        before = self._held.pop(id(parameter), None)
        if self._release:
            if before is not None:
                with torch.no_grad():
                    grad = self._offloader.reload(before[1]).add_(grad)
            parameter.grad = None
        try:
            handle = self._offloader.send(grad, held=not self._release)
        except BaseException:
            parameter.grad = grad
            raise
        self._held[id(parameter)] = parameter, handle

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._reload({id(p) for group in optimizer.param_groups for p in group["params"]} & {*self._held})

    def _reload(self, keys: Iterable[int]) -> None:
        for key in keys:
            parameter, handle = self._held[key]
            if parameter.grad is None:
                parameter.grad = self._offloader.reload(handle)
            elif self._release:
                raise OffloadError(
                    f"p.grad of shape {tuple(parameter.shape)} was set while the sum of earlier backwards is "
                    "on the host: call clear() to drop that one, or reload_all() before setting. "
                    "DistributedDataParallel sets it after this hook: use apply(gradients='host') beside it"
                )
            del self._held[key]
        self._offloader.sync_reload()

    def reload_all(self) -> None:
        """Bring every gradient back to the device, as `p.grad`. Blocks the host: never."""
        self._reload(list(self._held))

    def has_offloaded_grads(self) -> bool:
        return bool(self._held)

    @property
    def offloaded_params(self) -> list[Tensor]:
        """Parameters whose gradient the host has."""
        return [parameter for parameter, _ in self._held.values()]

    def clear(self) -> None:
        """Drop the host's gradients, as `zero_grad()` drops the device's."""
        self._held.clear()

    def remove_hooks(self) -> None:
        """Gradients stay on the device from here on; `reload_all()` still returns those on the host."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
