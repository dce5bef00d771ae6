"""What modules with streamed weights have: hooks of a block's forward, and of state dicts.

One invariant: a copy of a module, by deepcopy or pickle, has hooks that do nothing.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

from torch import nn

from offload.errors import OffloadError
from offload.weights.weight import BlockHolder, BlockWeights, Close, Weight, nobody

_COMPILED, _IN_DYNAMO = ("compile_wrapper", "_fn"), os.path.join("_dynamo", "eval_frame.py")
"""Frames in which torch runs what was compiled: of the block, or of anything around it."""


class BlockCalls:
    """The hooks of a block, as `HookPair` calls them."""

    def __init__(self, stream: BlockHolder, block: BlockWeights) -> None:
        self._stream, self._block = stream, block

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Close:
        frame: FrameType | None = sys._getframe()
        self._block.compiled = False
        while frame is not None:
            if frame.f_code.co_name in _COMPILED and frame.f_code.co_filename.endswith(_IN_DYNAMO):
                run = frame.f_locals.get("self")
                self._block.compiled |= type(run).__name__ == "OptimizeContext"
                _refuse_config(getattr(run, "compiler_config", None), self._block.name)
            frame = frame.f_back
        return self._stream.enter(self._block, args, kwargs)

    def leave(self, close: Close, output: Any, failed: bool) -> None:
        self._stream.leave(self._block, close)


def refuse_recorded_graphs(module: nn.Module, name: str) -> None:
    """Raises ValueError where the module is compiled with CUDA graphs, which read weights at one address."""
    compiled = getattr(module, "_compiled_call_impl", None) or module
    asked = getattr(compiled, "get_compiler_config", None)
    _refuse_config(asked() if callable(asked) else None, name)


def _refuse_config(config: object, name: str) -> None:
    if isinstance(config, dict) and config.get("triton.cudagraphs"):
        raise ValueError(
            f"{name} is compiled with CUDA graphs (mode='reduce-overhead', or triton.cudagraphs), which read "
            "weights at one address, and apply(weights=...) brings them to another one each time; compile it "
            "without, or leave weights= out"
        )


def refuse_without_values(model: nn.Module, args: Any) -> None:
    """A hook before the forwards of a model that was on meta at `apply`, up to the first one with all values.
    Raises OffloadError."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    if names := [name for name, tensor in tensors if tensor.is_meta]:
        raise OffloadError(
            f"{type(model).__name__} runs with {len(names)} parameters or buffers on the meta device, which "
            f"has no values (the first: {names[0]}); call offload.load_weights(model, path) first"
        )
    for key in [key for key, hook in model._forward_pre_hooks.items() if hook is refuse_without_values]:
        del model._forward_pre_hooks[key]


class HostState:
    """The module's state_dict() has the host's copy of a weight; load_state_dict(assign=True) is followed. A
    copied module's has no weight."""

    def __init__(self, weight: Weight | None = None) -> None:
        self._weight: Callable[[], Weight | None] = nobody if weight is None else weakref.ref(weight)

    def _here(self, module: nn.Module) -> tuple[Weight, BlockHolder] | None:
        weight = self._weight()
        stream = None if weight is None else cast("BlockHolder | None", weight.holder())
        return (weight, stream) if weight and stream and weight.module() is module else None

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """After state_dict(): with keep_vars the parameter itself stays."""
        if (found := self._here(module)) is not None:
            weight, stream = found
            key = prefix + weight.attribute
            mine = module._parameters.get(weight.attribute)
            has_it = mine is weight.parameter and not weight.without_values
            if has_it and state.get(key, weight.parameter) is not weight.parameter:
                state[key] = weight.expand_later() if weight.int8 else stream.host_copy(weight)

    def loading(self, module: nn.Module, *args: Any) -> None:
        """Before load_state_dict(), which may be given a state dict of this module itself."""
        if (found := self._here(module)) is not None and found[0].is_read_on_host:
            found[1].host_copy(found[0])  # which has the newest bytes then

    def loaded(self, module: nn.Module, keys: Any) -> None:
        """After load_state_dict()."""
        if (found := self._here(module)) is not None:
            found[1].adopt(found[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return HostState, ()
