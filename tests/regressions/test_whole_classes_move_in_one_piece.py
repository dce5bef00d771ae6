"""Atomic steps and classes that are not torch's copied each tensor through pageable memory, one by one.

They move as one piece of pinned memory each way now, and a class that keeps gradients, swaps `.data` or makes
state where it is made finds what it finds alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, RMSprop

from offload import OffloadEngine
from offload.device.sim import SimDevice
from offload.errors import OffloadError
from offload.optim import HybridDeviceOptimizer
from tests.optim_pair import EXECUTORS, torchs


class Swapping(Optimizer):
    """Makes state in its constructor and for each group that is added, keeps the last gradient itself, and
    has its averages and its weights take each other's memory."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.state["all"] = {"steps": 0}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self.state[parameter]["average"] = parameter.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["all"]["steps"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    entry = self.state[parameter]
                    change = parameter.grad - entry.get("last", 0.5 * parameter.grad)
                    entry["last"] = parameter.grad
                    entry["average"].lerp_(parameter, 0.3)
                    parameter.data, entry["average"] = entry["average"], parameter.data
                    parameter.sub_(group["lr"] * self.state["all"]["steps"] * change)


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (5,), (2, 3, 2, 2))
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    made[2].data = made[2].data.to(memory_format=torch.channels_last)
    return made


def loop(make: Any, dtype: torch.dtype) -> list[Tensor]:
    weights = parameters(dtype)
    optimizer = make(weights[:2])
    for number in range(6):
        if number == 1:
            for entry in (optimizer.state[each] for each in weights[:2] if each in optimizer.state):
                entry["mine"] = 1.0
        if number == 2:
            optimizer.add_param_group({"params": [weights[2]], "lr": 0.02})
        if number == 4:
            weights[0].data = weights[0].data * 0.5
            weights[2].data = weights[2].data.contiguous()
        for place, parameter in enumerate(weights):
            parameter.grad = (parameter.detach() * (number - 2) + place) if number % 3 != place else None
        optimizer.step()
    return [each.detach().clone() for each in weights]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cls", "options"), [(Swapping, {}), (RMSprop, {}), (AdamW, {"atomic_step": True})])
def test_it_has_the_bits_of_the_class_alone(
    cls: Any, options: dict[str, Any], dtype: torch.dtype, executor: Any
) -> None:
    engine = OffloadEngine(device=SimDevice(executor=executor, seed=3))
    made: list[HybridDeviceOptimizer] = []

    def make(params: Any) -> HybridDeviceOptimizer:
        made.append(HybridDeviceOptimizer(params, 1.0, cls, lr=0.1, engine=engine, **options))
        return made[-1]

    def alone(params: Any) -> Optimizer:
        return torchs(params, cls, lr=0.1) if cls is AdamW else cls(params, lr=0.1)

    found = loop(make, dtype)
    made[0].close()
    for mine, theirs in zip(found, loop(alone, dtype), strict=True):
        assert torch.equal(mine, theirs)
    assert engine.arena.stats().lent_bytes == 0


@pytest.mark.parametrize("cls", [Swapping, RMSprop])
def test_weights_and_gradients_are_in_the_arena_and_move_in_one_piece_each_way(cls: Any) -> None:
    engine = OffloadEngine(device=SimDevice())
    weights = [nn.Parameter(torch.ones(64)) for _ in range(50)]
    optimizer = HybridDeviceOptimizer(weights, 1.0, cls, lr=0.1, engine=engine)
    assert engine.arena.stats().lent_bytes >= optimizer.host_bytes >= 2 * 50 * 64 * 4
    pieces: list[tuple[Any, int]] = []
    engine.copier.watch(lambda direction, owner, nbytes, *_: pieces.append((direction.name, nbytes)))
    for parameter in weights[:49]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.close()
    moved = 50 if cls is Swapping else 49  # such a class may write what has no gradient, too
    if cls is Swapping:  # whose own memory took the weights' place: torch copied those
        assert pieces == [("D2H", (49 + moved) * 256), ("H2D", 256)]
    else:
        assert pieces == [("D2H", 2 * 49 * 256), ("H2D", 49 * 256)]


def test_state_that_took_the_weights_memory_outlives_their_parameter() -> None:
    """The entry of a parameter that leaves its group is the user's, and the memory goes back."""
    engine = OffloadEngine(device=SimDevice())
    gone, other = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64))
    optimizer = HybridDeviceOptimizer([gone], 1.0, Swapping, lr=0.1, engine=engine)
    gone.grad = torch.ones(64)
    optimizer.step()
    average = optimizer.state[gone]["average"]
    before = average.clone()
    optimizer.add_param_group({"params": [other]})
    optimizer.param_groups[0]["params"] = []
    other.grad = torch.ones(64)
    optimizer.step()
    third = HybridDeviceOptimizer([nn.Parameter(torch.full((64,), 7.0))], 1.0, Swapping, engine=engine)
    assert torch.equal(average, before)
    third.close()
    optimizer.close()


def test_entries_that_are_held_are_the_classs_after_an_error_of_the_closure() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = HybridDeviceOptimizer([weight], 1.0, Counting, engine=OffloadEngine(device=SimDevice()))
    held = optimizer.state["all"]

    def fails() -> None:
        raise KeyError("no batch")

    for _ in range(2):
        with pytest.raises(KeyError, match="no batch"):
            optimizer.step(fails)
        optimizer.step(lambda: None)
    assert optimizer.state["all"] is held
    assert held["steps"] == 2
    optimizer.close()


class Counting(Optimizer):
    """Counts in a tensor, which no parameter has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.state["all"] = {"steps": torch.zeros(())}

    def step(self, closure: Any = None) -> None:
        self.state["all"]["steps"] += 1
        closure()


def test_a_step_that_failed_after_an_exchange_of_memory_is_undone() -> None:
    class Fails(Swapping):
        def step(self, closure: Any = None) -> None:
            super().step()
            if self.state["all"]["steps"] == 2:
                raise RuntimeError("half way")

    weight = nn.Parameter(torch.arange(4.0))
    engine = OffloadEngine(device=SimDevice())
    optimizer = HybridDeviceOptimizer([weight], 1.0, Fails, lr=0.1, engine=engine)
    weight.grad = torch.ones(4)
    optimizer.step()
    before = weight.detach().clone(), optimizer.state[weight]["average"].clone()
    with pytest.raises(OffloadError, match="half way"):
        optimizer.step()
    assert torch.equal(weight, before[0])
    assert torch.equal(optimizer.state[weight]["average"], before[1])
    optimizer.close()
