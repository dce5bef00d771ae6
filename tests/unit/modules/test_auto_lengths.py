"""Mode "auto" where each step has other lengths and another number of microbatches: one plan for the typical
step, followed by position."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import PipelineOffloadManager
from offload.auto import plan as auto_plan
from offload.groups import timed
from offload.groups.seen import StepClock
from offload.policy.actions import Rates
from offload.policy.menu import Block
from offload.policy.mixture import MixedPlan, choose_mixture
from tests.unit.modules.training import WIDTH, build, equal, seeded

SLOW_LINK = Rates(d2h_bytes_per_s=1e3, h2d_bytes_per_s=1e3)
LAYERS, STEPS = 4, 16


def steps(seed: int = 3, fewest: int = 8, most: int = 24) -> list[list[int]]:
    """The rows of each microbatch of each step."""
    draws = random.Random(seed)
    return [[draws.randrange(fewest, most + 1, 2) for _ in range(draws.randint(1, 3))] for _ in range(STEPS)]


def train_varied(model: nn.Module, rows_of_steps: list[list[int]]) -> Iterator[list[Tensor]]:
    """The gradients of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, rows in enumerate(rows_of_steps):
        outputs = []
        with seeded(step):
            for count in rows:
                outputs.append(model(torch.randn(count, WIDTH)).square().mean())
            for output in reversed(outputs):
                output.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        yield gradients


def test_gradients_are_bitwise_equal_and_the_total_holds_whatever_the_lengths(
    manager: PipelineOffloadManager,
) -> None:
    manager.engine.rates = SLOW_LINK
    plain = list(train_varied(build(blocks=LAYERS), steps()))
    model, total = build(blocks=LAYERS), 60_000
    peaks: list[int] = []
    with offload.activations(model, "auto", min_numel=1, device_total=f"{total}B") as handle:
        for seen, expected in zip(train_varied(model, steps()), plain, strict=True):
            assert equal(seen, expected)
            peaks.append(manager.stats.device_bytes_peak)
        explained = handle.explain()
    assert max(peaks[3:]) <= total
    assert max(peaks[3:]) > min(peaks[:2])  # it keeps more than the steps that recompute everything
    assert explained.plan is not None
    assert sum(share.recomputed_bytes for share in explained.shares) > 0


class _Times(dict[Any, float]):
    """Every action takes a millisecond."""

    def __contains__(self, action: object) -> bool:
        return True

    def __missing__(self, action: object) -> float:
        return 1e-3

    def get(self, action: object, default: Any = None) -> Any:
        return 1e-3


@pytest.mark.parametrize(
    "options", [{"mode": "auto", "device_total": "60000B"}, {"mode": "groups", "device_limit": "60000B"}]
)
def test_with_times_known_groups_follow_one_plan_whatever_the_lengths(
    options: dict[str, Any], manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.engine.rates = Rates(d2h_bytes_per_s=4e7, h2d_bytes_per_s=4e7)
    monkeypatch.setattr(StepClock, "end_step", lambda self: _Times())
    planned: list[int] = []
    search = timed.timed_plan

    def noted(units: Any, *rest: Any) -> Any:
        planned.append(len(units))
        return search(units, *rest)

    monkeypatch.setattr(timed, "timed_plan", noted)
    plain = list(train_varied(build(blocks=LAYERS), steps()))
    model, limit = build(blocks=LAYERS), 60_000
    with offload.activations(model, min_numel=1, **options):
        for number, seen in enumerate(train_varied(model, steps())):
            assert equal(seen, plain[number])
            assert number < 3 or manager.stats.device_bytes_peak <= limit
    assert 1 <= len(planned) <= 7
    assert max(planned) >= 2  # microbatches


def test_plans_are_for_the_typical_step_of_the_last_eight_and_few(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.engine.rates = SLOW_LINK
    planned: list[tuple[int, dict[tuple[int, int], int]]] = []
    ended: list[int] = []

    def noted(
        actions: Any, blocks: dict[tuple[int, int], list[Block]], *rest: Any, **named: Any
    ) -> MixedPlan:
        inputs = {chunk: own[0].menu[-1].saved_bytes for chunk, own in blocks.items()}
        planned.append((len(ended) + 1, inputs))
        return choose_mixture(actions, blocks, *rest, **named)

    monkeypatch.setattr(auto_plan, "choose_mixture", noted)
    model, rows = build(blocks=LAYERS), steps()
    with offload.activations(model, "auto", min_numel=1, device_total="60000B"):
        for step, _ in enumerate(train_varied(model, rows)):
            ended.append(step)
    assert 2 <= len(planned) <= 4  # from what was measured under the one before, and for more microbatches
    for step, inputs in planned:
        lengths = [length for own in rows[max(0, step - 8) : step] for length in own]
        typical = statistics.mean(lengths) + statistics.pstdev(lengths)
        for nbytes in inputs.values():
            assert nbytes == pytest.approx(typical * WIDTH * 4, abs=1)
    assert len(planned[-1][1]) == 3  # the most microbatches, though many steps have fewer


def test_a_shape_that_stays_is_planned_exactly(manager: PipelineOffloadManager) -> None:
    """Rows vary at first, then every step is the same: its plan has that step's bytes."""
    manager.engine.rates = SLOW_LINK
    model = build(blocks=LAYERS)
    rows = [*steps()[:6], *[[10, 14]] * 14]
    with offload.activations(model, "auto", min_numel=1, device_total="60000B") as handle:
        for _ in train_varied(model, rows):
            pass
        plan = handle.explain().plan
    assert plan is not None
    inputs = {chunk: own[0].menu[-1].saved_bytes for chunk, own in plan.problem.blocks.items()}
    assert sorted(inputs.values()) == [10 * WIDTH * 4, 14 * WIDTH * 4]
