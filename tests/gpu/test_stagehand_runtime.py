"""StageHand's weight runtime on a GPU: bits, its marks by the allocator's count, figures, and memory at its
end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import ActivationRuntime
from offload.compat.stagehand import LayerRuntime, StagehandRuntime
from tests.gpu.test_weights import BLOCK_BYTES, BLOCKS, ROWS, WIDTH, adam, pair, step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("engine_of_the_gpu", "clean_allocator")]

MIB = 1 << 20
PATTERN = r"^layers\.\d+$"


def build(model: nn.Module, blocks: float, low: float, **fields: Any) -> StagehandRuntime:
    """blocks, low: marks, beyond what the model has beside its blocks."""
    beside = torch.cuda.memory_allocated() - BLOCKS * BLOCK_BYTES
    given = {"telemetry_enabled": False, **fields}
    return StagehandRuntime(
        model,
        block_pattern=PATTERN,
        vram_high_watermark_mb=(beside + blocks * BLOCK_BYTES) / MIB,
        vram_low_watermark_mb=(beside + low * BLOCK_BYTES) / MIB,
        **given,
    )


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("checkpoints", [None, False, True])
@pytest.mark.parametrize("window", [1, 3])
def test_steps_have_the_bits_of_plain_torch(lora: bool, checkpoints: bool | None, window: int) -> None:
    model, plain = pair(checkpoints=checkpoints)
    for each in (model, plain):
        each.layers.requires_grad_(not lora)
    runtime = build(model, 8, 4, prefetch_window_blocks=window)
    ours, its = adam(model), adam(plain)
    for number in range(6):
        with runtime.forward_context(step=number):
            found = step(model, number, ours)
        for mine, other in zip(found, step(plain, number, its), strict=True):
            assert torch.equal(mine, other)
    runtime.shutdown()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.usefixtures("deterministic")
def test_both_runtimes_share_the_link_and_gradients_are_plain_torchs() -> None:
    model, plain = pair()
    runtime = build(model, 6, 4)
    activations = ActivationRuntime(
        vram_high_watermark_mb=1, vram_low_watermark_mb=1, min_numel=1, telemetry_enabled=False
    )
    ours, its = adam(model), adam(plain)
    for number in range(5):
        with runtime.forward_context(activations, number):
            found = step(model, number, ours)
        for mine, other in zip(found, step(plain, number, its), strict=True):
            assert torch.equal(mine, other)
    assert activations.last_metrics is not None
    assert activations.last_metrics.activations_spilled > 0
    activations.close()
    runtime.shutdown()


def test_the_allocators_count_stays_below_the_high_mark_and_figures_add_up(tmp_path: Path) -> None:
    model, plain = pair(checkpoints=False)
    del plain
    model.layers.requires_grad_(False)
    activations_bytes = 4 * BLOCK_BYTES  # of one recomputed block and all inputs
    path = tmp_path / "lines.jsonl"
    runtime = build(model, 8, 6, telemetry_enabled=True, telemetry_file=str(path))
    for number in range(8):
        torch.cuda.reset_peak_memory_stats()
        with runtime.forward_context(step=number):
            step(model, number, torch.optim.SGD(model.embed.parameters(), lr=0.1))
        assert torch.cuda.max_memory_allocated() <= runtime.budget.high_bytes + activations_bytes
    runtime.shutdown()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(8)]
    last = lines[-1]
    assert last["d2h_bytes"] == 0
    assert last["h2d_bytes"] % BLOCK_BYTES == 0
    assert 0 < last["h2d_bytes"] < 2 * BLOCKS * BLOCK_BYTES
    assert last["prefetch_hits"] + last["prefetch_misses"] == 2 * BLOCKS
    assert last["prefetch_hits"] >= 2 * BLOCKS - 2
    assert all(line["copy_time_ms"] > 0 for line in lines)
    assert last["compute_time_ms"] > 0
    assert last["vram_reserved_mb"] >= last["vram_used_mb"] > 0
    assert (last["nan_count"], last["inf_count"], last["dtype_promotions"]) == (0, 0, 0)


def test_nan_is_counted_without_a_wait() -> None:
    model, _ = pair()
    runtime = build(model, 6, 4)
    with torch.no_grad(), runtime.forward_context(step=0):
        model(torch.full((ROWS, WIDTH), float("nan"), device="cuda", dtype=torch.bfloat16))
    runtime.telemetry.drain()
    assert runtime.telemetry.last is not None
    assert runtime.telemetry.last.nan_count == BLOCKS * ROWS * WIDTH
    runtime.shutdown()


def test_layer_mode_has_the_outputs_of_plain_torch() -> None:
    model, plain = pair()
    runtime = LayerRuntime(model, vram_budget="600MB", telemetry=False)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    for _ in range(4):
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
    assert runtime.traced
    runtime.shutdown()


def test_fifty_steps_and_a_pool_that_is_used_again_hold_no_more_memory() -> None:
    model, plain = pair(checkpoints=False)
    model.layers.requires_grad_(False)
    del plain
    runtime = build(model, 6, 4)
    optimizer, seen = adam(model), []
    for number in range(50):
        with runtime.forward_context(step=number):
            step(model, number, optimizer)
        torch.cuda.synchronize()
        stats = runtime.offload_engine.arena.stats()
        seen.append((torch.cuda.memory_reserved(), stats.held_bytes, stats.lent_bytes))
    assert seen[9] == seen[49]
    pool = runtime.shutdown_keep_pool()
    assert pool.stats().lent_bytes == 0
    second = StagehandRuntime(model, None, PATTERN, pool=pool, telemetry_enabled=False)
    step(model, 0, optimizer)
    assert pool.stats().held_bytes == seen[9][1]
    second.shutdown()
