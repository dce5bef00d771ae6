"""The micro benchmark's arithmetic: what belongs to a tensor, to its group, to Python's collector."""

from __future__ import annotations

import gc

import pytest
import torch

import bench_stage
from bench.measure import Collector
from bench.micro import _cost_of, _StepCost


def step(few_us: float, many_us: float, collector_s: float = 0.0, full: int = 0) -> _StepCost:
    return _StepCost({4: few_us, 32: many_us}, {4: 2 * few_us, 32: 2 * many_us}, collector_s, full)


@pytest.mark.req("S3-93")
def test_tiny_micro_prints_a_line_for_each_case_and_number_of_live_tensors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    threads, listening = torch.get_num_threads(), list(gc.callbacks)
    try:
        assert bench_stage.main(["--tiny", "--micro", "--live", "8,16"]) == 0
    finally:
        torch.set_num_threads(threads)
    assert gc.callbacks == listening, "as they were before"
    lines = capsys.readouterr().out.splitlines()
    cases = [line for line in lines if " live: " in line]
    assert [line.split()[:2] for line in cases] == [
        [case, n] for n in ("8", "16") for case in ("small", "kept", "moved")
    ]
    assert ["over them" in line for line in cases] == [False, False, True] * 2
    assert [" 0% left" in line for line in cases] == [True, True, False] * 2


def test_collections_are_counted_while_it_is_entered_and_no_longer() -> None:
    with Collector() as collector:
        gc.collect()
        gc.collect(0)
        assert collector.full == 1
        assert collector.seconds > 0
    seconds = collector.seconds
    gc.collect()
    assert (collector.full, collector.seconds) == (1, seconds)


def test_cost_of_a_tensor_and_of_a_group_follow_from_two_sizes_of_groups() -> None:
    # a tensor costs 3 us, a group 8: with four a group 3 + 8/4 = 5 over plain, with 32 a group 3 + 8/32 =
    # 3.25; the same twice in backward
    marked, plain = step(10 + 5, 10 + 3.25), step(10, 10)
    assert marked.tensor_us(plain) == pytest.approx((3, 6))
    assert marked.group_us(plain) == pytest.approx(8 + 16)


def test_collectors_time_is_divided_by_all_tensors_of_the_steps_wherever_it_landed() -> None:
    plain = step(10, 10, collector_s=1e-3)
    quiet, struck = step(15, 13.25, collector_s=1e-3), step(15, 13.25, collector_s=16e-3, full=1)
    cost = _cost_of("moved", 100, 500, [(quiet, plain), (struck, plain), (quiet, plain)], 4.0, 1.0)
    assert cost["collector_us"] == pytest.approx(15e-3 / (3 * 500) * 1e6)
    assert cost["own_us"] == pytest.approx(9)
    assert cost["full_collections"] == 1
    assert cost["over_bare_us"] == pytest.approx(9 + 10 - 4)


def test_one_step_that_was_disturbed_does_not_move_a_tensors_own_cost() -> None:
    plain = step(10, 10)
    pairs = [(step(15, 13.25), plain), (step(900, 900), plain), (step(15, 13.25), plain)]
    assert _cost_of("kept", 100, 500, pairs, 4.0, 0.0)["own_us"] == pytest.approx(9)
