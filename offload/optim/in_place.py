"""`HybridDeviceOptimizer(offload_fraction=0)`: an object of the class itself, with the names of ours.

One invariant: the class comes first in the order of methods, and so does torch's Optimizer. So its steps,
closures, hooks, state, state dicts and what a GradScaler asks of it are its own, and no code of this package
runs in them.
"""

from __future__ import annotations

import functools
import types
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.engine import OffloadEngine, default_engine
from offload.optim.parts import clip_, total_norm
from offload.optim.placing import Place
from offload.optim.state import fill_state
from offload.optim.step import Overlap


class InPlace:
    """Names of HybridDeviceOptimizer where nothing is offloaded; see there."""

    param_groups: list[dict[str, Any]]
    offload_fraction = 0.0
    param_update_in_fp32 = False
    cpu_share = 0.0
    host_bytes = 0
    ring_bytes = 0
    overlap: Overlap = "step"
    pin_cpu_grads = pin_cpu_params = overlap_cpu_optimizer_d2h_h2d = True
    max_grad_norm = None
    last_grad_norm: Tensor | None = None
    last_microbatch: bool | None = None
    _given_engine: OffloadEngine | None = None

    @property
    def engine(self) -> OffloadEngine:
        """The engine that was given, else the process's own of the parameters' device."""
        if self._given_engine is not None:
            return self._given_engine
        devices = (p.device for group in self.param_groups for p in group["params"] if p.is_cuda)
        return default_engine(str(next(devices, "sim")))

    @property
    def cpu_optimizers(self) -> list[Optimizer]:
        return []

    @property
    def gpu_optimizer(self) -> Any:
        return self

    @property
    def sub_optimizers(self) -> list[Any]:
        return [self]

    def place_of(self, parameter: Tensor) -> Place:
        if not any(p is parameter for group in self.param_groups for p in group["params"]):
            raise ValueError("the tensor is not one of the optimizer's parameters")
        return Place.GPU

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize_parameters(self) -> None:
        """Does nothing: weights are never on their way."""

    def update_fp32_param_by_new_param(self) -> None:
        """Does nothing: there are no masters."""

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, total: Tensor | None = None
    ) -> Tensor:
        weights = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad for p in weights if p.grad is not None]
        device = weights[0].device
        self.last_grad_norm = total if total is not None else total_norm(gradients, norm_type, device)
        clip_(gradients, max_norm, self.last_grad_norm)
        return self.last_grad_norm

    def dummy_step(self) -> None:
        fill_state([self])  # type: ignore[list-item]

    def close(self) -> None:
        """Does nothing: no memory is lent."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _unbuilt, (type(self).__mro__[1],), self.__getstate__()


@functools.cache
def in_place(cls: Any) -> Any:
    """The class of objects of the optimizer class that have our names too."""
    made = types.new_class(cls.__name__, (cls, InPlace))
    made.__module__ = cls.__module__
    return made


def _unbuilt(cls: Any) -> Any:
    made = in_place(cls)
    return made.__new__(made)
