"""`configure` between two steps, under each mode: bits stay those of plain training, the handle goes on
reporting, and each cap is held by whom it should be, then and after `remove`.

The end of mode "auto" brought the limit back from before its plan, and the end of "legacy" did nothing, where
`configure` had been called meanwhile; handles said that their figures end there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import OffloadConfig
from offload.policy.actions import Rates
from tests.ticks import counted_time
from tests.unit.groups.stack import build_manager, installed
from tests.unit.modules.training import ROWS, WIDTH, build

STEPS, SLOW = 9, Rates(d2h_bytes_per_s=1e3, h2d_bytes_per_s=1e3)
HELD: dict[Any, dict[str, str]] = {
    "auto": {"device_limit_bytes": "auto"},
    "legacy": {"max_spilling_bytes": "legacy", "max_restoring_bytes": "legacy"},
}
"""By whom, whatever the new config says."""
MODES: list[tuple[Any, dict[str, Any]]] = [
    ("auto", {"device_total": "20kB"}),
    ("legacy", {}),
    ("groups", {"device_limit": "5kB"}),
    ("watermark", {"high": "5kB"}),
    ("hidden_states", {}),
    ("selective", {"device_limit": "4kB"}),
    (True, {}),
]


def model() -> nn.Module:
    torch.manual_seed(1)
    return build(blocks=4)


def trained(module: nn.Module, between: Callable[[int], object] = int) -> list[Tensor]:
    """The gradients of all steps."""
    found = []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        between(step)
        batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        module(batch).square().mean().backward()
        found += [weight.grad.clone() for weight in module.parameters() if weight.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


@functools.cache
def plain() -> list[Tensor]:
    return trained(model())


@pytest.mark.parametrize(("mode", "arguments"), MODES, ids=[str(mode) for mode, _ in MODES])
@pytest.mark.parametrize(
    "config", [{"device_limit_bytes": 3000}, {"max_spilling_bytes": 100, "max_restoring_bytes": 50}]
)
def test_bits_reports_and_limits_outlive_configure(
    mode: Any, arguments: dict[str, Any], config: dict[str, Any]
) -> None:
    wanted = plain()
    with counted_time(), installed(build_manager()) as manager:
        engine = manager.engine
        engine.rates = SLOW
        module = model()
        handle = offload.apply(module, mode, min_numel=1, **arguments)

        def configure(step: int) -> None:
            if step == 5:
                offload.marks.change_limits(OffloadConfig(min_offloaded_tensor_size=1, **config))

        assert all(map(torch.equal, trained(module, configure), wanted))
        assert handle.report().total.steps == STEPS
        limits = engine.limits
        by = {cap: limits.held_by(cap) for cap in config}  # type: ignore[arg-type]
        assert by == dict.fromkeys(config, "config") | {
            cap: name for cap, name in HELD.get(mode, {}).items() if cap in config
        }
        handle.remove()
        assert {cap: getattr(limits, cap) for cap in config} == config
        assert limits.named == set(config)
