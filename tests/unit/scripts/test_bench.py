"""The benchmark's workloads, and one run of it on the CPU: a figure from a GPU is only as good as the script
that printed it."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bench_stage
from bench import child
from bench.rows import RowOptions
from bench.workload import live_peak_chunks, workload
from tests.unit.scripts.bench_rig import context_of


# -- workloads -----------------------------------------------------------------------------------------------
def test_w2_is_three_forwards_then_turns_then_three_backwards() -> None:
    text = " ".join(f"{action.kind}{action.microbatch}" for action in workload("W2").actions)
    assert text == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert live_peak_chunks(workload("W2").actions) == 4
    assert live_peak_chunks(workload("W1").actions) == 1


def test_overrides_change_only_what_they_name() -> None:
    shape = workload("W1", layers=3).shape
    assert (shape.layers, shape.sequence, shape.ffn) == (3, 16384, 14336)
    with pytest.raises(ValueError, match="W9"):
        workload("W9")


def test_steps_of_lengths_that_vary_are_drawn_by_their_number() -> None:
    work = workload("WV")
    steps = [work.drawn(number) for number in range(-10, 50)]
    assert steps == [workload("WV").drawn(number) for number in range(-10, 50)]
    assert {len(step.actions) // 2 for step in steps} == {6, 7, 8}
    lengths = [length for step in steps for length in step.lengths or ()]
    assert (min(lengths) // 1024, max(lengths), {length % 256 for length in lengths}) == (8, 16384, {0})
    assert workload("W2").drawn(0) == workload("W2").drawn(1) == (workload("W2").actions, None)


def test_rows_of_lengths_that_vary_run_the_same_steps(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tiny", "--workload", "WV", "--rows", "ours_auto", "--warmup", "3", "--samples", "1"]
    assert bench_stage.main(arguments) == 0
    assert "bitwise" in capsys.readouterr().out


def test_marks_cover_every_saved_tensor_of_a_block() -> None:
    context = context_of("W1")
    parameters = {p.untyped_storage().data_ptr() for p in context.stack.parameters()}
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and storage.nbytes():
            seen[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        context.stack.blocks[0](context.inputs.of(0))
    probed = sum(group.nbytes for group in context.layer_bytes.values())
    assert probed == sum(storage.nbytes() for storage in seen.values())


def test_microbatches_differ_so_that_a_mixup_shows() -> None:
    inputs = context_of("W2").inputs
    values = [inputs.of(microbatch).detach() for microbatch in range(8)]
    assert all(not torch.equal(values[a], values[b]) for a in range(8) for b in range(a))


def test_two_stacks_are_built_of_the_same_bits() -> None:
    first, second = context_of("W1").stack, context_of("W1").stack
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


# -- the command ---------------------------------------------------------------------------------------------
def test_several_limits_give_several_rows_and_w2_means_the_total(tmp_path: Path) -> None:
    args = bench_stage.parse(["--rows", "ours_all,checkpoint", "--device-limit-gb", "50,22"])
    requests = bench_stage.requests_for(args, "W2", tmp_path)
    assert [label for label, _ in requests] == ["nothing", "ours_all@50t", "ours_all@22t", "checkpoint"]
    assert [request.options.total_limit_bytes for _, request in requests] == [
        None,
        50_000_000_000,
        22_000_000_000,
        None,
    ]
    w1 = bench_stage.requests_for(args, "W1", tmp_path)[1][1]
    assert (w1.options.saved_limit_bytes, w1.options.total_limit_bytes) == (50_000_000_000, None)
    assert pickle.loads(pickle.dumps(w1)) == w1


def test_unknown_row_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_stage.parse(["--rows", "ours_everything"])
    assert "known are nothing, checkpoint" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_command_says_so_and_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_stage.main(["--workload", "W1"]) == 2
    assert "need a CUDA GPU" in capsys.readouterr().out


@pytest.mark.req("S3-93")
def test_tiny_run_prints_every_row_and_writes_every_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    chosen = "checkpoint,selective,save_on_cpu,trl,megatron_all"
    threads = torch.get_num_threads()
    try:
        assert bench_stage.main(["--tiny", "--workload", "W1", "--rows", chosen, "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    text = capsys.readouterr().out
    assert "no figure below is a measurement" in text
    written = json.loads(out.read_text())
    assert [result["row"] for result in written["results"]] == ["nothing", *chosen.split(",")]
    for result in written["results"]:
        assert f"\n{result['row']} " in text
        if result["status"] == "ok":
            assert len(result["samples"]) == 2
            assert result["gradients"]["verdict"] in ("bitwise", "reference")
        else:
            assert result["status"] in ("not installed", "skipped")
    assert {"torch", "cpus"} <= written["hardware"].keys()
    assert written["links"]["measured"] is False


def test_total_limit_below_what_is_resident_is_a_skipped_row_not_a_crash() -> None:
    options = RowOptions(total_limit_bytes=1, working_set_bytes=2)
    request = child.RowRequest(row="ours_all", workload="W1", options=options, tiny=True)
    result = child.run(replace(request, samples=1))
    assert result["status"] == "skipped"
    assert "leaves nothing for saved tensors" in result["reason"]


@pytest.mark.req("S3-93")
def test_a_tiny_w5_prints_the_hosts_time_of_each_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, threads = tmp_path / "out.json", torch.get_num_threads()
    arguments = ["--tiny", "--workload", "W5", "--rows", "ours_all,ours_kept", "--device-limit-gb", "0"]
    try:
        assert bench_stage.main([*arguments, "--layers", "1", "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    text = capsys.readouterr().out
    results = {result["row"]: result for result in json.loads(out.read_text())["results"]}
    assert {result["gradients"]["verdict"] for result in results.values()} == {"bitwise", "reference"}
    moved, kept = results["ours_all"]["engine"], results["ours_kept"]["engine"]
    assert moved["saved"] == kept["saved"] == kept["kept"] > 0
    assert 0.9 < moved["spilled"] / moved["saved"] <= 1  # what is saved last and read at once may stay
    saves = 16 * sum(group["saves"] for group in results["ours_all"]["layer_bytes"].values())
    assert saves > moved["saved"]  # several saves of one storage, and small tensors
    assert f"us a saved tensor ({saves}, parameters left out)" in text
    assert f"a storage that left ({moved['spilled']:.0f})" in text
    assert f"a group ({7 * 16})" in text
    for result in results.values():
        assert 0 <= result["issue_collector_ms"] < result["issue_ms"]
    # without a cap the bound is the link's, or the baseline's step
    assert results["ours_all"]["bound_ms"] == results["nothing"]["step_ms"]
