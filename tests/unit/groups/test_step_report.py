"""What a steady step's figures say of its limits, once: one that was passed, and copies that save nothing."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from offload import PipelineOffloadManager
from offload.config import OffloadConfig
from offload.groups.reports import MANY_SHAPES, StepReport
from offload.telemetry.records import StepStats
from offload.transfer.limits import Limits
from tests.unit.groups.stack import ROWS, WIDTH, Driver, build_manager, build_stages, gpipe, installed, lifo

MIB = 1 << 20
FC1 = ROWS * WIDTH * 4


def report(stats: StepStats, limit: int | None, live_peak_bytes: int = 0) -> None:
    StepReport().look(stats, Limits(OffloadConfig(device_limit_bytes=limit)), live_peak_bytes)


def test_a_limit_that_is_passed_is_said_with_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    report(StepStats(step=3, device_bytes_peak=2000), 1000)
    (message,) = caplog.messages
    assert message.startswith(
        "saved tensors took up to 2.00 kB of the device at once in step 3, 1.00 kB more than "
        "device_limit (device_limit_bytes in OffloadConfig), 1.00 kB: what is being saved or read must fit"
    )


def test_what_mode_auto_sets_itself_is_not_called_a_users_limit(caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(OffloadConfig(device_limit_bytes=1000))
    limits.again_room_bytes = 0
    stats = StepStats(step=3, device_bytes_peak=2000, spill_bytes=10)
    StepReport().look(stats, limits, 2000)
    limits.device_limit_bytes = None
    StepReport().look(stats, limits, 2000)  # it leaves no choice, and says so itself
    (message,) = caplog.messages
    assert (
        "2.00 kB of the device at once in step 3, 1.00 kB more than mode='auto' had planned for, 1.00 kB: "
        in message
    )
    assert message.endswith("Where device_total is passed, give a larger one")


def test_a_limit_that_is_passed_for_want_of_host_memory_is_not_said_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """There were two warnings with two amounts, and one named reserve_host, which `offload` does not have."""
    passed = StepStats(
        step=3, device_bytes_peak=2000, refused=1, refused_bytes=900, host_bytes_wanted_peak=5000
    )
    report(passed, 1000)
    assert caplog.messages == []
    # denied by admission: the host had memory
    report(replace(passed, host_bytes_wanted_peak=0), 1000)
    assert "1.00 kB more than device_limit" in caplog.text


def after_plans(plans: int, reserved: int, active: int) -> None:
    found = StepReport()
    for step in range(3 * plans):
        found.step(replanned=step % 3 == 0, allocator=lambda: (reserved, active))


def test_a_cache_that_steps_of_many_shapes_have_filled_is_said_once_with_the_way_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    after_plans(9, 100_000, 40_000)
    assert caplog.messages == [
        "torch's allocator holds 100.00 kB of the device, 2.50 times the 40.00 kB that were ever in use at "
        "once: 4 of 10 steps had a new shape, and cached blocks of one size do not serve another. Set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before torch is imported"
    ]


def test_a_cache_is_nothing_to_say_at_125_percent_or_with_few_shapes_or_segments_that_expand(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    after_plans(16, 125, 100)
    after_plans(3, 1000, 100)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    after_plans(16, 1000, 100)
    assert caplog.messages == []


def test_steps_of_many_shapes_are_told_of_a_limit_that_they_pass(caplog: pytest.LogCaptureFixture) -> None:
    """No step of theirs follows a plan of its own, so none was looked at."""
    with installed(build_manager(device_limit_bytes=FC1 - 1)), caplog.at_level(logging.WARNING):
        driver = Driver(build_stages(1, 2, ("fc1",)))
        for microbatches in range(1, MANY_SHAPES + 2):
            driver.step(gpipe(microbatches))
    (message,) = [text for text in caplog.messages if "device_limit_bytes" in text]
    assert f"1 B more than device_limit (device_limit_bytes in OffloadConfig), {FC1 - 1} B: " in message


def test_a_limit_that_holds_is_nothing_to_say(caplog: pytest.LogCaptureFixture) -> None:
    report(StepStats(step=3, device_bytes_peak=1000, spill_bytes=10), 1000, live_peak_bytes=1000)
    assert caplog.messages == []


def test_a_small_model_that_moves_everything_and_saves_nothing_is_told_once(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(build_stages(1, 2, ("fc1",)))
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            driver.step(gpipe(3))
    (message,) = [text for text in caplog.messages if "as if none had left" in text]
    assert "Set device_limit (device_limit_bytes in OffloadConfig) to" in message


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
