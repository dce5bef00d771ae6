"""The dry run beside the engine: this project's GPT on the simulated device, whose clock stands for a GPU's.

Bytes are the same to the byte, because both count storages that autograd saves. Times are the simulation's,
whose tolerance is a few percent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from offload import OffloadConfig, OffloadEngine, PipelineOffloadManager
from offload.device.sim import SimDevice
from offload.groups import timed
from offload.planner.profiler import BlockProfiler
from offload.policy.actions import Rates, one_f_one_b
from offload.policy.mixture import choose_keeps
from parallel.dry_run.costs import piece_of
from parallel.dry_run.job import Stage
from parallel.dry_run.rank_step import RankPlan, RankStep
from parallel.dry_run.rates import GPUS
from parallel.dry_run.trace import Trace, trace, trace_halves
from parallel.transformer import PRESETS, TransformerStage, group_names
from tests.unit.groups.stack import Driver, installed
from tests.unit.planner.families import watched

MICROBATCHES, STAGES = 5, 3
MODEL = PRESETS["tiny"].with_(sequence=64, dim=32, ffn=96, layers=12, offload_modules=group_names("all"))
BATCH, LAYERS = 2, 4
ORDER = one_f_one_b(0, STAGES, MICROBATCHES)
FORWARD_S, BACKWARD_S = 4e-6, 9e-6  # of a layer


def build_stage() -> TransformerStage:
    """One from the middle: layers only."""
    stage = TransformerStage(MODEL, 1, STAGES)
    stage.reset_parameters()
    return stage


def hidden() -> Tensor:
    return torch.randn(BATCH, MODEL.sequence, MODEL.dim)


@pytest.fixture(scope="module")
def seen() -> Trace:
    return trace(build_stage(), hidden)


class GptDriver(Driver):
    """Feeds hidden states, and lets the clock run by what each layer computes."""

    def __init__(self, stage: TransformerStage, device: SimDevice) -> None:
        super().__init__([stage], announced=True)
        for block in stage.blocks.values():
            for part in (block.attn.wq, block.attn, block.mlp.gate, block.mlp):
                part.register_forward_hook(lambda *_: device.compute_for(FORWARD_S / 4))
                part.register_full_backward_hook(lambda *_: device.compute_for(BACKWARD_S / 4))

    def _input(self, microbatch: int) -> Tensor:
        return hidden()


def run(config: dict[str, int | float], rates: Rates, steps: int) -> Iterator[PipelineOffloadManager]:
    device = SimDevice(
        executor="clock", d2h_gb_s=rates.d2h_bytes_per_s / 1e9, h2d_gb_s=rates.h2d_bytes_per_s / 1e9
    )
    engine = OffloadEngine(
        OffloadConfig(min_offloaded_tensor_size=1, piece_bytes=1 << 12, **config), device=device
    )
    with installed(PipelineOffloadManager(engine, print_summary=False)) as manager:
        manager.engine.rates = rates
        driver = GptDriver(build_stage(), device)
        for _ in range(steps):
            manager.set_order(ORDER)
            driver.step(ORDER)
            yield manager


class OneLayer(nn.Module):
    """A layer of the stage, called as the stage calls it."""

    def __init__(self, stage: TransformerStage) -> None:
        super().__init__()
        self.layer = next(iter(stage.blocks.values()))
        self.tables = (stage.rotary_cos[: MODEL.sequence], stage.rotary_sin[: MODEL.sequence])
        self.register_buffer("cos", stage.rotary_cos)
        self.register_buffer("sin", stage.rotary_sin)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.tables)


def rank_step(rates: Rates) -> RankStep:
    layer = OneLayer(build_stage())
    plain, checkpointed = (trace(layer, hidden, recompute=again) for again in (False, True))
    piece = piece_of("layer", plain, checkpointed, GPUS["h200"], gpus_per_host=1)
    known = replace(
        piece, forward_s=FORWARD_S, backward_s=BACKWARD_S, forward_host_s=0.0, backward_host_s=0.0
    )
    stage = Stage(index=0, pieces=(known,) * LAYERS, layers=LAYERS, is_last=True)
    return RankStep(ORDER, {0: stage}, rates, "groups")


def test_saved_bytes_and_their_peak_are_those_of_a_real_run(seen: Trace) -> None:
    rates = Rates(d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9)
    for manager in run({"activation_offload_fraction": 0.0, "device_limit_bytes": 1 << 40}, rates, 3):
        stats = manager.stats
    assert stats.saved_bytes == MICROBATCHES * seen.saved_bytes
    assert stats.device_bytes_peak == STAGES * seen.saved_bytes
    step = rank_step(rates)
    played = step.play(step.keep_all(0)).result
    assert played.peak_bytes == stats.device_bytes_peak
    assert (played.step_s, played.stall_s) == (pytest.approx(step.plain_s()), 0.0)


def test_what_the_halves_of_a_split_backward_read_is_what_those_of_a_real_run_were_seen_to() -> None:
    stage = build_stage()
    parameters = list(stage.parameters())
    engine = OffloadEngine(OffloadConfig(min_offloaded_tensor_size=1, piece_bytes=1), device=SimDevice())
    with installed(PipelineOffloadManager(engine, print_summary=False)) as manager:
        manager.begin_chunk(1, 0)
        x = hidden().requires_grad_()
        y = stage(x * 1)
        manager.end_forward(1, 0)
        manager.begin_backward(1, 0, "I")
        groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter(parameters))[1]
        del y
        manager.end_backward(1, 0, "I")
        manager.begin_backward(1, 0, "W")
        stage_backward_weight(iter(parameters), groups)
        manager.end_backward(1, 0, "W")
        seen = manager.tracker.seen(None).schedule()[1][1, 0]
        manager.step_end()
    halves = trace_halves(OneLayer(build_stage()), hidden)
    assert sum(size.w_bytes for size in seen) == LAYERS * halves.read_bytes
    assert sum(size.passed_bytes for size in seen) == LAYERS * halves.passed_bytes > 0


@pytest.mark.parametrize(
    ("chunks", "gb_s"),
    [(1.0, 20.0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1.5, 10.0), (1.5, 20.0)))],
)
def test_stall_and_peak_under_a_limit_are_those_of_a_real_run(
    seen: Trace, chunks: float, gb_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = partial(choose_keeps, max_trials=30)  # for both
    monkeypatch.setattr(timed, "choose_keeps", few)
    rates = Rates(d2h_bytes_per_s=gb_s * 1e9, h2d_bytes_per_s=gb_s * 1e9)
    limit_bytes = int(chunks * seen.saved_bytes)
    for manager in run({"device_limit_bytes": limit_bytes}, rates, 7):
        stats = manager.stats
    step = rank_step(rates)
    levels = step.uniform(0)
    chosen = few(step.order, step.sizes(levels), step.compute_s(levels), rates, limit_bytes)
    plan = RankPlan(
        levels=levels,
        keeps=chosen.keeps,
        saved_limit_bytes=limit_bytes,
        restoring_room_bytes=chosen.restoring_room_bytes,
    )
    played = step.play(plan).result
    real_s = step.plain_s() + stats.stall_ms / 1e3
    assert stats.stall_ms / 1e3 > 0.3 * step.plain_s(), "nothing to predict"
    assert played.step_s == pytest.approx(real_s, rel=0.05)
    assert played.peak_bytes == pytest.approx(stats.device_bytes_peak, rel=0.02)
    assert stats.device_bytes_peak <= limit_bytes


def test_a_trace_counts_what_the_profile_of_a_real_call_counts() -> None:
    """Of the same layer: BlockProfiler watches a call that a device computes, `trace` may have none."""
    layer, x = OneLayer(build_stage()), hidden().requires_grad_()
    engine = OffloadEngine(OffloadConfig(), device=SimDevice())
    profiler = BlockProfiler(layer, engine, (x,), min_elements=1)
    with watched(profiler):
        layer(x)
    profile = profiler.profile()
    engine.close()
    traced = trace(layer, hidden)
    # the model's own tables, which all chunks share, are no chunk's bytes in a dry run
    tables = sum(table.nbytes for table in layer.tables)
    assert profile.given_bytes == profile.input_bytes + tables
    assert (profile.plain_bytes - tables, profile.input_bytes) == (traced.saved_bytes, traced.input_bytes)
    of_profile = {
        (str(c.operator), c.number): (c.nbytes, c.saved_bytes) for c in profile.calls if c.saved_bytes
    }
    of_trace = {call.key: (call.made_bytes, call.saved_bytes) for call in traced.forward if call.saved_bytes}
    assert of_profile == of_trace
