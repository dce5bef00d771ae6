"""Runs of mode "auto" on a simulated device that has a link: compute and copies take what the device's clock
says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import PipelineOffloadManager
from offload.auto import calls as auto_calls
from offload.auto import plan as auto_plan
from offload.auto.plan import Beside
from offload.device.sim import SimDevice
from offload.policy import mixed_search
from offload.policy.actions import Rates
from offload.policy.mixture import MixedPlan
from tests.unit.groups.stack import build_manager, installed
from tests.unit.modules.training import ROWS, WIDTH, build

LAYERS, TOTAL, MICROBATCHES = 6, 25_000, 2
SETTLED = 17
"""Steps until the third plan of a shape."""
FORWARD_S = 1e-3
RATE = 4e6
"""Bytes a second in each direction: two thirds of what a block saves, in the time of its forward."""


class LinkedDevice(SimDevice):
    """With a link whose rates a test sets, and seconds of compute by its own clock."""

    pins = True

    def __init__(self) -> None:
        super().__init__(executor="clock")
        self.block_s = FORWARD_S
        self.set_rate(RATE)

    def set_rate(self, bytes_per_s: float) -> None:
        self._d2h_bytes_per_s = self._h2d_bytes_per_s = bytes_per_s


class Run:
    """A model in mode "auto" whose blocks take the device's `block_s` forward, and twice that backward."""

    def __init__(self, device: LinkedDevice, manager: PipelineOffloadManager) -> None:
        self.device, self.manager = device, manager
        manager.engine.reserve_host(1 << 20, measure=False)
        manager.engine.rates = Rates(
            d2h_bytes_per_s=device._d2h_bytes_per_s, h2d_bytes_per_s=device._h2d_bytes_per_s
        )
        self.model = build(blocks=LAYERS)
        for block in self.model.layers:
            block.register_forward_pre_hook(self._computed(1))  # a recompute ends early
            block.register_full_backward_hook(self._computed(2))
        self.handle = offload.apply(self.model, "auto", min_numel=1, device_total=f"{TOTAL}B")
        self.plans: list[MixedPlan] = []
        self.planned_factor = 1.0  # of a block's seconds while a plan is followed
        self.microbatches = MICROBATCHES
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def _computed(self, passes: int) -> Callable[..., None]:
        def compute(module: nn.Module, *_: Any) -> None:
            factor = self.planned_factor if self.handle.explain().plan is not None else 1.0
            self.device.compute_for(passes * self.device.block_s * factor)

        return compute

    def steps(self, count: int) -> None:
        for _ in range(count):
            losses = [self.model(torch.randn(ROWS, WIDTH)).square().mean() for _ in range(self.microbatches)]
            for loss in losses:
                loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            plan = self.handle.explain().plan
            if plan is not None and (not self.plans or plan is not self.plans[-1]):
                self.plans.append(plan)


@pytest.fixture
def new_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], Run]]:
    """On a link of so many bytes a second, with a host that is ahead of the device. Searches are short and
    waited for."""
    monkeypatch.setattr(mixed_search, "_MOST_TRIALS", 40)
    monkeypatch.setattr(auto_calls, "perf_counter", lambda: 0.0)  # the device's clock is not the host's
    monkeypatch.setattr(auto_plan, "Beside", lambda calculate, waits: Beside(calculate, waits=True))
    with installed(None):
        runs: list[Run] = []

        def new(rate: float) -> Run:
            device = LinkedDevice()
            device.set_rate(rate)
            if PipelineOffloadManager.OFFLOAD_MGR is not None:
                PipelineOffloadManager.OFFLOAD_MGR.close()
            manager = PipelineOffloadManager.OFFLOAD_MGR = build_manager(device=device, piece_bytes=512)
            runs.append(Run(device, manager))
            return runs[-1]

        yield new
        for run in runs:
            run.handle.remove()
