"""The formula of what a layer saves, beside what the engine counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe import Placement, build_stage_module, saved_bytes_of_layer
from offload import StepStats, init_chunk_handler, step_end
from tests.inside import impose
from tests.unit.moe.mixtures import BATCH, SMALL, loss_of, offloading, step, text

TOKENS = BATCH * SMALL.sequence
CHANGES: list[dict[str, Any]] = [
    {},
    {"balance": "loss"},
    {"shared_hidden": 0, "top_k": 3},
    {"normalize": False},
    {"probabilities": "output"},
]
EXPERTS_ALONE: list[dict[str, Any]] = [
    {"offload_modules": ("expert_fc1", "moe_act")},
    {"offload_modules": ("expert_fc1", "moe_act"), "input_kept": "permuted"},
    {"experts_mode": "save_on_cpu"},
    {"experts_mode": "save_on_cpu", "input_kept": "permuted"},
    {"experts_mode": "both"},
    {"experts_mode": "both", "input_kept": "permuted"},
]


def counted(config: Any, dtype: torch.dtype, **placement: Any) -> int:
    """Bytes a layer that the engine saw in a step."""
    with offloading(min_offloaded_tensor_size=1) as manager:
        model = build_stage_module(config, dtype=dtype, **placement)
        init_chunk_handler()
        logits = model(text())
        loss_of(logits, text()).backward()
        step_end()
        return int(manager.stats.saved_bytes) // config.layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", EXPERTS_ALONE, ids=str)
def test_what_experts_and_router_save_is_the_formulas(placement: dict[str, Any], dtype: torch.dtype) -> None:
    for changes in CHANGES:
        config = SMALL.with_(**changes)
        by_group = saved_bytes_of_layer(config, Placement(**placement), tokens=TOKENS, dtype=dtype)
        of_experts = [by_group.get(name, 0) for name in ("expert_fc1", "moe_act", "experts")]
        assert counted(config, dtype, **placement) == sum(of_experts), changes


def test_each_half_by_itself() -> None:
    by_group = saved_bytes_of_layer(SMALL, tokens=TOKENS, dtype=torch.float32)
    for name in ("expert_fc1", "moe_act"):
        found = counted(SMALL, torch.float32, offload_modules={name})
        assert found == by_group[name]


def test_the_largest_model_of_the_benchmarks() -> None:
    """Qwen3-30B-A3B's shapes, 16,384 tokens on one rank: h is 403 MB a layer, the input 537 or 67 MB."""
    config = SMALL.with_(
        dim=2048, expert_hidden=768, experts=128, top_k=8, heads=32, kv_heads=4, head_dim=128, shared_hidden=0
    )
    kept = {
        input_kept: saved_bytes_of_layer(
            config, Placement(input_kept=input_kept), tokens=16_384, dtype=torch.bfloat16
        )
        for input_kept in ("permuted", "unpermuted")
    }
    assert kept["permuted"]["moe_act"] == 402_653_184 + 262_144
    assert kept["permuted"]["expert_fc1"] - kept["unpermuted"]["expert_fc1"] == 536_870_912
    assert kept["unpermuted"]["expert_fc1"] == 67_108_864 + 8_388_608 + 12 * 131_072 + 4 * 16_384


# -- what leaves, and what the step holds without it --


def summary_of(layers: int, microbatches: int) -> tuple[dict[str, int], StepStats, StepStats]:
    """With both marks of the experts: bytes that leave by name, as the first step plans them, and the figures
    of that step and of one in which nothing may leave. Later plans are timed."""
    config = SMALL.with_(layers=layers, shared_hidden=0)
    with offloading(min_offloaded_tensor_size=1, max_restoring_bytes=8192) as manager:
        model = build_stage_module(config, offload_modules=("expert_fc1", "moe_act"), input_kept="permuted")
        step(model, tuple(range(microbatches)))
        summary, stats = dict(manager.offload_summary_bytes), manager.stats
        impose(manager.engine, max_spilling_bytes=0)
        step(model, tuple(range(microbatches)))
        return summary, stats, manager.stats


@pytest.mark.req("S3-94")
def test_the_peak_of_saved_bytes_falls_by_what_the_step_no_longer_holds() -> None:
    _, stats, stayed = summary_of(layers=6, microbatches=2)
    assert stayed.spill_bytes == 0
    assert stayed.device_bytes_peak == stayed.saved_bytes == stats.saved_bytes
    assert stats.device_bytes_peak < stayed.device_bytes_peak / 2
    assert stats.spill_bytes == stats.saved_bytes


@pytest.mark.req("S3-95")
def test_several_groups_of_one_name_leave_and_of_one_chunk_the_last_stays() -> None:
    by_group = saved_bytes_of_layer(
        SMALL.with_(shared_hidden=0), Placement(input_kept="permuted"), tokens=TOKENS, dtype=torch.float32
    )
    rows = 4 * TOKENS * SMALL.top_k * SMALL.dim  # the last of its name, which the backward reads first
    several, _, _ = summary_of(layers=3, microbatches=1)
    assert several == {
        "expert_fc1": 3 * by_group["expert_fc1"] - rows,
        "moe_act": 2 * by_group["moe_act"],
    }
    alone, _, _ = summary_of(layers=1, microbatches=1)
    assert alone == {"expert_fc1": by_group["expert_fc1"] - rows, "moe_act": 0}
