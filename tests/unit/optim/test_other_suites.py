"""Optimizers of others, and torch's own test cases, run beside the class itself: see tests/optim_suites.py.

What is not installed is skipped: `pip install schedulefree prodigyopt` (in the extra "test"), and timm, which
needs torchvision.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.optim import HybridDeviceOptimizer
from tests import optim_suites
from tests.forks import forked
from tests.optim_suites import FRACTIONS, bits_that_differ

TIMMS: dict[str, dict[str, Any]] = {
    "AdaBelief": {},
    "Adafactor": {},
    "AdafactorBigVision": {},
    "AdamP": {},
    "AdamWLegacy": {"weight_decay": 0.1},
    "Adan": {},
    "Adopt": {},
    "Lamb": {"weight_decay": 0.1},
    "LaProp": {},
    "Lars": {"momentum": 0.9},
    "Lion": {},
    "MADGRAD": {},
    "Mars": {},
    "Muon": {},
    "NAdamLegacy": {},
    "NAdamW": {},
    "NvNovoGrad": {},
    "RAdamLegacy": {},
    "RMSpropTF": {"momentum": 0.9},
    "SGDP": {"momentum": 0.9},
    "SGDW": {"momentum": 0.9, "weight_decay": 0.1},
}


CASES: list[tuple[str, dict[str, Any], dict[str, bool]]] = [
    # Lamb takes a norm over all parameters, Lamb and Adan count in their groups
    *((f"timm.optim.{name}", {"lr": 1e-2, **options}, {}) for name, options in TIMMS.items()),
    # these count in their groups, and `train()` and `eval()` change the weights
    *(
        (f"schedulefree.{name}ScheduleFree", {"lr": 1e-2}, {"train": True})
        for name in ("AdamW", "SGD", "RAdam")
    ),
    # it estimates a step size from all parameters of all groups, and keeps it in the groups
    *(
        ("prodigyopt.Prodigy", {"lr": 1.0, **options}, {"adds": False})
        for options in ({}, {"safeguard_warmup": True, "weight_decay": 0.1}, {"slice_p": 11})
    ),
]


@pytest.mark.parametrize(("path", "options", "how"), CASES, ids=str)
def test_classes_of_others_have_their_own_bits(
    path: str, options: dict[str, Any], how: dict[str, bool]
) -> None:
    module, _, name = path.rpartition(".")
    pytest.importorskip(module.partition(".")[0])
    cls = getattr(importlib.import_module(module), name)
    differ = [bits_that_differ(cls, options, fraction, **how) for fraction in FRACTIONS]
    assert differ == [0.0, 0.0, 0.0]


def test_torchs_own_cases_have_its_bits() -> None:
    with forked(Path(optim_suites.__file__)) as process:
        ended = process.ended(600.0)
    assert ended.code == 0, ended.output + ended.errors


class Averaging(torch.optim.SGD):
    """A class with methods of its own that change weights, and with a count in its group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)

    @torch.no_grad()
    def scale(self, factor: float) -> str:
        for group in self.param_groups:
            group["scaled"] = group.get("scaled", 0) + 1
            for parameter in group["params"]:
                parameter.mul_(factor)
        return "scaled"


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_methods_of_a_class_reach_its_weights_and_groups(fraction: float) -> None:
    """schedule-free's `eval()` was not there; on the optimizer inside it changed the host's copy alone."""
    layer = torch.nn.Linear(8, 8)
    optimizer: Any = HybridDeviceOptimizer(layer.parameters(), fraction, Averaging, lr=0.1)
    before = layer.weight.detach().clone()
    assert optimizer.scale(0.5) == "scaled"
    assert torch.equal(layer.weight, before * 0.5)
    assert optimizer.param_groups[0]["scaled"] == 1
    layer(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert torch.equal(layer.weight, before * 0.5 - 0.1 * layer.weight.grad)  # type: ignore[operator]
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        optimizer.nothing()
    optimizer.close()
