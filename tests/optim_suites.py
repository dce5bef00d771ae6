"""The optimizers of others, and torch's own test cases of its optimizers, through the hybrid one: `python -m
tests.optim_suites` runs each class and input of torch.testing's optim_db, in a process of its own, since that
package changes global settings.

One loop asks all that a run may: several groups, a group that is added, a scheduler, a closure, a parameter
without a gradient, and a resume in the middle from a state dict.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.optim import HybridDeviceOptimizer

FRACTIONS = (0.0, 0.5, 1.0)
STEPS, RESUMED = 6, 3

Make = Callable[[list[dict[str, Any]]], Any]
_of_the_class: dict[str, list[Tensor]] = {}
"""Weights that a class by itself gives, by class and options: each fraction is compared with them."""


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    one, two, three = (nn.Linear(a, b, bias=False) for a, b in ((24, 32), (32, 16), (16, 24)))
    return nn.Sequential(one, nn.Tanh(), two, three)


def _trained(make: Make, *, adds: bool, train: bool) -> list[Tensor]:
    """Weights after `STEPS` steps. adds: a group comes later. train: the class has modes (schedule-free)."""
    model = _model()
    first, second, late = model.parameters()

    def made(whole: bool) -> tuple[Any, Any]:
        groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second]}]
        optimizer = make([*groups, {"params": [late]}] if whole or not adds else groups)
        if train:
            optimizer.train()
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    optimizer, scheduler = made(whole=False)
    for number in range(STEPS):
        if number == 1 and adds:
            optimizer.add_param_group({"params": [late]})
        if number == RESUMED:
            saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
            optimizer, scheduler = made(whole=True)
            optimizer.load_state_dict(saved[0])
            scheduler.load_state_dict(saved[1])
        if train and number == RESUMED + 1:
            optimizer.eval()
            optimizer.train()

        def closure(number: int = number, optimizer: Any = optimizer) -> Tensor:
            x = torch.randn(4, 24, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            loss: Tensor = model(x).square().sum()
            loss.backward()
            if number == 2:
                second.grad = None
            return loss

        if number % 2:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        if optimizer.param_groups[0]["lr"] is not None:
            scheduler.step()
    if train:
        optimizer.eval()
    return [each.detach().clone() for each in model.parameters()]


def bits_that_differ(
    cls: type[Optimizer],
    kwargs: dict[str, Any],
    fraction: float,
    *,
    adds: bool = True,
    train: bool = False,
    share: float | None = None,
) -> float:
    """By how much weights differ most from those of the class itself: 0.0 if in no bit. share: of elements,
    what the host steps."""
    if "fused" in inspect.signature(cls).parameters:
        kwargs = {"fused": True, **kwargs}

    def hybrid(groups: list[dict[str, Any]]) -> HybridDeviceOptimizer:
        return HybridDeviceOptimizer(
            groups, fraction, cls, bucket_bytes=2048, cpu_share=share, **copy.deepcopy(kwargs)
        )

    key = f"{cls} {kwargs} {adds} {train}"
    if key not in _of_the_class:
        _of_the_class[key] = _trained(
            lambda groups: cls(groups, **copy.deepcopy(kwargs)), adds=adds, train=train
        )
    expected = _of_the_class[key]
    found = _trained(hybrid, adds=adds, train=train)
    if all(map(torch.equal, found, expected)):
        return 0.0
    pairs = zip(found, expected, strict=True)
    return max(float((one - other).abs().nan_to_num(1.0).max()) for one, other in pairs) or 1e-45


def torchs_cases() -> Iterator[tuple[type[Optimizer], dict[str, Any]]]:
    """Classes and inputs of torch's test_optim. LBFGS needs a closure and is refused; SparseAdam takes sparse
    gradients, which the regressions have."""
    if "expecttest" not in sys.modules:  # which torch.testing asks for, to subclass it
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        if info.optim_cls.__name__ not in ("LBFGS", "SparseAdam"):
            for case in info.optim_inputs_func(device="cpu"):
                yield info.optim_cls, {"lr": 1e-2, **case.kwargs}


def _main() -> str | None:
    """What differs, if anything does."""
    logging.disable(logging.WARNING)
    differing = []
    for cls, kwargs in torchs_cases():
        for fraction in FRACTIONS:
            for share in (0.0, 1.0) if cls in (torch.optim.Adam, torch.optim.AdamW) and fraction else (None,):
                adds = cls is not torch.optim.Adagrad  # which makes no state for a group that comes later
                if by := bits_that_differ(cls, kwargs, fraction, adds=adds, share=share):
                    differing.append(
                        f"{cls.__name__} {kwargs} offload_fraction={fraction} cpu_share={share}: {by}"
                    )
    return "\n".join(differing) or None


if __name__ == "__main__":
    sys.exit(_main())
