"""Every ordering note of park and wake: a program that needs its edge, and the same program without it, which
must fail.

One invariant, as in test_edges.py: titles in the notes, in the code and here are one set.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args
from unittest.mock import patch

import pytest

import offload
from offload.device.sim import ExecutorName, SimDevice
from offload.engine import OffloadEngine
from offload.errors import HazardError
from tests.property.edges import Edge, devices, edge_titles, noted_titles
from tests.unit.park.states import in_training, same, state_of, train

SOURCES = sorted((Path(__file__).resolve().parents[2] / "offload" / "park").glob("*.py"))


def cycles(device: SimDevice) -> None:
    """Steps between cycles, the second on another lane, by kinds and whole; each reads what is awake."""
    (model, optimizer), (plain, other) = in_training(), in_training()
    side, engine = device.new_compute_lane("side"), OffloadEngine(device=device)
    for cycle in range(3):
        with device.use_lane(side if cycle == 1 else device.compute):
            parked = offload.park(model, optimizer, engine=engine)
            parked.wake("optimizer")
            parked.wake()
            for tensor in state_of(model, optimizer):
                device.note_read(device.compute, tensor)
            assert same(state_of(model, optimizer), state_of(plain, other))
            for each in ((model, optimizer), (plain, other)):
                train(*each, 1, cycle)
            last = device.record(device.compute)
        device.wait(side, last, "test")
        device.wait(device.compute, last, "test")


EDGES = {
    "park out": Edge(cycles, "RAW", ("d2h", "compute")),
    "park room": Edge(cycles, "allocator reuse", ("h2d", "compute")),
    "park here": Edge(cycles, "RAW", ("compute", "h2d")),
}


@pytest.mark.parametrize("executor", get_args(ExecutorName))
def test_with_all_its_edges_a_loop_has_no_hazard_and_its_own_bits(executor: ExecutorName) -> None:
    for device in devices(executor):
        cycles(device)
        assert all(device.waits[title] for title in EDGES)


@pytest.mark.parametrize("title", EDGES)
def test_without_its_edge_the_same_loop_has_a_hazard_that_names_both_sides_and_the_edge(title: str) -> None:
    EDGES[title].check_without(title)


@pytest.mark.xfail(strict=True, raises=HazardError, reason="the host does not wait for the copies")
def test_bytes_that_are_freed_before_the_host_has_waited_are_a_hazard() -> None:
    device = SimDevice()
    with patch.object(device, "synchronize"), patch.object(device, "elapsed_ms", return_value=0.0):
        cycles(device)


def test_every_edge_in_the_code_has_a_note_and_every_note_has_its_scenario() -> None:
    texts = [path.read_text() for path in SOURCES]
    assert noted_titles(texts) == set(EDGES) == edge_titles(texts)
