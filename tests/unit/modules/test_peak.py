"""Where device memory is highest: seen in the first steps after `apply`, said by the report."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import PipelineOffloadManager
from offload.modules import memory
from tests.unit.modules.training import ROWS, WIDTH, Model, build, equal, train


@pytest.fixture
def rises(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A device whose peak rises when it is told to."""
    highest = [1000]
    monkeypatch.setattr(memory, "device_peak_bytes", lambda: highest[0])

    def by(nbytes: int) -> None:
        highest[0] += nbytes

    return by


class Wide(nn.Module):
    """A model whose head saves more than its blocks."""

    def __init__(self, on_head: Callable[[], None]) -> None:
        super().__init__()
        self.model = build()
        self.head = nn.Linear(5, 100)
        self.on_head = on_head

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.model(x))
        self.on_head()
        return torch.tanh(logits)


@pytest.mark.parametrize("mode", ["groups", "hidden_states"])
def test_the_report_names_the_phase_of_the_peak_and_what_is_largest_there(
    mode: str, rises: Callable[[int], None]
) -> None:
    model = Wide(lambda: rises(5000))
    handle = offload.apply(model, mode, min_numel=1)
    train(model, steps=3)
    told = handle.report()
    assert told.peak.startswith("Device memory is highest, ")
    assert "active, in the head and the loss, after the last block; the largest tensor saved" in told.peak
    assert told.peak.endswith(f"outside of the blocks is float32[{ROWS}, 100], {ROWS * 100 * 4 / 1e3:.2f} kB")
    assert told.peak in str(told)
    assert told.as_dict()["peak"] == told.peak


def test_a_peak_in_the_backward_or_the_blocks_is_named_as_such(rises: Callable[[int], None]) -> None:
    model = build()
    handle = offload.apply(model, min_numel=1)
    model.layers[1].fc2.register_forward_hook(lambda *_: rises(100))
    train(model, steps=1)
    assert "active, in the forward, up to the last block; " in handle.report().peak
    model.layers[0].fc1.register_full_backward_hook(lambda *_: rises(100))
    train(model, steps=1)
    assert handle.report().peak.endswith("active, in the backward of the blocks")


def test_a_peak_before_apply_hides_it_and_the_watch_ends(rises: Callable[[int], None]) -> None:
    model = build()
    handle = offload.apply(model, min_numel=1)
    train(model, steps=4)
    assert handle.report().peak == ""
    model.layers[0].register_forward_hook(lambda *_: rises(100))
    train(model, steps=1)
    assert handle.report().peak == ""


def test_without_an_optimizer_of_torch_the_watch_ends_with_the_steps_that_are_ended_by_hand(
    rises: Callable[[int], None], manager: PipelineOffloadManager
) -> None:
    """While it watched, and it did for ever, kept blocks of W5 on an H200 took the host 1.4 ms each, as each
    of their saves was looked at."""
    model = build()
    offload.apply(model, min_numel=1)
    stacked: list[int] = []
    model.embed.register_forward_hook(lambda *_: stacked.append(len(manager.engine.hooks._here.stack)))
    for _ in range(5):
        model(torch.randn(ROWS, WIDTH)).sum().backward()
        manager.step_end()
    assert stacked == [1, 1, 1, 0, 0]


def test_the_watch_changes_no_bit(rises: Callable[[int], None]) -> None:
    plain, model = Wide(int), Wide(int)
    offload.apply(model, "hidden_states", min_numel=1)
    assert equal(train(model), train(plain))
    assert isinstance(model.model, Model)
    assert model(torch.ones(ROWS, WIDTH)).shape == (ROWS, 100)
