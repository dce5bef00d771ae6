"""What offload does to device memory on a real GPU, against figures that are derived here.

The model is a chain of L tanh, each a group. A tanh saves its result and nothing else, N bytes, so the peaks
can be counted by hand. All tensors are of N bytes, a multiple of 2 MiB, so the allocator cuts every block to
size. Memory is `active_bytes`: unlike `max_memory_allocated` it counts blocks that were freed and that a
stream still uses.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import (
    OffloadConfig,
    OffloadEngine,
    PipelineOffloadManager,
    StepStats,
    group_commit,
    group_start,
    offload_hooks,
)
from offload.device.cuda import CudaDevice
from tests.gpu.workbench import DEVICE, assert_same_bits, installed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_allocator")]

MIB = 1 << 20
N = 16 * MIB
L = 10
ROUNDING = 512
"""Bytes: the allocator rounds each request up to a multiple of it."""


def build_manager(**config: Any) -> PipelineOffloadManager:
    """Every tensor is a piece of its own, and the host has room for all of them."""
    engine = OffloadEngine(
        OffloadConfig(min_offloaded_tensor_size=1, piece_bytes=1, **config), device=CudaDevice()
    )
    engine.reserve_host(2 * L * N)
    return PipelineOffloadManager(engine, print_summary=False)


@pytest.fixture
def managed() -> Iterator[Any]:
    """Builds a manager and makes it the process-wide one until the test ends."""
    with contextlib.ExitStack() as stack:

        def build(**config: Any) -> PipelineOffloadManager:
            manager = build_manager(**config)
            stack.enter_context(installed(manager))
            return manager

        yield build


def chain(x: Tensor, layers: int = L) -> Tensor:
    for _ in range(layers):
        x = group_start(x, "mlp_act")
        with offload_hooks():
            x = torch.tanh(x)
        x = group_commit(x, "mlp_act")
    return x


@dataclass
class Ends:
    """What a step starts from: N bytes each."""

    x: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, nbytes: int = N) -> Ends:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(nbytes // 4, generator=generator).to(DEVICE).requires_grad_()
        return cls(x, torch.ones_like(x))


def run_step(
    ends: Ends, manager: PipelineOffloadManager | None, layers: int = L, microbatches: int = 1
) -> StepStats | None:
    """The forwards, then the backwards; the input's gradient is dropped, so that the step leaves nothing."""
    outputs = []
    for microbatch in range(microbatches):
        if manager is not None:
            manager.begin_chunk(0, microbatch)
        outputs.append(chain(ends.x, layers))
        if manager is not None:
            manager.end_forward(0, microbatch)
    for microbatch in range(microbatches):
        if manager is not None:
            manager.begin_backward(0, microbatch, "B")
        outputs[microbatch].backward(ends.gradient)
        if manager is not None:
            manager.end_backward(0, microbatch, "B")
    ends.x.grad = None
    return None if manager is None else manager.step_end()


def active_bytes() -> int:
    return int(torch.cuda.memory_stats()["active_bytes.all.current"])


def peak_of(step: Any) -> tuple[int, Any]:
    """(the most active bytes while `step()` runs, what it returned). Ends with the device idle, so that every
    time it took is known."""
    torch.cuda.reset_peak_memory_stats()
    result = step()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["active_bytes.all.peak"]), result


# -- peaks ---------------------------------------------------------------------------------------------------


def test_without_offload_the_peak_is_all_saved_tensors_and_four_more() -> None:
    """At the second node of the backward: x, the root gradient, the L results (the last one has a name), a
    gradient in and one out."""
    before = active_bytes()
    ends = Ends.of()
    peak, _ = peak_of(lambda: run_step(ends, None))
    assert peak - before == (L + 4) * N


@pytest.mark.parametrize(("spilling", "restoring"), [(1, 0), (1, 1), (2, 2), (3, 1), (1, 4)])
def test_with_offload_the_peak_falls_by_what_was_spilled_less_the_windows(
    managed: Any, spilling: int, restoring: int
) -> None:
    """In flight are at most the two windows; the one tensor more is the one that a node reads, which no
    window counts any more.

    At least x, the root, the held result, the tensor that is read and two gradients are there at once,
    whatever leaves.
    """
    before = active_bytes()
    ends = Ends.of()
    without, _ = peak_of(lambda: run_step(ends, None))
    manager = managed(max_spilling_bytes=spilling * N, max_restoring_bytes=restoring * N)
    for _ in range(3):  # the first step without a plan, then with
        peak, stats = peak_of(lambda: run_step(ends, manager))
        assert stats.refused == 0
        assert stats.spill_bytes >= (L - 1) * N
        windows = (spilling + restoring) * N
        assert peak <= without - stats.spill_bytes + windows + N + ROUNDING * (L + 6)
        assert peak - before >= 6 * N


@pytest.mark.req("S2-99")
def test_the_peak_falls_by_what_the_summary_says(managed: Any) -> None:
    """Many small layers, so that the windows are small beside what leaves: within 30% and 20 MiB of
    offload_summary_bytes."""
    nbytes, layers = 4 * MIB, 60
    ends = Ends.of(nbytes)
    without, _ = peak_of(lambda: run_step(ends, None, layers))
    manager = managed(max_spilling_bytes=nbytes, max_restoring_bytes=nbytes)
    run_step(ends, manager, layers)
    peak, _ = peak_of(lambda: run_step(ends, manager, layers))
    saved, promised = without - peak, manager.offload_summary_total_bytes
    assert promised == (layers - 1) * nbytes  # the group that is read first stays
    assert saved > 0
    assert abs(saved - promised) <= 0.3 * promised
    assert abs(saved - promised) <= 20 * MIB


@pytest.mark.parametrize("limit", [3, 4, 6])
def test_saved_bytes_on_the_device_stay_under_the_limit(managed: Any, limit: int) -> None:
    """By the engine's count, and by the allocator's: beside what is counted there are x, the root, the held
    result of each microbatch, the tensor that a node reads and two gradients, or in the forward the result
    that is being made."""
    microbatches = 2
    before = active_bytes()
    ends = Ends.of()
    manager = managed(device_limit_bytes=limit * N)
    for _ in range(4):  # the last one runs with the plan from measured times
        peak, stats = peak_of(lambda: run_step(ends, manager, microbatches=microbatches))
        assert stats.refused == 0
        assert stats.restored > 0
        assert stats.device_bytes_peak <= limit * N
        assert manager.engine.transfers.device_bytes == 0
        assert peak - before <= (limit + 2 + microbatches + 3) * N + ROUNDING * microbatches * L


# -- nothing grows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "caps",
    [{"max_spilling_bytes": 2 * N, "max_restoring_bytes": 2 * N}, {"device_limit_bytes": 5 * N}],
    ids=str,
)
def test_ten_steps_hold_what_one_step_holds(managed: Any, caps: dict[str, int]) -> None:
    ends = Ends.of()
    before = active_bytes()
    manager = managed(**caps)
    peaks, held = [], []
    for _ in range(10):
        peak, stats = peak_of(lambda: run_step(ends, manager, microbatches=2))
        assert active_bytes() == before
        assert manager.engine.arena.stats().lent == 0
        peaks.append(peak)
        held.append(stats.host_bytes_held)
    assert len(set(peaks[4:])) == 1, peaks  # by then the plan is settled
    assert len(set(held[5:])) == 1, held
    assert max(held) == held[0], "the host memory grew although it was reserved"


@pytest.mark.parametrize("asked", [True, False])
def test_what_an_odd_phase_left_in_the_cache_goes_back_once_the_plan_has_settled(
    managed: Any, asked: bool
) -> None:
    """Two segments that nobody uses: they can hold no block of a step beside the ones that it has, and stay
    until they are given back."""
    ends = Ends.of()
    manager = managed(max_spilling_bytes=2 * N, trim_device=asked)
    for _ in range(2):  # without a plan and with one: all the memory that a step takes
        run_step(ends, manager)
    torch.cuda.synchronize()
    steady = torch.cuda.memory_reserved()
    odd = [torch.empty(steady, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    odd.clear()
    torch.cuda.reset_peak_memory_stats()
    reserved = []
    for _ in range(7):
        run_step(ends, manager)
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[:3] == [3 * steady] * 3
    if asked:
        assert max(reserved[3:]) <= steady
    else:
        assert reserved[3:] == [3 * steady] * 4


@pytest.mark.req("S0-38")
def test_a_leftover_of_4_mb_in_each_step_does_not_stay(
    managed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its graph is kept and its backward never runs: a step holds it until it ends, and only its sum, 512
    bytes, stays."""
    caplog.set_level(logging.ERROR, "offload")  # a warning a step is right, and not the subject
    manager = managed(max_spilling_bytes=2 * N)
    x = torch.randn(MIB, device=DEVICE, requires_grad=True)
    sums: list[Tensor] = []
    before = active_bytes()
    for step in range(10):
        manager.begin_chunk(0, 0)
        y = group_start(x, "mlp_act")
        with offload_hooks():
            y = torch.tanh(y).square().sum()
        sums.append(group_commit(y, "mlp_act"))
        del y
        manager.end_forward(0, 0)
        stats = manager.step_end()
        assert stats.saved == 1
        assert stats.spill_bytes == 4 * MIB
        assert active_bytes() - before <= (step + 1) * ROUNDING
        assert manager.engine.arena.stats().lent == 0
        assert manager.engine.transfers.device_bytes == 0


def test_after_reset_instance_pinned_and_device_memory_are_back() -> None:
    before = active_bytes()
    manager = PipelineOffloadManager.reset_instance(build_manager(device_limit_bytes=4 * N))
    try:
        ends = Ends.of()
        run_step(ends, manager)
        run_step(ends, manager)
        manager.begin_chunk(0, 0)
        unread = chain(ends.x)
        block = manager.engine.arena.take(4096)
        assert block is not None
        (pinned,) = block.extents
        manager.engine.arena.give_back(block, None)
        del block
        assert pinned.is_pinned()
        held = manager.engine.arena.held_bytes
        assert held >= L * N

        fresh = PipelineOffloadManager.reset_instance()
        assert fresh is not manager
        assert manager.engine.arena.held_bytes == 0
        assert manager.engine.arena.budget.used_bytes == 0
        assert not pinned.is_pinned()
        assert fresh.engine.arena.held_bytes == 0
        assert active_bytes() - before == 3 * N  # x, the root, and the result that `unread` names
        del ends, unread
        assert active_bytes() == before
    finally:
        PipelineOffloadManager.OFFLOAD_MGR = None


# -- exceptions ----------------------------------------------------------------------------------------------


class BoomError(Exception):
    """What the model raises."""


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise BoomError


def fail_in_the_forward(ends: Ends, manager: PipelineOffloadManager) -> None:
    """The first microbatch is complete; the second raises in the middle of a group."""
    manager.begin_chunk(0, 0)
    first = chain(ends.x)
    manager.end_forward(0, 0)
    manager.begin_chunk(0, 1)
    x = chain(first, 3)
    x = group_start(x, "mlp_act")
    with offload_hooks():
        x = torch.tanh(x)
        raise BoomError


def fail_in_the_backward(ends: Ends, manager: PipelineOffloadManager) -> None:
    """Half of the saved tensors have been read, some are on their way back."""
    manager.begin_chunk(0, 0)
    y = chain(_Raises.apply(chain(ends.x, L // 2)), L // 2)
    manager.end_forward(0, 0)
    manager.begin_backward(0, 0, "B")
    y.backward(ends.gradient)


def gradient_of(ends: Ends, manager: PipelineOffloadManager | None) -> Sequence[Tensor]:
    if manager is not None:
        manager.begin_chunk(0, 0)
    y = chain(ends.x)
    if manager is not None:
        manager.end_forward(0, 0)
        manager.begin_backward(0, 0, "B")
    y.backward(ends.gradient)
    gradient, ends.x.grad = ends.x.grad, None
    assert gradient is not None
    return [gradient]


@pytest.mark.parametrize("fail", [fail_in_the_forward, fail_in_the_backward])
def test_an_exception_in_the_middle_of_a_step_leaves_nothing(
    managed: Any, fail: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "offload")
    ends = Ends.of()
    expected = gradient_of(ends, None)
    manager = managed(max_spilling_bytes=2 * N, max_restoring_bytes=2 * N)
    run_step(ends, manager)
    before = active_bytes()
    for _ in range(3):
        with contextlib.suppress(BoomError):
            fail(ends, manager)
            pytest.fail("it did not raise")
        manager.step_end()
        _let_autograds_thread_finish()
        gc.collect()
        assert active_bytes() == before
        assert manager.engine.arena.stats().lent == 0
        assert manager.engine.transfers.device_bytes == 0
        assert manager.engine.transfers.in_flight() == (0, 0)
    assert_same_bits(expected, gradient_of(ends, manager))


def _let_autograds_thread_finish() -> None:
    """It reports an exception before it lets go of what it was working on; after another backward it has."""
    torch.ones(1, device=DEVICE, requires_grad=True).sum().backward()
