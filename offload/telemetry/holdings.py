"""What of a process's weights, gradients and optimizer state is on one device now.

One invariant: it looks, and keeps no tensor alive. Modules and optimizers are found once, among all objects
of the process, so that no model has to be registered; what is made later is not counted.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Holdings:
    """on_device: whether a tensor's bytes are in the device's memory. Blocks the host: never; to find what
    there is takes about 0.1 s."""

    def __init__(self, on_device: Callable[[Tensor], bool]) -> None:
        self._on_device = on_device
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        for each in gc.get_objects():  # by type(): isinstance() would run properties of users' proxies
            if issubclass(type(each), nn.Module) and each.__dict__.get("_parameters"):
                self._modules.add(each)
            elif issubclass(type(each), Optimizer):
                self._optimizers.add(each)

    def weights_and_gradients(self) -> tuple[int, int]:
        """Bytes of parameters' storages on the device, and of their gradients'."""
        with torch._C.DisableTorchFunctionSubclass():  # a streamed weight is not fetched to be counted
            weights = [each for module in self._modules for each in module._parameters.values()]
            seen: set[int] = set()
            return self._bytes(weights, seen), self._bytes((w.grad for w in weights if w is not None), seen)

    def optimizer_bytes(self) -> int:
        """Bytes of optimizers' state on the device."""
        with torch._C.DisableTorchFunctionSubclass():
            # of an object's own: a HybridDeviceOptimizer's is a view of those inside, made when it is read
            states = [vars(each).get("state") or {} for each in self._optimizers]
            return self._bytes(_tensors([*map(dict.values, states)]), set())

    def _bytes(self, tensors: Iterable[Tensor | None], seen: set[int]) -> int:
        """Of storages that are not among `seen`, which has them then."""
        total = 0
        for tensor in tensors:
            tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
            if tensor is None or tensor.layout is not torch.strided or not self._on_device(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
        return total


def _tensors(found: Any) -> Iterator[Tensor]:
    for each in found:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, dict):
            yield from _tensors(each.values())
        elif isinstance(each, (list, tuple)) or type(each).__name__ == "dict_values":
            yield from _tensors(each)
