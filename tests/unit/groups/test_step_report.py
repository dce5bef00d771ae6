"""What a steady step's figures say of its limits, once: one that was passed, and copies that save nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from offload import PipelineOffloadManager
from offload.config import OffloadConfig
from offload.groups.reports import StepReport
from offload.telemetry.records import StepStats
from offload.transfer.admission import Limits
from tests.unit.groups.stack import ROWS, WIDTH, Driver, build_manager, build_stages, gpipe, installed, lifo

MIB = 1 << 20
FC1 = ROWS * WIDTH * 4


def report(stats: StepStats, limit: int | None, live_peak_bytes: int = 0) -> None:
    StepReport().look(stats, Limits(OffloadConfig(device_limit_bytes=limit)), live_peak_bytes)


def test_a_limit_that_is_passed_is_said_with_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    report(StepStats(step=3, device_bytes_peak=2000), 1000)
    (message,) = caplog.messages
    assert message.startswith(
        "saved tensors took up to 2,000 bytes of the device at once in step 3, and device_limit_bytes is "
        "1,000: what is being saved or read must fit"
    )


def test_a_limit_that_is_passed_for_want_of_host_memory_says_how_much_to_reserve(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stats = StepStats(
        step=3, device_bytes_peak=2000, refused=1, refused_bytes=900, host_bytes_wanted_peak=5000
    )
    report(stats, 1000)
    assert "900 bytes found no host memory; call reserve_host(5,000) before the first step" in caplog.text


def test_a_limit_that_holds_is_nothing_to_say(caplog: pytest.LogCaptureFixture) -> None:
    report(StepStats(step=3, device_bytes_peak=1000, spill_bytes=10), 1000, live_peak_bytes=1000)
    assert caplog.messages == []


@pytest.fixture
def manager() -> Iterator[PipelineOffloadManager]:
    with installed(build_manager()) as manager:
        assert manager is not None
        yield manager


def test_a_small_model_that_moves_everything_and_saves_nothing_is_told_once(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(build_stages(1, 2, ("fc1",)))
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            driver.step(gpipe(3))
    (message,) = [text for text in caplog.messages if "as if none had left" in text]
    assert "Set device_limit_bytes" in message


@pytest.mark.parametrize("schedule", [gpipe, lifo])
def test_the_table_is_of_a_whole_steady_step_and_adds_up_to_what_the_next_one_moves(
    manager: PipelineOffloadManager, schedule: object
) -> None:
    driver = Driver(build_stages(1, 2, ("fc1", "act")))
    assert callable(schedule)
    driver.step(schedule(3))
    table = manager.step_offload_bytes
    assert set(table) == {"fc1", "act"}
    driver.step(schedule(3))
    assert sum(table.values()) == manager.stats.spill_bytes
    of_one_chunk = sum(manager.offload_summary_bytes.values())
    assert of_one_chunk < manager.stats.spill_bytes or schedule is lifo
