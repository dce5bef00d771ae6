"""Every optimizer class of a package, run beside itself: `python -m tests.optim_packages timm.optim` prints
one line of JSON a class.

One loop, with a resume from a state dict in the middle, runs with the class alone, and with the hybrid
optimizer at each fraction; after every step all weights are compared. How a class wants to be called is found
by trying, with the class alone: most take `step()`; some a closure, gradients with a graph, groups with keys
of their own, or the module.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import inspect
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.optim import HybridDeviceOptimizer
from tests.optim_suites import FRACTIONS

PACKAGES = ("pytorch_optimizer", "timm.optim", "schedulefree", "prodigyopt", "torchao.optim")
STEPS, RESUMED = 6, 3

Make = Callable[[Any], Any]


@dataclass(frozen=True)
class Case:
    """One way of using a class."""

    groups: str = "flat"
    """flat: parameters; muon: groups with use_muon; matrices: those alone; model: the module itself."""
    closure: bool = False
    graph: bool = False
    resumes: bool = True


CASES = [
    Case(groups, closure, graph, resumes)
    for resumes in (True, False)
    for groups in ("flat", "muon", "matrices", "model")
    for closure, graph in ((False, False), (True, False), (False, True))
]


def classes_of(package: str) -> dict[str, type[Optimizer]]:
    module = importlib.import_module(package)
    found = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    return {
        name: cls
        for name, cls in sorted(found.items())
        if issubclass(cls, Optimizer) and cls.__module__.partition(".")[0] == package.partition(".")[0]
    }


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))


def _given(model: nn.Module, groups: str) -> Any:
    every = list(model.parameters())
    matrices = [p for p in every if p.ndim > 1]
    if groups != "muon":
        return {"flat": every, "matrices": matrices, "model": model}[groups]
    return [
        {"params": matrices, "use_muon": True},
        {"params": [p for p in every if p.ndim < 2], "use_muon": False},
    ]


def _trained(make: Make, case: Case) -> list[list[Tensor]]:
    """The weights after each step."""
    model = _model()
    optimizer = make(_given(model, case.groups))
    found = []
    for number in range(STEPS):
        if number == RESUMED and case.resumes:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make(_given(model, case.groups))
            optimizer.load_state_dict(saved)
        if hasattr(optimizer, "train"):
            optimizer.train()

        def closure(number: int = number, optimizer: Any = optimizer) -> Tensor:
            x = torch.randn(4, 24, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            with torch.enable_grad():
                loss: Tensor = model(x).square().mean()
                loss.backward(create_graph=case.graph)
            return loss

        torch.manual_seed(number)
        numpy.random.seed(number)
        if case.closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        found.append([each.detach().clone() for each in model.parameters()])
    return found


def _wrapper(cls: type[Optimizer]) -> type[Optimizer]:
    """A class of parameters, of one that takes an optimizer."""

    class Wrapped(cls):  # type: ignore[valid-type,misc]
        def __init__(self, params: Any) -> None:
            super().__init__(torch.optim.SGD(params, lr=1e-2, momentum=0.9))

    Wrapped.__name__ = cls.__name__
    return Wrapped


ARGUMENTS: dict[str, dict[str, Any]] = {
    "base_optimizer": {"base_optimizer": torch.optim.SGD, "lr": 1e-2},
    "num_data": {"num_data": 16},
    "num_iterations": {"num_iterations": 10},
    "num_epochs": {"num_epochs": 2, "num_batches_per_epoch": 5},
}


def _as_used(cls: type[Optimizer]) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class, or one of parameters around it, and the arguments that it must have."""
    parameters = inspect.signature(cls).parameters
    if next(iter(parameters)) in ("optimizer", "base_optimizer"):
        return _wrapper(cls), {}
    needed = [
        name
        for name, each in parameters.items()
        if (each.default is each.empty or (name == "lr" and not isinstance(each.default, float)))
        and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    kwargs: dict[str, Any] = {}
    for name in needed[1:]:
        kwargs |= ARGUMENTS.get(name, {name: 1e-2})
    return cls, kwargs


def _hybrid(given: Any, cls: Any, fraction: float, kwargs: dict[str, Any]) -> HybridDeviceOptimizer:
    return HybridDeviceOptimizer(given, fraction, cls, bucket_bytes=2048, **copy.deepcopy(kwargs))


def _alone(given: Any, cls: Any, kwargs: dict[str, Any]) -> Optimizer:
    return cls(given, **copy.deepcopy(kwargs))


def _same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> bool:
    steps = zip(found, expected, strict=True)
    return all(torch.equal(*pair) for step in steps for pair in zip(*step, strict=True))


def found_of(name: str, cls: type[Optimizer]) -> dict[str, Any]:
    """What became of a class: `case`, how it was called, or None; `alone`, why it cannot be; `differs`, at
    which fractions; `refused`, by fraction, the error."""
    error = ""
    for case in CASES:
        try:
            used, kwargs = _as_used(cls)
            expected = _trained(functools.partial(_alone, cls=used, kwargs=kwargs), case)
        except Exception as raised:  # it wants to be called otherwise
            error = error or f"{type(raised).__name__}: {raised}"
            continue
        differs, refused = [], {}
        for fraction in FRACTIONS:
            make = functools.partial(_hybrid, cls=used, fraction=fraction, kwargs=kwargs)
            try:
                if not _same(_trained(make, case), expected):
                    differs.append(fraction)
            except Exception as raised:
                refused[str(fraction)] = f"{type(raised).__name__}: {raised}"
        called = dataclasses.asdict(case)
        return {"name": name, "case": called, "alone": "", "differs": differs, "refused": refused}
    return {"name": name, "case": None, "alone": error, "differs": [], "refused": {}}


def main(package: str, *names: str) -> None:
    logging.disable(logging.WARNING)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    for name, cls in classes_of(package).items():
        if not names or name in names:
            sys.stdout.write(json.dumps(found_of(name, cls)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
