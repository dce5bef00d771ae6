"""State that a loop of torch's takes out and puts back, and a class that is not torch's in another order.

Entries were views of the only copy also once they had been replaced: a swap gave both parameters one state, a
backup was overwritten with what it was the backup of. Each test is a loop that is right with torch, run
beside it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from offload.optim import HybridDeviceOptimizer

FRACTIONS = [0.0, 0.5, 1.0]
Make = Callable[..., Any]
"""An optimizer of a class: torch's own, or that class in ours."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def adam(make: Make, parameters: Any) -> Any:
    return make(AdamW, parameters, lr=1e-2, fused=True)


def swaps(optimizer: Any, one: Tensor, other: Tensor) -> None:
    state = optimizer.state
    state[one], state[other] = state[other], state[one]


def swaps_tensors(optimizer: Any, one: Tensor, other: Tensor) -> None:
    entry, second = optimizer.state[one], optimizer.state[other]
    entry["exp_avg"], second["exp_avg"] = second["exp_avg"], entry["exp_avg"]
    entry["exp_avg"], entry["exp_avg_sq"] = entry["exp_avg_sq"].sqrt(), entry["exp_avg"].square()


def deletes_and_restores(optimizer: Any, one: Tensor, other: Tensor) -> None:
    for parameter in (one, other):
        entry = optimizer.state[parameter]
        del optimizer.state[parameter]
        assert not optimizer.state.get(parameter)
        optimizer.state[parameter] = entry


def clears_and_restores(optimizer: Any, one: Tensor, other: Tensor) -> None:
    backup = dict(optimizer.state)
    optimizer.state.clear()
    optimizer.state.update(backup)


def restores_a_tensor(optimizer: Any, one: Tensor, other: Tensor) -> None:
    entry = optimizer.state[one]
    held = entry["exp_avg"]
    entry["exp_avg"] = torch.zeros_like(held)
    assert held.any()
    entry["exp_avg"] = held


CHANGES = [swaps, swaps_tensors, deletes_and_restores, clears_and_restores, restores_a_tensor]


def beside(loop: Callable[[Make], nn.Module], fraction: float) -> None:
    plain = loop(lambda cls, parameters, **options: cls(parameters, **options))
    ours = loop(
        lambda cls, parameters, **options: HybridDeviceOptimizer(parameters, fraction, cls, **options)
    )
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_taken_out_of_state_and_put_back_is_what_it_was(change: Any, fraction: float) -> None:
    def loop(make: Make) -> nn.Module:
        model = net()
        optimizer = adam(make, model.parameters())
        for number in range(4):
            step(model, optimizer, number)
            change(optimizer, *model.parameters())
        step(model, optimizer, 4)
        return model

    beside(loop, fraction)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_an_entry_that_was_replaced_is_put_back_steps_later(fraction: float) -> None:
    def loop(make: Make) -> nn.Module:
        model = net()
        optimizer = adam(make, model.parameters())
        step(model, optimizer, 0)
        parameter = model[0].weight
        backup = optimizer.state[parameter]
        optimizer.state[parameter] = {key: torch.zeros_like(value) for key, value in backup.items()}
        for number in range(1, 3):
            step(model, optimizer, number)
        optimizer.state[parameter] = backup
        step(model, optimizer, 3)
        return model

    beside(loop, fraction)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_state_goes_with_a_parameter_that_takes_the_place_of_another(fraction: float) -> None:
    """As Gaussian splatting resets opacities: it raised KeyError."""

    def loop(make: Make) -> nn.Module:
        model = net()
        optimizer = adam(make, model.parameters())
        step(model, optimizer, 0)
        group, old = optimizer.param_groups[0], model[0].weight
        entry = optimizer.state.get(old)
        entry["exp_avg"] = torch.zeros_like(old)
        del optimizer.state[old]
        model[0].weight = group["params"][0] = nn.Parameter(old.detach() * 0.5)  # type: ignore[assignment]
        optimizer.state[model[0].weight] = entry
        step(model, optimizer, 1)
        return model

    beside(loop, fraction)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_state_may_be_set_before_its_parameter_is_in_a_group(fraction: float) -> None:
    """It was dropped."""

    def loop(make: Make) -> nn.Module:
        model = net()
        first, second = model.parameters()
        optimizer = adam(make, [first])
        optimizer.state[second] = {
            "step": torch.tensor(5.0),
            "exp_avg": torch.full_like(second, 0.1),
            "exp_avg_sq": torch.full_like(second, 0.2),
        }
        assert second in optimizer.state
        optimizer.add_param_group({"params": [second]})
        step(model, optimizer, 0)
        return model

    beside(loop, fraction)


class Ordered(Optimizer):
    """Each parameter's step depends on how many came before it. factor: of all steps."""

    factor = 1.0

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        place = 1.0
        for group in self.param_groups:
            for parameter in group["params"]:
                moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
                moment.mul_(0.9).add_(parameter.grad)
                parameter.sub_(moment, alpha=group["lr"] * self.factor / place)
                place += 1


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_class_sees_its_parameters_and_groups_in_the_order_that_they_have_now(
    fraction: float, loads: bool
) -> None:
    """It stepped in the order of before, and what was loaded went to the parameter that had been there."""

    def loop(make: Make) -> nn.Module:
        model = net()
        first, second = model.parameters()
        optimizer = make(Ordered, [{"params": [first]}, {"params": [second], "lr": 1e-3}])
        step(model, optimizer, 0)
        optimizer.param_groups.reverse()
        if loads:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step(model, optimizer, 1)
        optimizer = make(Ordered, model.parameters())
        step(model, optimizer, 2)
        optimizer.param_groups[0]["params"].reverse()
        if loads:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step(model, optimizer, 3)
        return model

    beside(loop, fraction)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_an_attribute_of_the_class_that_is_set_counts(fraction: float) -> None:
    """It was set on the wrapper alone."""

    def loop(make: Make) -> nn.Module:
        model = net()
        optimizer = make(Ordered, model.parameters())
        optimizer.factor = 0.1
        assert optimizer.factor == 0.1
        step(model, optimizer, 0)
        return model

    beside(loop, fraction)


class OwnMethods(Ordered):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


@pytest.mark.parametrize("fraction", FRACTIONS[1:])
def test_what_of_a_class_is_not_called_is_said_once(
    fraction: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    with caplog.at_level(logging.WARNING):
        optimizer = HybridDeviceOptimizer(model.parameters(), fraction, OwnMethods)
        for number in range(2):
            step(model, optimizer, number)
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step(lambda: 0.0)
    said = "OwnMethods has zero_grad() and state_dict() of its own, which this optimizer does not call"
    assert caplog.text.count(said) == 1
    assert caplog.text.count("the closure is evaluated once before the step, and OwnMethods gets none") == 1
    caplog.clear()
    torchs = HybridDeviceOptimizer(net().parameters(), fraction, AdamW)
    torchs.step(lambda: 0.0)
    assert "closure" not in caplog.text
