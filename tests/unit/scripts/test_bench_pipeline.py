"""The pipeline benchmark's arithmetic and its launchers; tests/integration/test_bench_pipeline.py runs all of
it over two ranks."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import bench_pipeline
from offload.policy.actions import Rates, one_f_one_b
from parallel.launch import Ranks
from pipelines import report
from pipelines.bounds import compare_rates, compute_seconds, rates_of
from pipelines.launches import Ending, Launcher
from pipelines.memory import BlockFacts, most_layers, need_lines, need_of
from pipelines.record import Run
from pipelines.requests import JobShape, Request, RowRequest, rows_of
from pipelines.rows import delta_of
from pipelines.sets import after_set, within_budget
from pipelines.worker import OUT_OF_MEMORY, complete

TWO, ALONE = Ranks(0, 2, 0, 2), Ranks(0, 1, 0, 1)
GB = 10**9
FACTS: dict[str, Any] = {
    "usable_bytes": 100 * GB,
    "parameters": 250_000_000,
    "saved_bytes": 2 * GB,
    "working_bytes": GB,
    "output_bytes": GB // 10,
    "forward_ms": 10.0,
    "backward_ms": 20.0,
    "groups": {
        "core_attn": {"nbytes": GB, "movable_bytes": GB},
        "mlp_act": {"nbytes": GB, "movable_bytes": GB},
    },
}
BLOCK = BlockFacts.from_json(FACTS)


# -- what is asked for ---------------------------------------------------------------------------------------


def test_rows_come_in_the_order_of_their_value() -> None:
    rows = rows_of(
        ["1f1b", "zbv"], ["nothing", "ours", "attention", "delta"], [30 * GB, 15 * GB], verify=True
    )
    assert [row.label for row in rows] == [
        "links",
        "1f1b nothing",
        "1f1b ours 30 GB",
        "1f1b attention",
        "1f1b verify",
        "zbv verify",
        "1f1b delta",
        "zbv ours 30 GB",
        "1f1b ours 15 GB",
        "zbv nothing",
        "zbv attention",
    ]


def test_rows_that_were_not_asked_for_are_left_out_but_the_link_is_always_measured() -> None:
    assert [row.kind for row in rows_of(["1f1b"], ["ours"], [GB], verify=False)] == ["links", "ours"]
    assert [row.kind for row in rows_of(["1f1b"], [], [], verify=True)] == ["links", "verify"]


def test_request_survives_json() -> None:
    request = bench_pipeline.request_of(
        bench_pipeline.parse(["--budget-s", "100", "--layers", "6"], TWO), TWO, began=1000.0
    )
    assert Request.from_json(request.to_json()) == request
    assert request.deadline == 1100.0
    assert request.host_limit_bytes == 220 * GB
    assert request.shape.layers == 6
    assert request.shape.microbatches == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--schedules", "chimera"], "no schedule is called 'chimera'"),
        (["--schedules", ","], "--schedules is empty"),
        (["--rows", "ours,theirs"], "--rows theirs: known are nothing, ours, attention, delta"),
        (["--layers", "7"], "--layers 7 cannot be cut into the 2 virtual stages of interleaved1f1b"),
        (["--microbatches", "3"], "dualpipev needs a microbatch for every stage: 3 for 4 stages"),
        (["--samples", "0"], "--samples is 0; it must be at least 1"),
        (["--budget-s", "soon"], "invalid float value: 'soon'"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(arguments: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        bench_pipeline.parse(arguments, TWO)


def test_shape_and_limits_that_were_left_open_come_from_the_figures_of_a_block() -> None:
    rows = list(rows_of(["1f1b", "zbv"], ["ours"], [], verify=False))
    done, shape = complete(rows, JobShape(microbatches=4), BLOCK, 2)
    assert shape.layers == most_layers(BLOCK, live=2, optimizer_bytes=12, multiple=2) == 10
    # of 2 microbatches x 10 layers x 2 GB
    assert [row.saved_limit_bytes for row in done] == [None, 20 * GB, 20 * GB, 10 * GB]
    again, same = complete(done, shape, BLOCK, 2)
    assert (again, same) == (done, shape)


# -- memory --------------------------------------------------------------------------------------------------


def test_need_is_the_sum_of_its_parts() -> None:
    need = need_of(BLOCK, layers=10, live=2, optimizer_bytes=12)
    assert need.resident_bytes == 10 * 250_000_000 * 16
    assert need.saved_bytes == 2 * 10 * 2 * GB
    assert need.working_bytes == GB + 6 * GB // 10
    assert need.total_bytes == 81_600_000_000


def test_most_layers_is_the_last_multiple_that_fits() -> None:
    layers = most_layers(BLOCK, live=2, optimizer_bytes=12, multiple=2)
    fits, too_much = (
        need_of(BLOCK, layers=count, live=2, optimizer_bytes=12).total_bytes for count in (layers, layers + 2)
    )
    assert fits <= 0.97 * BLOCK.usable_bytes < too_much
    assert layers % 2 == 0
    small = BlockFacts.from_json(FACTS | {"usable_bytes": 1})
    assert most_layers(small, live=2, optimizer_bytes=12, multiple=2) == 2


def test_calculation_is_printed_with_its_parts() -> None:
    need = need_of(BLOCK, layers=10, live=2, optimizer_bytes=12)
    text = "\n".join(need_lines(BLOCK, need, sequence=8192, optimizer_bytes=12, ranks=2, microbatches=4))
    assert (
        "250.0 M parameters x (2 weight + 2 gradient + 12 optimizer) = 4.000 GB; saves 2.000 GB a microbatch"
        in text
    )
    assert (
        "resident 40.0 + saved 40.0 + working set, sent and received 1.6 = 81.6 GB of 100.0 usable (81.6%)"
        in text
    )
    assert "1f1b needs 1.50 s a step at least (4 + 1 slots)" in text


# -- balance -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peaks", "delta"),
    [([40, 10], 30), ([40, 30, 20, 10], 10), ([40, 99, 99, 11], 9), ([10, 40], 0), ([10, 10], 0)],
)
def test_delta_lifts_the_last_rank_to_the_first(peaks: list[float], delta: int) -> None:
    assert delta_of(peaks) == delta


# -- bounds --------------------------------------------------------------------------------------------------


def test_shared_rates_cost_time_and_a_plan_is_never_below_its_bound() -> None:
    pytest.importorskip("scipy")
    actions = one_f_one_b(0, 2, 4)
    compute_s = compute_seconds(actions, BLOCK, 4, None)
    assert compute_s == [4 * (0.010 if action.kind == "F" else 0.020) for action in actions]
    lone = rates_of({"d2h": 50e9, "h2d": 50e9, "duplex_d2h": 50e9, "duplex_h2d": 50e9})
    shared = Rates(d2h_bytes_per_s=20e9, h2d_bytes_per_s=20e9, duplex_bytes_per_s=30e9)
    found = compare_rates(actions, compute_s, BLOCK, 4, 4 * GB, lone, shared)
    assert found["compute_ms"] == pytest.approx(480)
    assert found["compute_ms"] <= found["bound_lone_ms"] < found["bound_shared_ms"]
    for name in ("lone", "shared"):
        assert found[f"plan_{name}_ms"] >= found[f"bound_{name}_ms"] * (1 - 1e-6)
    assert found["plan_lone_on_shared_ms"] >= found["bound_shared_ms"] * (1 - 1e-6)


def test_measured_times_replace_those_of_a_block_by_action() -> None:
    actions = one_f_one_b(1, 2, 1)
    assert compute_seconds(actions, BLOCK, 1, {"1F0": 0.5}) == [0.5, 0.020]


# -- the report ----------------------------------------------------------------------------------------------


def rank_of(walls_ms: list[float], active: int, **more: Any) -> dict[str, Any]:
    engine = {
        "device_bytes_peak": 5 * GB,
        "host_bytes_held": 12 * GB,
        "host_bytes_lent_peak": 10 * GB,
        "stall_ms": 7.0,
        "spill_bytes": 20 * GB,
        "restore_bytes": 19 * GB,
        "refused_bytes": 0,
    }
    timed = {
        "first_ms": 500.0,
        "walls_ms": walls_ms,
        "active_bytes": active,
        "reserved_bytes": active + GB,
        "action_ms": [100.0, 200.0],
        "engine": engine,
    }
    return timed | more


def row_of(kind: str, ranks: list[dict[str, Any]], schedule: str = "1f1b", **more: Any) -> dict[str, Any]:
    row = {"kind": kind, "schedule": schedule, "saved_limit_bytes": None, "limit_share": None}
    return {"row": row, "label": f"{schedule} {kind}", "status": "ok", "ranks": ranks, "row_s": 1.0} | more


def test_a_step_is_as_long_as_its_slowest_rank_and_ratios_are_to_rows_of_this_run() -> None:
    nothing = row_of(
        "nothing", [rank_of([100, 90], 100 * GB, engine={}), rank_of([80, 100], 50 * GB, engine={})]
    )
    reserved = [{"reserve_bytes": nbytes * GB, "reserve_ms": 1000.0 * nbytes} for nbytes in (3, 2)]
    ours = row_of(
        "ours", [rank_of([125, 120], 60 * GB, **reserved[0]), rank_of([110, 125], 50 * GB, **reserved[1])]
    )
    other = row_of("ours", [rank_of([200, 200], 60 * GB), rank_of([200, 200], 60 * GB)], schedule="zbv")
    full = row_of(
        "nothing",
        [],
        schedule="zbv",
        status="out of memory",
        reason="rank 0: out of memory with 139.0 GB active",
    )
    lines = "\n".join(report.steps_lines([nothing, ours, other, full], tokens=1000)).splitlines()
    cells = {line.split("  ")[0]: line.split() for line in lines}
    assert (
        "1f1b ours: first step 500 ms; 3.0 + 2.0 GB pinned before it, and the link measured, in 3.0 s"
        in lines
    )
    assert cells["1f1b nothing"][2:7] == ["100", "100..100", "10,000", "1.000", "1.000"]
    assert cells["1f1b ours"][2:7] == ["125", "125..125", "8,000", "1.250", "1.250"]
    assert cells["zbv ours"][2:7] == ["200", "200..200", "5,000", "-", "2.000"]
    assert cells["1f1b ours"][7:] == [
        "0",
        "300",
        "60.00",
        "61.00",
        "1.017",
        "5.00",
        "12.00",
        "1.200",
        "7",
        "20.00",
        "19.00",
        "0.00",
    ]
    assert cells["zbv nothing"][2:] == ["out", "of", "memory"]
    assert "zbv nothing: out of memory: rank 0: out of memory with 139.0 GB active" in lines


@pytest.mark.parametrize(("after", "said"), [([40, 38], "flatter; "), ([40, 20], "NOT FLATTER")])
def test_balance_says_whether_peaks_became_flatter(after: list[int], said: str) -> None:
    ranks = [
        rank_of(
            [100],
            new * GB,
            balanced_bytes=new * GB,
            delta_bytes=20 * GB,
            before=rank_of([90], old * GB, balanced_bytes=old * GB),
        )
        for old, new in zip([40, 20], after, strict=True)
    ]
    text = "\n".join(report.delta_lines(row_of("delta", ranks)))
    assert said in text
    assert "delta_offload_bytes_across_pp_ranks 20,000,000,000" in text
    assert "step 90 ms before, 100 ms after" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "bitwise equal on every rank: 9+9 tensors in 5 steps, 3+3 saved tensors left"),
        (
            {"num_wrong": 1, "wrong": ["step 2: stage 1 stack.blocks.0.q.weight"]},
            "DIFFERENT in 1 tensors, first step 2: stage 1",
        ),
        ({"left": 0}, "PROVES NOTHING: no tensor left rank 1"),
        ({"repeatable": False}, "NOT COMPARABLE: without offload two steps differ on rank 1"),
    ],
)
def test_verdict_is_good_only_if_something_left_and_nothing_differs(
    change: dict[str, Any], said: str
) -> None:
    good = {"tensors": 9, "steps": 5, "wrong": [], "num_wrong": 0, "left": 3, "repeatable": True}
    result = row_of("verify", [good, good | change])
    assert said in report.verify_lines([result])[0]
    assert report.equal_gradients(result) == (not change)


# -- launchers -----------------------------------------------------------------------------------------------


def launched_pair(folder: Path, first: str, second: str, *, silence_s: float = 30.0) -> list[Ending]:
    """Two launchers, each on a thread, each with a little program; what the first learns of both."""
    store = dist.HashStore()
    found: dict[int, list[Ending]] = {}

    def launch(rank: int, program: str) -> None:
        launcher = Launcher(Ranks(rank, 2, rank, 2), store, folder, silence_s=silence_s)
        found[rank] = launcher.run("set0", [sys.executable, "-c", textwrap.dedent(program)], dict(os.environ))

    threads = [
        threading.Thread(target=launch, args=(rank, program)) for rank, program in enumerate((first, second))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    return found[0]


HANGS = "import time; time.sleep(600)"


def test_good_ends_are_told_to_the_first_launcher(tmp_path: Path) -> None:
    endings = launched_pair(tmp_path, "pass", "pass")
    assert endings == [Ending(code=0), Ending(code=0)]


def test_process_that_fails_ends_the_one_that_waits_for_it(tmp_path: Path) -> None:
    failure = {
        "out_of_memory": True,
        "reason": "OutOfMemoryError: tried",
        "active_bytes": 139 * GB,
        "reserved_bytes": 140 * GB,
    }
    fails = f"""
        import json, pathlib, sys
        pathlib.Path({str(tmp_path / "failure-set0-1.json")!r}).write_text({json.dumps(failure)!r})
        sys.exit({OUT_OF_MEMORY})
    """
    endings = launched_pair(tmp_path, HANGS, fails)
    assert endings[1] == Ending(code=OUT_OF_MEMORY, reason="OutOfMemoryError: tried", failure=failure)
    assert endings[0].reason == "ended because another rank had failed"
    assert not endings[0].ended_by_itself


def test_process_that_is_killed_says_its_last_word_and_ends_the_other(tmp_path: Path) -> None:
    dies = "import os, sys; sys.stderr.write('almost there\\n'); sys.stderr.flush(); os.kill(os.getpid(), 9)"
    endings = launched_pair(tmp_path, dies, HANGS)
    assert endings[0] == Ending(code=-9, reason="ended with -9: almost there", said="almost there")
    assert endings[1].code == -9


def test_silence_ends_a_process_and_a_sign_of_life_puts_it_off(tmp_path: Path) -> None:
    signs = tmp_path / "signs-set0-0.txt"
    shows_life = (
        f"import time\nfor n in range(4):\n    time.sleep(0.5)\n    open({str(signs)!r}, "
        "'a').write('x')\ntime.sleep(600)"
    )
    endings = launched_pair(tmp_path, shows_life, "pass", silence_s=1.5)
    assert endings[0].reason == "ended after 2 s without a sign of life"
    assert endings[1].code == 0
    assert signs.read_text() == "xxxx", "the last came later than one silence after the start"


# -- sets of processes ---------------------------------------------------------------------------------------


def run_of(rows: tuple[RowRequest, ...], deadline: float | None = None) -> Run:
    shape = JobShape(layers=2, microbatches=4)
    request = Request(
        rows=rows, shape=shape, device="cpu", host_limit_bytes=GB, timeout_s=1.0, deadline=deadline
    )
    return Run(request, TWO, "torchrun", began=0.0)


def test_row_that_filled_a_device_is_told_and_the_rest_goes_on_in_a_new_set() -> None:
    rows = (RowRequest(kind="links"), RowRequest(kind="nothing"), RowRequest(kind="attention"))
    run = run_of(rows)
    full = {
        "out_of_memory": True,
        "reason": "OutOfMemoryError",
        "active_bytes": 139 * GB,
        "reserved_bytes": 140 * GB,
    }
    endings = [
        Ending(code=OUT_OF_MEMORY, reason="OutOfMemoryError", failure=full),
        Ending(code=-9, reason="ended because another failed"),
    ]
    assert after_set(run, list(rows), endings, taken=1) == [rows[2]]
    told = run.results[-1]
    assert (told["label"], told["status"]) == ("1f1b nothing", "out of memory")
    assert told["reason"] == "rank 0: out of memory with 139.0 GB active, 140.0 GB reserved"


def test_set_of_the_rows_that_are_left_runs_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stage a rank could have a layer more than two; what is left after a failure must not decide it
    anew."""
    rows = rows_of(["1f1b", "zbv"], ["nothing", "ours"], [], verify=False)
    request = Request(
        rows=rows, shape=JobShape(microbatches=4), device="cpu", host_limit_bytes=GB, timeout_s=1.0
    )
    run = Run(request, TWO, "torchrun", began=0.0)
    monkeypatch.setattr(Run, "facts", {"block": FACTS | {"usable_bytes": 95 * GB}})
    only_1f1b = [row for row in rows if row.schedule == "1f1b"]
    assert complete(only_1f1b, request.shape, run._block, 2)[1].layers == 11
    assert run.shape.layers == 10
    assert [row.saved_limit_bytes for row in run.completed(only_1f1b) if row.kind == "ours"] == [
        20 * GB,
        10 * GB,
    ]


def test_failed_row_blames_the_rank_that_ended_by_itself() -> None:
    rows = (RowRequest(kind="nothing"), RowRequest(kind="attention"))
    run = run_of(rows)
    endings = [
        Ending(code=-9, reason="ended because another rank had failed"),
        Ending(code=1, reason="ValueError: no"),
    ]
    assert after_set(run, list(rows), endings, taken=0) == [rows[1]]
    assert (run.results[-1]["status"], run.results[-1]["reason"]) == ("failed", "rank 1: ValueError: no")


def test_warnings_of_a_set_that_ended_well_are_repeated_once_each() -> None:
    run = run_of((RowRequest(kind="nothing"),))
    endings = [Ending(code=0), Ending(code=0, said="cannot grow\ncannot grow\nlate")]
    assert after_set(run, [RowRequest(kind="nothing")], endings, taken=1) == []
    assert run.notes == ["rank 1 said: cannot grow", "rank 1 said: late"]


def test_without_the_links_figures_no_other_row_is_tried() -> None:
    rows = (RowRequest(kind="links"), RowRequest(kind="nothing"))
    run = run_of(rows)
    assert (
        after_set(
            run, list(rows), [Ending(code=1, reason="no NCCL"), Ending(code=1, reason="no NCCL")], taken=0
        )
        == []
    )
    assert run.notes == ["without the link's rates and the block's figures no other row can run"]


def test_rows_after_the_budget_are_told_and_no_set_is_started_for_them() -> None:
    rows = (RowRequest(kind="nothing"), RowRequest(kind="attention"))
    run = run_of(rows, deadline=time.time() - 1)
    assert within_budget(run, list(rows)) == []
    assert [result["status"] for result in run.results] == ["not run", "not run"]
    assert within_budget(run_of(rows, deadline=time.time() + 60), list(rows)) == list(rows)


def test_alone_there_is_a_pipeline_of_one_rank() -> None:
    args = bench_pipeline.parse(["--schedules", "1f1b"], ALONE)
    assert args.microbatches == 2
