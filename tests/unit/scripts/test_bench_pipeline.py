"""The pipeline benchmark's arithmetic; tests/integration/test_bench_pipeline.py runs all of
it over two ranks."""

from __future__ import annotations

import json
import pickle
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import bench.run
import bench_pipeline
from pipelines import child, report
from pipelines.memory import BlockFacts, most_layers, need_lines, need_of
from pipelines.requests import JobShape, complete, rows_of

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
BLOCK = BlockFacts(**FACTS)


# -- what is asked for ---------------------------------------------------------------------------------------


def test_rows_come_in_the_order_of_their_value() -> None:
    kinds = ["nothing", "ours", "weights"]
    rows = rows_of(["1f1b", "zbv"], kinds, [30 * GB, 15 * GB], verify=True)
    assert [row.label for row in rows] == [
        "links",
        "1f1b nothing",
        "1f1b ours 30 GB",
        "1f1b weights",
        "1f1b verify",
        "zbv verify",
        "zbv ours 30 GB",
        "1f1b ours 15 GB",
        "zbv nothing",
        "zbv weights",
    ]
    assert {row.streamed for row in rows if row.kind == "verify"} == {("weights",)}


def test_a_total_is_a_row_of_mode_auto_for_each_schedule() -> None:
    rows = rows_of(["1f1b", "zbv"], ["auto"], [], verify=False, totals_bytes=[100 * GB])
    assert [row.label for row in rows] == ["links", "1f1b auto 100 GB", "zbv auto 100 GB"]


def test_rows_that_were_not_asked_for_are_left_out_but_the_link_is_always_measured() -> None:
    assert [row.kind for row in rows_of(["1f1b"], ["ours"], [GB], verify=False)] == ["links", "ours"]
    assert [row.kind for row in rows_of(["1f1b"], [], [], verify=True)] == ["links", "verify"]


def test_request_has_what_the_command_line_says() -> None:
    request = bench_pipeline.request_of(bench_pipeline.parse(["--ranks", "2", "--layers", "6"]))
    assert request.host_limit_bytes == 220 * GB
    assert (request.shape.layers, request.shape.microbatches) == (6, 4)
    assert pickle.loads(pickle.dumps(request)) == request


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--schedules", "chimera"], "no schedule is called 'chimera'"),
        (["--schedules", ","], "--schedules is empty"),
        (
            ["--rows", "ours,theirs"],
            "--rows theirs: known are nothing, ours, weights, auto",
        ),
        (["--rows", "auto"], "a row of mode auto needs both: --rows auto and --device-total-gb 120, say"),
        (["--layers", "7"], "--layers 7 cannot be cut into the 2 virtual stages of interleaved1f1b"),
        (["--microbatches", "3"], "dualpipev needs a microbatch for every stage: 3 for 4 stages"),
        (["--rows", "weights", "--layers", "6"], "under interleaved1f1b --layers 8 at least, not 6"),
        (["--one-launch", "--isolate"], "--one-launch and --isolate exclude each other"),
        (["--samples", "0"], "--samples is 0; it must be at least 1"),
        (["--budget-s", "soon"], "invalid float value: 'soon'"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(arguments: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        bench_pipeline.parse(["--ranks", "2", *arguments])


def test_shape_and_limits_that_were_left_open_come_from_the_figures_of_a_block() -> None:
    rows = rows_of(["1f1b", "zbv"], ["ours"], [], verify=False)
    done, shape = complete(rows, JobShape(microbatches=4), BLOCK, 2)
    assert shape.layers == most_layers(BLOCK, live=2, optimizer_bytes=12, multiple=2) == 10
    # of 2 microbatches x 10 layers x 2 GB
    assert [row.saved_limit_bytes for row in done] == [None, 20 * GB, 20 * GB, 10 * GB]
    assert complete(done, shape, BLOCK, 2) == (done, shape)


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
    small = BlockFacts(**(FACTS | {"usable_bytes": 1}))
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {},
            "bitwise equal on every rank: 9+9 tensors in 5 steps, 3+3 saved tensors left, "
            "14.0 MB came in those of weights",
        ),
        (
            {"num_wrong": 1, "wrong": ["step 2: stage 1 stack.blocks.0.q.weight"]},
            "DIFFERENT in 1 tensors, first step 2: stage 1",
        ),
        ({"left": 0}, "PROVES NOTHING: no tensor left rank 1"),
        ({"came": {"weights": 0}}, "PROVES NOTHING: no weight came to rank 1 with weights"),
        ({"repeatable": False}, "NOT COMPARABLE: without offload two steps differ on rank 1"),
    ],
)
def test_verdict_is_good_only_if_something_left_and_nothing_differs(
    change: dict[str, Any], said: str
) -> None:
    good = {"tensors": 9, "steps": 5, "wrong": [], "num_wrong": 0, "left": 3, "repeatable": True}
    good["came"] = {"weights": 7 * 10**6}
    result = row_of("verify", [good, good | change])
    assert said in report.verify_lines([result])[0]
    assert report.equal_gradients(result) == (not change)


def test_what_streams_and_what_a_plan_said_stand_beside_what_was_measured() -> None:
    weights = {name: 1 for name in ("blocks", "kept_blocks", "hits", "misses")}
    weights |= {name: GB for name in ("limit_bytes", "streamed_bytes", "in_bytes", "out_bytes")}
    stages = [weights | {"stall_ms": 1.5}, weights | {"stall_ms": 2}]
    streamed = row_of("weights", [rank_of([100], GB, weights=stages)])
    explained = {"predicted_ms": 290.04, "explained": "settled", "warmup": 14}
    auto = row_of("auto", [rank_of([310, 312, 311], GB, **explained)])
    lines = report.steps_lines([streamed, auto], tokens=1000)
    assert (
        "1f1b weights, rank 0: at most 2.00 of 2.00 GB of weights on the device, 2 of 2 blocks "
        "stay; a step: 2.00 GB in, 2.00 out, 2 of 4 uses not foretold, compute waited 3.5 ms"
    ) in lines
    assert (
        "1f1b auto, rank 0, after 14 steps: the plan's step 290.0 ms, measured 311.0, its actions 300.0"
        in lines
    )


def test_an_all_reduce_is_printed_alone_and_beside_copies() -> None:
    sums = {
        "nbytes": 268 * 10**6,
        "alone": 300e9,
        "beside_copies": 290e9,
        "copies_d2h": 44e9,
        "copies_h2d": 45e9,
    }
    lines = report.link_lines({"ranks": [{"rates": [], "sums": sums}, {"sums": sums | {"alone": 301e9}}]})
    assert lines[-1] == (
        "  an all-reduce of 268 MB over all ranks, bus GB/s on each: alone 300.0 301.0; beside copies both "
        "ways on every rank 290.0 290.0; the copies beside it: out 44.0 44.0, back 45.0 45.0"
    )


# -- failures ------------------------------------------------------------------------------------------------


def test_a_launch_that_failed_has_the_reason_of_the_rank_whose_device_was_full(tmp_path: Path) -> None:
    died = {"status": "failed", "reason": "process ended with 1: ====="}
    assert child.with_failures(died, tmp_path) == died
    lost = {"status": "failed", "reason": "rank 0: connection closed by peer", "at": 1.0}
    full = {"status": "out of memory", "reason": "rank 1: out of memory with 139.0 GB active", "at": 2.0}
    for rank, failure in enumerate((lost, full)):
        (tmp_path / f"failure-{rank}.json").write_text(json.dumps(failure))
    found = child.with_failures(died, tmp_path)
    assert (found["status"], found["reason"]) == (full["status"], full["reason"])
    assert child.with_failures({"status": "ok"}, tmp_path) == {"status": "ok"}


@pytest.mark.parametrize("how", ["--one-launch", "--isolate"])
def test_rows_behind_one_that_fills_a_device_are_launched_again(tmp_path: Path, how: str) -> None:
    launches: list[tuple[list[str], float]] = []

    def launch(command: list[str], *, timeout: float, **_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[-1])
        rows = pickle.loads((folder / "request.pickle").read_bytes()).rows
        launches.append(([row.label for row in rows], timeout))
        for number, row in enumerate(rows):
            if row.kind == "weights":
                full = {"status": "out of memory", "reason": "rank 1: full", "at": 1.0}
                (folder / "failure-1.json").write_text(json.dumps(full))
                return subprocess.CompletedProcess(command, 1, "", "=====")
            links = {"block": FACTS, "rates": [], "hardware": bench.run.hardware()}
            ranks = [links if row.kind == "links" else rank_of([100.0], GB)]
            found = row_of(row.kind, ranks, row=asdict(row), label=row.label)
            (folder / f"row-{number:03d}.json").write_text(json.dumps(found))
        (folder / "result.json").write_text(json.dumps({"status": "ok"}))
        return subprocess.CompletedProcess(command, 0, "", "")

    out = tmp_path / "out.json"
    options = ["--tiny", how, "--schedules", "1f1b,zbv", "--rows", "nothing,weights"]
    with patch.object(bench.run, "run_shown", launch):
        assert bench_pipeline.main([*options, "--row-timeout-s", "100", "--out", str(out)]) == 0
    all_rows = ["1f1b nothing", "1f1b weights", "zbv nothing", "zbv weights"]
    together = [(all_rows, 400), (all_rows[2:], 200)]
    apart = [([row], 100) for row in all_rows]
    assert launches == [(["links"], 100), *(together if how == "--one-launch" else apart)]
    found = [(each["label"], each["status"]) for each in json.loads(out.read_text())["results"]]
    status = ["ok", "ok", "out of memory", "ok", "out of memory"]
    assert found == list(zip(["links", *all_rows], status, strict=True))
