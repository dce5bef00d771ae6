"""What is measured of a step on the simulated clock, what is planned of it, and what is said."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import OffloadEngine, PipelineOffloadManager
from offload.device.sim import SimDevice
from offload.policy.streamed import best_plans
from tests.inside import streaming_of, streams_from
from tests.nets import Computes
from tests.unit.groups.stack import installed

WIDTH, BLOCKS, ROWS = 64, 8, 4
BLOCK_BYTES = WIDTH * WIDTH * 4
LINK_GB_S = 1.0
COPY_S = BLOCK_BYTES / (LINK_GB_S * 1e9)


class Block(nn.Module):
    def __init__(self, device: SimDevice, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH, requires_grad=False)
        self.device, self.seconds = device, seconds

    def forward(self, x: Tensor) -> Tensor:
        return x + Computes.apply(x @ self.weight, self.device, self.seconds)


def steps(
    device: SimDevice, seconds: float, weights: str, number: int = 8, microbatches: int = 1
) -> tuple[offload.Applied, list[float]]:
    """The handle, and how long each step takes."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Sequential(*(Block(device, seconds) for _ in range(BLOCKS)))
    )
    handle = offload.apply(model, weights=weights, blocks="1.*")
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    times = []
    for _ in range(number):
        begun = device.compute.time_s
        for _ in range(microbatches):
            model(torch.randn(ROWS, WIDTH)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(device.compute.time_s - begun)
    return handle, times


def simulated() -> tuple[SimDevice, Any]:
    device = SimDevice(executor="clock", h2d_gb_s=LINK_GB_S, d2h_gb_s=LINK_GB_S)
    return device, installed(PipelineOffloadManager(OffloadEngine(device=device)))


def test_what_a_block_computes_and_what_the_link_does_are_what_the_clock_says() -> None:
    device, manager = simulated()
    with manager, streams_from(WIDTH * WIDTH):
        handle, _ = steps(device, 2 * COPY_S, "host")
        assert handle.weights is not None
        compute_s = 3 * 2 * COPY_S * BLOCKS
        assert handle.weights.compute_ms == pytest.approx(compute_s * 1e3, rel=0.15)
        handle.remove()


@pytest.mark.parametrize("ratio", [0.4, 2.0])
def test_a_settled_step_takes_what_the_law_says(ratio: float) -> None:
    """Of each pass what is longer, its compute or its copies; and no more."""
    device, manager = simulated()
    with manager, streams_from(WIDTH * WIDTH):
        handle, times = steps(device, ratio * COPY_S, "host", number=10)
        forward, copies = ratio * COPY_S * BLOCKS, COPY_S * BLOCKS
        law = max(forward, copies) + max(2 * forward, copies)
        assert times[-1] <= 1.02 * law
        handle.remove()


def test_more_bytes_make_a_step_shorter_that_the_link_holds_up_and_explain_says_so() -> None:
    found = {}
    for weights in ("host", f"{5 * BLOCK_BYTES}B"):
        device, manager = simulated()
        with manager, streams_from(WIDTH * WIDTH):
            handle, times = steps(device, 0.4 * COPY_S, weights, number=12)
            assert handle.weights.misses == 0
            assert streaming_of(handle).residency.present_bytes_peak <= handle.weights.limit_bytes
            if weights == "host":
                assert handle.weights.next_gb_ms > 0  # type: ignore[operator]
                assert "1 GB more of weights= would take" in str(handle.explain())
            found[weights] = times[-1]
            handle.remove()
    assert found[f"{5 * BLOCK_BYTES}B"] < 0.8 * found["host"]


def test_a_long_step_is_planned_by_its_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes the square of the number of uses: of 3,000 tokens that 6 blocks generate, half an hour."""
    planned, gains = [], []

    def plan(uses: Any, *rest: Any) -> Any:
        planned.append(len(uses))
        return best_plans(uses, *rest)

    monkeypatch.setattr("offload.weights.stream.best_plans", plan)
    for microbatches in (1, 12):
        device, manager = simulated()
        with manager, streams_from(WIDTH * WIDTH):
            handle, _ = steps(device, 0.4 * COPY_S, f"{5 * BLOCK_BYTES}B", 4, microbatches)
            gains.append(handle.weights.next_gb_ms or 0.0)
            handle.remove()
    assert planned[0] == 2 * BLOCKS
    assert max(planned) == 8 * BLOCKS
    assert gains[0] > 0
    assert gains[1] == pytest.approx(12 * gains[0], rel=0.1)


def test_a_link_that_makes_a_step_a_fifth_longer_is_said_once_with_the_tokens_that_hide_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, manager = simulated()
    with manager, streams_from(WIDTH * WIDTH):
        monkeypatch.setattr("offload.weights.stream.WeightStream._may_say_link", lambda self: True)
        handle, _ = steps(device, 0.25 * COPY_S, "host", number=10)
        stream = streaming_of(handle)
        handle.remove()
    assert stream.removed
    said = [record.message for record in caplog.records if "the link makes a step" in record.message]
    assert len(said) == 1
    # a forward of 4 rows computes a quarter of what its copies take
    found = re.search(r"hide from about ([\d,]+) tokens a forward on; this one has ([\d,]+)", said[0])
    assert found is not None, said
    assert int(found[2]) == ROWS
    assert int(found[1]) == pytest.approx(4 * ROWS, rel=0.3)


def test_what_computes_longer_than_its_copies_is_not_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, manager = simulated()
    with manager, streams_from(WIDTH * WIDTH):
        monkeypatch.setattr("offload.weights.stream.WeightStream._may_say_link", lambda self: True)
        steps(device, 2 * COPY_S, "host", number=10)[0].remove()
    assert "the link makes a step" not in caplog.text
