"""The measurement of the link: how often it lines up with others, and what it does without host memory. The
rates are the GPU tests'."""

from __future__ import annotations

import pytest

from offload import OffloadConfig, OffloadEngine
from offload.device.sim import SimDevice
from offload.memory.arena import HostArena
from offload.memory.budget import LocalHostBudget
from offload.transfer import copier
from offload.transfer.copier import CapsAdmission, Copier
from offload.transfer.limits import Limits

KIB = 1024
LIMITS = Limits(OffloadConfig())


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "_COPY_BYTES", 64 * KIB)


def test_measuring_lines_up_before_each_of_its_three_parts_and_lends_nothing_afterwards() -> None:
    device = SimDevice()
    arena = HostArena(device, budget=LocalHostBudget(1 << 30))
    lent: list[int] = []
    copier.measure_rates(Copier(device, CapsAdmission(LIMITS)), arena, lambda: lent.append(arena.lent_bytes))
    assert lent == [128 * KIB] * 3
    assert arena.lent_bytes == 0


def test_a_rank_without_host_memory_lines_up_as_often_as_the_others() -> None:
    device = SimDevice()
    arena = HostArena(device, budget=LocalHostBudget(0))
    times: list[int] = []
    assert copier.measure_rates(Copier(device, CapsAdmission(LIMITS)), arena, lambda: times.append(1)) is None
    assert len(times) == 3


def test_copies_that_take_no_time_give_no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimDevice()
    arena = HostArena(device, budget=LocalHostBudget(1 << 30))
    monkeypatch.setattr(copier, "_seconds", lambda *_: 0.0)
    assert copier.measure_rates(Copier(device, CapsAdmission(LIMITS)), arena, lambda: None) is None
    assert arena.lent_bytes == 0


def test_the_simulated_device_has_no_link_to_measure() -> None:
    engine = OffloadEngine(OffloadConfig(), device="sim")
    engine.reserve_host(1 << 20)
    assert not engine.can_measure_link
    assert engine.rates is None
    engine.close()
