"""The report: what was saved, moved and kept, with its reasons; sums that agree with the engine's own
counts."""

from __future__ import annotations

import json
import re
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offload
from offload import PipelineOffloadManager, init_chunk_handler, step_end
from offload.integrations import step_figures
from offload.report import Report, ReportStart, report
from offload.telemetry.figures import Figures, GroupFigures, KindFigures, Ledger, Stayed
from offload.telemetry.records import StepStats
from tests.unit.groups.stack import ROWS, WIDTH, Driver, build_manager, build_stages, gpipe, installed, leaf
from tests.unit.groups.stack import save_one as saved

FLOAT = 4
MICROBATCHES, LAYERS = 3, 2
INPUT = ROWS * WIDTH * FLOAT  # of fc1
HIDDEN = 2 * INPUT  # fc1's output, which gelu saves
FATES = ("came_back_bytes", "read_here_bytes", "unread_bytes")
REASONS = ("by_plan_bytes", "no_host_bytes", "denied_bytes", "freed_first_bytes")


def trained(steps: int, names: tuple[str, ...] = ("fc1", "act"), **driver: int) -> list[StepStats]:
    """The stats of so many steps of two marked layers and three microbatches."""
    run = Driver(build_stages(1, LAYERS, names), **driver)
    found = []
    for _ in range(steps):
        run.step(gpipe(MICROBATCHES))
        found.append(PipelineOffloadManager.OFFLOAD_MGR.stats)  # type: ignore[union-attr]
    return found


def assert_adds_up(figures: Figures) -> None:
    assert figures.saved_bytes == figures.moved_bytes + figures.kept_bytes
    assert figures.kept_bytes == sum(getattr(figures, reason) for reason in REASONS)
    assert figures.moved_bytes == sum(getattr(figures, fate) for fate in FATES)
    assert figures.back_bytes == figures.came_back_bytes + figures.again_bytes
    assert min(getattr(figures, name) for name in (*REASONS, *FATES, "again_bytes")) >= 0
    both = ("came_back_bytes", "read_here_bytes")
    for name in ("saved_bytes", "moved_bytes", "by_plan_bytes", "no_host_bytes", "kept_bytes", *both):
        assert getattr(figures, name) == sum(getattr(group, name) for group in figures.groups.values()), name


@pytest.mark.usefixtures("manager")
def test_every_step_adds_up_with_the_engines_counts_and_the_total_with_the_steps() -> None:
    steps = trained(5)
    found = report()
    assert found.total.saved_bytes == 5 * MICROBATCHES * LAYERS * (INPUT + HIDDEN)
    assert found.total.moved_bytes == sum(step.spill_bytes for step in steps)
    assert found.total.back_bytes == sum(step.restore_bytes for step in steps)
    assert found.total.kept_bytes == sum(step.kept_bytes for step in steps)
    assert found.total.peak_bytes == max(step.device_bytes_peak for step in steps)
    assert found.total.steps == 5
    assert found.last is not None
    last = steps[-1]
    assert (found.last.saved_bytes, found.last.moved_bytes) == (last.saved_bytes, last.spill_bytes)
    assert last.saved_bytes == last.kept_bytes + last.spill_bytes == MICROBATCHES * LAYERS * (INPUT + HIDDEN)
    for figures in (found.total, found.last):
        assert_adds_up(figures)


@pytest.mark.usefixtures("manager")
def test_the_plans_part_is_its_margin_and_the_device_without_offload_would_hold_all_microbatches() -> None:
    trained(4)
    last = report().last
    # the last group of each name stays in the first chunk to run backward
    assert last.groups["fc1"].by_plan_bytes == INPUT
    assert last.groups["act"].by_plan_bytes == HIDDEN
    assert last.groups["fc1"].saved_bytes == MICROBATCHES * LAYERS * INPUT
    assert last.would_hold_bytes == MICROBATCHES * LAYERS * (INPUT + HIDDEN)
    assert last.peak_bytes <= last.would_hold_bytes


@pytest.mark.usefixtures("manager")
def test_as_dict_is_plain_and_has_the_figures_with_the_last_step_beside() -> None:
    steps = trained(2)
    found = json.loads(json.dumps(report().as_dict()))
    for name in ("saved_bytes", "moved_bytes", "kept_bytes", "peak_bytes", "host_bytes", "stall_ms"):
        assert name in found
        assert name in found["last_step"]
    assert found["last_step"]["moved_bytes"] == steps[-1].spill_bytes
    assert found["host_bytes"] == steps[-1].host_bytes_held
    assert found["groups"]["act"]["kept_bytes"] == report().total.groups["act"].kept_bytes
    assert found["ranks"] == {}


def test_a_report_can_begin_later_and_counts_from_there(manager: PipelineOffloadManager) -> None:
    before = trained(2)
    start = ReportStart(manager, "apply")
    after = trained(3)
    assert start.report().total.moved_bytes == sum(step.spill_bytes for step in after)
    assert start.report().total.steps == 3
    assert report().total.moved_bytes == sum(step.spill_bytes for step in [*before, *after])
    assert "\noffload report: 3 steps since apply, on a simulated link" in str(start.report())


def test_a_report_whose_manager_was_closed_says_that_its_figures_end_there() -> None:
    with installed(build_manager()) as manager:
        start = ReportStart(manager, "apply")
        trained(2)
        assert start.report().remark == ""
    found = start.report()
    assert found.total.steps == 2
    assert "the manager that they are of was closed or reset; offload.report() has those since" in str(found)


def test_what_can_never_leave_is_counted_by_reason_in_the_first_step_only(
    manager: PipelineOffloadManager,
) -> None:
    trained(3, ("norm", "act"), min_elements=ROWS * WIDTH + 1)
    stayed = report().total.groups["norm"].stayed
    # layer_norm saves its input, its weight, and mean and rstd of each row
    small = stayed["smaller than min_numel (min_offloaded_tensor_size)"]
    assert small == Stayed(
        tensors=3 * MICROBATCHES * LAYERS,
        nbytes=MICROBATCHES * LAYERS * FLOAT * (ROWS * WIDTH + 2 * ROWS),
        largest_elements=ROWS * WIDTH,
    )
    assert stayed["a parameter, or a view or a cast of one"].tensors >= MICROBATCHES * LAYERS
    last = report().last
    assert last.stayed == {}
    assert not manager.engine.hooks.observers


def test_a_tensor_marked_to_stay_is_counted_so(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    x = leaf()
    offload.mark_not_offloadable(x)
    saved(x).sum().backward()
    step_end()
    assert [*report().total.groups["a"].stayed] == ["marked not offloadable"]


def test_what_became_of_moved_bytes_adds_up_to_them_and_to_what_came_back() -> None:
    one = 64 * FLOAT  # what each saves
    with installed(build_manager(max_spilling_bytes=1)):  # one copy out at a time
        init_chunk_handler(None, None, 1)
        dropped, twice, last = (saved(leaf() * 1.0) for _ in range(3))
        del dropped
        last.sum().backward()  # its copy out is still under way
        twice.sum().backward(retain_graph=True)
        twice.sum().backward()
        step_end()
        text, found = str(report()), report().last
    assert found is not None
    assert_adds_up(found)
    assert (found.saved_bytes, found.moved_bytes) == (3 * one, 3 * one)
    assert (found.came_back_bytes, found.read_here_bytes, found.unread_bytes) == (one, one, one)
    assert (found.back_bytes, found.again_bytes) == (2 * one, one)
    rows = [line.split("  256 B")[0].rstrip() for line in text.splitlines() if "  256 B" in line]
    assert rows == [
        "    copied back",
        "    read before it left the device",
        "    not read",
        "copied back once more",
    ]


def test_bytes_without_host_memory_are_no_part_of_the_plans(caplog: pytest.LogCaptureFixture) -> None:
    with installed(build_manager(host_limit_bytes=0)):
        trained(3)
        found = report().total
    assert found.moved_bytes == 0
    assert found.no_host_bytes > 0
    assert_adds_up(found)
    assert found.denied_bytes == 0
    text = str(report())
    assert "nothing is offloaded: there is no manager" in text, "it is closed by now"


def test_bytes_that_admission_denies_are_said_so() -> None:
    with installed(build_manager(max_spilling_bytes=0)):
        trained(1)
        found = report()
    assert found.total.denied_bytes == found.total.saved_bytes > 0
    assert "Why nothing left: admission denied it, as max_spilling_bytes=0 does" in str(found)


@pytest.mark.usefixtures("manager")
def test_a_report_of_a_model_whose_tensors_are_all_small_says_why_nothing_left() -> None:
    trained(1, ("act",), min_elements=1 << 20)
    text = str(report())
    assert (
        "Why nothing left: nothing that was saved may leave; most of it is smaller than "
        "min_numel (min_offloaded_tensor_size)" in text
    )


def test_steps_without_offload_are_not_counted_but_the_stall_of_the_step_before_is(
    manager: PipelineOffloadManager,
) -> None:
    steps = trained(1)
    manager.disable_offload()
    trained(1)
    manager.enable_offload()
    steps += trained(1)
    total = report().total
    assert total.steps == 2
    assert total.saved_bytes == sum(step.saved_bytes for step in steps)


def test_a_forward_that_was_begun_again_counts_with_both_runs(manager: PipelineOffloadManager) -> None:
    for _ in range(2):  # the first is cut short, as by an exception
        manager.begin_chunk(0, 0)
        y = saved(leaf())
    y.sum().backward()
    step_end()
    last = report().last
    assert last.groups["a"].saved_bytes == last.saved_bytes == 2 * 64 * FLOAT


@pytest.mark.parametrize("cut_short", [128, 32])
@pytest.mark.usefixtures("manager")
def test_what_the_device_would_have_held_is_not_known_with_a_step_that_was_cut_short(cut_short: int) -> None:
    """The report said that a device which held 512 bytes at once would have held 256 without offload."""
    for elements, whole in ((cut_short, False), (64, True)):
        init_chunk_handler()
        y = saved(leaf(elements))
        if whole:
            y.sum().backward()
        step_end()
    found = report()
    assert (found.last.peak_bytes, found.last.would_hold_bytes) == (64 * FLOAT, 64 * FLOAT)
    assert (found.total.peak_bytes, found.total.would_hold_bytes) == (max(cut_short, 64) * FLOAT, 0)


def test_without_a_manager_the_report_is_empty_and_says_so() -> None:
    with installed(None):
        found = offload.report()
    assert found == Report(since="configure", remark=found.remark)
    assert found.last_step == {}
    assert found.as_dict()["saved_bytes"] == 0
    assert "Call offload.apply(model), or offload.configure() and marks" in str(found)


def test_gathering_communicates_and_nothing_else_does(
    manager: PipelineOffloadManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(1)
    assert [*report(gather=True).ranks] == [0], "without torch.distributed, of this process"
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        found = report(gather=True)
        assert found.ranks[0]["moved_bytes"] == found.total.moved_bytes
        assert "in all, by rank" in str(found)
        monkeypatch.setattr(dist, "all_gather_object", None)
        assert report().ranks == {}
        with pytest.raises(TypeError):
            report(gather=True)
    finally:
        dist.destroy_process_group()


def test_the_table_has_each_figure_of_the_last_step_and_of_all_steps() -> None:
    step = Figures(
        steps=1,
        saved_bytes=3_000_000_000,
        moved_bytes=2_500_000_000,
        kept_bytes=500_000_000,
        by_plan_bytes=500_000_000,
        peak_bytes=900_000_000,
        would_hold_bytes=3_000_000_000,
        over_limit_bytes=100_000_000,
        host_bytes=2_600_000_000,
        stall_ms=1.25,
        stall_count=3,
        groups={"mlp": GroupFigures(saved_bytes=3_000_000_000, moved_bytes=2_500_000_000)},
    )
    kinds = {
        "activations": KindFigures(device_bytes=900_000_000, host_bytes=2_500_000_000),
        "optimizer": KindFigures(device_bytes=6, out_bytes=7_000_000, in_bytes=8_000, stall_ms=2.25),
    }
    lines = str(
        Report(since="apply", total=step + step, last=step, kinds=kinds, device_limit_bytes=800_000_000)
    ).splitlines()
    (row,) = [line.split() for line in lines if line.startswith("saved for the backward")]
    assert row[-4:] == ["3.00", "GB", "6.00", "GB"]
    assert "    the plan keeps it" in [line[:21] for line in lines]
    text = "\n".join(lines)
    assert "beyond device_limit (800.00 MB)" in text
    (row,) = [line.split() for line in lines if line.startswith("optimizer ")]
    assert row[1:] == ["6", "B", "0", "B", "7.00", "MB", "8.00", "kB", "2.2", "ms"]
    assert "by kind" not in str(
        Report(since="apply", total=step, last=step, kinds={"activations": kinds["activations"]})
    )
    (row,) = [line.split("  ")[-2:] for line in lines if "time of the step before; waits of this one" in line]
    assert row == ["1.2 ms; 3 waits", "2.5 ms; 6 waits"]
    assert "admission denied" not in text, "a reason that held nothing is left out"


WELL = Figures(
    steps=1,
    saved_bytes=50_000_000,
    moved_bytes=40_000_000,
    kept_bytes=10_000_000,
    peak_bytes=29_000_000,
    would_hold_bytes=50_000_000,
    host_lent_bytes=40_000_000,
    stall_ms=0.2,
    step_ms=200.0,
    groups={"layer": GroupFigures(saved_bytes=50_000_000)},
)

CHANGES = {
    "nothing": (WELL, "next: nothing; a lower device_limit"),
    "the host is short": (
        replace(WELL, no_host_bytes=5_000_001, over_limit_bytes=1, stall_ms=90.0),
        "next: 5.00 MB found no host memory; give apply host_reserve='45.01 MB', and no smaller host_limit",
    ),
    "the limit is passed": (
        replace(WELL, over_limit_bytes=2_000_000, stall_ms=90.0),
        "next: 2.00 MB at once beyond device_limit (27.00 MB); raise device_limit, or mark smaller groups",
    ),
    "stalls": (replace(WELL, stall_ms=10.0), "next: more leaves than can be copied beside compute; raise"),
    "no gain": (
        replace(WELL, peak_bytes=50_000_000),
        "next: as much was on the device as if nothing had left; set a lower device_limit",
    ),
}


@pytest.mark.parametrize("cause", CHANGES)
def test_a_report_begins_with_what_left_what_stalls_for_it_and_the_next_change(cause: str) -> None:
    """A report said what had moved, and not whether it was worth it: no time of a step, no share of it that
    was waited, no advice."""
    step, change = CHANGES[cause]
    found = Report(since="apply", total=step, last=step, device_limit_bytes=27_000_000)
    first, second, empty, title = str(found).splitlines()[:4]
    share = {"nothing": "0.1%", "no gain": "0.1%", "stalls": "5.0%"}.get(cause, "45.0%")
    held = (
        "50.00 MB at once instead of 50.00 MB (100%)"
        if cause == "no gain"
        else ("29.00 MB at once instead of 50.00 MB (58%)")
    )
    assert first == (
        f"offload: saved tensors at most {held}, 40.00 MB moved; stalls {share} of a step of 200.0 ms"
    )
    assert second.startswith(change)
    assert (empty, title) == ("", "offload report: 1 step since apply")
    assert found.as_dict()["verdict"] == found.verdict == f"{first}\n{second}"


def test_the_change_in_mode_auto_is_of_its_total_and_not_of_a_limit_that_nobody_set() -> None:
    last = replace(WELL, over_limit_bytes=2_000_000)
    found = Report(
        since="apply", total=last, last=last, device_limit_bytes=27_000_000, device_limit_by="auto"
    )
    _, second = found.verdict.splitlines()
    assert second.startswith(
        "next: 2.00 MB at once beyond what device_total leaves (27.00 MB); raise device_total"
    )


def test_a_plan_of_auto_that_stalls_is_given_a_larger_total_and_no_other_mode() -> None:
    last = replace(WELL, stall_ms=90.0)
    found = Report(since="apply", total=last, last=last, device_limit_bytes=1, device_limit_by="auto")
    assert found.verdict.endswith("beside compute; raise device_total; explain() has what that saves")


def test_a_step_in_which_nothing_left_any_more_says_why() -> None:
    last = replace(WELL, moved_bytes=0, kept_bytes=50_000_000, by_plan_bytes=50_000_000)
    _, second = Report(since="apply", total=WELL + last, last=last).verdict.splitlines()
    assert second.startswith("Why nothing left in the last step: the plan kept it")


def test_an_optimizers_state_alone_that_moves_is_said_and_logged(tmp_path: Path) -> None:
    """Once "Why nothing left: no group was committed", and no figures for a trainer's log."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    handle = offload.apply(model, optimizer=optimizer)
    try:
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        moved = handle.report().kinds["optimizer"].out_bytes
        assert step_figures(handle)["offload/to_host_bytes"] == moved > 0
        assert handle.report().verdict.startswith("offload: optimizer: 33.28 kB on the device")
        assert "mode=False, as it was asked: no saved tensor of Linear leaves" in str(handle.report())
        handle.report().save(tmp_path / "a.html")
        page = (tmp_path / "a.html").read_text()
        assert "Optimizer: 33.28 kB on the device, 33.28 kB on the host" in page
        assert "Saved tensors on the device, at most" not in page  # a card of 0 B
    finally:
        handle.remove()
        PipelineOffloadManager.close_instance()


@pytest.mark.usefixtures("manager")
def test_a_verdict_on_the_simulated_device_says_what_its_times_are_and_has_no_share_at_first() -> None:
    assert report().verdict.startswith("offload: no step with offload has ended yet\nnext: run a step")
    trained(1)
    first = report().verdict.splitlines()[0]
    assert first.endswith("moved; stalls known a step later")
    trained(1)
    text = str(report())
    assert re.search(r"; stalls \d+\.\d% of a step of [\d,]+\.\d ms\n", text)
    assert "on a simulated link (stalls are its copies', a step's time is the host's)" in text


def test_a_stall_is_a_share_of_the_step_that_it_is_of(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stalls are read a step late. So is the time of their step, from end to end on the host's clock. A step
    without offload, as the arms of a comparison have in between, is none that a stall is a share of."""
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    start = ReportStart(manager, "apply")
    trained(1)  # the clock begins at its end
    times = []
    for took_s, on in ((2.0, True), (3.0, True), (5.0, True), (7.0, True), (11.0, False), (13.0, True)):
        now_s += took_s
        (manager.enable_offload if on else manager.disable_offload)()
        trained(1)
        last = start.report().last
        times.append(last.step_ms)
    assert times[1:] == [2_000.0, 3_000.0, 5_000.0, 7_000.0, 7_000.0]
    assert start.report().total.step_ms == pytest.approx(times[0] + 28_000.0)
    assert ReportStart(manager, "now").report().total.step_ms == 0.0


def test_bytes_that_continued_to_the_disk_have_rows_of_their_own(tmp_path: Path) -> None:
    assert "disk" not in str(Report(since="apply", total=Figures(steps=1), last=Figures(steps=1)))
    with installed(build_manager(disk_directory=str(tmp_path))):
        (stats,) = trained(1)
        found = report()
    assert found.total.disk_out_bytes == stats.disk_write_bytes
    assert found.total.disk_back_bytes == stats.disk_read_bytes
    assert found.total.disk_bytes == stats.disk_bytes_peak
    figures = Figures(steps=1, disk_out_bytes=5_000_000, disk_back_bytes=4_000_000, disk_blocked_ms=2.5)
    text = str(Report(since="apply", total=figures, last=figures))
    for said in ("written to the disk", "  read back", "  the host was blocked", "5.00 MB", "2.5 ms"):
        assert said in text


def test_levels_take_the_larger_of_two_steps_and_counts_their_sum() -> None:
    one, other = Figures(steps=1, saved_bytes=3, peak_bytes=5), Figures(steps=1, saved_bytes=4, peak_bytes=2)
    assert (one + other).saved_bytes == 7
    assert (one + other).peak_bytes == 5
    assert {field.name for field in fields(Figures)} >= {"would_hold_bytes", "stall_ms"}


def test_the_first_steps_stall_is_of_before_the_point_in_time() -> None:
    ledger = Ledger()
    for ms in (5.0, 1.0, 2.0):
        kinds = {"activations": KindFigures(stall_ms=ms)}
        ledger.add(Figures(steps=1, stall_ms=ms, step_ms=10 * ms, kinds=kinds))
    assert ledger.total.stall_ms == ledger.total.kinds["activations"].stall_ms == 3.0
    assert ledger.total.step_ms == 30.0, "so a share is of the same steps"


def test_a_wrapper_subclass_is_looked_at_inside() -> None:
    """Its members are what stays or leaves."""
    nested = torch.nested.nested_tensor(
        [torch.randn(3, 4), torch.randn(5, 4)], layout=torch.jagged, requires_grad=True
    )
    with installed(build_manager()):
        init_chunk_handler(None, None, 1)
        saved(nested * 1.0).values().sum().backward()
        step_end()
        stayed = report().total.groups["a"].stayed
    assert sum(one.tensors for one in stayed.values()) >= 1


@pytest.mark.parametrize(
    "what",
    [{"mode": "checkpoint"}, {"gradients": "host"}, {"mode": "watermark", "high": "1MB"}],
    ids=["checkpoint", "gradients", "watermark"],
)
def test_the_close_look_ends_with_the_first_step_where_no_group_begins(
    what: dict[str, Any], manager: PipelineOffloadManager
) -> None:
    """It went on for the whole run, and every save was judged twice."""
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters())
    with offload.apply(model, **what):
        for _ in range(2):
            looked = bool(manager.engine.hooks.observers)
            model(torch.ones(1, 1024)).sum().backward()
            optimizer.step()
    assert looked is bool(manager.engine.hooks.observers) is False
