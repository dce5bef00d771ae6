"""Steps that started in the backward and may be undone: every ordering note of theirs, and the same programs
without the edge.

One invariant, as in test_optim_edges.py: titles in the notes, in the code and here are one set (that file
compares them).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import pytest
from torch.optim import AdamW

from offload import OffloadEngine
from offload.device.sim import ExecutorName, SimDevice, SimLane
from offload.errors import HazardError, OffloadError
from offload.optim import HybridDeviceOptimizer
from tests.unit.optim.rig import assert_same_bits, backward, net, room_for_all, weights


def left_out(device: SimDevice) -> None:
    """A step whose buckets started early is left out: its old weights go back, and the memory they were in
    goes to compute."""
    unwrapped(lambda: trained(device, skipped=1))


def elsewhere(device: SimDevice) -> None:
    """The first to wait for the new weights is another lane than the one that allocated the memory of the old
    ones."""
    unwrapped(lambda: trained(device, reader=device.new_compute_lane("side")))


def unwrapped(run: Callable[[], None]) -> None:
    """Raises the hazard itself if a worker met it."""
    try:
        run()
    except OffloadError as error:
        raise error.__cause__ if isinstance(error.__cause__, HazardError) else error from error


def trained(device: SimDevice, *, skipped: int | None = None, reader: SimLane | None = None) -> None:
    """Three backwards in which all buckets start.

    skipped: which of them no step follows. reader: waits for each step's weights, on a device that is so slow
    that the host never sees a step pass by itself.
    """
    model, reference = net(), net()
    common = {
        "lr": 1e-2,
        "cpu_share": 0.0,
        "bucket_bytes": 4096,
        "model": model,
        "step_in_backward": "undoable",
    }
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, engine=OffloadEngine(device=device), **common)  # type: ignore[arg-type]
    early = room_for_all(optimizer)
    if reader is not None:
        optimizer._steps.let_go = lambda: None  # type: ignore[method-assign]
    expected = AdamW(reference.parameters(), lr=1e-2, fused=True)
    optimizer.last_microbatch = True
    for step in range(3):
        backward(model, step)
        backward(reference, step)
        assert len(early.started) == len(optimizer.placed.streamed.buckets)
        for bucket in early.started.values():
            bucket.done.wait()  # a step that never began has nothing to undo
        if step != skipped:
            optimizer.step()
            expected.step()
            if reader is not None:
                with device.use_lane(reader):
                    optimizer.synchronize_parameters()
                device.wait(
                    device.compute,
                    device.record(reader),
                    "the program's own: the reader is done before the next backward",
                )
        optimizer.zero_grad()
        expected.zero_grad()
    assert_same_bits(weights(model, optimizer), weights(reference, expected))
    optimizer.close()


@dataclass(frozen=True)
class Edge:
    """One note. touched: what the optimizer's lane may still do with memory that compute gets without the
    edge."""

    run: Callable[[SimDevice], None]
    touched: str


EDGES = {"undone": Edge(left_out, "reads"), "old weights": Edge(elsewhere, "writes")}
TITLES = tuple(EDGES)


@pytest.mark.parametrize("executor", get_args(ExecutorName))
@pytest.mark.parametrize("title", TITLES)
def test_with_all_its_edges_a_step_that_may_be_undone_has_no_hazard_and_torchs_bits(
    title: str, executor: ExecutorName
) -> None:
    for seed in range(5 if executor == "random" else 1):
        device = SimDevice(executor=executor, seed=seed)
        EDGES[title].run(device)
        assert device.waits[title] > 0 or executor != "late", "the scenario does not use its edge"


@pytest.mark.parametrize("title", TITLES)
@pytest.mark.xfail(strict=True, raises=HazardError, reason="the edge is left out")
def test_without_its_edge_the_same_step_has_a_hazard(title: str) -> None:
    EDGES[title].run(SimDevice(without={title}))


@pytest.mark.parametrize("title", TITLES)
def test_the_hazard_names_both_sides_and_the_edge(title: str) -> None:
    with pytest.raises(HazardError) as caught:
        EDGES[title].run(SimDevice(without={title}))
    message = str(caught.value)
    assert message.startswith("allocator reuse hazard on bytes ")
    assert re.search(
        rf"work issued to compute may get them next, .* of optimizer\), which {EDGES[title].touched} them",
        message,
    ), message
    assert f"'{title}'" in message.split("edges left out of ", 1)[1], message
