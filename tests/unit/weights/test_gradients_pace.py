"""How long a microbatch takes with gradients on the host, by the virtual clock, beside what bounds it: the
longer of the backward and of the copies one way."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import marks
from offload.device import Event, Lane
from offload.device.sim import SimDevice
from tests.inside import gradients_of, streams_from
from tests.property.test_weight_edges import managed

LAYERS, MICROBATCHES = 10, 3
MB = 1000
"""Simulated bytes of a megabyte: sizes and the link are those of an H200 and of Qwen2.5-7B."""
SIZES = {"q": 25.7, "k": 3.7, "v": 3.7, "o": 25.7, "gate": 135.8, "up": 135.8, "down": 135.8}
FORWARD_MS = {"q": 0.17, "k": 0.03, "v": 0.03, "o": 0.77, "gate": 0.9, "up": 0.9, "down": 1.0}
BYTES = sum(int(size * MB / 4) * 4 for size in SIZES.values())
LINK_GB_S = 52.7 * MB / 1e6


class Device(SimDevice):
    """The host is so far ahead that it sees no event pass in a backward. ops: given to compute for copies."""

    def __init__(self) -> None:
        super().__init__(executor="clock", d2h_gb_s=LINK_GB_S, h2d_gb_s=LINK_GB_S, poison=False)
        self.ops, self.is_ahead = 0, True

    def poll(self, event: Event) -> bool:
        return super().poll(event) and not self.is_ahead

    def record(self, lane: Lane, *, timed: bool = False) -> Any:
        self.ops += lane is self.compute
        return super().record(lane, timed=timed)

    def wait(self, lane: Lane, event: Event, order: str) -> None:
        self.ops += lane is self.compute
        super().wait(lane, event, order)


class Product(torch.autograd.Function):
    """What takes the time of a projection, and saves as it does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, device: SimDevice, seconds: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.given = device, seconds, weight.shape
        device.compute_for(seconds)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.saved_tensors  # noqa: B018  a checkpoint runs its forward again
        device, seconds, shape = ctx.given
        device.compute_for(2 * seconds)
        return grads[0], torch.ones(shape), None, None


class Block(nn.Module):
    def __init__(self, device: SimDevice, faster: float) -> None:
        super().__init__()
        self.device, self.faster = device, faster
        for name, size in SIZES.items():
            setattr(self, name, nn.Parameter(torch.zeros(int(size * MB / 4))))

    def forward(self, x: Tensor) -> Tensor:
        for name, ms in FORWARD_MS.items():
            x = Product.apply(x, getattr(self, name), self.device, ms / self.faster / 1e3)  # type: ignore[no-untyped-call]
        return x


class Model(nn.Module):
    def __init__(self, device: SimDevice, faster: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(device, faster) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@contextmanager
def trained(faster: float = 1.0) -> Iterator[tuple[Device, Model, Any]]:
    """After a step, in which the order is learned."""
    device = Device()
    model = Model(device, faster)
    with managed(device), streams_from(64):
        handle = offload.apply(model, gradients="host")
        step(device, model)
        yield device, model, handle
        handle.remove()


def step(device: Device, model: Model) -> list[float]:
    """Seconds of each backward."""
    found = []
    for _ in range(MICROBATCHES):
        loss = model(torch.zeros(4, requires_grad=True)).sum()
        begun = device.now_s
        loss.backward()
        found.append(device.now_s - begun)
    model.zero_grad()
    device.is_ahead = False
    offload.step_end()
    device.is_ahead = True
    return found


@pytest.mark.parametrize("faster", [1.0, 1.6])
def test_a_backward_takes_as_long_as_its_compute_or_its_copies(faster: float) -> None:
    with trained(faster) as (device, model, _):
        compute_s = LAYERS * 3 * sum(FORWARD_MS.values()) / faster / 1e3
        copies_s = LAYERS * BYTES / (LINK_GB_S * 1e9)
        for backward_s in step(device, model):
            assert backward_s <= 1.02 * max(compute_s, copies_s)


def test_the_stall_that_is_told_is_what_compute_lost() -> None:
    with trained(2.0) as (device, model, handle):
        before = device.stall_s
        step(device, model)
        lost_ms = (device.stall_s - before) * 1e3
        step(device, model)
        assert lost_ms > 50
        assert handle.gradients.stall_ms == pytest.approx(lost_ms)


def test_compute_is_given_little_for_copies_and_the_last_backward_fetches_nothing_in_vain() -> None:
    with trained() as (device, model, handle):
        device.ops, before = 0, handle.gradients.misses
        step(device, model)
        uses = MICROBATCHES * LAYERS * len(SIZES)
        assert device.ops < 2.5 * uses  # 8 when each came and went alone
        assert handle.gradients.misses == before
        assert handle.gradients.in_bytes == (MICROBATCHES - 1) * LAYERS * BYTES


def test_the_limits_can_lower_the_window() -> None:
    with trained() as (device, model, handle):
        stream, largest = gradients_of(handle), int(135.8 * MB / 4) * 4
        assert handle.gradients.window_bytes == 2 * BYTES + largest
        limits = marks.default_manager().engine.limits
        assert (limits.gradients_window_bytes, limits.held_by("gradients_window_bytes")) == (
            handle.gradients.window_bytes,
            "gradients",
        )
        share = limits.contributor("test")
        share.bound("gradients_window_bytes", 4 * largest)
        stream.residency.present_bytes_peak = 0
        step(device, model)
        assert stream.residency.present_bytes_peak <= handle.gradients.window_bytes == 4 * largest
        share.bound("gradients_window_bytes", 0)
        step(device, model)
        assert handle.gradients.window_bytes == 3 * largest
        assert (limits.gradients_window_bytes, limits.held_by("gradients_window_bytes")) == (0, "test")
    assert limits.held_by("gradients_window_bytes") == "test", "a removed model bounds nothing"


def test_gradients_that_no_backward_added_to_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with trained() as (device, model, _), caplog.at_level(logging.WARNING):
        for _ in range(2):
            weight = model.layers[1].gate
            (weight.grad,) = torch.autograd.grad((weight * 2).sum(), [weight])
            step(device, model)
        assert [record.message for record in caplog.records if "were set as p.grad" in record.message] == [
            "1 gradients (the first: layers.1.gate) were set as p.grad, not added to by a backward, "
            "as the weight-gradient actions of zero-bubble schedules do, and DistributedDataParallel where a "
            "rank has not used them: they stay on the device until a backward adds to them. Use a schedule "
            "with whole backwards, or leave gradients= out"
        ]
