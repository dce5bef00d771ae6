"""Choices that `apply` makes for a model whose weights stream: which of them do, and its steps where no mode
of activations infers them.

One invariant: the hooks of a block's weights are inside those of its activations, in the forward and in a
recompute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from offload.device import device_bytes, device_name
from offload.groups.manager import GroupsManager
from offload.modules.hooks import CallsUnderWay
from offload.modules.settings import is_adapter
from offload.modules.steps import Root, Steps
from offload.optim.step import stepped_by_open_ones
from offload.sizes import argument_bytes
from offload.weights.choose import Choice, choose, choose_gradients, quantize
from offload.weights.files import Slab
from offload.weights.hooks import refuse_recorded_graphs


class WeightsRoot(Root):
    """A model of which weights leave and activations do not."""

    def __init__(self, model: nn.Module, steps: Steps, manager: Callable[[], GroupsManager]) -> None:
        super().__init__(model)
        self.calls = CallsUnderWay()
        self._is_called = False  # by a forward with gradients
        self._stepped = weakref.WeakSet[Optimizer]()  # since the last step, where it is not
        self._steps = steps
        self._manager = manager

    def step_ends(self, by: Optimizer | None) -> None:
        """A step ends, as of Root. Where a module inside the model is called, no forward is seen: a step is
        what lies between two steps of one optimizer, whatever others step meanwhile or inside of it."""
        if self._is_called or by is None or not self.end_seen:
            return
        if not self._stepped or by in self._stepped:
            self._stepped.clear()
            self._manager().tracker.begin_inferred_forward(self.stage, None)
            self._manager().tracker.end_inferred_forward()
        self._stepped.add(by)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._here.running == 0:
            self._is_called = self._is_called or torch.is_grad_enabled()
            self._steps.forward_begins(self, None)
        self._here.running += 1

    def leave(self, state: None, output: Any, failed: bool) -> None:
        self._here.running -= 1
        if self._here.running == 0:
            self._manager().tracker.end_inferred_forward()


def weights_limit(weights: float | str | None) -> int | None:
    """Bytes of `weights=`; None for "host". Raises ValueError."""
    if weights is None or weights == "host":
        return None
    try:
        return argument_bytes(weights, name="weights", of_bytes=device_bytes(), least=0)
    except ValueError as error:
        raise ValueError(f'{error}; or weights="host": those of all blocks wait there') from None


def device_of(device: torch.device | int | str) -> torch.device:
    """The device with its index; the CPU stands for the simulated one. Raises ValueError."""
    try:
        found = torch.device("cpu" if device == "sim" else device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is no device: {error}") from error
    gpus = torch.cuda.device_count()
    if found.type not in ("cpu", "cuda") or (found.type == "cuda" and (found.index or 0) >= gpus):
        raise ValueError(f"device={device!r}: weights stream to one of {gpus} GPUs here, or to the CPU")
    return torch.device(device_name("cuda")) if found == torch.device("cuda") else found


def check_gradients(gradients: str | None) -> None:
    """Raises ValueError for another value of `gradients=` than there is."""
    if gradients not in (None, "host", "device"):
        raise ValueError(
            f'gradients is {gradients!r}, must be "host", "device", or None, which is "host" for the weights '
            "that stream"
        )


def waiting_gradients(
    model: nn.Module, gradients: str | None, choice: Choice | None, least: int | None = None
) -> list[str]:
    """Names of the parameters whose gradients may wait on the host; choice: of the weights that stream.
    least: elements of the others, None for 1 Mi. Raises ValueError where that cannot be; nothing has
    changed."""
    if gradients == "device" or (gradients is None and choice is None):
        return []
    found = choose_gradients(model, None if gradients == "host" else choice, least)
    named = {id(model.get_parameter(name)): name for name in found}
    taken = 'apply(gradients="host"), and takes its gradient in the backward'
    _refuse_stepped(named, taken, in_backward=True)
    return found


def _refuse_stepped(names: Mapping[int, str], asked: str, *, in_backward: bool) -> None:
    """Raise ValueError if an optimizer that was built before steps one of them. names: of parameters, by
    id."""
    for parameter in stepped_by_open_ones(in_backward=in_backward):
        if (name := names.get(id(parameter))) is not None:
            raise ValueError(
                f"{name} is stepped by a HybridDeviceOptimizer that was built before {asked}: close() that "
                "optimizer, or build it after apply()"
            )


def chosen_weights(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    where: torch.device,
    quantized: str | PathLike[str] | None = None,
    *,
    every: bool = False,
    least: int | None = None,
) -> tuple[Choice, Slab | None]:
    """Which weights of the blocks stream to `where`, and which as INT8, of a slab if `quantized` is its
    manifest. every: also small ones, and those of adapters. least: elements, None for 1 Mi.
    Raises ValueError where that cannot be; nothing has changed."""
    for name, module in model.named_modules():
        refuse_recorded_graphs(module, name or type(model).__name__)
    adapters = is_adapter if not every else lambda name: False
    choice = choose(model, blocks, adapters, where, 1 if every else least)
    streamed = {id(weight.parameter): weight.name for each in choice.blocks.values() for weight in each}
    _refuse_stepped(streamed, "apply(weights=...), and keeps a copy of it on the host", in_backward=False)
    slab = None
    if quantized is not None:
        quantize(choice, model)
        if quantized != "int8":
            slab = Slab(quantized, model, is_adapter)
            slab.give(model, (each for found in choice.blocks.values() for each in found if each.int8))
    return choice, slab
