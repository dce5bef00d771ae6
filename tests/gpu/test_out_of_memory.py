"""A GPU that runs out of memory, for real: the user catches it, nothing of the step stays behind, and the
next step has the right bits.

Memory is made short with blocks that take all that is left. The same steps on the simulated device, with more
places to fail, are in tests/unit/groups/test_out_of_memory.py.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import (
    OffloadConfig,
    OffloadEngine,
    PipelineOffloadManager,
    group_commit,
    group_start,
    offload_hooks,
)
from offload.device.cuda import CudaDevice
from offload.transfer.block import BlockState
from offload.transfer.copier import Priority
from tests.gpu.workbench import DEVICE, assert_same_bits, installed
from tests.inside import caps_of, impose

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_allocator")]

MIB = 1 << 20
N = 16 * MIB
L = 8
ROOM = 4 << 30
"""Bytes that this process may allocate in all, so that filling the device does not depend on who else is on
it."""


@pytest.fixture(autouse=True)
def little_room() -> Iterator[None]:
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, ROOM / total))
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Everything that the device still has is taken inside, in blocks of `N` bytes, so that none of that size
    is left."""
    taken: list[Tensor] = []
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            taken.append(torch.empty(N, dtype=torch.uint8, device=DEVICE))
    yield
    taken.clear()


def too_much() -> Tensor:
    return torch.empty(2 * ROOM, dtype=torch.uint8, device=DEVICE)


class _Backward(torch.autograd.Function):
    """An identity whose backward calls `what`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, what: Callable[[], object]) -> Tensor:
        ctx.what = what
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.what()
        return gradients[0], None


def nothing() -> None:
    return None


def chain(x: Tensor, layers: int, inside: Callable[[], object] = nothing) -> Tensor:
    """`layers` groups of N bytes each; `inside` is called within the last one's hooks."""
    for layer in range(layers):
        x = group_start(x, "mlp_act")
        with offload_hooks():
            x = torch.tanh(x)
            if layer == layers - 1:
                inside()
        x = group_commit(x, "mlp_act")
    return x


class Steps:
    """Two microbatches, both forwards first. The gradient of x is what a step gives."""

    def __init__(self, manager: PipelineOffloadManager | None) -> None:
        self.manager = manager
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(N // 4, generator=generator).to(DEVICE).requires_grad_()
        self.root = torch.ones_like(self.x)

    def step(
        self, *, in_forward: Callable[[], object] = nothing, in_backward: Callable[[], object] = nothing
    ) -> Tensor:
        """The calls happen in the middle of the second microbatch."""
        manager = self.manager
        outputs: list[Tensor] = []
        for microbatch in range(2):
            if manager is not None:
                manager.begin_chunk(0, microbatch)
            half = chain(self.x, L // 2, in_forward if microbatch else nothing)
            if microbatch:
                half = _Backward.apply(half, in_backward)
            outputs.append(chain(half, L // 2))
            del half
            if manager is not None:
                manager.end_forward(0, microbatch)
        for microbatch in range(2):
            if manager is not None:
                manager.begin_backward(0, microbatch, "B")
            outputs[microbatch].backward(self.root)
            if manager is not None:
                manager.end_backward(0, microbatch, "B")
        outputs.clear()
        gradient, self.x.grad = self.x.grad, None
        assert gradient is not None
        if manager is not None:
            manager.step_end()
        return gradient


@pytest.fixture
def manager() -> Iterator[PipelineOffloadManager]:
    config = OffloadConfig(
        min_offloaded_tensor_size=1, piece_bytes=1, max_spilling_bytes=2 * N, max_restoring_bytes=2 * N
    )
    engine = OffloadEngine(config, device=CudaDevice())
    engine.reserve_host(3 * L * N)
    made = PipelineOffloadManager(engine, print_summary=False)
    with installed(made):
        yield made


def active_bytes() -> int:
    return int(torch.cuda.memory_stats()["active_bytes.all.current"])


def let_autograds_thread_finish() -> None:
    """It reports an exception before it lets go of what it was working on; after another backward it has."""
    torch.ones(1, device=DEVICE, requires_grad=True).sum().backward()


@pytest.mark.parametrize("where", ["in_forward", "in_backward"])
def test_a_step_that_runs_out_of_memory_leaves_nothing_and_the_next_has_the_right_bits(
    manager: PipelineOffloadManager, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "offload")
    expected = Steps(None).step()
    steps = Steps(manager)
    assert_same_bits([expected], [steps.step()])
    before = active_bytes()
    limits = caps_of(manager.engine)
    for _ in range(3):
        with contextlib.suppress(torch.OutOfMemoryError):
            steps.step(**{where: too_much})
            pytest.fail("it fitted")
        steps.x.grad = None
        manager.step_end()
        let_autograds_thread_finish()
        gc.collect()
        assert active_bytes() == before
        assert manager.engine.arena.stats().lent == 0
        assert manager.engine.transfers.device_bytes == 0
        assert manager.engine.transfers.in_flight() == (0, 0)
        assert caps_of(manager.engine) == limits
        found = steps.step()
        assert_same_bits([expected], [found])
        del found
        assert active_bytes() == before
    assert manager.stats.restored > 0


def test_a_restore_without_room_gives_up_ahead_of_its_reader_and_makes_room_for_it(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    transfers = manager.engine.transfers
    impose(manager.engine, max_restoring_bytes=0)  # nothing is fetched but by this test
    manager.begin_chunk(0, 0)
    x = torch.full((N // 4,), 0.5, device=DEVICE, requires_grad=True)
    y = chain(x, 3).square().sum()
    manager.end_forward(0, 0)
    first, second, third = list(manager.tracker.handlers[next(iter(manager.tracker.handlers))].saved.living())
    for record in (first, second, third):
        assert record.transfer is not None
        transfers.settle_spill(record.transfer)
    assert [record.state for record in (first, second, third)] == [BlockState.SPILLED] * 3
    assert transfers.restore([second], Priority.SPECULATIVE) is not None
    with no_room():
        assert transfers.restore([first], Priority.SPECULATIVE) is None
        assert first.state is BlockState.SPILLED
        assert transfers.restore([first], Priority.REQUIRED) is not None, "the room of what was fetched ahead"
        assert second.state is BlockState.SPILLED
    assert caplog.text.count("the device has no room for 16.78 MB that come back") == 1
    y.backward()
    found, x.grad = x.grad, None
    del y, first, second, third, record
    manager.step_end()
    plain = x.detach().requires_grad_()
    manager.disable_offload()
    chain(plain, 3).square().sum().backward()
    assert found is not None
    assert plain.grad is not None
    assert_same_bits([plain.grad], [found])
    assert manager.engine.arena.stats().lent == 0


def test_a_commit_without_room_to_pack_a_sparse_view_sends_it_whole(manager: PipelineOffloadManager) -> None:
    """Packing would take a buffer of 16 MiB, a quarter of the tensor."""
    wide = torch.randn(4 * N // 16, 4, device=DEVICE, requires_grad=True)
    manager.begin_chunk(0, 0)
    x = group_start(wide, "mlp_act")
    with offload_hooks():
        values = x * 1
        part = values[:, :1]
        y = part.sin()
    del values, part
    with no_room():
        y = group_commit(y, "mlp_act")
    manager.end_forward(0, 0)
    assert manager.engine.transfers.counts.spill_bytes == 4 * N
    (found,) = torch.autograd.grad(y.sum(), wide)
    del y
    manager.step_end()
    (expected,) = torch.autograd.grad((wide * 1)[:, :1].sin().sum(), wide)
    assert_same_bits([expected], [found])
