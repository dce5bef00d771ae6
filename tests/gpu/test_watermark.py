"""The watermark runtime on a real GPU: its lanes, its bits, and the mark as torch's allocator counts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from offload import ActivationRuntime, OffloadConfig, OffloadEngine
from offload.device.cuda import CudaDevice

pytestmark = pytest.mark.gpu

MIB = 1 << 20
WIDTH, ROWS, BLOCKS = 1024, 4096, 24
TENSOR = 4 * WIDTH * ROWS  # 16 MiB


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)]
    return nn.Sequential(*layers).cuda()


@pytest.fixture
def engine() -> OffloadEngine:
    return OffloadEngine(OffloadConfig(min_offloaded_tensor_size=1))


def train(model: nn.Module, runtime: ActivationRuntime | None, steps: int = 3) -> tuple[list[bytes], int]:
    """The bits of all gradients, and the most bytes allocated in the last step."""
    seen: list[bytes] = []
    for step in range(steps):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        x = torch.randn(ROWS, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        if runtime is None:
            loss = model(x).square().mean()
        else:
            runtime.step_begin(step)
            with runtime.managed_forward():
                loss = model(x).square().mean()
        del x
        loss.backward()
        del loss
        if runtime is not None:
            runtime.step_end()
        peak = torch.cuda.max_memory_allocated()
        for parameter in model.parameters():
            assert parameter.grad is not None
            seen.append(parameter.grad.cpu().numpy().tobytes())
            parameter.grad = None
    return seen, peak


@pytest.mark.req("S0-17", "S2-30")
def test_each_direction_has_a_stream_of_its_own(engine: OffloadEngine) -> None:
    device = engine.device
    assert isinstance(device, CudaDevice)
    compute = torch.cuda.current_stream()
    streams = {device.d2h.stream.cuda_stream, device.h2d.stream.cuda_stream, compute.cuda_stream}
    assert len(streams) == 3
    engine.close()


@pytest.mark.req("S0-7", "S0-9", "S0-10")
@pytest.mark.parametrize("order", ["forecast", "reactive"])
def test_above_the_mark_the_bits_are_those_of_the_run_without_and_the_peak_is_lower(
    order: str, engine: OffloadEngine
) -> None:
    wanted, peak = train(build(), None)
    high = peak - 20 * TENSOR
    fields: dict[str, Any] = {"slabs_per_class": (0, 0, 32, 2, 0)} if order == "reactive" else {}
    runtime = ActivationRuntime(
        engine=engine,
        order=order,
        vram_high_watermark_mb=high / MIB,
        vram_low_watermark_mb=high / MIB,
        telemetry_enabled=False,
        **fields,
    )
    found, lower = train(build(), runtime)
    metrics = runtime.last_metrics
    assert metrics is not None
    assert found == wanted
    assert metrics.activations_spilled == metrics.activations_restored >= 16
    assert lower <= peak - 10 * TENSOR
    if order == "forecast":
        # what an operator has for itself, of which no reading knows
        assert lower <= high + 4 * TENSOR
        assert runtime.last_details.latched_bytes == 0
    runtime.close()
    del runtime


def test_with_memory_enough_nothing_moves(engine: OffloadEngine) -> None:
    runtime = ActivationRuntime(
        engine=engine, vram_high_watermark_mb=1e6, vram_low_watermark_mb=1e6, telemetry_enabled=False
    )
    train(build(), runtime)
    assert runtime.last_metrics is not None
    assert runtime.last_metrics.activations_spilled == 0
    assert runtime.last_metrics.stall_count == 0
    assert engine.arena.held_bytes == 0
    runtime.close()


@pytest.mark.req("S0-45")
def test_the_peak_of_a_step_is_the_allocators_own(engine: OffloadEngine, tmp_path: Any) -> None:
    _, peak = train(build(), None)
    runtime = ActivationRuntime(
        engine=engine,
        vram_high_watermark_mb=1e6,
        vram_low_watermark_mb=1e6,
        telemetry_file=str(tmp_path / "steps.jsonl"),
    )
    train(build(), runtime)
    assert runtime.last_metrics is not None
    assert abs(runtime.last_metrics.vram_peak_mb * MIB - peak) <= 2 * TENSOR
    runtime.close()
