"""The edges that a kept output of a checkpointed region needs on its way out and back, each with its twin
without the edge.

A kept output goes to its group only when autograd saves something after it, maybe under another lane than the
operator's. The record carries the operator's lane, and so the order note "spill" of transfer/engine.py holds
for it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from offload import OffloadConfig, OffloadEngine, PipelineOffloadManager, selective_contexts
from offload.device.sim import ExecutorName, SimDevice
from offload.errors import HazardError
from offload.groups import scopes
from offload.groups.chunk import KeptScope

ROWS, WIDTH = 32, 32
MM = torch.ops.aten.mm.default
WEIGHT = torch.eye(WIDTH) * 2


def run(device: SimDevice, body: Callable[[Tensor], Tensor]) -> None:
    """One region, forward and backward, on lanes that are `device`'s; its gradient is that of a run without a
    checkpoint."""
    config = OffloadConfig(min_offloaded_tensor_size=1, piece_bytes=1, max_spilling_bytes=1)
    manager = PipelineOffloadManager(OffloadEngine(config, device=device), print_summary=False)
    PipelineOffloadManager.OFFLOAD_MGR = manager
    try:
        x = (
            torch.arange(ROWS * WIDTH, dtype=torch.float32)
            .view(ROWS, WIDTH)
            .div(ROWS * WIDTH)
            .requires_grad_()
        )
        (expected,) = torch.autograd.grad(body(x).sum(), [x])
        manager.begin_chunk(0, 0)
        y = checkpoint(body, x, use_reentrant=False, context_fn=selective_contexts({MM}))
        manager.end_forward(0, 0)
        transfers = manager.engine.transfers
        for transfer in list(transfers._spilling):
            transfers.settle_spill(transfer)  # as a cap does: the source goes back to its allocator
        manager.begin_backward(0, 0, "B")  # and what comes first is fetched
        (found,) = torch.autograd.grad(y.sum(), [x])
        manager.end_backward(0, 0, "B")
        del y
        stats = manager.step_end()
        assert (stats.saved, stats.restored) == (1, 1)
        assert torch.equal(expected, found)
    finally:
        PipelineOffloadManager.OFFLOAD_MGR = None


def run_to_its_hazard(program: Callable[[SimDevice], None], device: SimDevice) -> None:
    """What the program raises holds none of its frames any more: torch 2.11 leaves a checkpoint's contexts,
    and so our modes, open until the frames of an exception in its forward are gone, and pytest keeps those of
    an expected failure."""
    try:
        program(device)
    except HazardError as error:
        said = str(error)
    else:
        return
    raise HazardError(said)


def one_lane(device: SimDevice) -> None:
    run(device, lambda x: torch.sin(x @ WEIGHT).tanh())


def two_lanes(device: SimDevice) -> None:
    """The product is computed on a lane of its own, and the save that follows it is on the first, which waits
    for it only later."""
    side = device.new_compute_lane("side")

    def body(x: Tensor) -> Tensor:
        first = device.compute
        with device.use_lane(side):
            product = x @ WEIGHT
            device.note_write(side, product)
        beside = torch.sin(x)  # is saved, and so the product leaves
        device.wait(first, device.record(side), "joined by the model")
        device.note_read(first, product)
        device.wait(side, device.record(first), "given back by the model")  # its bytes are the side lane's
        return (beside * product).tanh()

    run(device, body)


PROGRAMS = pytest.mark.parametrize("program", [one_lane, two_lanes])
NEEDED = ("spill", "settle", "allocate", "read")


@pytest.mark.parametrize("executor", get_args(ExecutorName))
@PROGRAMS
def test_a_kept_output_has_no_hazard_on_its_way(
    program: Callable[[SimDevice], None], executor: ExecutorName
) -> None:
    for seed in range(10 if executor == "random" else 1):
        device = SimDevice(executor=executor, seed=seed)
        program(device)
        assert all(device.waits[title] > 0 for title in NEEDED) or executor != "late"


@pytest.mark.parametrize("title", NEEDED)
@pytest.mark.xfail(strict=True, raises=HazardError, reason="the edge is left out")
def test_without_one_of_its_edges_it_has(title: str) -> None:
    run_to_its_hazard(one_lane, SimDevice(executor="late", without={title}))


@pytest.mark.xfail(
    strict=True, raises=HazardError, reason="the record is given the lane of the save, not the operator's"
)
def test_without_the_operators_lane_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(KeptScope):
        __slots__ = ()

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments[:-1], None)  # type: ignore[arg-type]

    monkeypatch.setattr(scopes, "KeptScope", Late)
    run_to_its_hazard(two_lanes, SimDevice(executor="late"))
