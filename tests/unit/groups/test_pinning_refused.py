"""Host memory that cannot be pinned: what has no block stays on the device, is counted, is said once, and the
gradients are the same.

Real refusals of CUDA and of the system are in tests/gpu/test_pinning_refused.py and
tests/unit/device/test_cuda_memory.py.
"""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import patch

import pytest

from offload import PipelineOffloadManager
from offload.device.sim import SimDevice
from offload.errors import HostBudgetError
from tests.soak import small_slabs
from tests.unit.groups.stack import (
    Action,
    Driver,
    assert_same,
    baseline,
    build_manager,
    build_stages,
    installed,
    one_f_one_b,
)

PAGE = 4096
STEPS: list[list[Action]] = [one_f_one_b(4, 2)] * 6
NEEDED = 4 * PAGE
"""Bytes: less than these steps have lent at once where nothing is refused; a test asserts it."""

CAPS: dict[str, dict[str, Any]] = {
    "windows": {"max_spilling_bytes": 2048, "max_restoring_bytes": 2048},
    "device limit": {"device_limit_bytes": 2 * PAGE},
}


class StingyDevice(SimDevice):
    """A device whose system pins `pinnable_bytes` and refuses more. in_background: pinning takes time, so a
    thread of the arena does it."""

    def __init__(self, pinnable_bytes: int, *, in_background: bool) -> None:
        super().__init__()
        self.pinnable_bytes = pinnable_bytes
        self.refused = 0
        self._in_background = in_background

    @property
    def pins(self) -> bool:
        return self._in_background

    def host_memory(self, nbytes: int, registration_bytes: int) -> Any:
        if nbytes > self.pinnable_bytes:
            self.refused += 1
            raise HostBudgetError(f"cudaHostRegister refused {nbytes:,} bytes")
        self.pinnable_bytes -= nbytes
        return super().host_memory(nbytes, registration_bytes)


def run(manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture) -> None:
    """All steps: bitwise, every saved tensor either left or is counted, some of each, and one warning."""
    expected = baseline(build_stages(), STEPS)
    with installed(manager):
        driver = Driver(build_stages(), announced=True)
        found = []
        for actions in STEPS:
            found.append(driver.step(actions))
            manager.engine.arena.synchronize_growth()
            stats = manager.stats
            assert stats.saved == stats.kept + stats.spilled
            assert 0 < stats.refused <= stats.kept
            assert stats.refused_bytes > 0
            assert manager.engine.arena.held_bytes <= NEEDED
        assert stats.spilled > 0 or stats.host_bytes_held == 0
        assert_same(expected, found)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    (once,) = said
    assert "found no host memory and stayed on the device, beside any device_limit: of " in once
    assert "Raise host_limit (host_limit_bytes in OffloadConfig) to that: it is " in once or (
        "The system refuses more: " in once
    )


@pytest.mark.parametrize("caps", CAPS)
def test_where_nothing_is_refused_more_is_needed(caps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the tests below say nothing."""
    with small_slabs(monkeypatch, PAGE):
        manager = build_manager(**CAPS[caps])
    with installed(manager):
        driver = Driver(build_stages(), announced=True)
        for actions in STEPS:
            driver.step(actions)
            assert manager.stats.refused == 0
            assert manager.stats.host_bytes_lent_peak > NEEDED


@pytest.mark.parametrize("in_background", [False, True], ids=["inline", "in the background"])
@pytest.mark.parametrize("pages", [0, 2, 4])
@pytest.mark.parametrize("caps", CAPS)
def test_a_system_that_refuses_to_pin_costs_room_and_not_results(
    caps: str,
    pages: int,
    in_background: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = StingyDevice(pages * PAGE, in_background=in_background)
    with small_slabs(monkeypatch, PAGE):
        manager = build_manager(device=device, **CAPS[caps])
    run(manager, caplog)
    assert device.refused > 0


@pytest.mark.parametrize("in_background", [False, True], ids=["inline", "in the background"])
@pytest.mark.parametrize("pages", [0, 2, 4])
def test_a_low_host_limit_costs_room_and_not_results(
    pages: int, in_background: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_slabs(monkeypatch, PAGE):
        device = StingyDevice(1 << 40, in_background=in_background)
        manager = build_manager(device=device, host_limit_bytes=pages * PAGE, **CAPS["windows"])
    run(manager, caplog)
    assert device.refused == 0
    assert manager.engine.arena.budget.used_bytes == 0


def test_a_reservation_that_is_refused_is_an_error_and_training_goes_on_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = StingyDevice(4 * PAGE, in_background=False)
    with small_slabs(monkeypatch, PAGE):
        manager = build_manager(device=device, **CAPS["windows"])
    with installed(manager):
        with pytest.raises(HostBudgetError, match="refused"):
            manager.reserve_host(64 * PAGE)
        measures: list[bool] = []
        with patch.object(manager.engine, "reserve_host", lambda _, *, measure: measures.append(measure)):
            manager.reserve_host(PAGE)
            manager.reserve_host(PAGE, measure=False)
        assert measures == [True, False], "the link"
        assert manager.engine.arena.held_bytes == manager.engine.arena.budget.used_bytes <= 4 * PAGE
        driver = Driver(build_stages(), announced=True)
        found = [driver.step(actions) for actions in STEPS[:2]]
        assert manager.stats.spilled > 0
    assert_same(baseline(build_stages(), STEPS[:2]), found)
