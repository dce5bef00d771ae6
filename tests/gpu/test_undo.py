"""Steps that start in the backward and may be undone, on a real GPU: the bits of none, within the memory of
none.

pytest -m gpu -n 0 tests/gpu/test_undo.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import HybridDeviceOptimizer, OffloadEngine
from tests.gpu.test_optimizer import BUCKET, DEVICE, RECIPE, WIDTH, assert_same_bits, net
from tests.gpu.widened import WidenedDevice, sleep

pytestmark = pytest.mark.gpu

ROWS = 8192
"""A layer's output is 32 MiB in float32, and its weights are 4: what the backward frees has room for the old
weights."""
STEPS = 6
NEVER, ALWAYS = 1e9, 1e-4
"""Norms to clip to."""


@contextmanager
def hybrid(
    model: nn.Module, device: WidenedDevice | None = None, /, **options: Any
) -> Iterator[HybridDeviceOptimizer]:
    """Every backward is its step's last, and a step that was undone does not keep the next ones from
    starting."""
    engine = OffloadEngine(device=device if device is not None else "cuda")
    common: dict[str, Any] = {
        "engine": engine,
        "bucket_bytes": BUCKET,
        "cpu_share": 0.0,
        "model": model,
        "param_update_in_fp32": True,
    }
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, **{**common, **RECIPE, **options})
    optimizer.last_microbatch = True
    if optimizer._early is not None:
        optimizer._early.quiet_steps = 0
    try:
        yield optimizer
    finally:
        if device is not None:
            device.slow_ms = {}
        optimizer.close()
        engine.close()


def backward(model: nn.Module, number: int) -> None:
    dtype = next(model.parameters()).dtype
    generator = torch.Generator(device=DEVICE).manual_seed(100 + number)
    model(
        torch.randn(ROWS, WIDTH, device=DEVICE, generator=generator).to(dtype)
    ).float().square().mean().backward()


def trained(
    model: nn.Module, optimizer: HybridDeviceOptimizer, norms: list[float | None], *, slow_ms: float = 0.0
) -> list[Tensor]:
    """Weights and state after a step for each norm; None leaves the step out."""
    for number, norm in enumerate(norms):
        backward(model, number)
        if slow_ms:
            sleep(slow_ms)
        if norm is not None:
            optimizer.clip_grad_norm_(norm)
            optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize_parameters()
    found = [parameter.detach().clone() for parameter in model.parameters()]
    return found + [
        value.reshape(-1).clone().cpu()
        for parameter in model.parameters()
        for value in optimizer.state[parameter].values()
    ]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "norms",
    [[NEVER] * STEPS, [ALWAYS] * STEPS, [NEVER, ALWAYS, None, NEVER, ALWAYS, NEVER]],
    ids=["never", "always", "in turn"],
)
def test_steps_that_may_be_undone_have_the_bits_of_steps_that_wait(
    norms: list[float | None], dtype: torch.dtype, share: float
) -> None:
    model = net(dtype)
    with hybrid(model, cpu_share=share) as optimizer:
        expected = trained(model, optimizer, norms)
    model = net(dtype)
    with hybrid(model, cpu_share=share, step_in_backward="undoable") as optimizer:
        assert_same_bits(trained(model, optimizer, norms), expected)
        counts, buckets = optimizer.early_counts, len(optimizer.placed.streamed.buckets)
        assert counts is not None
        assert counts.started >= len(norms) * buckets // 2, "what the backward has freed is there"
        steps_kept = sum(norm == NEVER for norm in norms)
        if steps_kept in (0, len(norms)):
            assert counts.undone == (counts.started if steps_kept == 0 else 0)
        else:
            assert 0 < counts.undone < counts.started


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("slow", ["d2h", "h2d", "both", "compute"])
def test_slow_lanes_change_no_bit_of_them(slow: str) -> None:
    norms: list[float | None] = [NEVER, ALWAYS, None, NEVER]
    model = net()
    with hybrid(model, bucket_bytes=4 * BUCKET) as optimizer:
        expected = trained(model, optimizer, norms)
    device, model = WidenedDevice(), net()
    with hybrid(model, device, bucket_bytes=4 * BUCKET, step_in_backward="undoable") as optimizer:
        device.slow_ms = {lane: 3.0 for lane in ("d2h", "h2d") if slow in (lane, "both")}
        assert_same_bits(
            trained(model, optimizer, norms, slow_ms=40.0 if slow == "compute" else 0.0), expected
        )
        assert optimizer.early_counts is not None
        assert optimizer.early_counts.started > 0


@pytest.mark.usefixtures("clean_allocator")
def test_the_old_weights_do_not_raise_the_peak_of_a_step() -> None:
    """Both ways hold weights, gradients, the ring and the forward's activations; old weights lie where
    activations were. A block of torch's allocator may be up to 1 MiB longer than was asked for, and no more
    than one such is above the mark. The counts' other side is 512 bytes each. Nothing of the last step is
    under way when a step begins, so no gradient is held longer in one of the two."""
    backward(net(), 0)  # cuBLAS gets its workspace
    peaks = {}
    for mode in (False, "undoable"):
        before = torch.cuda.memory_allocated()
        model = net()
        with hybrid(model, step_in_backward=mode) as optimizer:
            for number in range(4):
                torch.cuda.synchronize()
                optimizer.synchronize_parameters()
                torch.cuda.reset_peak_memory_stats()
                backward(model, number)
                optimizer.clip_grad_norm_(NEVER)
                optimizer.step()
                optimizer.zero_grad()
                optimizer.synchronize_parameters()
                peaks[mode] = torch.cuda.max_memory_allocated() - before
            if optimizer.early_counts is not None:
                assert optimizer.early_counts.started >= 2 * len(optimizer.placed.streamed.buckets)
            other_side = 512 * sum(len(bucket.steps) for bucket in optimizer.placed.streamed.buckets)
        del model, optimizer  # before the next one's measure begins
    assert peaks["undoable"] <= peaks[False] + (1 << 20) + other_side


@pytest.mark.parametrize(("dtype", "each"), [(torch.float32, 16), (torch.bfloat16, 24)])
def test_both_sides_of_the_state_are_pinned_and_exact(dtype: torch.dtype, each: int) -> None:
    model = net(dtype)
    with hybrid(model, step_in_backward="undoable") as optimizer:
        padded = sum(-(-parameter.numel() // 16) * 16 for parameter in model.parameters())
        assert optimizer.engine.arena.stats().lent_bytes == each * padded
        trained(model, optimizer, [NEVER, NEVER])
        for parameter in model.parameters():
            assert optimizer.state[parameter]["exp_avg"].is_pinned()
