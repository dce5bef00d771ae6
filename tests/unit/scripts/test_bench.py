"""The benchmark's arithmetic, and one run of it on the CPU: a figure from a GPU is only as good as the script that printed it."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_stage  # noqa: E402
from bench import child, gradients, lanes, ours, report, rows  # noqa: E402
from bench.measure import Clock, clear_gradients, run_step, timed_step  # noqa: E402
from bench.rows import RowContext, RowOptions, SkippedError  # noqa: E402
from bench.workload import ATTENTION_GROUPS, GROUPS, Inputs, Stack, live_peak_chunks, probe_saved_bytes, tiny, workload  # noqa: E402

CPU = torch.device("cpu")
LINK = {"d2h": 50e9, "h2d": 50e9, "duplex_d2h": 50e9, "duplex_h2d": 50e9}


def context_of(name: str, **options: Any) -> RowContext:
    work = tiny(name)
    stack, inputs = Stack(work.shape, CPU, torch.float32), Inputs(work.shape, CPU, torch.float32)
    clear_gradients(stack, inputs, work.keep_gradients)
    layer_bytes = probe_saved_bytes(stack, inputs.of(0), 1)
    return RowContext(
        workload=work, stack=stack, inputs=inputs, device=CPU, options=RowOptions(**options), layer_bytes=layer_bytes, resident_bytes=0
    )


def prints_of(row: rows.Row) -> dict[str, Any]:
    return gradients.gradient_prints(row, Clock(CPU))


# -- workloads ----------------------------------------------------------------------------------------------------------


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


# -- rows ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [rows.CheckpointRow, rows.SelectiveCheckpoint, rows.SaveOnCpu])
@pytest.mark.parametrize("name", ["W1", "W2"])
def test_torch_rows_give_the_gradients_of_nothing(row: type[rows.Row], name: str) -> None:
    reference = prints_of(rows.Nothing(context_of(name)))
    assert gradients.compare(reference, prints_of(row(context_of(name))))["verdict"] == "bitwise"


def test_selective_keeps_matrix_products_and_every_attention_of_this_torch() -> None:
    kept = {str(operator) for operator in rows.kept_operators()}
    assert {"aten.mm.default", "aten.addmm.default", "aten.bmm.default"} <= kept
    for flavour in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"):
        assert f"aten._scaled_dot_product_{flavour}.default" in kept
    assert not [name for name in kept if "backward" in name]


def test_total_limit_leaves_what_is_not_resident_and_not_working_set() -> None:
    options = RowOptions(total_limit_bytes=50_000, working_set_bytes=2_000)
    assert ours.saved_limit_bytes(options, 7_000) == 41_000
    assert ours.saved_limit_bytes(RowOptions(saved_limit_bytes=3_000), 7_000) == 3_000
    assert ours.saved_limit_bytes(RowOptions(), 7_000) is None
    with pytest.raises(SkippedError, match="raise --device-limit-gb"):
        ours.saved_limit_bytes(options, 48_000)


def test_reserve_is_what_is_live_at_once_within_the_host_limit() -> None:
    assert ours.host_reserve_bytes(88_000, 110_000) == 88_000
    assert ours.host_reserve_bytes(88_000, 80_000) == 80_000


def test_row_that_would_pin_more_than_the_host_limit_is_skipped_with_both_numbers() -> None:
    with pytest.raises(SkippedError, match=r"would pin about .* --host-limit-gb is 0"):
        rows.SaveOnCpu(context_of("W1", host_limit_bytes=1))


class FakeManager:
    """Writes down what the row announces."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stats = SimpleNamespace(saved=4, spill_bytes=5, host_bytes_held=7, host_bytes_lent_peak=6, stall_ms=0.5)
        self.offload_summary_total_bytes = 9

    def register_parameters(self, module: torch.nn.Module) -> None:
        self.calls.append("register")

    def set_order(self, actions: Any) -> None:
        self.calls.append(f"order {len(actions)}")

    def begin_chunk(self, stage: int, microbatch: int) -> None:
        self.calls.append(f"F{microbatch}")

    def end_forward(self, stage: int, microbatch: int) -> None:
        self.calls.append(f"f{microbatch}")

    def begin_backward(self, stage: int, microbatch: int, kind: str) -> None:
        self.calls.append(f"{kind}{microbatch}")

    def end_backward(self, stage: int, microbatch: int, kind: str) -> None:
        self.calls.append(f"{kind.lower()}{microbatch}")

    def step_end(self) -> None:
        self.calls.append("end")


class FakeOffload(SimpleNamespace):
    """The public names that a row uses, without an engine."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = FakeManager()
        self.marks: list[str] = []
        self.config: SimpleNamespace | None = None
        self.OffloadConfig = lambda **fields: _Config(**fields)
        self.PipelineOffloadManager = SimpleNamespace(reset_instance=lambda: self.manager.calls.append("reset"))

    def configure(self, config: Any, device: str, print_summary: bool) -> FakeManager:
        self.config = config
        return self.manager

    def group_start(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        self.marks.append(f"+{name}")
        return tensor

    def group_commit(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        self.marks.append(f"-{name}")
        return tensor

    def offload_hooks(self) -> Any:
        return nullcontext()


class _Config(SimpleNamespace):
    __dataclass_fields__: dict[str, Any] = {}  # noqa: RUF012 - asdict() of an empty dataclass is {}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeOffload:
    module = FakeOffload()
    monkeypatch.setitem(sys.modules, "offload", module)
    return module


def test_our_row_announces_every_action_in_order(fake: FakeOffload) -> None:
    context = context_of("W2", saved_limit_bytes=1000, max_spilling_bytes=10, piece_bytes=20)
    with rows.opened(ours.Ours(context)) as row:
        run_step(row, context.workload.actions, Clock(CPU))
    expected = "register|order 16|F0 f0 F1 f1 F2 f2 F3 f3 B0 b0 F4 f4 B1 b1 F5 f5 B2 b2 F6 f6 B3 b3 F7 f7 B4 b4 B5 b5 B6 b6 B7 b7|end|reset"
    assert fake.manager.calls == [call for part in expected.split("|") for call in (part.split(" ") if part[0] == "F" else [part])]
    assert fake.config is not None
    assert (fake.config.device_limit_bytes, fake.config.max_spilling_bytes, fake.config.piece_bytes) == (1000, 10, 20)
    assert not hasattr(fake.config, "max_restoring_bytes")  # not given: the engine's own default


def test_our_row_marks_all_groups_in_order_or_the_attention_only(fake: FakeOffload) -> None:
    for groups in (GROUPS, ATTENTION_GROUPS):
        fake.marks.clear()
        context = context_of("W1")
        with rows.opened(ours.Ours(context, groups)) as row:
            run_step(row, context.workload.actions, Clock(CPU))
        assert fake.marks == [f"{sign}{name}" for _ in range(2) for name in groups for sign in "+-"]


def test_block_inputs_row_marks_one_group_a_block_around_the_checkpoint(fake: FakeOffload) -> None:
    reference = prints_of(rows.Nothing(context_of("W3")))
    with rows.opened(ours.OursBlockInputs(context_of("W3"))) as row:
        assert gradients.compare(reference, prints_of(row))["verdict"] == "bitwise"
    assert fake.marks == ["+block_input", "-block_input"] * 2


def test_our_rows_figures_come_from_the_manager(fake: FakeOffload) -> None:
    with rows.opened(ours.Ours(context_of("W1"))) as row:
        cost = timed_step(row, Clock(CPU))
    assert (cost.pinned_held, cost.pinned_lent_peak) == (7, 6)
    assert cost.engine == {"saved": 4, "spill_bytes": 5, "host_bytes_held": 7, "host_bytes_lent_peak": 6, "stall_ms": 0.5, "table_bytes": 9}


@pytest.mark.parametrize("name", ["W1", "W2"])
@pytest.mark.parametrize("groups", [GROUPS, ATTENTION_GROUPS])
def test_our_rows_give_the_gradients_of_nothing(name: str, groups: tuple[str, ...]) -> None:
    reference = prints_of(rows.Nothing(context_of(name)))
    with rows.opened(ours.Ours(context_of(name, min_elements=1, saved_limit_bytes=200_000), groups)) as row:
        left = 0
        for _ in range(2):  # the second step runs the plan that the first one made
            assert gradients.compare(reference, prints_of(row))["verdict"] == "bitwise"
            left += row.stats()["spilled"]
        assert left > 0


@pytest.mark.parametrize("name", ["W1", "W2"])
def test_our_selective_row_gives_the_gradients_of_nothing_and_saves_what_it_foretold(name: str) -> None:
    reference = prints_of(rows.Nothing(context_of(name)))
    with rows.opened(ours.OursSelective(context_of(name, min_elements=1, saved_limit_bytes=200_000))) as row:
        assert isinstance(row, ours.OursSelective)
        forwards = len(row.context.workload.actions) // 2
        saved: list[int] = []
        adopt = row.manager.engine.transfers.adopt
        row.manager.engine.transfers.adopt = lambda record: (saved.append(record.nbytes), adopt(record))[1]
        for _ in range(2):
            saved.clear()
            assert gradients.compare(reference, prints_of(row))["verdict"] == "bitwise"
            assert sum(saved) == row.chunk_bytes * forwards
            assert row.stats()["spilled"] > 0


def test_our_selective_row_leaves_room_for_what_a_block_recomputes_and_its_bound_does_not() -> None:
    context = context_of("W1", min_elements=1, total_limit_bytes=400_000, working_set_bytes=50_000)
    block_bytes = sum(group.nbytes for group in context.layer_bytes.values())
    with rows.opened(ours.OursSelective(context)) as row:
        assert isinstance(row, ours.OursSelective)
        assert (row.bound_cap_bytes, row.limit_bytes) == (350_000, 350_000 - block_bytes)


class _Identity(torch.autograd.Function):
    """A mark as the engine makes them: a node of its own in the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def test_a_mark_on_the_norms_input_does_not_change_the_order_of_its_gradients_sum() -> None:
    """On the CPU RMSNorm reads its input twice, so a residual that passed by the mark was added last instead of first: other bits."""
    reference = prints_of(rows.Nothing(context_of("W1")))
    marked = context_of("W1")
    marks = SimpleNamespace(start=lambda t, _: _Identity.apply(t), commit=lambda t, _: _Identity.apply(t), hooks=nullcontext)
    marked.stack.mark(marks, GROUPS)
    assert gradients.compare(reference, prints_of(rows.Nothing(marked)))["verdict"] == "bitwise"


# -- gradients ----------------------------------------------------------------------------------------------------------


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


# -- lanes --------------------------------------------------------------------------------------------------------------


def event(category: str, name: str, start: float, length: float, nbytes: int = 0) -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": start, "dur": length, "args": {"bytes": nbytes} if nbytes else {}}


def test_lanes_are_told_apart_and_overlap_counts_once() -> None:
    events = [
        event("kernel", "gemm", 0, 4000),
        event("kernel", "other stream", 3000, 2000),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 8000, 2000, 5),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1000, 3000, 150_000_000),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 6000, 1000, 50_000_000),
        event("cpu_op", "aten::mm", 0, 90_000),
        {"cat": "kernel", "name": "an instant", "ts": 5.0},
    ]
    step = lanes.summarise_events(events)
    compute, d2h, h2d = step.lanes
    assert (step.span_ms, compute.busy_ms, compute.idle_ms) == (10.0, 7.0, 3.0)
    assert (d2h.busy_ms, d2h.nbytes, d2h.gigabytes_per_s) == (3.0, 150_000_000, pytest.approx(50.0))
    assert h2d.operations == 1
    assert (step.compute_idle_while_h2d_ms, step.compute_idle_while_d2h_ms, step.all_idle_ms) == (1.0, 0.0, 2.0)
    gap = compute.longest[0]
    assert (gap.start_ms, gap.length_ms, gap.others_ms) == (5.0, 3.0, {"d2h": 0.0, "h2d": 1.0})
    assert compute.busy_share[0] == pytest.approx(1.0)
    text = "\n".join(lanes.render(step, "a row"))
    assert "busy      7.0 idle      3.0 ms" in text
    assert max(len(line) for line in text.splitlines()) < 200


def test_trace_without_device_operations_is_said_so() -> None:
    assert "no device operations" in lanes.render(lanes.summarise_events([event("cpu_op", "x", 0, 1)]), "r")[0]


# -- bounds and the table -----------------------------------------------------------------------------------------------


def result_of(**fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"row": "ours_all", "status": "ok", "moves_all_groups": True, "engine": {}, "step_ms": 4000.0, "options": {}}
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
    assert result["bound_ms"] == pytest.approx(1200.0)  # 30 GB at 50 GB/s each way, both longer than the compute
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
    assert result["bound_ms"] / 3194 == pytest.approx(published, abs=0.02)  # how the step splits into passes is not published


def test_the_bound_of_a_selective_row_has_its_bytes_and_the_recompute_in_its_backwards() -> None:
    pytest.importorskip("scipy")
    baseline, selective = baseline_of("W2", 3194.0), baseline_of("W2", 3243.0) | {"row": "selective"}
    link = {"d2h": 55.2e9, "h2d": 55.1e9, "duplex_d2h": 50.75e9, "duplex_h2d": 50.75e9}
    fields = {"row": "ours_selective", "moves_all_groups": False, "chunk_bytes": 14_100_000_000, "saved_limit_bytes": 10_000_000_000}
    result = result_of(**fields, bound_cap_bytes=13_000_000_000)
    report.add_bound(result, baseline, link, selective)
    assert result["bound_ms"] / 3194 == pytest.approx(1.10, abs=0.02)
    assert result["over_baseline"] == pytest.approx(4000 / 3194)
    assert "a forward saves 14.10 GB; compute of the row selective, 3243 ms" in result["bound_of"]
    alone = result_of(**fields, bound_cap_bytes=13_000_000_000)
    report.add_bound(alone, baseline, link)
    assert "bound_ms" not in alone


def test_a_row_that_did_not_run_is_printed_with_its_reason() -> None:
    line = report.row_line({"row": "trl", "status": "not installed", "reason": "not installed: trl (No module named 'trl')"})
    assert line.split() == ["trl", *["not", "installed:", "trl", "(No", "module", "named", "'trl')"]]
    assert "skipped: would pin" in report.row_line({"row": "save_on_cpu", "status": "skipped", "reason": "would pin 1 GB"})


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
    checkpoint = result_of(row="checkpoint", step_ms=3700.0, active_bytes=24e9)
    result = result_of(row="ours_inputs", step_ms=3718.5, active_bytes=20e9, moves_all_groups=False, engine={"spill_bytes": 4e9})
    report.add_bound(result, baseline, LINK)
    assert "bound_ms" not in result
    trl = result_of(row="trl_inputs", step_ms=3700.0, active_bytes=24e9)
    assert report.notes_lines(trl, None, checkpoint) == ["  trl_inputs: 1.0000 of checkpoint's step, active 0.00 GB below it"]


# -- the command --------------------------------------------------------------------------------------------------------


def test_several_limits_give_several_rows_and_w2_means_the_total(tmp_path: Path) -> None:
    args = bench_stage.parse(["--rows", "ours_all,checkpoint", "--device-limit-gb", "50,22", "--piece-mb", "16", "--trace", "t.json"])
    requests = bench_stage.requests_for(args, "W2", tmp_path)
    assert [label for label, _ in requests] == ["nothing", "ours_all@50t", "ours_all@22t", "checkpoint"]
    assert [request.options.total_limit_bytes for _, request in requests] == [None, 50_000_000_000, 22_000_000_000, None]
    assert requests[1][1].options.piece_bytes == 16 << 20
    assert [request.trace is not None for _, request in requests] == [False, True, True, True]
    w1 = bench_stage.requests_for(args, "W1", tmp_path)[1][1]
    assert (w1.options.saved_limit_bytes, w1.options.total_limit_bytes) == (50_000_000_000, None)
    assert child.RowRequest.from_json(w1.to_json()) == w1


def test_unknown_row_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_stage.parse(["--rows", "ours_everything"])
    assert "known are nothing, checkpoint" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_command_says_so_and_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_stage.main(["--workload", "W1", "--no-isolate"]) == 2
    assert "need a CUDA GPU" in capsys.readouterr().out


def test_tiny_run_prints_every_row_and_writes_every_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_tiny_micro_prints_a_line_for_each_case_and_number_of_live_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert bench_stage.main(["--tiny", "--micro", "--live", "8,16"]) == 0
    finally:
        torch.set_num_threads(threads)
    text = capsys.readouterr().out
    assert [line.split()[:2] for line in text.splitlines()[1:]] == [[case, n] for n in ("8", "16") for case in ("small", "kept", "moved")]


def test_total_limit_below_what_is_resident_is_a_skipped_row_not_a_crash() -> None:
    options = RowOptions(total_limit_bytes=1, working_set_bytes=2, min_elements=1)
    request = child.RowRequest(row="ours_all", workload="W1", options=options, tiny=True)
    result = child.run(replace(request, samples=1))
    assert result["status"] == "skipped"
    assert "leaves nothing for saved tensors" in result["reason"]
