"""Every ordering note of the disk: a program that needs its edge, and the same program without it, which must
fail.

One invariant, as in test_edges.py: titles in the notes, in the code and here are one set. The simulated
device checks what the disk's threads do with host bytes; what they do with bytes of the file is checked here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import get_args

import pytest

from offload import OffloadConfig, OffloadEngine
from offload.device.sim import ExecutorName, SimDevice
from offload.disk.file import Extent, HostBytes
from offload.errors import HazardError
from offload.ids import ChunkId, GroupId
from offload.saved.handles import Handle, SavedChunk, SavedGroup
from tests.property.disk_steps import step_disk
from tests.property.edges import noted_titles
from tests.property.test_edges import NUMBERS, Desk

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "offload" / "disk").glob("*.py"))


class DiskDesk(Desk):
    """As Desk, over a file: what the one page of host memory held before lies there."""

    def __init__(self, device: SimDevice, directory: Path, without: Collection[str]) -> None:
        self.device = device
        config = OffloadConfig(
            min_offloaded_tensor_size=0,
            piece_bytes=1,
            host_limit_bytes=4096,
            disk_directory=str(directory),
            disk_ahead_bytes=0,
        )
        self.engine = OffloadEngine(config, device=device)
        self.transfers = self.engine.transfers
        self.disk = step_disk(self.engine, without=without)
        self.writer, self.reader = self.disk.writer, self.disk.reader
        self.under_way: list[Extent] = []  # extents that a thread is in the middle of
        write = self.disk.file.write

        def checked(tensors: Sequence[HostBytes], start: int) -> None:
            for other in self.under_way:
                if start < other.start + other.nbytes and other.start < start + 4096:
                    raise HazardError(f"WAR hazard: bytes {start:,} of the file are being read")
            write(tensors, start)

        self.disk.file.write = checked  # type: ignore[method-assign]
        self._chunk = SavedChunk(ChunkId(0, 0))
        self._group = SavedGroup(GroupId(ChunkId(0, 0), 0, "core_attn"), leaves=True)

    def write_out(self, handle: Handle) -> None:
        """Its bytes are in the file and nowhere else."""
        self.settle(handle)
        self.writer.drain()
        self.disk.collect()
        assert handle.record.block.host is None

    def begin_read(self, handle: Handle) -> None:
        """One of the reader's threads is in the middle of reading it ahead of its reader."""
        assert self.disk._start_reads([handle.record.block])  # `bring` may be without its edge
        job = self.reader.begin_next()
        self.under_way += [stored.extent for stored in job.items if stored.extent is not None]

    def finish(self) -> None:
        """Let all threads run to their end, and raise what they met."""
        self.under_way.clear()
        for worker in (self.reader, self.writer):
            worker.drain()
            for error in worker.errors:
                raise error
        self.disk.collect()


Program = Callable[[DiskDesk], None]


def write(desk: DiskDesk) -> None:
    handle = desk.save(1.0)
    desk.finish()
    desk.settle(handle)
    assert desk.read(handle) == 1.0


def release_of_a_write(desk: DiskDesk) -> None:
    """Two tensors, one page: the second takes the bytes that the first was written from."""
    first = desk.save(1.0)
    desk.settle(first)
    second = desk.save(2.0)
    assert desk.transfers.counts.refused == 0
    desk.settle(second)
    desk.finish()
    assert desk.read(first) == 1.0
    assert desk.read(second) == 2.0


def release_of_a_read(desk: DiskDesk) -> None:
    """A tensor is freed in the middle of its read: its page is not for the next one yet."""
    first = desk.save(1.0)
    desk.write_out(first)
    desk.begin_read(first)
    del first
    desk.reclaim()
    second = desk.save(2.0)  # refused while the read runs
    desk.finish()
    assert desk.read(second) == 2.0


def release_from_read_to_read(desk: DiskDesk) -> None:
    """A tensor is freed in the middle of its read: its page is not for the other thread's read yet, whose
    reader gets memory beside the limit."""
    first = desk.save(1.0)
    desk.write_out(first)
    second = desk.save(2.0)
    desk.write_out(second)
    desk.begin_read(first)
    del first
    desk.reclaim()
    value = desk.read(second)
    desk.finish()
    assert value == 2.0


def refill(desk: DiskDesk) -> None:
    """The first is read on a lane of its own, so where the second is read nobody has seen its copy end."""
    backward = desk.device.new_compute_lane("backward")
    first = desk.save(1.0)
    desk.write_out(first)
    second = desk.save(2.0)
    desk.write_out(second)
    with desk.device.use_lane(backward):
        desk.device.compute_for(1.0)
        assert desk.read(first) == 1.0
    del first
    value = desk.read(second)
    desk.finish()
    assert value == 2.0


def arrive(desk: DiskDesk) -> None:
    first = desk.save(1.0)
    desk.write_out(first)
    second = desk.save(2.0)
    desk.write_out(second)  # the page has its bytes
    value = desk.read(first)
    desk.finish()
    assert value == 1.0


def arrive_in_another_order(desk: DiskDesk) -> None:
    """The read that began later is over, and the bytes of the one before are still coming."""
    desk.engine.arena.budget.limit_bytes = 2 * 4096  # type: ignore[misc]
    first, second = desk.save(1.0), desk.save(2.0)
    desk.write_out(first)
    desk.write_out(second)
    desk.begin_read(first)
    assert desk.disk._start_reads([second.record.block])
    desk.reader._run_next()
    values = desk.read(second), desk.read(first)
    desk.finish()
    assert values == (2.0, 1.0)


def extent(desk: DiskDesk) -> None:
    """A tensor is freed in the middle of its read: its extent is not for the next write yet."""
    desk.engine.arena.budget.limit_bytes = 2 * 4096  # type: ignore[misc]
    first = desk.save(1.0)
    desk.write_out(first)
    desk.begin_read(first)
    del first
    desk.reclaim()
    second = desk.save(2.0)
    desk.settle(second)
    desk.writer.drain()
    desk.finish()
    assert desk.read(second) == 2.0


EDGES: dict[str, tuple[str, Program, ExecutorName]] = {
    "write": ("write", write, "late"),
    "release of a write": ("release", release_of_a_write, "late"),
    "release of a read": ("release", release_of_a_read, "late"),
    "release from read to read": ("release", release_from_read_to_read, "late"),
    "refill": ("refill", refill, "clock"),
    "arrive": ("arrive", arrive, "late"),
    "arrive in another order": ("arrive", arrive_in_another_order, "late"),
    "extent": ("extent", extent, "late"),
}


def run(name: str, executor: ExecutorName, directory: Path, *, seed: int = 0, whole: bool = True) -> None:
    title, program, _ = EDGES[name]
    desk = DiskDesk(SimDevice(executor=executor, seed=seed), directory, () if whole else {title})
    program(desk)
    desk.finish()


@pytest.mark.req("S4-22")
@pytest.mark.parametrize("executor", get_args(ExecutorName))
@pytest.mark.parametrize("name", EDGES)
def test_with_all_its_edges_a_program_reads_what_it_saved(
    name: str, executor: ExecutorName, tmp_path: Path
) -> None:
    for seed in range(10 if executor == "random" else 1):
        run(name, executor, tmp_path, seed=seed)


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.xfail(strict=True, raises=HazardError, reason="the edge is left out")
def test_without_its_edge_the_same_program_has_a_hazard(name: str, tmp_path: Path) -> None:
    run(name, EDGES[name][2], tmp_path, whole=False)


def test_copies_to_the_device_keep_host_bytes_from_the_next_spill(tmp_path: Path) -> None:
    """[Order: reuse] holds for bytes that were read back as for all others."""

    def program(device: SimDevice) -> None:
        desk = DiskDesk(device, tmp_path, ())
        backward = device.new_compute_lane("backward")
        first = desk.save(1.0)
        desk.write_out(first)
        with device.use_lane(backward):
            assert desk.read(first) == 1.0
        del first
        second = desk.save(2.0)
        assert desk.transfers.counts.refused == 0
        desk.settle(second)
        assert desk.read(second) == 2.0

    program(SimDevice(executor="clock"))
    with pytest.raises(HazardError, match=r"WAR hazard .* edges left out of d2h: 'reuse'"):
        program(SimDevice(executor="clock", without={"reuse"}))


def test_every_edge_in_the_code_has_a_note_and_every_note_has_its_program() -> None:
    texts = [path.read_text() for path in SOURCES]
    calls = r'\.(?:wait|passed|synchronize)\([^()"]*"(\w+)"\)'
    used = {title for text in texts for title in re.findall(calls, text)}
    assert noted_titles(texts) == used == {title for title, _, _ in EDGES.values()}


def test_a_tensor_is_as_large_as_the_page_of_these_programs() -> None:
    assert 4 * NUMBERS == 4096
