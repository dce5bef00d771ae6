"""Copies run beside the compute, and the host is never blocked: by events on the device, as inequalities
between parts of one run.

The model is a chain of layers that each compute for a known time, a sleeping kernel, in the forward and in
the backward, and save N bytes, whose copy takes a little less. No absolute time is asserted: the step is
compared with its compute alone and with its bytes at the rates of the link, both measured here. These tests
must be alone on their card.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload import (
    OffloadConfig,
    OffloadEngine,
    PipelineOffloadManager,
    StepStats,
    group_commit,
    group_start,
    offload_hooks,
)
from offload.compat.tensors import TensorOffloader
from offload.device.cuda import CudaDevice
from offload.policy.actions import Rates
from tests.gpu.widened import cycles_of, sleep
from tests.gpu.workbench import DEVICE, installed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_allocator")]

N = 64 << 20
LAYERS = 12
ROUNDS = 5
COMPUTE_TO_COPY = 1.2
"""A layer computes a little longer than its copy takes, so that the copies can just be hidden."""
HEAD_START_MS = 3.0
"""The host is that far ahead when the measured part begins, as it is in training."""
LONG_MS = 400.0
"""Many times what the host needs to issue a step."""


class Busy(torch.autograd.Function):
    """Identity that computes for a while, in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cycles: int) -> Tensor:
        ctx.cycles = cycles
        torch.cuda._sleep(cycles)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        torch.cuda._sleep(ctx.cycles)
        return gradient, None


def chain(x: Tensor, cycles: int, *, marked: bool) -> Tensor:
    for _ in range(LAYERS):
        x = Busy.apply(x, cycles)
        if marked:
            x = group_start(x, "mlp_act")
            with offload_hooks():
                x = torch.tanh(x)
            x = group_commit(x, "mlp_act")
        else:
            x = torch.tanh(x)
    return x


class Bench:
    """One engine, and the step that is run with it and without."""

    def __init__(self, **config: Any) -> None:
        engine = OffloadEngine(
            OffloadConfig(min_offloaded_tensor_size=1, piece_bytes=N, **config), device=CudaDevice()
        )
        engine.reserve_host(LAYERS * N)
        self.manager = PipelineOffloadManager(engine, print_summary=False)
        rates = engine.rates
        assert rates is not None
        self.rates: Rates = rates
        self.cycles = cycles_of(
            COMPUTE_TO_COPY * 1000 * N / min(rates.d2h_bytes_per_s, rates.h2d_bytes_per_s)
        )
        self.x = torch.randn(N // 4, device=DEVICE, requires_grad=True)
        self.gradient = torch.ones_like(self.x)

    def step(self, *, marked: bool) -> StepStats | None:
        """All of it issued, copies included, when this returns; nothing waited for."""
        if marked:
            self.manager.begin_chunk(0, 0)
        y = chain(self.x, self.cycles, marked=marked)
        if marked:
            self.manager.end_forward(0, 0)
            self.manager.begin_backward(0, 0, "B")
        y.backward(self.gradient)
        if marked:
            self.manager.end_backward(0, 0, "B")
        self.x.grad = None
        return self.manager.step_end() if marked else None

    def milliseconds(self, *, marked: bool) -> float:
        """Device time of a step, to the end of its last copy."""
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        sleep(HEAD_START_MS)
        start.record()
        self.step(marked=marked)
        compute, device = torch.cuda.current_stream(), self.manager.engine.device
        for lane in (device.d2h, device.h2d):
            compute.wait_stream(lane.stream)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(**request.param)
    with installed(made.manager):
        for _ in range(6):  # until the plan is settled and host memory that it does not need is given back
            made.step(marked=True)
            torch.cuda.synchronize()
        made.step(marked=False)
        yield made


CAPS = [{"max_spilling_bytes": 2 * N, "max_restoring_bytes": 3 * N}, {"device_limit_bytes": 6 * N}]


@pytest.mark.req("S3-64")
@pytest.mark.parametrize("bench", CAPS, indirect=True, ids=["windows", "device limit"])
def test_a_step_takes_little_longer_than_its_compute_or_its_copies(bench: Bench) -> None:
    """At most 15% longer than the longer one, and two fifths of the shorter one are hidden: how many copies
    fit under a limit depends on what else uses the link."""
    steps, computes = [], []
    for _ in range(ROUNDS):
        computes.append(bench.milliseconds(marked=False))
        steps.append(bench.milliseconds(marked=True))
    stats = bench.manager.stats
    assert stats.refused == 0
    assert stats.restored >= LAYERS // 4, "hardly anything came back: the test proves nothing"
    copies_ms = 1000 * (
        stats.spill_bytes / bench.rates.d2h_bytes_per_s + stats.restore_bytes / bench.rates.h2d_bytes_per_s
    )
    step_ms, compute_ms = statistics.median(steps), statistics.median(computes)
    figures = (
        f"step {step_ms:.1f}, compute {compute_ms:.1f}, copies {copies_ms:.1f} ms, stalls {stats.stall_count}"
    )
    shorter_ms, longer_ms = sorted((compute_ms, copies_ms))
    assert step_ms <= 1.15 * longer_ms, figures
    assert step_ms <= longer_ms + 0.6 * shorter_ms, figures


@pytest.mark.parametrize(
    "bench",
    [*CAPS, {"max_spilling_bytes": 1, "max_restoring_bytes": 0}, {"max_inflight_offloads": 0}],
    indirect=True,
    ids=["windows", "device limit", "one at a time", "wait at each commit"],
)
def test_the_host_issues_a_whole_step_while_the_device_is_still_busy_with_something_else(
    bench: Bench,
) -> None:
    """Whatever waits, it is a lane. The device has not begun with the step when its last operation has been
    issued."""
    torch.cuda.synchronize()
    begun = torch.cuda.Event()
    sleep(LONG_MS)
    begun.record()
    bench.manager.begin_chunk(0, 0)
    y = chain(bench.x, bench.cycles, marked=True)
    bench.manager.end_forward(0, 0)
    assert not begun.query(), "the forward was issued only after the device had caught up"
    bench.manager.begin_backward(0, 0, "B")
    y.backward(bench.gradient)
    bench.manager.end_backward(0, 0, "B")
    bench.x.grad = None
    stats = bench.manager.step_end()
    assert not begun.query(), "the step was issued only after the device had caught up"
    assert stats.refused == 0
    assert stats.spilled >= LAYERS // 4
    torch.cuda.synchronize()


@pytest.mark.req("S3-12", "S3-64")
def test_copies_both_ways_run_beside_compute() -> None:
    """Copy and compute together are compared with their sum, by hand and without a model."""
    offload.configure(OffloadConfig(host_reserve_bytes=512 << 20), device="cuda")
    offloader = TensorOffloader()
    a, x = torch.randn(4096, 4096, device="cuda"), torch.randn(64 << 20, device="cuda")

    def compute() -> None:
        for _ in range(8):
            a @ a

    def ms(compute_too: bool, out: bool) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        handle = None if out else offloader.offload(x)
        offloader.sync_all()
        torch.cuda.synchronize()
        start.record()
        if out:
            handle = offloader.offload(x)
        else:
            assert handle is not None
            back = offloader.reload(handle)
        if compute_too:
            compute()
        if out:
            torch.cuda.current_stream().wait_stream(offloader.d2h_stream)
        else:
            offloader.sync_reload()
            del back
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        start.record()
        compute()
        end.record()
    torch.cuda.synchronize()
    alone = start.elapsed_time(end)
    for out in (True, False):
        ms(True, out)
        copied, both = min(ms(False, out) for _ in range(3)), min(ms(True, out) for _ in range(3))
        assert both < max(copied, alone) + 0.5 * min(copied, alone)
    offloader.clear()
