"""What modules and optimizers have while something of them is parked: hooks that answer from the host, or
refuse and name what to wake.

Reads from Python meet the class of each parked tensor; these hooks are for what does not: state dicts, whose
readers ask for addresses, and C++ (a backward that adds to a gradient, a compiled forward, the buffers that
DistributedDataParallel sends). One invariant: a copy of a module, by deepcopy or pickle, has hooks that do
nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.compile import Unscripted
from offload.optim.state import paired
from offload.params.view import inner_parts, local_of, sharded_like
from offload.park.census import own_optimizer
from offload.weights.watched import StreamedWeight, away_of, on_host
from offload.weights.weight import nobody


def is_parked(tensor: Any) -> bool:
    return isinstance(tensor, StreamedWeight) and away_of(tensor) is not None


def host_value(value: Any) -> Any:
    """Parked tensors' values on the CPU, views of the host's bytes, in a tensor or in nested state; what is
    not parked as it is."""
    if isinstance(value, dict):
        return {key: host_value(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(host_value, value))
    if not is_parked(value):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        inner = {name: host_value(part) for name, part in inner_parts(value).items()}
        if local_of(value) is not value:
            return sharded_like(value, inner["_local_tensor"])
        if inner:
            kind: Any = type(value)
            context = kind.__tensor_flatten__(value)[1]
            return kind.__tensor_unflatten__(inner, context, value.size(), value.stride())
    return on_host(value)


def _load(parked: Any, value: Any) -> None:
    with torch.no_grad():
        host_value(parked).copy_(host_value(value))


class _Hook(Unscripted):
    """Calls a function, until its module is copied."""

    def __init__(self, call: Callable[..., Any] = nobody) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


class Gate:
    """The hooks, of one Parked. refuse: raises OffloadError for what is named, where one of the kinds that
    follow is parked."""

    def __init__(self, refuse: Callable[..., None]) -> None:
        self._refuse = refuse

    def close(self, model: nn.Module | None, optimizers: Sequence[Any]) -> Iterator[Any]:
        """Put hooks on what is parked by now; their handles."""
        if model is not None and any(hasattr(module, "_get_fsdp_state") for module in model.modules()):
            yield model.register_load_state_dict_pre_hook(_Hook(self._shards_load))
        for module in () if model is None else model.modules():
            if any(map(is_parked, (*module._parameters.values(), *module._buffers.values()))):
                yield module.register_state_dict_post_hook(_Hook(self._state_of_module))
                yield module.register_load_state_dict_pre_hook(_Hook(self._module_loads))
            wraps = hasattr(module, "_orig_mod") or isinstance(module, nn.parallel.DistributedDataParallel)
            if module is model or wraps or hasattr(module, "_get_fsdp_state"):
                yield module.register_forward_pre_hook(_Hook(self._forward), prepend=True)
        for parameter in () if model is None else model.parameters():
            if is_parked(parameter.grad) and parameter.requires_grad and parameter.is_leaf:
                yield parameter.register_hook(_Hook(partial(self._backward, weakref.ref(parameter))))
        for optimizer in (each for each in optimizers if isinstance(each, Optimizer)):
            yield optimizer.register_step_pre_hook(_Hook(self._step))
            yield optimizer.register_state_dict_post_hook(_Hook(self._state_of_optimizer))
            yield optimizer.register_load_state_dict_pre_hook(_Hook(self._optimizer_loads))

    def _forward(self, module: nn.Module, args: Any) -> None:
        self._refuse(f"a forward of {type(module).__name__}", "weights")

    def _backward(self, parameter: weakref.ref[Tensor], gradient: Tensor) -> None:
        """Before torch adds to its gradient in C++."""
        if (found := parameter()) is not None and is_parked(found.grad):
            self._refuse("a backward", "gradients")

    def _step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._refuse(f"step() of {type(optimizer).__name__}", "weights", "gradients", "optimizer")

    # -- state dicts -----------------------------------------------------------------------------------------
    def _state_of_module(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """After state_dict(): with keep_vars the parameter itself stays."""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if is_parked(tensor) and state.get(key := prefix + name, tensor) is not tensor:
                state[key] = host_value(tensor)

    def _shards_load(self, module: nn.Module, *_: Any) -> None:
        """Before load_state_dict() of a model with FSDP2, which reads each shard's memory behind it: nothing
        is loaded."""
        self._refuse(f"load_state_dict() of {type(module).__name__} under fully_shard()", "weights")

    def _module_loads(
        self, module: nn.Module, state: dict[str, Any], prefix: str, meta: Any, *_: Any
    ) -> None:
        """Before load_state_dict(): what fits is loaded into the host's bytes; torch says what does not."""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            value, assigns = state.get(prefix + name), meta.get("assign_to_params_buffers")
            able = is_parked(tensor) and isinstance(value, Tensor) and not assigns
            if able and value.shape == tensor.shape:  # type: ignore[union-attr]
                _load(tensor, value)
                state[prefix + name] = tensor  # whose copy_() of itself does nothing

    def _state_of_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": host_value(state["state"])}

    def _optimizer_loads(self, optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any] | None:
        """Before load_state_dict(): what is parked is loaded into the host's bytes. Raises OffloadError for
        state that would come to the device, or that torch would convert, ValueError for that of another
        model; nothing is loaded then."""
        own, made = own_optimizer(optimizer), dict(loaded.get("state", {}))
        what = f"load_state_dict() of {type(optimizer).__name__} with state of other names, shapes or dtypes"
        pairs: list[tuple[Tensor, Tensor]] = []
        for key, parameter in paired(optimizer.param_groups, loaded) if own is not None else ():
            mine, theirs = own.state.get(parameter, {}), made.get(key, {})
            if own is not optimizer or mine.keys() != theirs.keys():
                self._refuse(what, "optimizer")
            for name in (name for name in mine if is_parked(mine[name])):
                value, dtype = theirs[name], torch.float32 if name == "step" else parameter.dtype
                same = isinstance(value, Tensor) and value.shape == mine[name].shape
                if not same or dtype not in (mine[name].dtype, None):
                    self._refuse(what, "optimizer")
                pairs.append((mine[name], value))
                made[key] = {**made[key], name: mine[name]}
        for parked, value in pairs:
            _load(parked, value)
        return {**loaded, "state": made}
