"""What the disk's two threads run: a piece from host memory to the file, and back; and the counts of both.

One invariant: a thread takes no lock of the engine and changes nothing that the engine reads before the job
is over, but for what is its own in `totals`.

# [Order: write]
# hazard  RAW: the writer's thread reads host bytes that `d2h` has not finished writing.
# edge    the writer's thread synchronizes the spill's event before it writes to the file.
# alive   the block's host bytes, until the engine has seen that the write is over.
# proof   tests/property/test_disk_edges.py, edge "write"
#
# [Order: refill]
# hazard  WAR, WAW: the reader's thread fills host bytes that a lane still copies from or to for their last
#         user.
# edge    the reader's thread synchronizes every event that the host block was lent with before it reads.
# alive   the Stored holds the host block until the block takes it.
# proof   tests/property/test_disk_edges.py, edge "refill"
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from offload.device.base import Device, Event
from offload.disk.file import Extent, Extents, SpillFile
from offload.disk.stored import DiskCounts, Stored
from offload.memory.arena import Block

__all__ = ["FileCopies"]


class FileCopies:
    """Copies between host blocks and extents. `write` runs on one thread, `read` on another; both block it
    for events and for the disk."""

    def __init__(self, device: Device, file: SpillFile, extents: Extents) -> None:
        self._device = device
        self._file = file
        self._extents = extents
        self.totals = DiskCounts()
        """Ever. Each field has one thread that writes it."""
        self._before = DiskCounts()  # when the step began

    def take_counts(self) -> DiskCounts:
        """What was counted since the last call. Blocks the host: never."""
        totals, before = replace(self.totals), self._before
        self._before = totals
        return DiskCounts(
            write_bytes=totals.write_bytes - before.write_bytes,
            write_s=totals.write_s - before.write_s,
            read_bytes=totals.read_bytes - before.read_bytes,
            read_s=totals.read_s - before.read_s,
            blocked_s=totals.blocked_s - before.blocked_s,
            peak_bytes=self._extents.take_peak(),
        )

    def write(self, hosts: Mapping[Stored, Block], spilled: Event, piece: list[Stored]) -> None:
        """Write a piece side by side. spilled: the event of its copy to the host. Raises OSError if it is
        not in the file. Order: [Order: write]."""
        self.synchronize(spilled, "write")
        parts = [hosts[stored].extents for stored in piece]
        for part in (part for extents in parts for part in extents):
            self._device.note_read(self._device.host, part)
        extents = self._extents.take([stored.nbytes for stored in piece])
        began = time.monotonic()
        try:
            self._file.write(parts, extents[0].start)
        except BaseException:
            for extent in extents:
                self._extents.give_back(extent)
            raise
        self.totals.write_s += time.monotonic() - began
        for stored, extent in zip(piece, extents, strict=True):
            stored.extent = extent
            self.totals.write_bytes += stored.nbytes

    def read(self, places: Mapping[Stored, tuple[Extent, Block]], run: list[Stored]) -> None:
        """Fill the host blocks of these. run: by place in the file. Raises OSError if one is not filled.
        Order: [Order: refill]."""
        todo = [places[stored] for stored in run]
        for last_use in [event for _, host in todo for event in host.after]:
            self.synchronize(last_use, "refill")
        for part in (part for _, host in todo for part in host.extents):
            self._device.note_write(self._device.host, part)
        began = time.monotonic()
        while todo:
            count = 1  # one that was called off leaves a gap
            while count < len(todo) and todo[count - 1][0].end == todo[count][0].start:
                count += 1
            self._file.read([host.extents for _, host in todo[:count]], todo[0][0].start)
            self.totals.read_bytes += sum(host.nbytes for _, host in todo[:count])
            todo = todo[count:]
        self.totals.read_s += time.monotonic() - began

    def synchronize(self, event: Event, order: str) -> None:
        """Block this thread until the event has passed. order: as of Worker.wait."""
        self._device.synchronize(event)
