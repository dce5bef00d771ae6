"""What the tier knows of a block of saved bytes, and what the disk's threads run: a piece from host memory to
the file, and back; and the counts of both.

One invariant: a thread takes no lock of the engine and changes nothing that the engine reads before the job
is over, but for the counts. Two threads never have the same bytes: a block is in one write and one read at
most, of host blocks and extents that nobody else has.

A block and what the tier knows of it refer to each other only while the block can be read:
`DiskTier.forget` and a write that did not happen part them, so no cycle is left.

# [Order: write]
# hazard  RAW: a writer's thread reads host bytes that `d2h` has not finished writing.
# edge    that thread synchronizes the spill's event before it writes to the file.
# alive   the block's host bytes, until the engine has seen that the write is over.
# proof   tests/property/test_disk_edges.py, edge "write"
#
# [Order: refill]
# hazard  WAR, WAW: a reader's thread fills host bytes that a lane still copies from or to for their last
#         user.
# edge    that thread synchronizes every event that the host block was lent with before it reads.
# alive   the Stored holds the host block until the block takes it.
# proof   tests/property/test_disk_edges.py, edge "refill"
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from offload.device.base import Device, Event
from offload.disk.file import Extent, Extents, SpillFile
from offload.disk.worker import Job
from offload.memory.arena import Block


class DiskSettings(NamedTuple):
    """What a disk was made with; the fields are those of OffloadConfig."""

    directory: str
    limit_bytes: int | None = None
    ahead_bytes: int | None = None


class Spilled(Protocol):
    """A block of saved bytes that has left the device: what the tier reads and writes of it."""

    nbytes: int
    host: Block | None
    event: Event | None
    stored: Stored | None

    @property
    def label(self) -> object: ...


@dataclass(slots=True, eq=False)
class Stored:
    """What the tier has of one block, from its spill until no job of it is left.

    block: None once it was freed. extent: set by a writer's thread, valid once `write` is None.
    write, read: the jobs under way.
    host: what the read under way fills; of a freed block, what goes back. event: the last use of that.
    is_ahead: it is read soon, so its host bytes stay.
    """

    block: Spilled | None
    nbytes: int
    extent: Extent | None = None
    write: Job[Stored] | None = None
    read: Job[Stored] | None = None
    host: Block | None = None
    event: Event | None = None
    is_ahead: bool = False


class Moving:
    """Seconds in which at least one thread moved bytes in one direction, and the bytes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_threads = 0
        self._since = 0.0
        self.seconds = 0.0
        self.nbytes = 0

    def begin(self) -> None:
        self._change(1, 0)

    def end(self, nbytes: int) -> None:
        """The thread has moved so many."""
        self._change(-1, nbytes)

    def take(self) -> tuple[int, float]:
        """Bytes and seconds since the last call."""
        with self._lock:
            found = self.nbytes, self.seconds
            self.nbytes, self.seconds = 0, 0.0
            return found

    def _change(self, threads: int, nbytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            if self._num_threads:
                self.seconds += now - self._since
            self._since = now
            self._num_threads += threads
            self.nbytes += nbytes


class FileCopies:
    """Copies between host blocks and extents. `write` and `read` run on the disk's threads, and block them
    for events and for the disk."""

    def __init__(self, device: Device, file: SpillFile, extents: Extents) -> None:
        self._device = device
        self._file = file
        self._extents = extents
        self.writes, self.reads = Moving(), Moving()
        self.blocked_s = 0.0
        """The host waited so long for reads, in this step."""

    def take_figures(self) -> dict[str, Any]:
        """What was counted since the last call, by the fields of StepStats. Blocks the host: never."""
        (written, write_s), (read, read_s) = self.writes.take(), self.reads.take()
        blocked_s, self.blocked_s = self.blocked_s, 0.0
        return {
            "disk_write_bytes": written,
            "disk_read_bytes": read,
            "disk_bytes_peak": self._extents.take_peak(),
            "disk_blocked_ms": blocked_s * 1000,
            "disk_write_bytes_per_s": written / write_s if write_s else 0.0,
            "disk_read_bytes_per_s": read / read_s if read_s else 0.0,
        }

    def write(self, hosts: Mapping[Stored, Block], spilled: Event, piece: list[Stored]) -> None:
        """Write a piece side by side. spilled: the event of its copy to the host. Raises OSError if it is
        not in the file. Order: [Order: write]."""
        self.synchronize(spilled, "write")
        parts = [hosts[stored].extents for stored in piece]
        for part in (part for extents in parts for part in extents):
            self._device.note_read(self._device.host, part)
        extents = self._extents.take([stored.nbytes for stored in piece])
        nbytes = 0
        self.writes.begin()
        try:
            self._file.write(parts, extents[0].start)
            nbytes = sum(stored.nbytes for stored in piece)
        except BaseException:
            for extent in extents:
                self._extents.give_back(extent)
            raise
        finally:
            self.writes.end(nbytes)
        for stored, extent in zip(piece, extents, strict=True):
            stored.extent = extent

    def read(self, places: Mapping[Stored, tuple[Extent, Block]], run: list[Stored]) -> None:
        """Fill the host blocks of these. run: by place in the file. Raises OSError if one is not filled.
        Order: [Order: refill]."""
        todo = [places[stored] for stored in run]
        for last_use in [event for _, host in todo for event in host.after]:
            self.synchronize(last_use, "refill")
        for part in (part for _, host in todo for part in host.extents):
            self._device.note_write(self._device.host, part)
        nbytes = 0
        self.reads.begin()
        try:
            while todo:
                count = 1  # one that was called off leaves a gap
                while count < len(todo) and todo[count - 1][0].end == todo[count][0].start:
                    count += 1
                self._file.read([host.extents for _, host in todo[:count]], todo[0][0].start)
                nbytes += sum(host.nbytes for _, host in todo[:count])
                todo = todo[count:]
        finally:
            self.reads.end(nbytes)

    def synchronize(self, event: Event, order: str) -> None:
        """Block this thread until the event has passed. order: as of Worker.wait."""
        self._device.synchronize(event)
