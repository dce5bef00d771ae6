"""Every ordering note of the transfer engine: a program that needs its edge, and the same program without it,
which must fail.

One invariant: the titles in the notes, the titles of the edges in the code and the titles tested here are one
set; an edge that nobody needs, or that nothing proves, does not stay unnoticed.

Some edges are needed only beside a second compute lane: one lane alone carries the order on, from its wait
for one copy to the event that the next copy waits for. Those scenarios say so.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import torch

from offload import OffloadConfig, OffloadEngine, OffloadTensorGroup
from offload.device.sim import ExecutorName, SimDevice
from offload.errors import HazardError
from offload.ids import ChunkId, GroupId
from offload.saved.handles import Handle, SavedChunk, SavedGroup
from offload.transfer.copier import Priority
from tests.property.edges import Edge, devices, edge_titles

ROOT = Path(__file__).resolve().parents[2]
NOTES = ROOT / "offload" / "transfer"
NUMBERS = 1024  # of one saved tensor, float32
NBYTES = 4 * NUMBERS


class Desk:
    """One chunk's saves over an engine of its own. The host memory is one page, so one tensor: the next spill
    reuses its bytes."""

    def __init__(self, device: SimDevice) -> None:
        self.device = device
        self.engine = OffloadEngine(
            OffloadConfig(min_offloaded_tensor_size=0, piece_bytes=1, host_limit_bytes=4096), device=device
        )
        self.transfers = self.engine.transfers
        self._chunk = SavedChunk(ChunkId(0, 0))
        self._group = SavedGroup(GroupId(ChunkId(0, 0), 0, "core_attn"), leaves=True)

    def save(self, value: float) -> Handle:
        """A tensor that only autograd's graph holds; its spill is issued when this returns."""
        return self.engine.store.save(torch.full((NUMBERS,), value), self._chunk, self._group)

    def settle(self, handle: Handle) -> None:
        """As a cap does: compute waits for the spill, and the source goes back to its allocator."""
        assert handle.record.block.transfer is not None
        self.transfers.settle_spill(handle.record.block.transfer)

    def read(self, handle: Handle) -> float:
        """What the backward sees; all numbers are one, or it was the wrong bytes."""
        (value,) = self.engine.store.read(handle).unique().tolist()
        return float(value)

    def prefetch(self, handle: Handle) -> None:
        assert self.transfers.restore([handle.record.block], Priority.SPECULATIVE) is not None

    def reclaim(self) -> None:
        """As every call of the engine does first: reclaim what freed blocks hold."""
        self.transfers.reclaim_freed()


def spill(device: SimDevice) -> None:
    desk = Desk(device)
    handle = desk.save(1.0)
    assert desk.read(handle) == 1.0


def settle(device: SimDevice) -> None:
    desk = Desk(device)
    handle = desk.save(1.0)
    desk.settle(handle)
    assert desk.read(handle) == 1.0


def allocate(device: SimDevice) -> None:
    desk = Desk(device)
    handle = desk.save(1.0)
    desk.settle(handle)
    desk.prefetch(handle)
    assert desk.read(handle) == 1.0


def read(device: SimDevice) -> None:
    desk = Desk(device)
    handle = desk.save(1.0)
    desk.settle(handle)
    assert desk.read(handle) == 1.0


def restore(device: SimDevice) -> None:
    """The lane that settled the spill is not the one that reads: `allocate` orders h2d after the reader's
    lane only."""
    desk = Desk(device)
    side = device.new_compute_lane("side")
    handle = desk.save(1.0)
    desk.settle(handle)
    with device.use_lane(side):
        assert desk.read(handle) == 1.0


def reuse(device: SimDevice) -> None:
    """A backward on one lane waits for its bytes, a forward on another sends the next ones: `spill` orders
    d2h after the forward's only.

    Under the clock the forward's lane is not yet where the backward's is, so nobody has seen the restore end.
    """
    desk = Desk(device)
    backward = device.new_compute_lane("backward")
    first = desk.save(1.0)
    desk.settle(first)
    with device.use_lane(backward):
        assert desk.read(first) == 1.0
    del first  # its block is free from here on
    second = desk.save(2.0)
    assert desk.engine.arena.stats().lent == 1
    assert desk.transfers.counts.refused == 0
    desk.settle(second)
    assert desk.read(second) == 2.0


def abandon(device: SimDevice) -> None:
    desk = Desk(device)
    handle = desk.save(1.0)
    desk.settle(handle)
    desk.prefetch(handle)
    del handle  # its branch never runs backward
    desk.reclaim()
    device.empty(NBYTES)  # the allocator may hand out the same bytes
    assert desk.transfers.device_bytes == 0
    assert desk.transfers.in_flight() == (0, 0)
    assert desk.engine.arena.stats().lent == 0


def read_elsewhere(device: SimDevice) -> None:
    """Fetched on the lane that saved it, read for the last time on another one, and let go of."""
    desk = Desk(device)
    side = device.new_compute_lane("side")
    handle = desk.save(1.0)
    desk.settle(handle)
    desk.prefetch(handle)
    with device.use_lane(side):
        assert desk.read(handle) == 1.0
    del handle
    device.empty(NBYTES)  # the allocator may hand out the same bytes


def join(device: SimDevice) -> None:
    """A graph that ends with a spill under way, and another that reads it."""
    desk = Desk(device)
    desk.engine.reserve_host(NBYTES)
    with desk.engine.capturing() as region:
        with device.capture() as forward:
            handle = desk.save(1.0)
        with device.capture() as backward:
            assert desk.read(handle) == 1.0
    for _ in range(2):
        forward.replay()
        backward.replay()
    assert region.replays == 4


COPY = r"copy of 4,096 bytes \(operation \d+ of {}\)"
USE = r"{} of 4,096 bytes \(operation \d+ of {}\)"
EDGES = {
    "spill": Edge(spill, "RAW", (USE.format("note_write", "compute"), COPY.format("d2h"))),
    "reuse": Edge(reuse, "WAR", (COPY.format("h2d"), COPY.format("d2h")), "clock"),
    "settle": Edge(settle, "allocator reuse", (COPY.format("d2h"), "compute frees them")),
    "allocate": Edge(allocate, "allocator reuse", (USE.format("empty", "compute"), COPY.format("h2d"))),
    "restore": Edge(restore, "RAW", (COPY.format("d2h"), COPY.format("h2d"))),
    "read": Edge(read, "RAW", (COPY.format("h2d"), USE.format("note_read", "compute"))),
    "abandon": Edge(
        abandon, "allocator reuse", (COPY.format("h2d"), "work issued to compute may get them next")
    ),
    "read elsewhere": Edge(read_elsewhere, "RAW", (COPY.format("h2d"), USE.format("note_read", "side"))),
    "return": Edge(
        read_elsewhere,
        "allocator reuse",
        (USE.format("note_read", "side"), "work issued to compute may get them next"),
    ),
    "join": Edge(join, "allocator reuse", (COPY.format("d2h"), "compute frees them")),
}
TITLES = tuple(EDGES)


@pytest.mark.req("S4-32")
@pytest.mark.parametrize("executor", get_args(ExecutorName))
@pytest.mark.parametrize("title", TITLES)
def test_with_all_its_edges_a_program_has_no_hazard_and_reads_what_it_saved(
    title: str, executor: ExecutorName
) -> None:
    for device in devices(executor, 20):
        EDGES[title].check_with(title, device, executor)


@pytest.mark.parametrize("title", TITLES)
def test_without_its_edge_the_same_program_has_a_hazard_that_names_both_sides_and_the_edge(
    title: str,
) -> None:
    assert f" hazard on bytes [0, {NBYTES:,}) of a " in EDGES[title].check_without(title)


# -- the titles are one set ----------------------------------------------------------------------------------


def titles_proved_here(source: str) -> list[str]:
    """Of the notes whose proof is a scenario of this file, which it names by the note's title.
    test_captures.py has others."""
    found = re.findall(
        r"^# \[Order: (.+)\]\n(?:# (?:hazard|edge|alive| ) .*\n)+# proof +\S*/(\S+), edge \"(.+)\"$",
        source,
        re.MULTILINE,
    )
    assert all(title == edge for title, _, edge in found), found
    return [title for title, file, _ in found if file == Path(__file__).name]


def test_titles_are_found_where_they_are_passed_on() -> None:
    source = """
class Engine:
    def first(self): self.device.wait(lane, self.device.record(other), "one")
    def _await(self, lane, event, order): self.device.wait(lane, event, order)
    def _settle(self, transfer, order): self._await(transfer.lane, transfer.event, order)
    def last(self): self._settle(transfer, "two"); self.changed.wait()
"""
    assert edge_titles([source]) == {"one", "two"}


def test_every_edge_in_the_code_has_a_note_and_every_note_has_its_scenario() -> None:
    # test_optim_edges.py, test_disk_edges.py, test_weight_edges.py and test_park_edges.py have those
    others = {"optim", "disk", "weights", "park"}
    paths = [path for path in sorted((ROOT / "offload").rglob("*.py")) if path.parent.name not in others]
    used = edge_titles([path.read_text() for path in paths])
    noted = [title for path in sorted(NOTES.glob("*.py")) for title in titles_proved_here(path.read_text())]
    assert sorted(noted) == sorted(set(noted)), "two notes of one title"
    for_time_alone = {"let pass"}  # tests/unit/transfer/test_copier.py
    assert {*noted, *for_time_alone} == used == {*EDGES, *for_time_alone}


def test_every_note_says_hazard_edge_life_and_proof() -> None:
    """In every file, also where an arena or a group has a note of its own; the proof exists."""
    for path in sorted((ROOT / "offload").rglob("*.py")):
        for note in re.findall(r"^ *# \[Order: .+\]\n((?: *#.*\n)+)", path.read_text(), re.MULTILINE):
            words = re.findall(r"^ *# (hazard|edge|alive|proof)\b", note, re.MULTILINE)[:4]
            assert words == ["hazard", "edge", "alive", "proof"], f"{path}: {note}"
            proof = re.search(r"proof +(tests/\S+\.py)", note)
            assert proof is not None, f"{path}: {note}"
            assert (ROOT / proof[1]).is_file(), f"{path}: {note}"


# -- the edges that a group draws by hand --------------------------------------------------------------------


def by_hand(device: SimDevice) -> float:
    """One tensor out and back with a group's own events, the reader on another lane than the saver."""
    group = OffloadTensorGroup("core_attn", device=device)
    source = torch.full((NUMBERS,), 3.0)
    source_bytes, block = source.view(torch.uint8), device.host_memory(NBYTES, NBYTES).pieces[0]
    device.note_write(device.compute, source_bytes)
    device.wait(device.d2h, device.record(device.compute), "spill")
    device.copy(device.d2h, [(block, source_bytes)])
    group.record_offload_event(device.d2h)
    side = device.new_compute_lane("side")
    with device.use_lane(side):
        home = device.empty(NBYTES)
        device.wait(device.h2d, device.record(side), "allocate")
        group.wait_offload_event(device.h2d)
        device.copy(device.h2d, [(home, block)])
        group.record_reload_event(device.h2d)
        group.wait_reload_event(side)
        device.note_read(side, home)
        (value,) = home.view(torch.float32).unique().tolist()
    group.wait_offload_event(device.compute)
    device.note_free(device.compute, source_bytes)
    return float(value)


@pytest.mark.req("S2-24", "S2-25")
@pytest.mark.parametrize("executor", get_args(ExecutorName))
def test_the_events_of_a_group_order_its_copies(executor: ExecutorName) -> None:
    assert by_hand(SimDevice(executor=executor, seed=1)) == 3.0


@pytest.mark.parametrize(
    ("title", "sides"),
    [
        pytest.param("restore", ("h2d", "d2h"), marks=pytest.mark.req("S2-24"), id="offload event"),
        pytest.param("read", ("side", "h2d"), marks=pytest.mark.req("S2-25"), id="reload event"),
    ],
)
def test_without_the_wait_for_a_groups_event_its_copies_have_a_hazard(
    title: str, sides: tuple[str, str]
) -> None:
    later, earlier = sides
    with pytest.raises(
        HazardError,
        match=rf"RAW hazard .* of {later}\).* reads them while .* of {earlier}\).* which writes them",
    ):
        by_hand(SimDevice(without={title}))
