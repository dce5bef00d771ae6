"""The page of a report: its figures are the report's, names of users stay text, what was not recorded is
said, and it stays small enough to be mailed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.report import Report, report
from offload.sizes import bytes_text
from offload.telemetry.figures import Figures, GroupFigures
from offload.telemetry.timeline import MemorySample, Span, Timeline, Trace
from tests.unit.groups.stack import Driver, build_manager, build_stages, gpipe, installed

HOSTILE = ("<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "$\\frac{$", "_x & 'y' \"z")
MOST_BYTES = 600_000


class Parsed(HTMLParser):
    """tags: how often each. text: what is to be read. tables: their rows, each a list of cells. data: (value,
    text) by id. scripts: what they hold, by type."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.handlers: list[str] = []
        self.text, self.scripts = "", {}
        self.tables: list[list[list[str]]] = []
        self.data: dict[str, tuple[str, str]] = {}
        self._in: list[tuple[str, dict[str, Any]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        found = dict(attrs)
        self.handlers += [name for name in found if name.startswith("on")]
        self._in.append((tag, found))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._in and self._in.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tag, attributes = self._in[-1] if self._in else ("", {})
        if tag == "script":
            self.scripts[attributes.get("type")] = data
            return
        if tag == "style":
            return
        self.text += data
        if tag in ("td", "th"):
            self.tables[-1][-1][-1] += data
        if tag == "data":
            self.data[attributes["id"]] = attributes["value"], data


def saved(found: Report, folder: Path, trace: Trace | None = None) -> Parsed:
    found.save(folder / "report.html", trace)
    page = (folder / "report.html").read_text("utf-8")
    assert len(page.encode()) <= MOST_BYTES
    parsed = Parsed(page)
    assert [*parsed.scripts] == ["application/json"], "the figures are data, and nothing runs"
    assert not parsed.handlers
    assert not {"img", "iframe", "object", "image", "use", "a"} & ({*parsed.tags} - {"use"})
    assert parsed.tags["link"] == 1, "the icon, which is empty"
    assert page.count("://") == page.count("http://www.w3.org/"), "names of SVG alone"
    return parsed


def trace_of(timeline: Timeline) -> Trace:
    trace = Trace()
    trace._timeline = timeline
    return trace


def timeline_of(spans: int, names: int, microbatches: int = 8) -> Timeline:
    """Forwards and copies in turn, each a microsecond before the next."""
    found = [
        Span(
            lane=("compute", "d2h", "h2d")[at % 3],
            kind=("forward", "spill", "restore")[at % 3],  # type: ignore[arg-type]
            name=f"layers.{at % names}",
            owner=f"s0m{at * microbatches // spans}/layers.{at % names}",
            start_ms=at * 1.1,
            end_ms=at * 1.1 + 1,
            nbytes=64 << 20,
        )
        for at in range(spans)
    ]
    memory = [
        MemorySample(
            ms=at * 1.1,
            saved_bytes=at * 1000,
            without_bytes=at * 2000,
            host_bytes=at * 500,
            weights_bytes=7_000_000,
            gradient_bytes=at * 10,
            other_bytes=at % 7 * 1_000_000,
            pinned_bytes=10**9,
        )
        for at in range(spans)
    ]
    return Timeline(spans=found, memory=memory, device_limit_bytes=10**9, simulated=False, began_ns=10**18)


def test_the_figures_of_a_run_with_a_trace_are_those_of_its_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with installed(build_manager(device_limit_bytes=4000)):
        run = Driver(build_stages(1, 2, ("fc1", "act")))
        for _ in range(3):
            run.step(gpipe(3))
        with offload.tracing() as trace:
            run.step(gpipe(3))
        found = report()
        parsed = saved(found, tmp_path, trace)
        figures, last = found.as_dict(), found.last_step
    assert json.loads(parsed.scripts["application/json"]) == json.loads(json.dumps(figures))
    assert {name: value for name, (value, _) in parsed.data.items()} == {
        name: str(last[name]) for name in ("peak_bytes", "moved_bytes", "stall_ms", "host_bytes")
    }
    assert parsed.data["moved_bytes"][1] == bytes_text(last["moved_bytes"])
    assert last["moved_bytes"] > 0
    # each cell that is printed is on the page, too
    printed = {line.strip().split("  ")[0] for line in str(found).splitlines()}
    rows = {row[0].strip(): row[1:] for table in parsed.tables for row in table if row[0].strip()}
    assert printed >= {*rows} > {"fc1", "act", "moved to the host"}
    of_fc1 = last["groups"]["fc1"]
    assert rows["fc1"][:2] == [bytes_text(of_fc1[name]) for name in ("saved_bytes", "moved_bytes")]
    most = max(sample.saved_bytes for sample in trace.timeline.memory)
    for said in (
        "Did it work? Yes, as far as a simulated device shows.",
        f"activations: at most {bytes_text(most)}",
        "others: only a GPU shows",
        "fc1",
        "Nothing was chosen",
    ):
        assert said in " ".join(parsed.text.split()), said
    assert parsed.tags["svg"] == 4, "two pictures, each for a wide and a narrow window"
    assert "Not recorded" not in parsed.text


def test_names_of_users_are_text_wherever_they_stand(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    groups = {name: GroupFigures(saved_bytes=5, moved_bytes=5) for name in HOSTILE}
    last = Figures(steps=1, saved_bytes=20, moved_bytes=20, groups=groups)
    timeline = timeline_of(40, 4)
    spans = [
        replace(span, name=HOSTILE[at % 4], owner=f"s0m0/{HOSTILE[at % 4]}")
        for at, span in enumerate(timeline.spans)
    ]
    found = Report(since=HOSTILE[0], total=last, last=last, peak=HOSTILE[1], remark=HOSTILE[0])
    parsed = saved(found, tmp_path, trace_of(replace(timeline, spans=spans)))
    assert parsed.tags["script"] == 1
    for name in HOSTILE:
        assert parsed.text.count(name) >= 2, "in the table of groups and beside the lanes"
    assert {row[0] for table in parsed.tables for row in table} >= {*HOSTILE}
    assert json.loads(parsed.scripts["application/json"])["peak"] == HOSTILE[1]
    replace(found, peak="half \udc80").save(tmp_path / "half.html")  # of a path that is no UTF-8
    assert "half \\udc80" in (tmp_path / "half.html").read_text("utf-8")


def test_a_process_without_a_step_says_so_and_what_was_not_recorded(tmp_path: Path) -> None:
    parsed = saved(report(), tmp_path)
    text = " ".join(parsed.text.split())
    for said in (
        "Did it work? No step has ended yet.",
        "there is no manager in this process",
        "Not recorded, and neither are the lanes: run one step inside with offload.tracing() as trace:",
        "No group was committed",
        "Not gathered: report(gather=True), on all ranks.",
    ):
        assert said in text, said
    assert not parsed.data


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "Yes."),
        ({"stall_ms": 3.0}, "In part."),
        ({"no_host_bytes": 1}, "In part."),
        ({"over_limit_bytes": 1}, "In part."),
        ({"peak_bytes": 90}, "In part."),
        ({"moved_bytes": 0, "kept_bytes": 80}, "Nothing left the device in the last step."),
    ],
)
def test_the_answer_is_of_the_last_step_and_goes_with_the_advice(
    changes: dict[str, Any], word: str, tmp_path: Path
) -> None:
    last = Figures(steps=1, saved_bytes=80, moved_bytes=80, peak_bytes=20, would_hold_bytes=90)
    last = replace(last, stall_ms=1.0, step_ms=100.0)
    found = Report(since="apply", total=last, last=replace(last, **changes))
    parsed = saved(found, tmp_path)
    assert f"Did it work? {word}" in " ".join(parsed.text.split())
    advice = found.verdict.splitlines()[1]
    assert (word == "Yes.") == advice.startswith("next: nothing"), advice
    assert advice[1:] in parsed.text, "but for a capital letter"


def test_what_auto_chose_and_what_a_larger_budget_gains_are_on_the_page(tmp_path: Path) -> None:
    from tests.unit.test_plot import explained_of

    explained = explained_of(3, 4, limit_gb=9)
    last = Figures(steps=1, saved_bytes=8, moved_bytes=8)
    parsed = saved(Report(since="apply", total=last, last=last, explained=explained), tmp_path)
    rows = {row[0]: row[1:] for table in parsed.tables for row in table}
    _, expected = explained.table()
    assert expected
    assert [rows[name] for name, *_ in expected] == [figures for _, *figures in expected]
    assert explained.margins()[-1].startswith("A budget larger by ")
    for line in explained.margins():
        assert line in parsed.text


@pytest.mark.parametrize("names", [7, 130])
def test_a_long_step_of_many_groups_and_ranks_stays_small(tmp_path: Path, names: int) -> None:
    """More spans than there are pixels; 256 ranks. Drawn one by one, 20,000 took four minutes and 5 MB."""
    pytest.importorskip("matplotlib")
    groups = {f"layers.{at}": GroupFigures(saved_bytes=10**9, moved_bytes=10**9) for at in range(names)}
    last = Figures(steps=1, saved_bytes=names * 10**9, moved_bytes=names * 10**9, groups=groups)
    ranks = {rank: last.as_dict() for rank in range(256)}
    found = Report(since="apply", total=last, last=last, ranks=ranks)
    parsed = saved(found, tmp_path, trace_of(timeline_of(5_000, names, microbatches=64)))
    assert "and 156 more rows" in parsed.text, "of ranks"
    assert f"and {names - 24} more in the same colors" in parsed.text or names == 7
    kept = json.loads(parsed.scripts["application/json"])
    assert kept["ranks"]["99"]["moved_bytes"] == names * 10**9
    assert len(kept["groups"]) == min(100, names)


def test_what_cannot_be_drawn_is_an_error_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="nothing was recorded: no group was open"):
        report().save(tmp_path / "a.html", trace_of(replace(timeline_of(1, 1), spans=[])))
    with pytest.raises(RuntimeError, match="the trace is still being recorded"):
        report().save(tmp_path / "a.html", Trace())
    with pytest.raises(ValueError, match=r"a report is a page of HTML; name it \.html"):
        report().save(tmp_path / "a.json")
    with pytest.raises(TypeError, match=r"trace is a str, must be what offload\.tracing\(\) yields"):
        report().save(tmp_path / "a.html", "step.json")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        report().save(tmp_path / "a.html", trace_of(timeline_of(3, 1)))
    assert not [*tmp_path.iterdir()]
    report().save(tmp_path / "a.html")  # which draws nothing
