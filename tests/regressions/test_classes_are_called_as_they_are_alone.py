"""An optimizer of ours stood between the loop and the class that it wraps.

A class got no closure; its own `zero_grad`, `state_dict` and `load_state_dict` were not called; its methods
found no gradients, and what they wrote into them was lost; a scaler unscaled by other kernels. Now
`HybridDeviceOptimizer(offload_fraction=0)` is an object of the class itself, and above 0 a class that is not
torch's finds, on the host, what it finds alone.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from offload.errors import OffloadError
from offload.optim import HybridDeviceOptimizer
from offload.optim.placing import Place

Make = Callable[..., Any]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def loss_of(model: nn.Module, number: int) -> Tensor:
    return model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))).square().sum()


class Sam(Optimizer):
    """Steps up, asks its closure again there, and steps down from where it was. Keeps what it calls."""

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})
        self.calls: list[str] = []
        self.register_step_pre_hook(lambda *_: self.calls.append("before"))
        self.register_step_post_hook(lambda *_: self.calls.append("after"))

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        weights = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in weights]).norm()
        moves = [p.grad * self.param_groups[0]["rho"] / norm for p in weights]
        for parameter, move in zip(weights, moves, strict=True):
            parameter.add_(move)
        closure()
        for parameter, move in zip(weights, moves, strict=True):
            parameter.sub_(move).add_(parameter.grad, alpha=-self.param_groups[0]["lr"])
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls.append("zero_grad")
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"mine": len(self.calls), **super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls = ["zero_grad"] * state_dict.pop("mine")
        super().load_state_dict(state_dict)


def own_methods(make: Make) -> list[Any]:
    model = net()
    optimizer = make(model.parameters(), Sam)
    found: list[Any] = []
    for number in range(4):

        def closure(number: int = number, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            return loss

        found.append(optimizer.step(closure))
        if number == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make(model.parameters(), Sam)
            optimizer.load_state_dict(saved)
    return [*found, torch.tensor(len(optimizer.calls)), *model.parameters()]


def scaled(make: Make) -> list[Any]:
    model = net()
    optimizer = make(model.parameters(), AdamW, lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0, growth_interval=2, growth_factor=1.7)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for number in range(5):
        scaler.scale(loss_of(model, number)).backward()
        if number == 3:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
    return list(model.parameters())


def line_searched(make: Make) -> list[Any]:
    model = net()
    optimizer = make(model.parameters(), torch.optim.LBFGS, lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return list(model.parameters())


def copied(make: Make) -> list[Any]:
    model = net()
    optimizer = make(model.parameters(), AdamW, lr=1e-2)
    for number in range(4):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            model, optimizer = copy.deepcopy((model, optimizer))
        if number == 2:
            model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    return list(model.parameters())


class Old(Optimizer):
    """Writes as classes of before did: through `.data`, into gradients, into weights without gradients, and
    keeps the very gradient for its next step. `center` reads and writes gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def center(self) -> float:
        total = 0.0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.data.sub_(parameter.grad.data.mean())
                    total += float(parameter.grad.norm())
                else:
                    parameter.grad = torch.ones_like(parameter)
        return total

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.99)
                if parameter.grad is not None:
                    gradient, state = parameter.grad.data, self.state[parameter]
                    gradient.add_(parameter.data, alpha=0.1)
                    parameter.data.add_(gradient + state.get("last", 0.0), alpha=-group["lr"])
                    state["last"] = parameter.grad
        return loss


def old_class(make: Make) -> list[Any]:
    model = net()
    optimizer = make(model.parameters(), Old)
    seen: list[Any] = []
    for number in range(5):
        optimizer.zero_grad()
        if number == 3:  # a part of the model alone
            model[0](torch.ones(2, 8)).sum().backward()
        else:
            loss_of(model, number).backward()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if number % 2:
            seen.append(torch.tensor(optimizer.center()))
            seen += [p.grad.clone() for p in model.parameters()]
        optimizer.step(*([lambda: loss_of(model, 9)] if number == 4 else []))
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if number == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make(model.parameters(), Old)
            optimizer.load_state_dict(saved)
    return [*seen, *model.parameters()]


class Looks(Optimizer):
    """Evaluates a closure twice, which looks at groups and state, and changes them."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        for number in range(2):
            self.param_groups[0]["k"] += 1
            with torch.enable_grad():
                loss = closure()
            for parameter in self.param_groups[0]["params"]:
                moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
                moment.add_(parameter.grad, alpha=1 + number)
                parameter.sub_(moment, alpha=self.param_groups[0]["lr"])
        return loss


def closure_looks(make: Make) -> list[Any]:
    model = net()
    optimizer = make(model.parameters(), Looks)
    seen: list[Any] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, len(seen))
        loss.backward()
        optimizer.param_groups[0]["lr"] *= 0.9
        seen.append(torch.tensor(optimizer.param_groups[0]["k"]))
        for entry in optimizer.state.values():
            entry["moment"].mul_(0.5)
            seen.append(entry["moment"].clone())
        return loss

    for _ in range(3):
        seen.append(optimizer.step(closure))
    return [*seen, *model.parameters()]


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "loop", [own_methods, line_searched, old_class, closure_looks], ids=lambda loop: loop.__name__
)
def test_a_class_is_called_as_it_is_alone(loop: Any, fraction: float) -> None:
    same_bits(loop, fraction)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_an_error_of_the_closure_is_raised_as_it_is(fraction: float) -> None:
    model = net()
    optimizer: Any = HybridDeviceOptimizer(model.parameters(), fraction, Sam)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def closure() -> Tensor:
        raise StopIteration("no more batches")

    with pytest.raises(StopIteration, match="no more batches"):
        optimizer.step(closure)
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.step(lambda: loss_of(model, 0).backward())
    optimizer.close()


def test_methods_of_a_class_that_steps_a_share_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        HybridDeviceOptimizer(net().parameters(), 0.5, SGD, Sam, lr=0.1).close()
        HybridDeviceOptimizer(net().parameters(), 1.0, Sam, lr=0.1).close()
    said = "Sam steps a share of the parameters, and zero_grad() and state_dict() and load_state_dict()"
    assert caplog.text.count(said) == 1


class BreaksOff(SGD):
    """Fails after it has stepped; a class of its own on the host."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        raise MemoryError("no more")


def test_what_stays_on_the_device_is_not_stepped_before_a_step_that_may_be_undone() -> None:
    model = net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = HybridDeviceOptimizer(model.parameters(), 0.5, BreaksOff, SGD, lr=0.1)
    loss_of(model, 0).backward()
    with pytest.raises(OffloadError, match="weights and state are those of the last whole step"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.close()


@pytest.mark.parametrize("loop", [scaled, copied], ids=lambda loop: loop.__name__)
def test_a_loop_that_offloads_nothing_has_the_bits_of_the_class(loop: Any) -> None:
    same_bits(loop, 0.0)


def same_bits(loop: Any, fraction: float) -> None:
    expected = loop(lambda parameters, cls, **options: cls(parameters, **options))
    found = loop(
        lambda parameters, cls, **options: HybridDeviceOptimizer(parameters, fraction, cls, **options)
    )
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_it_is_an_object_of_the_class_and_has_the_names_of_ours() -> None:
    model = net()
    optimizer: Any = HybridDeviceOptimizer(model.parameters(), 0.0, AdamW, lr=1e-2)
    assert isinstance(optimizer, AdamW)
    assert isinstance(optimizer, HybridDeviceOptimizer)
    assert optimizer.sub_optimizers == [optimizer.gpu_optimizer] == [optimizer]
    assert optimizer.place_of(model[0].weight) is Place.GPU
    with pytest.raises(ValueError, match="is not one of the optimizer's parameters"):
        optimizer.place_of(torch.ones(2))
    optimizer.dummy_step()
    assert set(optimizer.state[model[0].weight]) == {"step", "exp_avg", "exp_avg_sq"}
    with optimizer.no_sync():
        optimizer.synchronize_parameters()
    assert not optimizer.host_bytes
    assert "hybrid" not in optimizer.state_dict()
    optimizer.close()
    loss_of(model, 0).backward()
    optimizer.step()


class OwnSGD(SGD):
    """Not torch's: it is stepped whole."""


@pytest.mark.parametrize(("fraction", "cls"), [(0.0, SGD), (1.0, OwnSGD)])
def test_max_grad_norm_clips_in_every_step_with_and_without_a_closure(
    fraction: float, cls: type[SGD]
) -> None:
    expected, found = net(), net()
    plain = SGD(expected.parameters(), lr=0.1)
    ours: Any = HybridDeviceOptimizer(found.parameters(), fraction, cls, lr=0.1, max_grad_norm=0.5)
    for number in range(4):
        plain.zero_grad()
        loss_of(expected, number).backward()
        norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        plain.step()

        def closure(number: int = number) -> Tensor:
            ours.zero_grad()
            loss = loss_of(found, number)
            loss.backward()
            return loss

        if number % 2:
            ours.step(closure)
        else:
            closure()
            ours.step()
        assert torch.equal(ours.last_grad_norm, norm)
    assert all(map(torch.equal, expected.parameters(), found.parameters()))
