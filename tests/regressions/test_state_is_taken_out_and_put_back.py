"""State that a loop of torch's takes out and puts back, and a class that is not torch's in another order.

Entries were views of the only copy also once they had been replaced: a swap gave both parameters one state, a
backup was overwritten with what it was the backup of. Each test is a loop that is right with torch, run
beside it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from offload import OffloadEngine
from offload.device.sim import SimDevice
from offload.optim import FSDPGPUOptimizerWrapper, HybridDeviceOptimizer

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


def replaces_all(optimizer: Any, one: Tensor, other: Tensor) -> None:
    """And puts it back; as a whole it was lost."""
    old = optimizer.state
    optimizer.state = {}
    optimizer.state = old


def holds_all(optimizer: Any, one: Tensor, other: Tensor) -> None:
    backup = copy.deepcopy(list(optimizer.state.values()))
    old = optimizer.state
    optimizer.state = {key: {name: value * 2 for name, value in entry.items()} for key, entry in old.items()}
    assert all(map(torch.equal, old[one].values(), backup[0].values()))
    optimizer.state[other]["mine"] = old[other]["exp_avg"]


def fills_by_key(optimizer: Any, one: Tensor, other: Tensor) -> None:
    """It was a ValueError at the first key."""
    optimizer.state[one].clear()
    optimizer.state[one]["step"] = torch.tensor(3.0)
    assert optimizer.state[one].keys() == {"step"}
    optimizer.state[one]["exp_avg"] = torch.full_like(one, 0.5)
    optimizer.state[one]["exp_avg_sq"] = torch.full_like(one, 0.25)


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("cpu_share", [0.0, 1.0])
@pytest.mark.parametrize(
    "change", [replaces_all, holds_all, fills_by_key], ids=lambda change: change.__name__
)
def test_state_is_a_dictionary_to_all_who_change_it(change: Any, cpu_share: float, fraction: float) -> None:
    def loop(make: Make) -> nn.Module:
        model = net()
        optimizer = make(AdamW, model.parameters(), lr=1e-2, fused=True)
        for number in range(4):
            step(model, optimizer, number)
            change(optimizer, *model.parameters())
        step(model, optimizer, 4)
        return model

    plain = loop(lambda cls, parameters, **options: cls(parameters, **options))
    share = {"cpu_share": cpu_share} if fraction else {}
    ours = loop(
        lambda cls, parameters, **options: HybridDeviceOptimizer(
            parameters, fraction, cls, bucket_bytes=1024, **share, **options
        )
    )
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("cls", [AdamW, torch.optim.RMSprop], ids=lambda cls: cls.__name__)
def test_entries_take_tensors_of_another_shape_until_the_parameter_has_it(cls: Any, fraction: float) -> None:
    """As Gaussian splatting prunes and clones points: an error at the first tensor."""

    def loop(make: Make) -> nn.Module:
        model = nn.Module()
        torch.manual_seed(0)
        model.points = nn.Parameter(torch.randn(12, 3))
        kernel = {"fused": True} if cls is AdamW else {}
        optimizer = make(cls, [{"params": [model.points], "name": "xyz"}], lr=1e-2, **kernel)
        for number in range(5):
            model.points.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            group = optimizer.param_groups[0]
            stored = optimizer.state.get(group["params"][0])
            for key, value in stored.items():
                if key != "step":
                    pruned = value[2:] if number % 2 else torch.cat([value, torch.zeros_like(value[:3])])
                    stored[key] = pruned
            del optimizer.state[group["params"][0]]
            points = model.points.detach()
            points = points[2:] if number % 2 else torch.cat([points, points[:3] * 0.5])
            model.points = group["params"][0] = nn.Parameter(points.clone())
            optimizer.state[group["params"][0]] = stored
        return model

    plain = loop(lambda cls, parameters, **options: cls(parameters, **options))
    ours = loop(
        lambda cls, parameters, **options: HybridDeviceOptimizer(parameters, fraction, cls, **options)
    )
    assert torch.equal(plain.points, ours.points)


def test_a_look_from_another_thread_waits_for_the_step_under_way() -> None:
    """It took a running step for one that was broken off, and the next step raised."""
    model = net()
    optimizer = HybridDeviceOptimizer(model.parameters(), 0.5, torch.optim.RMSprop, atomic_step=False)
    errors: list[BaseException] = []
    goes_on = threading.Event()

    def looks() -> None:
        while not goes_on.is_set():
            try:
                optimizer.state_dict()
                len(optimizer.state)
                optimizer.synchronize_parameters()
            except BaseException as error:
                errors.append(error)
                return

    thread = threading.Thread(target=looks)
    thread.start()
    try:
        for number in range(150):
            step(model, optimizer, number)
    finally:
        goes_on.set()
        thread.join()
    assert not errors
    optimizer.close()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_so_it_is_where_fsdps_wrapper_steps_an_optimizer(change: Any) -> None:
    """An entry that had been taken out was overwritten with what the next step wrote."""
    found = []
    for wraps in (False, True):
        model = net()
        optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
        engine = OffloadEngine(device=SimDevice(executor="late"))
        stepping: Any = (
            FSDPGPUOptimizerWrapper(optimizer, "cpu", engine=engine, bucket_bytes=1024)
            if wraps
            else optimizer
        )
        for number in range(4):
            step(model, stepping, number)
            change(optimizer, *model.parameters())
        step(model, stepping, 4)
        found.append(list(model.parameters()))
    assert all(map(torch.equal, *found))
