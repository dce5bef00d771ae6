"""Weights of registered modules on the host, under the names of an engine for torchtitan: the stream that
`offload.apply(weights="host")` has (offload/weights), with the order and the modules that the caller names.

    hook = offload_module_weights(model.layers)     # in the order of the forward
    ...                                             # any training loop
    hook.remove_hooks()

One invariant: nothing moves here. Which block comes and goes, and when, is the stream's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from offload import marks
from offload.apply import weights_root
from offload.compat.tensors import TensorOffloader
from offload.modules.hooks import CallsUnderWay, HookPair
from offload.modules.weights import WeightsRoot, chosen_weights
from offload.telemetry.speaker import speaker
from offload.weights.hooks import BlockCalls
from offload.weights.order import Order, Pass, Use
from offload.weights.stream import WeightStream

logger = speaker(__name__)


class RegisteredModules(nn.ModuleList):
    """The modules of one stream."""


class _Unforetold(Order):
    """Nothing is fetched ahead."""

    def coming(self) -> Iterator[int]:
        return iter(())


class _Started:
    """The modules that started together. They have one window, of their two largest."""

    def __init__(self, offloader: TensorOffloader, named: dict[str, nn.Module], prefetch: bool) -> None:
        self.modules = RegisteredModules(named.values())
        engine = offloader.engine
        choice, _ = chosen_weights(self.modules, named, engine.device.torch_device, every=True)
        if choice.resident:
            logger.warning(
                "%d registered weights stay on the device: %s",
                sum(number for number, _ in choice.resident.values()),
                "; ".join(f"{number} {why}" for why, (number, _) in choice.resident.items()),
            )
        self.stream = WeightStream(engine, self.modules, choice, None)
        blocks = range(len(self.stream.blocks))
        if not prefetch:
            self.stream.order = _Unforetold()
        for during in (Pass.FORWARD, Pass.INFERENCE):
            passes = [Use(block, during) for block in blocks]
            if during is Pass.FORWARD:
                passes += [Use(block, Pass.BACKWARD) for block in reversed(blocks)]
            self.stream.order.expect([*passes, *passes[:2]])
        self.root: WeightsRoot = weights_root(self.modules)
        calls = [(block, BlockCalls(self.stream, block)) for block in self.stream.blocks]
        self.calls = {id(named[block.name]): (block, each) for block, each in calls}


class WeightOffloadHook:
    """Weights of registered modules wait on the host; a module's come before its forward and its backward,
    and its device memory is free after its forward.

    offloader: whose engine moves them. prefetch_next: the next module's weights come while one computes; the
    order of registration is the first guess, and what is seen is believed. Modules start at
    `initial_offload()`, or at the first forward of one; those registered later are a stream of their own.
    Weights are frozen, or stepped on the device by an optimizer of torch's.
    """

    def __init__(self, offloader: TensorOffloader, prefetch_next: bool = True) -> None:
        self._offloader, self._prefetch = offloader, prefetch_next
        self._waiting: dict[str, nn.Module] = {}
        self._started: list[_Started] = []
        self._pairs: dict[nn.Module, HookPair] = {}
        self._under_way, self._numbers = CallsUnderWay(), count()

    def register(self, module: nn.Module, name: str | None = None) -> None:
        """Once for a module. name: in messages. Raises ValueError."""
        if not isinstance(module, nn.Module) or module in self._pairs:
            again = " again" if isinstance(module, nn.Module) else ", must be a torch.nn.Module"
            raise ValueError(f"register got a {type(module).__name__}{again}")
        self._waiting[f"{name or type(module).__name__} {next(self._numbers)}"] = module
        self._pairs[module] = HookPair(module, self._enter, self._leave, self._under_way)

    def initial_offload(self) -> None:
        """All registered weights go to the host now. Raises what `apply(weights="host")` does, and nothing
        has moved then. Blocks the host for the pinning."""
        if self._waiting:
            started = _Started(self._offloader, self._waiting, self._prefetch)
            self._started.append(started)
            self._waiting = {}
        for started in self._started:
            for block in started.stream.blocks:
                started.stream.free(block)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._waiting:
            self.initial_offload()
        for started in self._started:
            if (found := started.calls.get(id(module))) is not None:
                block, calls = found
                if block.index == 0:
                    started.root.enter(module, args, kwargs)
                return started, block, calls, calls.enter(module, args, kwargs)
        return None  # it has no weight that streams

    def _leave(self, state: Any, output: Any, failed: bool) -> None:
        if state is None:
            return
        started, block, calls, close = state
        calls.leave(close, output, failed)
        if block.index == 0:
            started.root.leave(None, output, failed)
        if torch._C._current_graph_task_id() == -1:
            started.stream.free(block)

    def remove_hooks(self) -> None:
        """Weights go back to where they were. Raises torch.OutOfMemoryError where they do not fit, and goes
        on then. Blocks the host."""
        while self._started:
            self._started[-1].stream.remove()
            self._started.pop()
        for pair in self._pairs.values():
            pair.remove()
        self._pairs.clear()
        self._waiting.clear()


_here: list[WeightOffloadHook] = []
"""The hook of `offload_weights`, from its first call to `reset_offloader`."""


def offload_module_weights(
    modules: Iterable[nn.Module], offloader: TensorOffloader | None = None
) -> WeightOffloadHook:
    """Have the weights of modules, in the order of their forwards, wait on the host from now on."""
    hook = WeightOffloadHook(offloader or TensorOffloader())
    for module in modules:
        hook.register(module)
    hook.initial_offload()
    return hook


def offload_weights(module: nn.Module, name: str = "weights") -> nn.Module:
    """Register a module with this process's hook, before its first forward. Returns it."""
    if not _here:
        _here.append(WeightOffloadHook(TensorOffloader()))
    _here[0].register(module, name)
    return module


def offload_activation(tensor: Tensor, name: str = "activation") -> Tensor:
    """Have leave what is saved from here to `offload_commit`: `offload.group_start(tensor, name,
    hooks=True)`."""
    return marks.group_start(tensor, name, hooks=True)


def offload_commit(tensor: Tensor, name: str = "activation") -> Tensor:
    """`offload.group_commit(tensor, name)`."""
    return marks.group_commit(tensor, name)


def reset_offloader() -> None:
    """Undo `offload_weights`: weights go back to where they were."""
    while _here:
        _here[-1].remove_hooks()
        _here.pop()
