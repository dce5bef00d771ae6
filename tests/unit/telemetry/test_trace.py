"""A trace's file says what its timeline says, on the clock of torch.profiler, and counting bytes by kind
touches nothing."""

from __future__ import annotations

import gc
import gzip
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import offload
from offload import PipelineOffloadManager
from offload.groups.recorder import Holdings
from offload.telemetry.timeline import Trace
from tests.inside import streams_from
from tests.unit.groups.stack import Driver, build_manager, build_stages, gpipe, installed
from tests.unit.telemetry.test_page import timeline_of, trace_of

TOLERANCE_US = 20_000  # of two clocks; one that is wrong is off by seconds at least


@pytest.fixture(autouse=True)
def _manager() -> Iterator[None]:
    with installed(build_manager("clock")):
        yield


def events_of(path: Path) -> list[dict[str, Any]]:
    opens: Any = gzip.open if path.suffix == ".gz" else open
    with opens(path, "rt") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def test_a_file_has_the_lanes_groups_microbatches_and_counters_of_its_timeline(tmp_path: Path) -> None:
    run = Driver(build_stages(1, 2, ("fc1", "act")))
    for _ in range(3):
        run.step(gpipe(3))
    with offload.tracing(tmp_path / "step.json") as trace:
        run.step(gpipe(3))
    timeline, events = trace.timeline, events_of(tmp_path / "step.json")
    tracks = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert {each["pid"] for each in events} == {10_000_000}
    work = [each for each in events if each["ph"] == "X" and tracks[each["tid"]] != "microbatches"]
    assert [(each["cat"], each["name"], each["args"].get("bytes", 0)) for each in work] == [
        (span.kind, span.name or "compute waits for a copy", span.nbytes) for span in timeline.spans
    ]
    for each, span in zip(work, timeline.spans, strict=True):
        assert each["ts"] == pytest.approx(span.start_ms * 1e3, abs=2e-3)
        assert each["dur"] == pytest.approx((span.end_ms - span.start_ms) * 1e3, abs=2e-3)
    assert {tracks[each["tid"]] for each in work if each["cat"] in ("spill", "restore")} == {
        "to the host",
        "to the device",
    }
    named = [each["name"] for each in events if each["ph"] == "X" and tracks[each["tid"]] == "microbatches"]
    assert named == [f"F s0m{mb}" for mb in range(3)] + [f"B s0m{mb}" for mb in range(3)]
    counters = [each for each in events if each["ph"] == "C"]
    for kind in ("weights", "gradients", "optimizer", "others", "activations"):
        seen = {each["args"][kind] for each in counters if each["name"] == "device bytes"}
        assert seen == {sample.by_kind[kind] for sample in timeline.memory}, kind
    pinned = {each["args"]["pinned"] for each in counters if each["name"] == "host bytes"}
    assert pinned == {sample.pinned_bytes for sample in timeline.memory} != {0}


def test_spans_of_a_track_are_nested_or_apart_so_that_viewers_show_them_all() -> None:
    run = Driver(build_stages(1, 2))  # with a group around others
    run.step(gpipe(2))
    with offload.tracing() as trace:
        run.step(gpipe(2))
    by_kind: dict[str, list[Any]] = {}
    for span in trace.timeline.spans:
        by_kind.setdefault(span.kind, []).append(span)
    for kind, spans in by_kind.items():
        open_ends: list[float] = []
        for span in spans:
            while open_ends and open_ends[-1] <= span.start_ms:
                open_ends.pop()
            assert not open_ends or span.end_ms <= open_ends[-1], kind
            open_ends.append(span.end_ms)


def test_events_of_a_profiler_of_the_same_step_are_in_the_same_file_on_the_same_clock(tmp_path: Path) -> None:
    x = torch.randn(16, 16, requires_grad=True)

    def step(seconds: float) -> None:
        offload.init_chunk_handler()
        h = offload.group_start(x * 1.0, "marked")
        with offload.offload_hooks(), record_function("inside"):
            time.sleep(seconds)
            h = h.square()
        offload.group_commit(h, "marked").sum().backward()
        offload.step_end()

    step(0)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, offload.tracing() as trace:
        step(0.03)
    profiler.export_chrome_trace(str(tmp_path / "profile.json"))
    before = (tmp_path / "profile.json").read_bytes()
    trace.save(tmp_path / "both.json.gz", profile=tmp_path / "profile.json")
    assert (tmp_path / "profile.json").read_bytes() == before
    events = events_of(tmp_path / "both.json.gz")
    assert all(each in events for each in json.loads(before)["traceEvents"])
    (ours,) = (each for each in events if each.get("cat") == "forward")
    (theirs,) = (each for each in events if each["name"] == "inside")
    assert ours["pid"] != theirs["pid"]
    assert abs(ours["ts"] - theirs["ts"]) < TOLERANCE_US
    assert abs(ours["ts"] + ours["dur"] - theirs["ts"] - theirs["dur"]) < TOLERANCE_US
    with offload.tracing() as later:
        step(0)
    for text, error in [
        (before.decode(), "they are of other steps"),
        ("[]", "is no Chrome trace of torch.profiler"),
        ("{", "is no Chrome trace of torch.profiler"),
        ('{"traceEvents": []}', "has no timed event"),
    ]:
        (tmp_path / "profile.json").write_text(text)
        with pytest.raises(ValueError, match=error):
            later.save(tmp_path / "wrong.json", profile=tmp_path / "profile.json")
    with pytest.raises(ValueError, match="nothing was recorded"), offload.tracing(tmp_path / "wrong.json"):
        time.sleep(0.001)
    with pytest.raises(ValueError, match="cannot write that"), offload.tracing(tmp_path / "no/step.json"):
        raise AssertionError("it is said before a step")
    assert not (tmp_path / "wrong.json").exists()


def test_a_step_as_long_as_w2s_takes_less_than_5_mb(tmp_path: Path) -> None:
    """W2: 8 layers of 7 groups, 8 microbatches; 64 MiB a piece of 190 GB each way."""
    spans = 8 * 7 * 8 * 2 + 2 * 190_000 // 64
    trace_of(timeline_of(spans, 7)).save(tmp_path / "w2.json")
    assert (tmp_path / "w2.json").stat().st_size < 5_000_000


def test_an_optimizers_step_is_a_span_and_nothing_is_left_when_a_recording_ends(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    optimizer = torch.optim.AdamW([weight])
    with offload.tracing() as trace:
        optimizer.step()
    optimizer.step()
    assert Counter((span.kind, span.name) for span in trace.timeline.spans) == {("optimizer", "AdamW"): 1}
    first, last = trace.timeline.memory[0], trace.timeline.memory[-1]
    state = sum(each.nbytes for each in optimizer.state[weight].values())
    assert last.optimizer_bytes - first.optimizer_bytes == state
    with pytest.raises(RuntimeError, match="the trace is still being recorded"):
        Trace().save(tmp_path / "no.json")
    assert not [*tmp_path.iterdir()]


def test_bytes_by_kind_are_those_of_distinct_storages() -> None:
    """On meta, where no other test of this process has anything."""
    model = nn.Sequential(nn.Linear(8, 8, device="meta"), nn.Linear(8, 8, bias=False, device="meta"))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    found = Holdings(lambda tensor: tensor.is_meta)
    assert found.weights_and_gradients() == (4 * 72, 0)
    assert found.optimizer_bytes() == 0
    model[0].weight.grad = torch.empty_like(model[0].weight)
    optimizer.state[model[0].bias] = {"exp_avg": torch.empty(8, device="meta"), "step": torch.tensor(1.0)}
    assert found.weights_and_gradients() == (4 * 72, 4 * 64)
    assert found.optimizer_bytes() == 4 * 8
    del model, optimizer
    assert found.weights_and_gradients() == (0, 0), "it keeps nothing alive"


def test_counting_fetches_no_streamed_weight_and_changes_no_bit() -> None:
    def trained(traced: bool) -> tuple[list[torch.Tensor], Any, Any, int]:
        torch.manual_seed(0)
        gc.collect()  # models of other tests
        manager = PipelineOffloadManager.OFFLOAD_MGR
        before_bytes, _ = Holdings(manager.engine.device.owns).weights_and_gradients()
        blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
        with streams_from(1), offload.activations(blocks, weights="10KB") as handle:
            optimizer, trace = torch.optim.SGD(blocks.parameters(), lr=0.1), None
            for number in range(4):
                x = torch.full((4, 32), float(number))
                if traced and number == 3:
                    with offload.tracing() as trace:
                        blocks(x).square().mean().backward()
                        optimizer.step()
                else:
                    blocks(x).square().mean().backward()
                    optimizer.step()
            figures = handle.weights.as_dict()
        return [parameter.detach().clone() for parameter in blocks.parameters()], figures, trace, before_bytes

    plain, traced = trained(False), trained(True)
    assert all(torch.equal(one, other) for one, other in zip(plain[0], traced[0], strict=True))
    for name in ("in_bytes", "out_bytes", "hits", "misses"):
        assert plain[1][name] == traced[1][name], name
    assert plain[1]["in_bytes"] > 0
    weights = [sample.weights_bytes - traced[3] for sample in traced[2].timeline.memory]
    assert 0 < max(weights) <= 10_000 < 4 * 4 * 33 * 32, "of those that are on the device"
    assert max(sample.gradient_bytes for sample in traced[2].timeline.memory) > 0
