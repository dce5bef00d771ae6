"""Mode "auto" where the link, or the device's clock, becomes another one in the middle of a run. Compute and
copies take what the simulated device's clock says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import PipelineOffloadManager
from offload.device.sim import SimDevice
from offload.groups import timed
from offload.modules import auto_drift, auto_plan
from offload.modules.beside import Beside
from offload.modules.block_calls import Timing
from offload.policy import mixed_search
from offload.policy.actions import Rates
from offload.policy.mixture import MixedPlan
from tests.unit.groups.stack import build_manager, installed
from tests.unit.modules.training import ROWS, WIDTH, build

LAYERS, TOTAL, MICROBATCHES = 6, 25_000, 2
SETTLED, AFTER = 17, 14
"""Steps until the third plan of a shape, and until another one follows a change."""
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
    """On a link of so many bytes a second, with a host that is ahead of the device. Plans may follow each
    other within 8 steps, looks within 2, and searches are short and waited for."""
    monkeypatch.setattr(Timing, "_is_paced", lambda timing, start: False)
    monkeypatch.setattr(mixed_search, "_MOST_TRIALS", 40)
    monkeypatch.setattr(timed, "_MOST_TRIALS", 12)
    monkeypatch.setattr(auto_plan, "Beside", lambda calculate, waits: Beside(calculate, waits=True))
    monkeypatch.setattr(auto_drift, "_PLAN_EVERY", 8)
    monkeypatch.setattr(auto_drift, "_LOOK_EVERY", 2)
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


def moved_and_recomputed(plan: MixedPlan) -> tuple[int, int]:
    """Bytes."""
    recomputed = sum(
        own[at].menu[0].saved_bytes - own[at].menu[level].saved_bytes
        for own, levels in zip(plan.problem.blocks.values(), plan.levels.values(), strict=True)
        for at, level in enumerate(levels)
    )
    return plan.predicted.moved_bytes, recomputed


def test_where_the_link_comes_to_carry_half_the_plan_is_that_of_a_link_that_always_did(
    new_run: Callable[[float], Run],
) -> None:
    always = new_run(RATE / 2)
    always.steps(SETTLED)
    run = new_run(RATE)
    run.steps(SETTLED)
    assert len(run.plans) == 3  # of one shape
    assert run.handle.explain().is_final
    run.device.set_rate(RATE / 2)
    run.steps(AFTER)
    *_, fast, slow = run.plans
    assert len(run.plans) == 4
    assert slow.problem.rates.d2h_bytes_per_s == pytest.approx(RATE / 2)
    assert slow.problem.rates.h2d_bytes_per_s == pytest.approx(RATE / 2)
    settled = always.plans[-1]  # what it keeps may differ where that costs nothing
    assert moved_and_recomputed(slow)[1] == moved_and_recomputed(settled)[1]
    assert slow.predicted_step_s - slow.plain_s == pytest.approx(settled.predicted_step_s - settled.plain_s)
    assert moved_and_recomputed(slow)[0] < moved_and_recomputed(fast)[0]


def test_the_first_plans_are_corrected_by_what_the_link_was_seen_to_carry(
    new_run: Callable[[float], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where each rank of a host has measured the link alone."""
    run = new_run(RATE / 2)
    run.manager.engine.rates = Rates(d2h_bytes_per_s=RATE, h2d_bytes_per_s=RATE)
    run.steps(SETTLED)
    assert [round(plan.problem.rates.d2h_bytes_per_s / RATE, 3) for plan in run.plans] == [1.0, 0.5, 0.5]


def test_another_clock_of_the_device_is_planned_for_once(new_run: Callable[[float], Run]) -> None:
    run = new_run(RATE / 2)
    run.steps(SETTLED)
    run.device.block_s *= 1.5
    run.steps(AFTER + 2)
    assert len(run.plans) == 4
    assert moved_and_recomputed(run.plans[3])[0] > moved_and_recomputed(run.plans[2])[0]


def test_a_plan_whose_steps_are_slower_than_those_before_it_is_given_up_until_other_steps_come(
    new_run: Callable[[float], Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(RATE / 2)
    run.planned_factor = 3.0
    run.steps(SETTLED + 6)
    explained = run.handle.explain()
    assert explained.plan is None
    assert explained.is_final
    assert "a step under the plan took longer than one that recomputes every block" in str(explained)
    (said,) = [record.getMessage() for record in caplog.records if "under the plan" in record.message]
    took_ms, recomputed_ms = (float(word) for word in said.split() if word.replace(".", "").isdigit())
    assert took_ms > 1.05 * recomputed_ms
    assert len(run.plans) == 3
    assert run.handle._auto is not None
    assert not run.handle._auto.memory.is_measured
    run.microbatches += 1
    run.planned_factor = 1.0
    run.steps(SETTLED + 6)
    assert run.handle.explain().plan is not None


def test_rates_and_seconds_that_tremble_a_little_change_no_plan(
    new_run: Callable[[float], Run],
) -> None:
    run = new_run(RATE)
    run.steps(SETTLED)
    for step in range(AFTER + 2):
        sign = (1, -1, -1, 1, 1)[step % 5]
        run.device.set_rate(RATE * (1 + 0.05 * sign))
        run.device.block_s = FORWARD_S * (1 + 0.02 * sign)
        run.steps(1)
    assert len(run.plans) == 3
