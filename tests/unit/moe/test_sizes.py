"""The formula of what a layer saves, beside what the engine counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe import Placement, build_stage_module, saved_bytes_of_layer
from offload import init_chunk_handler, step_end
from tests.unit.moe.mixtures import BATCH, SMALL, loss_of, offloading, text

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
