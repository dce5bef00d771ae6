"""Steps on the virtual clock: each operator computes for a millisecond, and a copy takes three."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload import OffloadConfig, OffloadEngine
from offload.device.sim import SimDevice
from tests.unit.watermark.training import ROWS, TENSOR, LivingStorages, blocks, runtime_of, train

OPERATOR_S = 1e-3
COPY_S = 3e-3  # of one tensor: compute makes saved bytes three times as fast as the link carries them


@dataclass(frozen=True)
class TimedStep:
    """waited_ms: compute for copies, or the host for them. peak: bytes."""

    waited_ms: float
    peak: int
    spilled: int  # tensors
    latched_bytes: int
    forwards_lost: int


def timed_steps(
    high: int,
    *,
    layers: int = 12,
    steps: int = 3,
    rows: Callable[[int], int] = lambda step: ROWS,
    layers_of: Callable[[int], int] | None = None,
    low: int | None = None,
    **fields: Any,
) -> list[TimedStep]:
    """high, low: the marks, in bytes. layers_of: how many of the layers a step runs."""
    rate = TENSOR / COPY_S / 1e9
    device = SimDevice(executor="clock", d2h_gb_s=rate, h2d_gb_s=rate)
    engine = OffloadEngine(OffloadConfig(min_offloaded_tensor_size=1, piece_bytes=TENSOR), device=device)
    meter = LivingStorages(device)
    found: list[TimedStep] = []
    last = [0.0]

    class Timed(torch.autograd.Function):
        """Takes an operator's time, and twice that in the backward; saves nothing."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.seconds = OPERATOR_S * x.shape[0] / ROWS
            device.compute_for(ctx.seconds)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            device.compute_for(2 * ctx.seconds)
            return grad

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        for layer in list(model)[: None if layers_of is None else layers_of(len(found))]:
            for part in layer:
                x = Timed.apply(part(x))
        return x.square().mean()

    model = blocks(layers)
    with meter:
        train(model, None, steps=1)  # the meter meets the weights
        meter.start_step()
        low = high - 4 * TENSOR if low is None else low
        with runtime_of(
            engine=engine, memory_allocated=meter.allocated, high=high, low=low, **fields
        ) as runtime:

            def note() -> None:
                metrics, details = runtime.last_metrics, runtime.last_details
                waited_s = device.stall_s + device.blocked_s
                found.append(
                    TimedStep(
                        (waited_s - last[0]) * 1000,
                        meter.peak,
                        metrics.activations_spilled,
                        details.latched_bytes,
                        details.forwards_lost,
                    )
                )
                last[0] = waited_s
                meter.start_step()

            train(model, runtime, steps=steps, rows=rows, loss_of=loss_of, after=note)
    return found


def peak_without(**arguments: Any) -> int:
    """Bytes of the highest step if nothing leaves."""
    return max(step.peak for step in timed_steps(1 << 40, **arguments))
