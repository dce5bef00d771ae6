"""A recorded step agrees with the engine's counts, and its picture says what it shows; nothing is recorded
unasked."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import offload
from offload import PipelineOffloadManager
from offload.groups.recorder import Recorder
from offload.planner.explained import Explanation
from offload.plot import Trace, _title, figure_of
from offload.policy.actions import Action, one_f_one_b
from offload.policy.mixture import choose_mixture
from offload.report import Report
from offload.sizes import bytes_text
from offload.telemetry.drawing import draw
from offload.telemetry.figures import Figures
from offload.telemetry.timeline import MemorySample, Span, Timeline
from tests.unit.groups.stack import (
    ROWS,
    WIDTH,
    Driver,
    assert_same,
    baseline,
    build_manager,
    build_stages,
    gpipe,
    installed,
)
from tests.unit.policy.mixtures import GB, H200, W2_BLOCK, Stage, played

INPUT = ROWS * WIDTH * 4  # of fc1, in bytes
LAYERS, MICROBATCHES = 2, 3
NAMES = ("fc1", "act")


@pytest.fixture
def manager() -> Iterator[PipelineOffloadManager]:
    with installed(build_manager("clock")) as manager:
        yield manager


def driver() -> Driver:
    return Driver(build_stages(1, LAYERS, NAMES))


def recorded(steps_before: int = 3) -> offload.Trace:
    run = driver()
    for _ in range(steps_before):
        run.step(gpipe(MICROBATCHES))
    with offload.tracing() as trace:
        run.step(gpipe(MICROBATCHES))
    return trace


def test_recorded_copies_are_those_that_the_step_counted(manager: PipelineOffloadManager) -> None:
    timeline = recorded().timeline
    copied = Counter[str]()
    for span in timeline.spans:
        copied[span.kind] += span.nbytes
        assert 0 <= span.start_ms <= span.end_ms <= timeline.duration_ms
    assert copied["spill"] == manager.stats.spill_bytes > 0
    assert copied["restore"] == manager.stats.restore_bytes > 0
    assert {span.lane for span in timeline.spans if span.kind == "spill"} == {"d2h"}
    assert {span.name for span in timeline.spans if span.lane != "compute"} <= {"fc1", "act"}
    assert sum(span.kind == "stall" for span in timeline.spans) == manager.stats.stall_count


def test_each_group_has_a_forward_and_a_backward_on_the_compute_lane(manager: PipelineOffloadManager) -> None:
    spans = [span for span in recorded().timeline.spans if span.kind in ("forward", "backward")]
    forwards = Counter(span.owner for span in spans if span.kind == "forward")
    assert forwards == {f"s0m{mb}/{name}": LAYERS for mb in range(MICROBATCHES) for name in NAMES}
    assert Counter(span.owner for span in spans if span.kind == "backward") == forwards
    last_forward = max(span.end_ms for span in spans if span.kind == "forward")
    assert all(span.start_ms >= last_forward for span in spans if span.kind == "backward"), "of gpipe"


def test_memory_without_offload_rises_to_all_that_was_saved_and_falls_to_nothing(
    manager: PipelineOffloadManager,
) -> None:
    memory = recorded().timeline.memory
    # fc1 saves its input, gelu its own, twice as wide
    assert max(sample.without_bytes for sample in memory) == MICROBATCHES * LAYERS * 3 * INPUT
    assert max(sample.saved_bytes for sample in memory) <= manager.stats.device_bytes_peak
    assert memory[0].without_bytes == memory[-1].without_bytes == memory[-1].saved_bytes == 0
    assert [sample.ms for sample in memory] == sorted(sample.ms for sample in memory)


def test_bytes_that_a_backward_has_freed_are_counted_out_at_once() -> None:
    """Nothing leaves, so the engine, which counts freed bytes out when it is called, is not called."""
    with installed(build_manager(max_spilling_bytes=0)):
        memory = recorded(0).timeline.memory
    assert [sample.saved_bytes for sample in memory] == [sample.without_bytes for sample in memory]
    assert max(sample.saved_bytes for sample in memory) == MICROBATCHES * LAYERS * 3 * INPUT


def test_nothing_is_recorded_after_the_block_and_gradients_are_the_same() -> None:
    expected = baseline(build_stages(1, LAYERS, NAMES), [gpipe(MICROBATCHES)] * 3)
    with installed(build_manager("clock")) as manager:
        run = driver()
        found = [run.step(gpipe(MICROBATCHES))]
        with offload.tracing() as trace:
            found.append(run.step(gpipe(MICROBATCHES)))
        count = len(trace.timeline.spans)
        assert not manager.engine.copier._watchers
        assert not manager.engine.hooks.observers
        found.append(run.step(gpipe(MICROBATCHES)))
        assert len(trace.timeline.spans) == count > 0
    assert_same(expected, found)


def test_a_trace_is_read_after_its_block_one_at_a_time_and_never_when_cut_off(
    manager: PipelineOffloadManager,
) -> None:
    with offload.tracing() as trace:
        with pytest.raises(RuntimeError, match="the trace is still being recorded"):
            trace.timeline  # noqa: B018
        with pytest.raises(RuntimeError, match="a recording is under way"), offload.tracing():
            pass
    assert trace.timeline.spans == []
    with pytest.raises(KeyError), offload.tracing() as cut:
        raise KeyError
    with pytest.raises(RuntimeError, match="was cut off by an exception"):
        cut.timeline  # noqa: B018
    Recorder(manager.tracker).stop()  # of one that was never started
    with offload.tracing():
        pass


@pytest.mark.usefixtures("manager")
def test_a_picture_names_groups_lanes_units_and_both_peaks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = recorded()
    offload.plot(tmp_path / "step.svg", trace)
    text = (tmp_path / "step.svg").read_text()
    for said in (
        "fc1",
        "act",
        "compute",
        "to the host",
        "to the device",
        "if nothing had left",
        "saved, with offload",
        "device memory (",
        "copies simulated",
        "paler: backward",
    ):
        assert f"<!-- {said}" in text or f"{said} -->" in text, said
    offload.plot(tmp_path / "step.png", trace, title="mine")
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"


def test_the_title_of_a_picture_is_the_first_line_of_a_report_with_the_same_figures(tmp_path: Path) -> None:
    """The title had a verdict that the report lacked."""
    timeline, trace = gpu_timeline(), Trace()
    trace._timeline = timeline
    stalls = [span for span in timeline.spans if span.kind == "stall"]
    assert stalls
    last = Figures(
        steps=1,
        moved_bytes=sum(span.nbytes for span in timeline.spans if span.kind == "spill"),
        peak_bytes=max(sample.saved_bytes for sample in timeline.memory),
        would_hold_bytes=max(sample.without_bytes for sample in timeline.memory),
        stall_ms=sum(span.end_ms - span.start_ms for span in stalls),
        step_ms=timeline.duration_ms,
    )
    first_line = Report(since="apply", total=last, last=last).verdict.splitlines()[0]
    assert first_line == f"offload: {_title(timeline)}"
    offload.plot(tmp_path / "step.svg", trace)
    assert f"<!-- {_title(timeline)} -->" in (tmp_path / "step.svg").read_text()


def test_a_gpus_timeline_lies_on_the_rest_of_its_memory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(gpu_timeline(), tmp_path / "gpu.svg", title="four layers")
    text = (tmp_path / "gpu.svg").read_text()
    for said in ("device memory (GB)", "others", "stall: compute waits for a copy"):
        assert f"<!-- {said} -->" in text, said
    assert "simulated" not in text


def gpu_timeline() -> Timeline:
    """Four layers of 10 ms forward and 20 ms backward, whose 400 MB each take 8 ms a way."""
    spans, memory = [], []
    gb = 10**9

    def compute(kind: str, layer: int, start: float, end: float) -> None:
        name = "mlp" if layer % 2 else "attention"
        spans.append(
            Span(lane="compute", kind=kind, name=name, owner=f"s0m0/{name}", start_ms=start, end_ms=end)  # type: ignore[arg-type]
        )

    def copied(lane: str, layer: int, start: float) -> None:
        name, kind = "mlp" if layer % 2 else "attention", "spill" if lane == "d2h" else "restore"
        spans.append(
            Span(
                lane=lane,
                kind=kind,  # type: ignore[arg-type]
                name=name,
                owner=f"s0m0/{name}",
                start_ms=start,
                end_ms=start + 8,
                nbytes=400_000_000,
            )
        )

    for layer in range(4):
        compute("forward", layer, 10 * layer, 10 * layer + 10)
        copied("d2h", layer, 10 * layer + 10)
        held = 0.4 * gb * min(2, layer + 1)
        memory.append(
            MemorySample(
                ms=10 * layer + 5,
                saved_bytes=int(held),
                without_bytes=int(0.4 * gb * (layer + 1)),
                host_bytes=int(0.4 * gb * layer),
                other_bytes=2 * gb,
            )
        )
    for at, layer in enumerate(reversed(range(4))):
        compute("backward", layer, 48 + 20 * at, 68 + 20 * at)
        copied("h2d", layer, 40 + 20 * at)
        memory.append(
            MemorySample(
                ms=48 + 20 * at,
                saved_bytes=int(0.4 * gb * min(2, 4 - at)),
                without_bytes=int(0.4 * gb * (4 - at)),
                host_bytes=int(0.4 * gb * (4 - at)),
                other_bytes=2 * gb + at * 10**8,
            )
        )
    spans.append(Span(lane="compute", kind="stall", name="", owner="", start_ms=40, end_ms=48))
    return Timeline(
        spans=sorted(spans, key=lambda span: span.start_ms),
        memory=memory,
        device_limit_bytes=gb,
        simulated=False,
    )


def explained_of(num_blocks: int, microbatches: int, limit_gb: int) -> Explanation:
    pytest.importorskip("matplotlib")
    stage = Stage.of(one_f_one_b(0, 4, microbatches), W2_BLOCK, num_blocks)
    limit = limit_gb * GB
    return Explanation(
        state="the plan is settled",
        names={chunk: tuple(f"layers.{at}" for at in range(num_blocks)) for chunk in stage.blocks},
        total_bytes=limit + 11 * GB,
        rest_bytes=11 * GB,
        limit_bytes=limit,
        plan=choose_mixture(stage.actions, stage.blocks, H200, limit, max_trials=2),
    )


def test_a_plans_picture_has_each_blocks_bytes_by_microbatch_and_what_they_cost(tmp_path: Path) -> None:
    explained = explained_of(3, 4, limit_gb=9)
    assert explained.plan is not None
    calls, shares = explained.calls, explained.shares
    assert [(chunk, share.name) for chunk, share in calls] == [
        ((0, microbatch), f"layers.{at}") for microbatch in range(4) for at in range(3)
    ]
    for share in shares:
        own = [call for _, call in calls if call.name == share.name]
        assert share.saved_bytes == 4 * W2_BLOCK.menu[0].saved_bytes
        assert list(share[1:5]) == [sum(call[field] for call in own) for field in range(1, 5)]
        assert sum(share.levels.values()) == 4
    figure = figure_of(explained)
    memory, times, cells, sums = figure.axes
    # a call's parts lie side by side and fill its cell: every call saves the most that one does
    widths = [path.get_extents().width for drawn in cells.collections for path in drawn.get_paths()]
    assert sum(widths) == pytest.approx(len(calls) * 0.92)
    assert sum(bar.get_width() for bar in sums.patches) == pytest.approx(
        sum(share.saved_bytes for share in shares) / GB
    )
    names = sums.get_legend_handles_labels()[1]
    assert len(names) == len({*names}), "each once in the legend"
    assert memory.patches[0].get_width() == 11
    assert memory.patches[1].get_width() == pytest.approx(explained.plan.predicted_peak_bytes / GB)
    assert sum(bar.get_width() for bar in times.patches) == pytest.approx(
        (explained.plan.plain_s + explained.plan.predicted_step_s) * 1e3, rel=1e-3
    )
    offload.plot(tmp_path / "plan.svg", explained, title="mine")
    text = (tmp_path / "plan.svg").read_text()
    for said in ("mine", "layers.2", "moved to the host and back", "would save", "total: 20.00"):
        assert said in text, said


def test_an_explanation_says_what_the_last_step_moved_and_no_time_is_minus_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """explain() had "0.19 MB moved" where the report said 33.55, and "-0.0 ms"."""
    explained = replace(explained_of(1, 4, limit_gb=40), moved_bytes=33_550_000)
    planned = sum(share.moved_bytes for share in explained.shares)
    assert planned != 33_550_000
    slower = replace(explained.plan, predicted=replace(explained.plan.predicted, step_s=99.0))
    monkeypatch.setattr("offload.planner.explained.scaled", lambda *_: slower)
    text = str(explained)
    assert "a step. The last step moved 33.55 MB: tensors move whole." in text
    assert "would save 0.0 ms a step" in text
    assert "-0.0" not in text
    assert "The last step moved" not in str(replace(explained, moved_bytes=planned))
    assert "The last step moved" not in str(replace(explained, moved_bytes=None))


def test_where_all_of_it_stays_nothing_is_lost_and_a_larger_budget_gains_nothing() -> None:
    explained = explained_of(1, 4, limit_gb=40)
    text = str(explained)
    assert "1.000 of it, of which 0.0 ms recompute and 0.0 ms stall for copies." in text
    assert "would save 0.0 ms a step" in text
    assert "11.00 GB are weights, gradients and working set, and 40.00 GB are for saved" in text
    no_gpu = replace(explained, rest_bytes=0, limit_bytes=50 * GB)
    assert "working set (only a GPU shows them), and 50.00 GB are for saved tensors" in str(no_gpu)


def test_blocks_that_are_equal_but_for_a_number_in_their_names_are_one_row() -> None:
    """A model of 96 layers had a table of 96 rows, most of them the same."""
    plain = explained_of(12, 4, limit_gb=200)
    names = [f"encoder.{at}" for at in range(4)] + [f"layers.{at}" for at in range(8)]
    assert plain.plan is not None
    last = len(W2_BLOCK.menu) - 1
    levels = dict.fromkeys(plain.names, (0,) * 6 + (last,) + (0,) * 5)
    plan = replace(plain.plan, levels=levels, kept_bytes=dict.fromkeys(plain.names, 1e18))
    explained = replace(plain, names=dict.fromkeys(plain.names, tuple(names)), plan=plan)
    rows = {name: figures for name, *figures in explained.table()[1]}
    assert [*rows] == ["encoder.0 .. encoder.3 (4 alike)", "layers.0 .. layers.7 (7 alike)", "layers.2"]
    first = explained.shares[0]
    assert rows["encoder.0 .. encoder.3 (4 alike)"][0] == bytes_text(first.saved_bytes), "of each"
    assert rows["encoder.0 .. encoder.3 (4 alike)"] == rows["layers.0 .. layers.7 (7 alike)"]


@pytest.mark.parametrize("again_room", [0, 1])
def test_what_both_halves_of_a_backward_compute_again_counts_for_both(again_room: int) -> None:
    """again_room: blocks whose W finds what its I computed again, so that it computes nothing itself."""
    order = [Action("F", 0, 0), Action("F", 0, 1)]
    order += [Action(kind, 0, m) for m in range(2) for kind in ("I", "W")]  # type: ignore[arg-type]
    stage = Stage.of(order, replace(W2_BLOCK, w_reads=0.4), 3)
    plan = choose_mixture(stage.actions, stage.blocks, H200, 4 * GB, max_trials=2)
    last = len(W2_BLOCK.menu) - 1
    levels = dict.fromkeys(stage.blocks, (0, last, last))
    room = again_room * stage.blocks[0, 0][0].w_bytes
    again_ms = 2 * (2 + 2 - again_room) * W2_BLOCK.menu[last].recompute_s * 1e3
    plan = replace(plan, levels=levels, again_room_bytes=room)
    assert sum(sum(plan.recompute_s(chunk)) for chunk in stage.blocks) * 1e3 == pytest.approx(again_ms)
    plan = replace(plan, predicted=played(stage, plan))
    assert plan.predicted.recompute_s * 1e3 == pytest.approx(again_ms)
    explained = Explanation(state="planned", plan=plan)
    text = str(explained)
    assert f"of which {again_ms:.1f} ms recompute and" in text
    assert sum(share.recompute_ms for share in explained.shares) == pytest.approx(again_ms)


def test_a_plan_that_is_not_made_yet_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no plan to draw: no plan yet: 1 of at least 2 steps"):
        offload.plot(tmp_path / "plan.png", Explanation(state="no plan yet: 1 of at least 2 steps"))
    assert not (tmp_path / "plan.png").exists()


def test_without_matplotlib_the_error_names_the_extra(
    manager: PipelineOffloadManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = recorded(0)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ImportError, match=r"pip install matplotlib, or in a checkout pip install '\.\[plot\]'"
    ):
        offload.plot(tmp_path / "step.png", trace)


def test_a_trace_of_nothing_is_refused(manager: PipelineOffloadManager, tmp_path: Path) -> None:
    with offload.tracing() as trace:
        pass
    with pytest.raises(ValueError, match="nothing was recorded: no group was open and nothing was copied"):
        offload.plot(tmp_path / "step.png", trace)
    assert not (tmp_path / "step.png").exists()


def test_what_is_neither_a_trace_nor_a_plan_is_refused_with_how_to_call(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"plot\(\) was given a str to draw, must be what offload\.tra"):
        offload.plot(offload.report(), str(tmp_path / "step.png"))  # type: ignore[arg-type]


def test_matplotlib_is_not_imported_by_the_package() -> None:
    """It is an extra, and takes a second."""
    for name in ("offload.plot", "offload.telemetry.drawing"):
        assert "matplotlib" not in vars(sys.modules[name])
