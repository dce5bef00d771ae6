"""A model that is dropped without `remove()` is freed with its optimizer, whatever was applied.

Gradients on the host remembered what their last step waits for, and with it all parameters and the modules
that hold them. Who ends a module's gradients is called when the module dies, and held that memory: no model
that a hybrid optimizer had stepped with weights="host" or gradients="host" ever went.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import offload
from tests.inside import streams_from
from tests.unit.groups.stack import build_manager, installed

WIDTH = 64

HOSTED: dict[str, Any] = {"weights": "host"}
APPLIED: list[dict[str, Any]] = [
    {"mode": False, **HOSTED},
    {"mode": False, "gradients": "host"},
    {"mode": "groups", **HOSTED, "gradients": "device"},
    {"mode": "auto", "device_total": "60MB", **HOSTED},
    {"mode": "auto", "device_total": "60MB", "conductor": True},
    {"mode": "auto", "device_total": "200kB", "conductor": False},
    {"mode": "hidden_states", **HOSTED, "conductor": True},
    {"mode": "selective", "gradients": "host"},
    {"mode": True, **HOSTED},
    {"mode": "watermark", "high": "1MB", "gradients": "host"},
    {"mode": "disk", **HOSTED},
]


def said(arguments: dict[str, Any]) -> str:
    return " ".join(
        f"{key}={value}" for key, value in arguments.items() if key not in ("high", "device_total")
    )


def trained(
    arguments: dict[str, Any], how: str, engine: offload.OffloadEngine
) -> list[weakref.ref[nn.Module]]:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(*blocks)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    given = {"optimizer": optimizer} if how == "applied" else {}
    offload.apply(model, min_numel=1, **arguments, **given)
    if how not in ("torch", "applied"):
        options: Any = {"overlap": how, "model": model, "cpu_share": 0.5, "engine": engine}
        optimizer = offload.HybridDeviceOptimizer(model.parameters(), 1.0, **options)
    for _ in range(2):
        model(torch.ones(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weakref.ref(module) for module in model.modules()]


@pytest.mark.parametrize("arguments", APPLIED, ids=said)
def test_a_model_that_is_dropped_is_freed_whatever_was_applied(arguments: dict[str, Any]) -> None:
    with installed(build_manager()) as manager, streams_from(WIDTH * WIDTH):
        ways = ("torch", "applied", "step", "forward", "backward")
        found = {how: trained(arguments, how, manager.engine) for how in ways}
        gc.collect()
        assert [how for how, modules in found.items() if any(each() is not None for each in modules)] == []
        if arguments["mode"] != "disk":  # whose threads end what they have begun, in their time
            assert manager.engine.arena.stats().lent_bytes == 0
