"""The summary of a sanitizer's log: reports as torch itself words them, each with its operations, the
engine's frames and its test."""

from __future__ import annotations

import pytest
from torch.cuda._sanitizer import CUDASanitizerErrors

from scripts.sanitize import reports_in, summary_of
from tests.property.sanitized import SanitizedDevice
from tests.property.test_sanitizer import run_once

PLAIN = "tests/gpu/test_exact.py::test_gradients[one stream-tiny] "
TWIN = "tests/gpu/test_races.py::test_without_its_edge_the_same_race_gives_wrong_bytes[read] "


def report_without(order: str, patch: pytest.MonkeyPatch) -> str:
    """What torch prints where this edge of the engine is left out."""
    with pytest.raises(CUDASanitizerErrors) as raised:
        run_once(SanitizedDevice(without={order}, check=False), patch)
    return "\n".join(str(error) for error in raised.value.errors)


def test_a_report_is_told_by_its_operations_the_engine_s_frames_and_its_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = f"{PLAIN}{report_without('spill', monkeypatch)}\nFAILED\n{TWIN}PASSED\n"
    (report,) = reports_in(log.splitlines())
    assert report.test == PLAIN.strip()
    assert report.now.operator == "aten::copy_"
    assert report.now.kind.startswith("reading from")
    assert report.before.operator == "aten::mul.Tensor"
    assert report.before.kind.startswith("writing to")
    assert "offload/transfer/engine.py:spill" in report.now.frames
    assert report.before.frames[0] == "tests/property/test_sanitizer.py:run_once"
    assert report.of_engine
    assert not report.on_purpose
    lines = summary_of([report, report])
    assert lines[0] == "2 x TOUCHES THE ENGINE"
    assert "offload/transfer/copier.py:copy < offload/transfer/engine.py:spill" in lines[1]
    assert lines[-1].startswith("torch's sanitizer: 2 reports, 2 of them touch the engine")


def test_a_report_of_a_test_that_leaves_an_edge_out_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    log = f"{PLAIN}PASSED\n{TWIN}{report_without('read', monkeypatch)}\n"
    (report,) = reports_in(log.splitlines())
    assert report.on_purpose
    assert report.test == TWIN.strip()
    assert summary_of([report])[0] == "1 x edge left out on purpose"
    assert (
        summary_of([report])[-1]
        == "torch's sanitizer: 1 reports, 0 of them touch the engine and have no explanation"
    )


def test_a_report_is_explained_by_both_of_its_operations_and_not_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A view that an operator does not declare is harmless over a spill's source; beside anything else it
    would be a finding."""
    (found,) = reports_in(f"{PLAIN}{report_without('spill', monkeypatch)}".splitlines())
    view = found.now._replace(operator="aten::_unsafe_view")
    assert found.alarming
    assert found._replace(now=view).alarming, "the earlier access is no spill"
    assert found._replace(before=found.now).alarming, "nor is every access after a spill a view"
    explained = found._replace(now=view, before=found.now)
    assert explained.explanation is not None
    assert not explained.alarming
    assert explained.of_engine
    assert summary_of([explained, found, explained])[0].startswith("2 x explained: the operator gives a view")
    assert (
        summary_of([explained, found])[-1]
        == "torch's sanitizer: 2 reports, 1 of them touch the engine and have no explanation"
    )


def test_a_clean_log_has_no_reports() -> None:
    assert list(reports_in(f"{PLAIN}PASSED\n3 passed in 1.00s\n".splitlines())) == []
    assert summary_of([]) == [
        "torch's sanitizer: 0 reports, 0 of them touch the engine and have no explanation"
    ]
