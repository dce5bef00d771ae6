"""On a GPU, a recorded step has the copies that the engine counted, with times of the device, and lies on the
rest of its memory; and the report adds up."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload import OffloadConfig, PipelineOffloadManager, group_commit, group_start, offload_hooks
from offload.report import report
from tests.gpu.workbench import DEVICE

pytestmark = pytest.mark.gpu

LAYERS, WIDTH = 6, 1024
INPUT = WIDTH * WIDTH * 4  # of a layer, in bytes: all that its group saves


@pytest.fixture
def manager() -> Iterator[PipelineOffloadManager]:
    config = OffloadConfig(
        min_offloaded_tensor_size=1024,
        host_reserve_bytes=64 << 20,
        max_spilling_bytes=INPUT,
        max_restoring_bytes=INPUT,
        piece_bytes=INPUT,
    )
    device = str(DEVICE) if DEVICE.type == "cuda" else "sim"
    yield offload.configure(config, device=device, print_summary=False)  # type: ignore[misc]
    PipelineOffloadManager.close_instance()


def train(layers: nn.ModuleList, steps: int) -> None:
    for _ in range(steps):
        offload.init_chunk_handler()
        x = torch.randn(WIDTH, WIDTH, device=DEVICE, requires_grad=True)
        for layer in layers:
            x = group_start(x * 1.0, "layer")
            with offload_hooks():
                y = layer(x)
            x = group_commit(y, "layer")
        x.square().mean().backward()
        offload.step_end()
        layers.zero_grad()


def test_a_recorded_step_has_the_copies_that_were_counted_and_times_of_the_device(
    manager: PipelineOffloadManager, tmp_path: Path
) -> None:
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, device=DEVICE) for _ in range(LAYERS))
    train(layers, 4)
    with offload.tracing() as trace:
        train(layers, 1)
    timeline = trace.timeline
    copies = [span for span in timeline.spans if span.lane != "compute"]
    for kind, nbytes in (("spill", manager.stats.spill_bytes), ("restore", manager.stats.restore_bytes)):
        assert sum(span.nbytes for span in copies if span.kind == kind) == nbytes > 0
    assert all(0 <= span.start_ms <= span.end_ms <= timeline.duration_ms for span in timeline.spans)
    for kind in ("forward", "backward"):
        assert sum(span.kind == kind for span in timeline.spans) == LAYERS
    assert max(sample.without_bytes for sample in timeline.memory) == LAYERS * INPUT
    assert max(sample.saved_bytes for sample in timeline.memory) < LAYERS * INPUT
    assert timeline.memory[-1].saved_bytes == timeline.memory[-1].without_bytes == 0
    if DEVICE.type == "cuda":
        assert not timeline.simulated
        assert all(span.end_ms > span.start_ms for span in copies)
        weights = LAYERS * WIDTH * WIDTH * 4
        assert all(sample.weights_bytes >= weights for sample in timeline.memory)
        # sampled as copies and groups begin and end: the last gradient comes after those
        largest = max(sample.gradient_bytes for sample in timeline.memory)
        assert weights * (LAYERS - 1) // LAYERS <= largest <= weights
        assert max(sample.other_bytes for sample in timeline.memory) > 0
        active = torch.cuda.memory_stats()["active_bytes.all.peak"]
        assert max(sum(sample.by_kind.values()) for sample in timeline.memory) <= active
    total = report().total
    assert total.saved_bytes == total.moved_bytes + total.kept_bytes == 5 * LAYERS * INPUT
    pytest.importorskip("matplotlib")
    offload.plot(tmp_path / "step.png", trace)
    assert (tmp_path / "step.png").stat().st_size > 10_000
    report().save(tmp_path / "report.html", trace)
    assert 20_000 < (tmp_path / "report.html").stat().st_size < 600_000
    assert "Did it work?" in (tmp_path / "report.html").read_text()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a kernel that takes long")
def test_the_host_waits_for_nothing_while_a_step_is_recorded(manager: PipelineOffloadManager) -> None:
    """The device sleeps for a second before the step; the host has issued all of it before the sleep ends."""
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, device=DEVICE) for _ in range(LAYERS))
    train(layers, 4)
    torch.cuda.synchronize()
    slept = torch.cuda.Event()
    with offload.tracing() as trace:
        torch.cuda._sleep(2_000_000_000)
        slept.record()
        train(layers, 1)
        assert not slept.query(), "the host was blocked until the device got there"
    assert slept.query()
    assert sum(span.kind == "forward" for span in trace.timeline.spans) == LAYERS


@pytest.mark.skipif(DEVICE.type != "cuda", reason="kernels and copies of a device")
def test_copies_lie_where_a_profiler_of_the_same_step_has_them(
    manager: PipelineOffloadManager, tmp_path: Path
) -> None:
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, device=DEVICE) for _ in range(LAYERS))
    train(layers, 4)
    with torch.profiler.profile() as profiler, offload.tracing() as trace:
        train(layers, 1)
    profiler.export_chrome_trace(str(tmp_path / "profile.json"))
    trace.save(tmp_path / "both.json", profile=tmp_path / "profile.json")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    theirs = [each for each in events if each.get("cat") == "gpu_memcpy" and "DtoH" in each["name"]]
    ours = [each for each in events if each.get("cat") == "spill"]
    copies = [each for each in theirs if each["args"].get("bytes", INPUT) >= INPUT]
    assert len(ours) == len(copies) > 0
    copies.sort(key=lambda each: each["ts"])
    apart = [mine["ts"] - its["ts"] for mine, its in zip(ours, copies, strict=True)]
    assert max(apart) - min(apart) < 1_000, "microseconds"
    # each puts the device's clock beside the host's by itself, on a host that other tests keep busy
    assert abs(statistics.median(apart)) < 10_000, "microseconds"
