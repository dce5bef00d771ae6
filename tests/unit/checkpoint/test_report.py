"""What is said of selective checkpoints, and how often."""

from __future__ import annotations

import logging

import pytest

from offload.checkpoint.net import KeepReport


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    found = [(record.levelno, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return found


def test_what_is_asked_for_in_several_checkpoints_is_one_thing(caplog: pytest.LogCaptureFixture) -> None:
    report = KeepReport()
    for matched in ([], ["mm"], []):
        report.region("key", ["bmm", "mm"], matched, ["exp"])
    with caplog.at_level(logging.INFO):
        report.step_ended()
    assert messages(caplog) == [(logging.INFO, "selective_contexts() keeps mm; not called: bmm")]


def test_nothing_is_said_before_a_checkpoint_has_run_and_once_after(caplog: pytest.LogCaptureFixture) -> None:
    report = KeepReport()
    report.step_ended()
    assert messages(caplog) == []
    report.region("key", ["mm"], [], ["exp", "sin", "exp"])
    report.region("key", ["mm"], [], ["exp"])
    for _ in range(2):
        report.step_ended()
    ((level, message),) = messages(caplog)
    assert level == logging.WARNING
    assert message.startswith(
        "selective_contexts() kept nothing: 2 checkpointed forwards called none of mm, so they are "
        "recomputed whole."
    )
    assert "They called exp, sin (" in message


def test_all_that_was_asked_for_is_called_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    report = KeepReport()
    report.region("key", ["mm"], ["mm"], [])
    with caplog.at_level(logging.INFO):
        report.step_ended()
    assert messages(caplog) == []


def test_a_long_list_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    report = KeepReport()
    report.region("key", ["mm"], [], [f"op{number}" for number in range(20)])
    report.step_ended()
    ((_, message),) = messages(caplog)
    assert "op11 and 8 more (" in message
    assert "op12" not in message
