"""Every schedule on real gloo ranks: right gradients, the order that was foretold, nothing left over,
evaluation in between.

The ranks are started once for all schedules; each test then looks at one thing they report.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional

from offload import OffloadConfig, PipelineOffloadManager, apply, configure
from parallel.order import actions_of
from parallel.schedules import SCHEDULES, build_schedule, schedule_named, stages_of
from parallel.stage import OffloadPipelineStage
from parallel.transformer import TransformerConfig, build_stage_module, group_names, stage_examples
from tests.inside import impose
from tests.once import run_ranks_once
from tests.ranks import run_ranks

BATCH, SEQUENCE = 2, 16
MODEL = TransformerConfig(
    dim=32,
    layers=8,
    heads=4,
    kv_heads=2,
    ffn=64,
    sequence=SEQUENCE,
    seed=7,
    offload_modules=group_names("all"),
)
NAMES = tuple(SCHEDULES)
SPLIT = ("interleavedzerobubble", "zbv", "dualpipev")


# ---- one rank ----


class Recorder:
    """Writes down what the stages announce, and passes it on to the manager."""

    def __init__(self, manager: PipelineOffloadManager) -> None:
        self.manager = manager
        self.said: list[tuple[str, int, int]] = []
        self.open: list[tuple[str, int, int]] = []
        self.buffers: list[weakref.ref[Tensor]] = []
        self.most_buffers = 0
        self.outputs: list[weakref.ref[Tensor]] = []
        self.most_outputs = 0  # when a backward begins

    def _begin(self, kind: str, stage: int, microbatch: int) -> None:
        self.said.append((kind, stage, microbatch))
        self.open.append((kind, stage, microbatch))

    def begin_chunk(self, stage: int, microbatch: int) -> None:
        self._begin("F", stage, microbatch)
        self.manager.begin_chunk(stage, microbatch)

    def end_forward(self, stage: int, microbatch: int) -> None:
        self.open.remove(("F", stage, microbatch))
        self.manager.end_forward(stage, microbatch)

    def begin_backward(self, stage: int, microbatch: int, kind: str) -> None:
        self._begin(kind, stage, microbatch)
        self.most_outputs = max(self.most_outputs, sum(ref() is not None for ref in self.outputs))
        self.manager.begin_backward(stage, microbatch, kind)

    def end_backward(self, stage: int, microbatch: int, kind: str) -> None:
        self.open.remove((kind, stage, microbatch))
        self.manager.end_backward(stage, microbatch, kind)

    def register_external(self, tensor: Tensor) -> None:
        self.buffers.append(weakref.ref(tensor))
        self.most_buffers = max(self.most_buffers, self.buffers_alive())
        self.manager.register_external(tensor)

    def buffers_alive(self) -> int:
        return sum(ref() is not None for ref in self.buffers)


@dataclass
class Pipeline:
    """One schedule over this rank's stages, and what was seen of it."""

    name: str
    microbatches: int
    manager: PipelineOffloadManager
    recorder: Recorder
    stages: list[OffloadPipelineStage]
    schedule: Any
    forwards: dict[int, int] = field(default_factory=dict)

    def inputs(self, seed: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(
            0, 256, (BATCH * self.microbatches, SEQUENCE + 1), generator=torch.Generator().manual_seed(seed)
        )
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def step(self, seed: int, *, evaluate: bool = False) -> list[float]:
        """Run one step from zero gradients, or one evaluation; returns the losses, on the rank that has
        them."""
        tokens, targets = self.inputs(seed)
        first = any(stage.is_first for stage in self.stages)
        last = any(stage.is_last for stage in self.stages)
        if not evaluate:
            self.zero_grad()
        losses: list[Tensor] = []
        run = self.schedule.eval if evaluate else self.schedule.step
        run(
            *([tokens] if first else []),
            target=targets if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        if not evaluate:
            self.manager.step_end()
        return [loss.item() for loss in losses]

    def zero_grad(self) -> None:
        for stage in self.stages:
            stage.submod.zero_grad(set_to_none=True)

    def grads(self) -> dict[str, Tensor]:
        return {
            f"{stage.stage_index}.{name}": parameter.grad.clone()
            for stage in self.stages
            for name, parameter in stage.submod.named_parameters()
            if parameter.grad is not None
        }

    def parameters(self) -> int:
        return sum(1 for stage in self.stages for _ in stage.submod.parameters())


def model_of(ranks: int) -> TransformerConfig:
    """A layer of one rank takes as long as one of two, and two in a virtual stage are enough."""
    return MODEL.with_(layers=min(MODEL.layers, 4 * ranks))


def build(name: str, rank: int, ranks: int, microbatches: int) -> Pipeline:
    spec, model = schedule_named(name), model_of(ranks)
    virtual = spec.default_virtual_stages
    # Small caps, so that the bytes really go: with larger ones a reader would find most of them still on
    # their way out.
    limits = OffloadConfig(
        min_offloaded_tensor_size=64,
        pp_rank=rank,
        host_reserve_bytes=32 << 20,
        piece_bytes=2048,
        max_spilling_bytes=8192,
    )
    manager = configure(limits, device="sim", print_summary=False)
    recorder = Recorder(manager)
    stages = []
    forwards: dict[int, int] = {}
    for index in stages_of(spec, rank=rank, ranks=ranks, virtual_stages=virtual):
        count = ranks * virtual
        module = build_stage_module(model, index, count)
        manager.register_parameters(module)
        inputs, outputs = stage_examples(
            model, index, count, batch=BATCH, sequence=SEQUENCE, dtype=torch.float32
        )
        module.register_forward_pre_hook(counting(forwards, index))
        if index + 1 < count:
            module.register_forward_hook(lambda *given: recorder.outputs.append(weakref.ref(given[2])))
        stages.append(
            OffloadPipelineStage(
                module,
                index,
                count,
                torch.device("cpu"),
                input_args=inputs,
                output_args=outputs,
                announcer=recorder,
            )
        )
    schedule = build_schedule(spec, stages, microbatches=microbatches, loss_fn=loss_of)
    manager.set_order(actions_of(schedule, rank))
    return Pipeline(name, microbatches, manager, recorder, stages, schedule, forwards)


def counting(forwards: dict[int, int], stage: int) -> Callable[..., None]:
    def count(*_args: Any) -> None:
        forwards[stage] = forwards.get(stage, 0) + 1

    return count


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def reference_grads(pipeline: Pipeline, ranks: int, seed: int) -> dict[str, Tensor]:
    """The gradients of the same model in one piece, without pipeline and without offload."""
    whole = build_stage_module(model_of(ranks).with_(offload_modules=frozenset()), 0, 1)
    tokens, targets = pipeline.inputs(seed)
    for part, target in zip(
        tokens.chunk(pipeline.microbatches), targets.chunk(pipeline.microbatches), strict=True
    ):
        (loss_of(whole(part), target) / pipeline.microbatches).backward()
    by_name = dict(whole.named_parameters())
    return {
        f"{stage.stage_index}.{name}": by_name[name].grad
        for stage in pipeline.stages
        for name, _ in stage.submod.named_parameters()
        if by_name[name].grad is not None
    }


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def report_of(name: str, rank: int, ranks: int, microbatches: int) -> dict[str, Any]:
    """Two steps without offload and the same with it, an evaluation between them, and what was seen."""
    pipeline = build(name, rank, ranks, microbatches)
    manager, recorder = pipeline.manager, pipeline.recorder
    manager.disable_offload()
    off_losses = [pipeline.step(seed) for seed in (1, 2)]
    off_grads = pipeline.grads()
    manager.enable_offload()

    pipeline.forwards.clear()
    recorder.said.clear()
    on_losses = [pipeline.step(1)]
    said = list(recorder.said)
    forwards_of_a_step = dict(pipeline.forwards)
    first_step = manager.stats
    between = pipeline.grads()

    pipeline.forwards.clear()
    recorder.said.clear()
    eval_losses = pipeline.step(2, evaluate=True)
    said_in_eval = list(recorder.said)
    forwards_of_eval = dict(pipeline.forwards)
    eval_kept_grads = same(between, pipeline.grads())

    pipeline.forwards.clear()
    on_losses.append(pipeline.step(2))
    on_grads = pipeline.grads()
    second_step = manager.stats
    expected = reference_grads(pipeline, ranks, 2)
    forwards_after_eval = dict(pipeline.forwards)
    recomputed = recomputed_step(pipeline) if name in SPLIT else 0
    return {
        "said": said,
        "foretold": list(actions_of(pipeline.schedule, rank)),
        "left_open": recorder.open,
        "forwards_of_a_step": forwards_of_a_step,
        "forwards_of_eval": forwards_of_eval,
        "forwards_after_eval": forwards_after_eval,
        "said_in_eval": said_in_eval,
        "eval_kept_grads": eval_kept_grads,
        "eval_losses": eval_losses,
        "off_losses": off_losses,
        "on_losses": on_losses,
        "bitwise": same(off_grads, on_grads),
        "recomputed_bitwise": same(off_grads, pipeline.grads()),
        "recomputed_forwards": recomputed,
        "grads": [len(on_grads), pipeline.parameters()],
        "near_reference": on_grads.keys() == expected.keys()
        and all(torch.allclose(on_grads[key], expected[key], rtol=1e-4, atol=1e-6) for key in expected),
        "spilled": [first_step.spill_bytes, second_step.spill_bytes],
        "restored": [first_step.restore_bytes, second_step.restore_bytes],
        "lent_after": host_bytes_lent(manager),
        "buffers_alive": recorder.buffers_alive(),
        "buffers_most": recorder.most_buffers,
        "buffers_all": len(recorder.buffers),
        "outputs_most": recorder.most_outputs,
    }


def recomputed_step(pipeline: Pipeline) -> int:
    """One more step, with every block recomputed. Returns how often a block ran."""
    ran = [0]

    def count(*_args: Any) -> None:
        ran[0] += 1

    handles = []
    for stage in pipeline.stages:
        handles.append(apply(stage.submod, mode="hidden_states", blocks="blocks.*"))
        for layer in stage.submod.blocks.values():
            handles.append(layer.attn.register_forward_hook(count))
    impose(pipeline.manager.engine, again_room_bytes=0)  # nothing stays between the halves
    pipeline.step(2)
    for handle in handles:
        handle.remove()
    return ran[0]


def host_bytes_lent(manager: PipelineOffloadManager) -> int:
    return int(manager.engine.arena.stats().lent_bytes)


def rank_main(rank: int, ranks: int, names: tuple[str, ...]) -> dict[str, Any]:
    return {
        name: report_of(name, rank, ranks, microbatches=2 * ranks + 2 if name == "gpipe" else 2 * ranks)
        for name in names
    }


# ---- the tests ----


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks_once(tmp_path_factory, "schedules", rank_main, 2, NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.req("S2-98", "S2-102")
def test_gradients_with_offload_are_bitwise_those_without(two_ranks: list[dict[str, Any]], name: str) -> None:
    check_gradients([rank[name] for rank in two_ranks])


def check_gradients(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["grads"][0] == report["grads"][1], "every parameter has a gradient"
        assert report["bitwise"]
        assert report["near_reference"]
        assert report["on_losses"] == report["off_losses"]
    assert any(report["on_losses"][0] for report in reports), "some rank has the losses"


@pytest.mark.parametrize("name", SPLIT)
def test_a_block_that_is_recomputed_runs_once_more_for_each_half_of_its_backward_and_no_bit_changes(
    two_ranks: list[dict[str, Any]], name: str
) -> None:
    """However many groups of parameters it has. Stage 0 has no input half."""
    for rank in two_ranks:
        report = rank[name]
        assert report["recomputed_bitwise"]
        passes = sum(kind in "FBW" or stage > 0 for kind, stage, _ in report["said"])
        stages = {stage for _, stage, _ in report["said"]}
        layers = MODEL.layers // (2 * len(stages))
        assert report["recomputed_forwards"] == layers * passes


@pytest.mark.parametrize("name", NAMES)
def test_all_bytes_that_left_come_back_and_none_stay_lent(two_ranks: list[dict[str, Any]], name: str) -> None:
    for rank in two_ranks:
        for spilled, restored in zip(rank[name]["spilled"], rank[name]["restored"], strict=True):
            assert spilled > 0
            assert restored > 0.9 * spilled, "the rest was read before it was gone"
        assert rank[name]["lent_after"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_foretold_order_is_the_order_that_was_announced(two_ranks: list[dict[str, Any]], name: str) -> None:
    for rank in two_ranks:
        assert rank[name]["said"] == rank[name]["foretold"]
        assert rank[name]["left_open"] == []


@pytest.mark.parametrize("name", NAMES)
def test_no_hidden_forward_runs_in_a_step_an_evaluation_or_after_it(
    two_ranks: list[dict[str, Any]], name: str
) -> None:
    for rank in two_ranks:
        microbatches = len({microbatch for _, _, microbatch in rank[name]["said"]})
        stages = {stage for _, stage, _ in rank[name]["said"]}
        once_a_microbatch = dict.fromkeys(stages, microbatches)
        assert rank[name]["forwards_of_a_step"] == once_a_microbatch
        assert rank[name]["forwards_of_eval"] == once_a_microbatch
        assert rank[name]["forwards_after_eval"] == once_a_microbatch


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_between_steps_works_and_changes_nothing(
    two_ranks: list[dict[str, Any]], name: str
) -> None:
    for rank in two_ranks:
        assert rank[name]["said_in_eval"] == []
        assert rank[name]["eval_kept_grads"]
        assert rank[name]["eval_losses"] == rank[name]["off_losses"][1], (
            "the same microbatches give the same losses"
        )


@pytest.mark.parametrize("name", NAMES)
def test_receive_buffers_live_no_longer_than_their_chunk(two_ranks: list[dict[str, Any]], name: str) -> None:
    for rank in two_ranks:
        assert rank[name]["buffers_all"] > 0
        assert rank[name]["buffers_alive"] == 0
    # the last stage holds one input at a time, and torch would hold one for each microbatch
    if name == "1f1b":
        assert two_ranks[1][name]["buffers_most"] <= 2


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_outputs_that_were_sent_are_gone_in_the_backwards_where_torch_lets_them_go(
    two_ranks: list[dict[str, Any]], name: str
) -> None:
    goes = hasattr(PipelineStage, "release_fwd_send_outputs")  # of torch 2.15
    most, in_flight = two_ranks[0][name]["outputs_most"], {"gpipe": 6, "1f1b": 2}[name]
    assert most == 0 if goes else most >= in_flight


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_four_ranks_get_the_same_gradients_with_and_without_offload(tmp_path: Path, name: str) -> None:
    reports = [rank[name] for rank in run_ranks(rank_main, 4, tmp_path, (name,))]
    check_gradients(reports)
    for report in reports:
        assert report["said"] == report["foretold"]
        assert report["lent_after"] == 0


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", NAMES)
def test_one_rank_alone_runs_every_schedule(name: str) -> None:
    report = report_of(name, 0, 1, microbatches=4)
    check_gradients([report])
    assert (
        report["said"] == [list(action) for action in report["foretold"]]
        or report["said"] == report["foretold"]
    )
    assert report["lent_after"] == 0


@pytest.mark.usefixtures("one_rank")
def test_step_after_a_step_that_raised_has_the_right_gradients() -> None:
    pipeline = build("interleaved1f1b", 0, 1, 4)
    pipeline.step(1)
    expected = pipeline.grads()

    def fail(*_args: Any) -> None:
        if pipeline.forwards[1] == 3:
            raise KeyError("a layer that fails")

    handle = pipeline.stages[1].submod.register_forward_pre_hook(fail)
    pipeline.forwards.clear()
    with pytest.raises(RuntimeError, match="failed to run forward"):
        pipeline.step(1)
    assert pipeline.recorder.open == [], "every announcement was ended"
    handle.remove()
    pipeline.schedule._internal_losses.clear()  # torch keeps those of a step that raised
    pipeline.manager.step_end()
    pipeline.step(1)
    assert same(expected, pipeline.grads())
    assert host_bytes_lent(pipeline.manager) == 0
