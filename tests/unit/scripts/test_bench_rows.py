"""The rows of the benchmark: each computes the gradients of the row that does nothing, and speaks to its
engine as it says."""

from __future__ import annotations

import gc
import sys
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import gradients, ours, rows, workload
from bench.measure import Clock, forward_active_bytes, run_step, timed_step
from bench.rows import RowOptions
from bench.run import SkippedError
from bench.workload import ATTENTION_GROUPS, GROUPS
from tests.unit.scripts.bench_rig import CPU, context_of, prints_of


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


SMALLEST = {"min_offloaded_tensor_size": 1}


class FakeManager:
    """Writes down what the row announces."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stats = SimpleNamespace(
            saved=4, spill_bytes=5, host_bytes_held=7, host_bytes_lent_peak=6, stall_ms=0.5
        )

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
        self.PipelineOffloadManager = SimpleNamespace(
            close_instance=lambda: self.manager.calls.append("reset")
        )

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
    context = context_of("W2", saved_limit_bytes=1000, engine={"max_spilling_bytes": 10, "piece_bytes": 20})
    with rows.opened(ours.Ours(context)) as row:
        run_step(row, Clock(CPU))
    expected = (
        "register|order 16|F0 f0 F1 f1 F2 f2 F3 f3 B0 b0 F4 f4 B1 b1 F5 f5 B2 b2 F6 f6 "
        "B3 b3 F7 f7 B4 b4 B5 b5 B6 b6 B7 b7|end|reset"
    )
    assert fake.manager.calls == [
        call for part in expected.split("|") for call in (part.split(" ") if part[0] == "F" else [part])
    ]
    assert (fake.config.device_limit_bytes, fake.config.max_spilling_bytes, fake.config.piece_bytes) == (
        1000,
        10,
        20,
    )
    assert not hasattr(fake.config, "max_restoring_bytes")  # not given: the engine's own default


def test_our_row_marks_all_groups_in_order_or_the_attention_only(fake: FakeOffload) -> None:
    for groups in (GROUPS, ATTENTION_GROUPS):
        fake.marks.clear()
        context = context_of("W1")
        with rows.opened(ours.Ours(context, groups)) as row:
            run_step(row, Clock(CPU))
        assert fake.marks == [f"{sign}{name}" for _ in range(2) for name in groups for sign in "+-"]


def test_block_inputs_row_marks_one_group_a_block_around_the_checkpoint(fake: FakeOffload) -> None:
    reference = prints_of(rows.Nothing(context_of("W3")))
    with rows.opened(ours.OursBlockInputs(context_of("W3"))) as row:
        assert gradients.compare(reference, prints_of(row))["verdict"] == "bitwise"
    assert fake.marks == ["+block_input", "-block_input"] * 2


@pytest.mark.parametrize("row", [ours.OursHiddenStates, rows.SaveInputsOnCpu])
def test_rows_that_hold_the_inputs_of_checkpoints_elsewhere_have_the_gradients_of_nothing(row: Any) -> None:
    reference = prints_of(rows.Nothing(context_of("W3")))
    context = context_of("W3", engine=SMALLEST)
    with rows.opened(row(context)) as opened:
        for _ in range(2):
            assert gradients.compare(reference, prints_of(opened))["verdict"] == "bitwise"
        left = opened.stats().get("spill_bytes", 0)
        assert forward_active_bytes(opened, Clock(CPU)) == 0  # a CPU counts none
    if row is ours.OursHiddenStates:
        source = context.inputs.source
        assert left == context.workload.shape.layers * source.numel() * source.element_size()


def test_our_rows_figures_come_from_the_manager(fake: FakeOffload) -> None:
    with rows.opened(ours.Ours(context_of("W1"))) as row:
        cost = timed_step(row, Clock(CPU))
    assert (cost.pinned_held, cost.pinned_lent_peak) == (7, 6)
    assert cost.engine == {
        "saved": 4,
        "spill_bytes": 5,
        "host_bytes_held": 7,
        "host_bytes_lent_peak": 6,
        "stall_ms": 0.5,
    }


@pytest.mark.parametrize("name", ["W1", "W2"])
@pytest.mark.parametrize("groups", [GROUPS, ATTENTION_GROUPS])
def test_our_rows_give_the_gradients_of_nothing(name: str, groups: tuple[str, ...]) -> None:
    reference = prints_of(rows.Nothing(context_of(name)))
    with rows.opened(ours.Ours(context_of(name, engine=SMALLEST, saved_limit_bytes=200_000), groups)) as row:
        left = 0
        for _ in range(2):  # the second step runs the plan that the first one made
            assert gradients.compare(reference, prints_of(row))["verdict"] == "bitwise"
            left += row.stats()["spilled"]
        assert left > 0


@pytest.mark.parametrize("name", ["W1", "W2"])
def test_our_selective_row_gives_the_gradients_of_nothing_and_saves_what_it_foretold(name: str) -> None:
    reference = prints_of(rows.Nothing(context_of(name)))
    with rows.opened(ours.OursSelective(context_of(name, engine=SMALLEST, saved_limit_bytes=100_000))) as row:
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
    context = context_of("W1", engine=SMALLEST, total_limit_bytes=400_000, working_set_bytes=50_000)
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
    """On the CPU RMSNorm reads its input twice, so a residual that passed by the mark was added last instead
    of first: other bits."""
    reference = prints_of(rows.Nothing(context_of("W1")))
    marked = context_of("W1")
    marks = SimpleNamespace(
        start=lambda t, _: _Identity.apply(t), commit=lambda t, _: _Identity.apply(t), hooks=nullcontext
    )
    marked.stack.mark(marks, GROUPS)
    assert gradients.compare(reference, prints_of(rows.Nothing(marked)))["verdict"] == "bitwise"


def test_the_probe_of_a_layer_leaves_nothing_of_its_forward_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a hook returns as it was given it holds its own graph, in a circle that no collector sees."""
    seen: list[weakref.ref[Any]] = []
    begin = workload._Recorder.__init__

    def note(recorder: Any, *args: Any) -> None:
        begin(recorder, *args)
        seen.append(weakref.ref(recorder))

    monkeypatch.setattr(workload._Recorder, "__init__", note)
    context_of("W2")
    gc.collect()
    assert [recorder() for recorder in seen] == [None]


def test_auto_gives_the_gradients_of_nothing_and_has_a_bound_of_its_own() -> None:
    pytest.importorskip("scipy")
    reference = prints_of(rows.Nothing(context_of("W2")))
    row = ours.OursAuto(context_of("W2", total_limit_bytes=400_000, engine={"min_offloaded_tensor_size": 1}))
    for _ in range(3):
        timed_step(row, Clock(CPU))
    assert row.bound_ms is not None
    assert gradients.compare(reference, prints_of(row))["verdict"] == "bitwise"
    row.close()
    assert "blocks.0" in row.notes["explained"]
    # the bound at other totals, less time for more memory, is the line of scripts/headline.py
    totals, least_ms = zip(*row.notes["bounds"], strict=True)
    assert 400_000 in totals
    assert list(least_ms) == sorted(least_ms, reverse=True)
