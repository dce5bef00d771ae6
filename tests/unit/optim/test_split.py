"""What a measured share is computed from: the bytes of the parameters that there are. The measurement itself
needs a GPU (tests/gpu)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadEngine
from offload.device.sim import SimDevice
from offload.errors import HostBudgetError
from offload.optim import split
from offload.optim.parameters import Managed
from offload.optim.places import OffloadRates

MANY = split.LEAST_NUMEL // 2
RATES = OffloadRates(
    cpu_elements_per_s=3.3e9,
    d2h_bytes_per_s=40e9,
    h2d_bytes_per_s=40e9,
    d2h_alone_bytes_per_s=50e9,
    h2d_alone_bytes_per_s=50e9,
)


def of(*dtypes: torch.dtype, numel: int = MANY) -> list[Managed]:
    device = SimDevice()
    return [
        Managed(nn.Parameter(torch.zeros(numel, dtype=dtype)), index, device, "")
        for index, dtype in enumerate(dtypes)
    ]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The bytes that a share was computed from, call by call."""
    calls: list[dict[str, Any]] = []
    best = split.best_cpu_share

    def watched(rates: OffloadRates, **sizes: float) -> tuple[float, float]:
        calls.append(sizes)
        return best(rates, **sizes)

    monkeypatch.setattr(split, "best_cpu_share", watched)
    monkeypatch.setattr(split, "measure", lambda *_, **__: RATES)
    return calls


ENGINE: Any = SimpleNamespace(device=SimpleNamespace(pins=True))


@pytest.mark.parametrize(
    ("dtypes", "masters", "on_cpu", "streamed"),
    [
        ((torch.float32, torch.float32), False, 4, 8),
        ((torch.float32, torch.float32), True, 4, 8),
        ((torch.bfloat16, torch.bfloat16), False, 2, 4),
        ((torch.bfloat16, torch.bfloat16), True, 2, 12),
        ((torch.bfloat16, torch.float32), True, 3, 10),  # 12 of one half, 8 of the other
        ((torch.bfloat16, torch.float32), False, 3, 6),
        ((torch.float64, torch.float16), True, 5, 14),
    ],
)
def test_bytes_are_those_of_the_parameters_whatever_their_types(
    asked: list[dict[str, Any]], dtypes: tuple[torch.dtype, ...], masters: bool, on_cpu: int, streamed: int
) -> None:
    split.measured_cpu_share(ENGINE, of(*dtypes), masters=masters, threads=None)
    (sizes,) = asked
    assert (sizes["cpu_out_bytes"], sizes["cpu_in_bytes"]) == (on_cpu, on_cpu)
    assert (sizes["streamed_out_bytes"], sizes["streamed_in_bytes"]) == (streamed, streamed)


def test_a_share_is_a_multiple_of_the_grid(asked: list[dict[str, Any]]) -> None:
    share = split.measured_cpu_share(ENGINE, of(torch.bfloat16, torch.bfloat16), masters=True, threads=None)
    assert 0 < share < 1
    assert share == round(round(share / split.GRID) * split.GRID, 2)


def test_a_small_model_is_not_measured(asked: list[dict[str, Any]]) -> None:
    assert split.measured_cpu_share(ENGINE, of(torch.float32, numel=1024), masters=False, threads=None) == 1.0
    assert asked == []


def test_nothing_is_measured_where_no_time_passes(asked: list[dict[str, Any]]) -> None:
    engine = OffloadEngine(device=SimDevice())
    assert (
        split.measured_cpu_share(engine, of(torch.float32, torch.float32), masters=False, threads=None)
        == split.UNMEASURED_SHARE
    )
    assert asked == []


def test_without_memory_for_a_measurement_the_cpu_steps_nothing_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: Any, **__: Any) -> OffloadRates:
        raise HostBudgetError("no")

    monkeypatch.setattr(split, "measure", refuses)
    assert (
        split.measured_cpu_share(ENGINE, of(torch.float32, torch.float32), masters=False, threads=None) == 0.0
    )
    assert "give cpu_share" in caplog.text
