"""HostShortage: one warning, with one amount and a call that there is, where saved tensors found no host
memory."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import offload
from offload.memory.loans import HostShortage
from offload.telemetry.records import StepStats
from tests.unit.groups.stack import build_manager, installed
from tests.unit.modules.training import build, train

LACKED = StepStats(
    step=0,
    refused=1,
    refused_bytes=900,
    host_bytes_held=4096,
    host_bytes_wanted_peak=5001,
    host_bytes_lent_peak=4100,
)


def ended(found: HostShortage, *steps: StepStats, refusal: str = "") -> None:
    for stats in steps:
        found.step_ended(stats, refusal)


def test_what_is_pinned_beside_the_steps_has_its_time_first(caplog: pytest.LogCaptureFixture) -> None:
    found = HostShortage()
    ended(found, LACKED, *(StepStats(step=step) for step in range(1, 3)))
    assert caplog.messages == []
    ended(found, *(StepStats(step=step) for step in range(3, 9)))
    assert caplog.messages == [
        "900 B of step 0 found no host memory and stayed on the device, beside any device_limit: of 8.20 kB "
        "that it needed there, 4.10 kB were pinned. More is pinned beside later steps; "
        "host_reserve='8.20 kB' of apply (host_reserve_bytes in OffloadConfig) has it before the first"
    ]


def test_host_memory_that_cannot_grow_is_said_at_once_and_once(caplog: pytest.LogCaptureFixture) -> None:
    ended(HostShortage(), *[LACKED] * 8, refusal="Raise host_limit")
    (said,) = caplog.messages
    assert said.endswith("4.10 kB were pinned. Raise host_limit")


def test_a_growth_that_was_refused_and_that_no_step_lacked_is_nothing_to_say(
    caplog: pytest.LogCaptureFixture,
) -> None:
    denied = StepStats(step=0, refused_bytes=900, host_bytes_wanted_peak=100, host_bytes_lent_peak=100)
    ended(HostShortage(), *[StepStats(step=0), denied] * 8, refusal="Raise host_limit")
    assert caplog.messages == []


@pytest.mark.parametrize("mode", ["groups", True, "watermark"])
def test_a_model_whose_host_limit_is_too_small_is_told_once(
    mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Two warnings had two amounts, and what one told to call is no function of `offload`. What this one
    names is taken, and is enough."""
    caplog.set_level(logging.WARNING)
    marks = {"high": "3kB"} if mode == "watermark" else {}

    def warned(limit: str) -> list[str]:
        caplog.clear()
        with installed(build_manager(piece_bytes=1)):
            model = build()
            offload.apply(model, mode, min_numel=1, host_limit=limit, **marks)
            train(model, steps=4)
        assert "reserve_host" not in caplog.text
        return [text for text in caplog.messages if "found no host memory" in text]

    (said,) = warned("4096B")
    assert "Raise host_limit (host_limit_bytes in OffloadConfig) to that: it is 4.10 kB" in said
    assert warned(said.split("device_limit: of ")[1].split(" that")[0]) == []
