"""What mode "auto" and mode "selective" said of themselves and was of no use to whoever read it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import PipelineOffloadManager
from tests.ticks import counted_time


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    PipelineOffloadManager.close_instance()
    with counted_time():
        yield
    PipelineOffloadManager.close_instance()


def said_in_steps(
    model: nn.Module, x: Tensor, caplog: pytest.LogCaptureFixture, *, steps: int = 8, **options: object
) -> tuple[str, str]:
    """All warnings, and what explain() says in mode "auto"."""
    caplog.set_level(logging.WARNING)
    with offload.activations(model, **options) as handle:  # type: ignore[arg-type]
        for _ in range(steps):
            model(x).square().mean().backward()
            torch.optim.SGD(model.parameters(), 0.01).step()
            model.zero_grad()
        return "\n".join(caplog.messages), str(handle.explain()) if options["mode"] == "auto" else ""


class Routed(nn.Module):
    """Picks rows, so a recompute must keep which: a tensor below min_numel."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.router, self.b = nn.Linear(64, 64), nn.Linear(64, 4), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        weight, chosen = self.router(hidden).softmax(-1).topk(1)
        return x + weight * self.b(hidden.tanh()).index_select(0, chosen.squeeze(-1))


def test_a_group_that_no_user_named_is_not_blamed_for_moving_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It said: group 'kept' moved nothing. Lower the threshold, or take its marks out."""
    model = nn.Sequential(*[Routed() for _ in range(4)])
    said, _ = said_in_steps(
        model, torch.randn(64, 64), caplog, mode="auto", min_numel=1000, device_total="200000B"
    )
    assert "moved nothing" not in said


def test_of_tensors_below_min_numel_explain_says_that_they_were_not_considered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It said: nothing was to choose, though more was saved than the total."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
    _, explained = said_in_steps(model, torch.randn(64, 64), caplog, mode="auto", device_total="60000B")
    assert "each is smaller than min_numel" in explained
    assert "no recompute was considered, whatever they take of the total" in explained


def test_selective_on_a_convolution_names_no_operators_that_the_mode_cannot_be_given(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It said: ask for some of those, of a mode that takes none."""
    model = nn.Sequential(*[nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(3)])
    said, _ = said_in_steps(model, torch.randn(2, 4, 8, 8), caplog, steps=2, mode="selective", min_numel=1)
    assert "of mode='selective' the operators are fixed, and mode='auto' keeps what pays" in said
