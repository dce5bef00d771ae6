"""State of parameters on a GPU, and classes that are stepped on the host for them: the bits of the class on
the CPU, with the same gradients.

pytest -m gpu -n 0 tests/gpu/test_optimizer_state.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from offload import HybridDeviceOptimizer
from tests.regressions.test_classes_are_called_as_they_are_alone import Old

pytestmark = pytest.mark.gpu

SIZES = ((300, 200), (200,), (64, 200))


class Twice(Optimizer):
    """Evaluates its closure where it is and a step further on."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        for _ in range(2):
            loss = closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
                    moment.mul_(0.9).add_(parameter.grad)
                    parameter.sub_(moment, alpha=group["lr"])
        return loss


def parameters(device: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).to(device)) for size in SIZES]


def give_gradients(given: list[nn.Parameter], number: int) -> None:
    """Of the weights, by operations that round alike on both devices."""
    generator = torch.Generator().manual_seed(1 + number)
    for parameter in given:
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.grad = noise + parameter.detach() * 0.5


Change = Callable[[Any, list[nn.Parameter], int], None]


def replaces_moments(optimizer: Any, given: list[nn.Parameter], number: int) -> None:
    for parameter in given:
        entry = optimizer.state[parameter]
        for key in [key for key in entry if key != "step"]:
            entry[key] = torch.full_like(parameter, 0.25)


def swaps_and_restores(optimizer: Any, given: list[nn.Parameter], number: int) -> None:
    first, _, third = given
    kept = optimizer.state.pop(first)
    assert third in optimizer.state
    optimizer.state[first] = kept


def keeps_slow_weights(optimizer: Any, given: list[nn.Parameter], number: int) -> None:
    """As timm's Lookahead, on the parameters' device."""
    with torch.no_grad():
        for parameter in given:
            slow = optimizer.state[parameter].setdefault("slow", parameter.detach().clone())
            assert slow.device == parameter.device
            slow.add_(parameter - slow, alpha=0.5)
            parameter.copy_(slow)


def nothing(optimizer: Any, given: list[nn.Parameter], number: int) -> None:
    """Leaves state alone."""


def trained(device: str, make: Callable[[Any], Any], change: Change, closure: bool) -> list[Tensor]:
    given = parameters(device)
    optimizer = make(given)
    for number in range(5):
        give_gradients(given, number)
        if closure:
            optimizer.step(lambda number=number: give_gradients(given, number))
        else:
            optimizer.step()
        change(optimizer, given, number)
    found = [parameter.detach().cpu() for parameter in given]
    getattr(optimizer, "close", lambda: None)()
    return found


@pytest.mark.parametrize("change", [nothing, replaces_moments, swaps_and_restores, keeps_slow_weights])
@pytest.mark.parametrize(
    ("cls", "options"),
    [(AdamW, {"lr": 0.1, "fused": True}), (SGD, {"lr": 0.1, "momentum": 0.9, "fused": True})],
    ids=["AdamW", "SGD"],
)
def test_state_that_is_changed_counts_as_on_the_cpu(
    cls: type[Optimizer], options: dict[str, Any], change: Change
) -> None:
    expected = trained("cpu", lambda given: cls(given, **options), change, closure=False)
    found = trained(
        "cuda",
        lambda given: HybridDeviceOptimizer(given, 1.0, cls, cpu_share=1.0, bucket_bytes=65536, **options),
        change,
        closure=False,
    )
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("cls", "closure"), [(Old, False), (Twice, True)], ids=["Old", "Twice"])
def test_a_class_that_is_not_torchs_has_its_bits_on_the_cpu(cls: type[Optimizer], closure: bool) -> None:
    expected = trained("cpu", lambda given: cls(given, lr=0.1), nothing, closure)
    found = trained("cuda", lambda given: HybridDeviceOptimizer(given, 1.0, cls, lr=0.1), nothing, closure)
    assert all(map(torch.equal, found, expected))


def test_nothing_offloaded_is_torchs_own_with_a_scaler_of_any_scale() -> None:
    found = []
    for ours in (False, True):
        given = parameters("cuda")
        optimizer: Any = (
            HybridDeviceOptimizer(given, 0.0, lr=0.1, fused=True)
            if ours
            else AdamW(given, lr=0.1, fused=True)
        )
        scaler = torch.amp.GradScaler("cuda", init_scale=3.0)
        for number in range(3):
            scaler.scale(torch.ones((), device="cuda"))
            give_gradients(given, number)
            for parameter in given:
                parameter.grad.mul_(3.0)  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
        found.append([parameter.detach() for parameter in given])
    assert all(map(torch.equal, *found))
