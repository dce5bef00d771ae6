"""What the benchmark makes of its samples: fingerprints of gradients, bounds and the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench import gradients, report, rows
from bench.workload import workload
from tests.unit.scripts.bench_rig import LINK, context_of, prints_of


# -- gradients -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fingerprint_sees_one_changed_element_and_a_swap(dtype: torch.dtype) -> None:
    tensor = torch.randn(1000, dtype=dtype)
    same, changed, swapped = tensor.clone(), tensor.clone(), tensor.clone()
    changed[17] = changed[17] * 2 + 1
    swapped[[3, 900]] = swapped[[900, 3]]
    prints = [int(gradients.fingerprint(t)) for t in (tensor, same, changed, swapped)]
    assert prints[0] == prints[1]
    assert prints[0] not in prints[2:]


def test_compare_says_bitwise_differs_or_not_finite() -> None:
    reference = prints_of(rows.Nothing(context_of("W1")))
    assert gradients.compare(reference, reference)["verdict"] == "bitwise"
    name = next(iter(reference["prints"]))
    other = {
        "prints": reference["prints"] | {name: 0},
        "samples": reference["samples"] | {name: reference["samples"][name] + 1.0},
    }
    different = gradients.compare(reference, other)
    assert different["verdict"].startswith("differs")
    assert different["max_difference"] == pytest.approx(1.0, rel=1e-3)
    other["samples"] = reference["samples"] | {name: reference["samples"][name] * float("nan")}
    assert gradients.compare(reference, other)["verdict"] == "not finite"


# -- bounds and the table ------------------------------------------------------------------------------------
def result_of(**fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "row": "ours_all",
        "status": "ok",
        "moves_all_groups": True,
        "engine": {},
        "step_ms": 4000.0,
        "options": {},
    }
    return base | fields


def baseline_of(name: str, step_ms: float) -> dict[str, Any]:
    """The published figures of the workload: 2.754 GB a layer, a third of the time in forwards."""
    work = workload(name)
    passes = len(work.actions) // 2
    return result_of(
        row="nothing",
        workload=name,
        step_ms=step_ms,
        forward_ms=step_ms * 0.3 / passes,
        backward_ms=step_ms * 0.7 / passes,
        actions=work.actions,
        shape={"layers": work.shape.layers, "sequence": work.shape.sequence},
        layer_bytes={"core_attn": {"nbytes": 2_754_000_000}},
        active_bytes=97.9e9,
        resident_bytes=7e9,
    )


def test_one_pass_is_bound_by_the_bytes_that_the_engine_moved() -> None:
    baseline = baseline_of("W1", 590.0)
    result = result_of(engine={"spill_bytes": 30e9})
    report.add_bound(result, baseline, LINK)
    # 30 GB at 50 GB/s each way, both longer than the compute
    assert result["bound_ms"] == pytest.approx(1200.0)
    peer = result_of(row="trl")
    report.add_bound(peer, baseline, LINK)
    assert peer["bound_ms"] == pytest.approx(2 * 12 * 2.754 / 50 * 1e3)
    kept = result_of(row="checkpoint", moves_all_groups=False)
    report.add_bound(kept, baseline, LINK)
    assert "bound_ms" not in kept
    assert kept["over_baseline"] == pytest.approx(4000 / 590)


@pytest.mark.parametrize(("total_gb", "published"), [(50, 1.10), (40, 1.19), (32, 1.29), (22, 1.55)])
def test_w2_bounds_are_those_of_the_published_program(total_gb: int, published: float) -> None:
    pytest.importorskip("scipy")
    baseline = baseline_of("W2", 3194.0)
    link = {"d2h": 55.2e9, "h2d": 55.1e9, "duplex_d2h": 50.75e9, "duplex_h2d": 50.75e9}
    result = result_of(saved_limit_bytes=int((total_gb - 9) * 1e9))
    report.add_bound(result, baseline, link)
    # how the step splits into passes is not published
    assert result["bound_ms"] / 3194 == pytest.approx(published, abs=0.02)


def test_the_bound_of_a_selective_row_has_its_bytes_and_the_recompute_in_its_backwards() -> None:
    pytest.importorskip("scipy")
    baseline, selective = baseline_of("W2", 3194.0), baseline_of("W2", 3243.0) | {"row": "selective"}
    link = {"d2h": 55.2e9, "h2d": 55.1e9, "duplex_d2h": 50.75e9, "duplex_h2d": 50.75e9}
    fields = {
        "row": "ours_selective",
        "moves_all_groups": False,
        "chunk_bytes": 14_100_000_000,
        "saved_limit_bytes": 10_000_000_000,
    }
    result = result_of(**fields, bound_cap_bytes=13_000_000_000)
    report.add_bound(result, baseline, link, selective)
    assert result["bound_ms"] / 3194 == pytest.approx(1.10, abs=0.02)
    assert result["over_baseline"] == pytest.approx(4000 / 3194)
    assert "a forward saves 14.10 GB; compute of the row selective, 3243 ms" in result["bound_of"]
    alone = result_of(**fields, bound_cap_bytes=13_000_000_000)
    report.add_bound(alone, baseline, link)
    assert "bound_ms" not in alone


def test_a_row_that_did_not_run_is_printed_with_its_reason() -> None:
    line = report.row_line(
        {"row": "trl", "status": "not installed", "reason": "not installed: trl (No module named 'trl')"}
    )
    assert line.split() == ["trl", *["not", "installed:", "trl", "(No", "module", "named", "'trl')"]]
    assert "skipped: would pin" in report.row_line(
        {"row": "save_on_cpu", "status": "skipped", "reason": "would pin 1 GB"}
    )


def test_rows_and_header_have_the_same_columns() -> None:
    result = result_of(
        label="ours_all@40t",
        first_step_ms=1.0,
        active_bytes=40e9,
        reserved_bytes=42e9,
        pinned_held=50e9,
        pinned_lent_peak=49e9,
        host_ms=3.0,
        engine={"spill_bytes": 1e9, "stall_ms": 2.0},
        over_baseline=1.2,
        bound_ms=3900.0,
        over_bound=1.026,
        gradients={"verdict": "bitwise"},
    )
    assert len(report.row_line(result)) == len(report.header_line())
    assert report.row_line(result).split()[6:9] == ["1.050", "50.00", "1.020"]


def test_block_inputs_are_judged_by_checkpointing_and_have_no_copy_bound() -> None:
    baseline = baseline_of("W3", 3000.0)
    checkpoint = result_of(row="checkpoint", step_ms=3700.0, active_bytes=24e9, reserved_bytes=28e9)
    result = result_of(
        row="ours_hidden_states",
        step_ms=3718.5,
        active_bytes=20e9,
        moves_all_groups=False,
        engine={"spill_bytes": 4e9},
    )
    report.add_bound(result, baseline, LINK)
    assert "bound_ms" not in result
    inputs = result_of(row="transformers_inputs", step_ms=3700.0, active_bytes=24e9, reserved_bytes=30e9)
    assert report.notes_lines(inputs, None, checkpoint) == [
        "  transformers_inputs: 1.0000 of checkpoint's step, active 0.00 GB below it, reserved -2.00"
    ]


def test_what_a_row_holds_after_the_forward_is_set_beside_the_inputs_that_may_leave() -> None:
    """Of 8 inputs of 65,536 x 4,096 values of two bytes, the last two may still be on the device."""
    nbytes = 65_536 * 4_096 * 2
    shape = {"layers": 8, "sequence": 65_536, "hidden": 4_096}
    held = {"active_bytes": 24e9, "reserved_bytes": 28e9}
    checkpoint = result_of(
        row="checkpoint", step_ms=3700.0, **held, forward_active_bytes=10e9 + 8 * nbytes, shape=shape
    )
    result = result_of(
        row="ours_hidden_states",
        step_ms=3718.5,
        **held,
        forward_active_bytes=10e9 + 2 * nbytes,
        shape=shape,
        engine={},
    )
    report.add_bound(result, baseline_of("W3", 3000.0), LINK)
    assert "bound_ms" not in result
    assert report.notes_lines(result, None, checkpoint) == [
        "  ours_hidden_states: 1.0050 of checkpoint's step, active 0.00 GB below it, reserved 0.00; after "
        "the forward 11.07 GB, 3.221 below it: 1.000 of 6 inputs' 3.221"
    ]
