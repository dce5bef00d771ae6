"""Saved tensors continue from pinned host memory to a file, and are back in host memory before the copy to
the device that wants them.

A block of saved bytes has host bytes from its spill on. A writer's thread waits for the spill, writes the
bytes to an extent of the file, and the engine then gives the host bytes back to the arena. `look_ahead` has
a reader's thread read the next ones in the order of the coming reads, into host blocks of the arena again.
`bring` is called before each restore; only there can the host be blocked, by a reader that comes before its
bytes. Nothing else of the step waits for the disk: without a free host block a tensor stays on the device.

One invariant: a block that can be read has its bytes in its host block, or else in its extent.

# [Order: arrive]
# hazard  RAW: `h2d` copies from host bytes that a reader's thread has not filled, though later ones are.
# edge    `bring` gives a block its host bytes only once their read is over; a required one waits for that.
# alive   the Stored, until the block has the host bytes.
# proof   tests/property/test_disk_edges.py, edge "arrive"

Host bytes that were read back are given back to the arena with the event of their copy to the device, as all
others are: [Order: reuse] of transfer/engine.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from offload.device.base import Device
from offload.disk.file import Extent, SpillFile
from offload.disk.loans import DiskLoans
from offload.disk.worker import DiskSettings, Job, JobState, Spilled, Stored
from offload.errors import OffloadError
from offload.memory.arena import Block, HostArena
from offload.sizes import bytes_text
from offload.telemetry.speaker import Once, speaker

logger = speaker(__name__)

DEFAULT_AHEAD_BYTES = 4 << 30
"""Window over coming reads where none was set: what a disk of 7 GB/s reads in half a second. Never more than
a quarter of the host limit, so that saves find host memory beside it."""

READ_BYTES = 32 << 20
"""Reads side by side in the file become one of about this size: a disk that reads 7 GB/s takes 5 ms for it.
"""

_GB = 1e9


class DiskTier(DiskLoans):
    """The disk of one engine. Callers hold the engine's lock; its threads take no lock of the engine.

    arena: lends what reads fill. settings: its directory and limit are those of SpillFile, which raises
        ValueError.
    """

    def __init__(self, device: Device, arena: HostArena, settings: DiskSettings) -> None:
        super().__init__(device, arena, SpillFile(settings.directory, settings.limit_bytes))
        self.settings = settings
        self._writes: deque[Stored] = deque()  # in the order in which they end
        self._refused_bytes = 0  # in this step, while writes were waiting
        self._offered_bytes = 0
        self._step_began = time.monotonic()
        self._said = Once()
        self._closed = False

    # -- out -------------------------------------------------------------------------------------------------
    def put(self, blocks: Sequence[Spilled]) -> None:
        """Write the blocks of a piece to the file once their spill has passed. Blocks the host: never.
        Order: [Order: write]."""
        piece, hosts = [], {}
        for block in blocks:
            assert block.host is not None
            stored = Stored(block, block.nbytes)
            piece.append(stored)
            hosts[stored] = block.host
        event = blocks[0].event  # of the piece
        assert event is not None
        job = Job(partial(self.copies.write, hosts, event), [*piece])
        for block, stored in zip(blocks, piece, strict=True):
            block.stored, stored.write = stored, job
            self._offered_bytes += block.nbytes
        self._num_blocks += len(piece)
        self._writes.extend(piece)
        self.writer.submit(job)

    def collect(self) -> None:
        """Give back the host bytes of what has been written. Blocks the host: never. Raises what a thread met
        and no disk answers for. Order: [Order: release], [Order: extent]."""
        writes = self._writes
        while writes:
            job = writes[0].write
            if job is not None and not self.writer.passed(job, "release"):
                break
            self._end_write(writes.popleft())
        freed, self._freed = self._freed, []
        for stored in freed:  # while a job ran on it
            self._end(stored)
        if self.spare:
            self.spare.release_passed()

    def note_refused(self, nbytes: int) -> None:
        """A tensor of so many bytes found no host block."""
        if self._writes:
            self._refused_bytes += nbytes

    def _end_write(self, stored: Stored) -> None:
        job, stored.write = stored.write, None
        block = stored.block
        if job is None or block is None or job.state is JobState.CALLED_OFF:
            return
        if job.error is not None:
            block.stored = None  # its host bytes stay
            self._num_blocks -= 1
            self._ahead.pop(stored, None)
            if not isinstance(job.error, OSError):
                raise job.error
            if self._said.first("write"):
                logger.warning(
                    f"{block.label}: its {bytes_text(block.nbytes)} could not be written to "
                    f"{self.file.directory} ({self.file.file_system}): {job.error.strerror or job.error}. "
                    "Such tensors stay in host memory, and on the device where that is full; free some "
                    "space, or raise disk_limit_bytes"
                )
        elif not stored.is_ahead:
            self._release_host(block)

    # -- back ------------------------------------------------------------------------------------------------
    def look_ahead(self, blocks: Iterable[Spilled]) -> None:
        """Have the next ones in host memory: read them, or call off their write. Blocks the host: never.

        blocks: in the order in which they will be read.
        """
        self.collect()
        room, missing = self.ahead_bytes, []
        for block in blocks:
            room -= block.nbytes
            if room < 0:
                break
            stored = block.stored
            if stored is None:
                continue
            if block.host is None:
                missing.append(block)
            elif stored.write is not None and self.writer.call_off(stored.write, stored):
                # it stays in host memory to its end
                block.stored = stored.write = stored.block = None
                self._num_blocks -= 1
                continue
            self._keep_ahead(stored)
        self._start_reads(missing)

    @property
    def ahead_bytes(self) -> int:
        """The window over coming reads."""
        if self.settings.ahead_bytes is not None:
            return self.settings.ahead_bytes
        return min(DEFAULT_AHEAD_BYTES, self._arena.budget.limit_bytes // 4)

    def bring(self, blocks: Sequence[Spilled], *, required: bool) -> bool:
        """Predicate: all these have host bytes now. What is missing is being read when this returns False.

        required: True blocks the host until all have, and raises OffloadError for one that cannot be read.
        Order: [Order: arrive].
        """
        missing = [block for block in blocks if block.host is None]
        if not missing:
            return True
        self.collect()
        if not required:
            return self._start_reads(missing) and all([self._take_read(block) for block in missing])
        began = time.monotonic()
        for block in missing:
            stored = block.stored
            assert stored is not None
            before = stored.read
            if before is not None:
                self._wait_for_read(before)
            if before is None or isinstance(before.error, OSError):
                if before is not None:  # it may have been another block's bytes
                    self._drop_read(stored)
                host = self._arena.take(block.nbytes) or self._make_room(block)
                self._submit_read([(stored, _extent_of(stored), host)], first=True)
                assert stored.read is not None
                self._wait_for_read(stored.read)
        self.copies.blocked_s += time.monotonic() - began
        return all([self._take_read(block, required=True) for block in missing])

    def _wait_for_read(self, job: Job[Stored]) -> None:
        self.reader.hurry(job)
        self.reader.wait(job, "arrive")

    def _start_reads(self, blocks: Iterable[Spilled]) -> bool:
        """Return True if the bytes of all these are being read: host memory was there. What lies side by side
        in the file is read at once."""
        run: list[tuple[Stored, Extent, Block]] = []  # by place
        nbytes, complete = 0, True
        for block in blocks:
            stored = block.stored
            assert stored is not None
            if stored.read is not None:
                continue
            host = self._arena.take(block.nbytes)
            if host is None:
                complete = False
                break
            self._keep_ahead(stored)
            found = stored, _extent_of(stored), host
            if run and nbytes < READ_BYTES and run[-1][1].end == found[1].start:
                run.append(found)
            elif run and nbytes < READ_BYTES and found[1].end == run[0][1].start:
                run.insert(0, found)  # a backward reads what lies before, next
            else:
                self._submit_read(run)
                run, nbytes = [found], 0
            nbytes += block.nbytes
        self._submit_read(run)
        return complete

    def _submit_read(self, run: list[tuple[Stored, Extent, Block]], *, first: bool = False) -> None:
        if run:
            places = {stored: (extent, host) for stored, extent, host in run}
            job = Job(partial(self.copies.read, places), [*places])
            for stored, _, host in run:
                stored.read, stored.host = job, host
            self.reader.submit(job, first=first)

    def _take_read(self, block: Spilled, *, required: bool = False) -> bool:
        """Return True if the block has its host bytes now, because its read is over."""
        stored = block.stored
        assert stored is not None
        job = stored.read
        assert job is not None
        if not required and not self.reader.passed(job, "arrive"):
            return False
        error = job.error
        if error is not None:
            if isinstance(error, OSError) and not required:
                return False  # its reader is told
            self._drop_read(stored)  # a further read tries again
            if not isinstance(error, OSError):
                raise error
            raise OffloadError(
                f"{block.label}: its {block.nbytes:,} bytes could not be read back from the file in "
                f"{self.file.directory} ({self.file.file_system}): {error.strerror or error}. They are lost, "
                "and with them this step; check the disk"
            ) from error
        stored.read = None
        block.host, stored.host = stored.host, None
        return True

    def _make_room(self, block: Spilled) -> Block:
        """A host block for a reader that waits, where the arena has none: of what the arena can still pin, of
        what would be read last, of what is being written, else beside the arena for as long as it takes.
        Blocks the host."""
        self._arena.synchronize_growth()
        if (host := self._arena.take(block.nbytes)) is not None:
            return host
        for stored in reversed([*self._ahead]):
            other, read = stored.block, stored.read
            if other is not None and other.host is not None and stored.write is None:
                self._release_host(other)
            elif read is not None and (
                self.reader.call_off(read, stored) or self.reader.passed(read, "release")
            ):
                self._drop_read(stored)
            else:
                continue
            if (host := self._arena.take(block.nbytes)) is not None:
                return host
        for stored in [*self._writes]:
            if stored.write is not None:
                stored.is_ahead = False
                self._ahead.pop(stored, None)
                self.writer.wait(stored.write, "release")
                self.collect()
                if (host := self._arena.take(block.nbytes)) is not None:
                    return host
        if self._said.first("spare"):
            logger.warning(
                f"{block.label}: host memory has no room for its {bytes_text(block.nbytes)}, which its "
                "reader waits for; they are pinned beside the limit until they are on the device. Raise "
                "host_limit_bytes"
            )
        return self.spare.take(block.nbytes)

    # -- the step --------------------------------------------------------------------------------------------
    def end_step(self) -> dict[str, Any]:
        """The step's figures, by the fields of StepStats; new ones begin. Warns once if tensors stayed on the
        device because the disk is slower than the step. Blocks the host: never."""
        self.collect()
        now = time.monotonic()
        figures = self.copies.take_figures()
        step_s = max(now - self._step_began, 1e-9)
        if self._refused_bytes and self._said.first("slow"):
            logger.warning(
                f"the disk writes {figures['disk_write_bytes_per_s'] / _GB:.2f} GB/s to "
                f"{self.file.directory} ({self.file.file_system}) and the step saved "
                f"{(self._offered_bytes + self._refused_bytes) / step_s / _GB:.2f} GB/s: host memory was "
                f"full and {bytes_text(self._refused_bytes)} stayed on the device. Save less, raise "
                "host_limit_bytes, or use a faster disk"
            )
        self._refused_bytes = self._offered_bytes = 0
        self._step_began = now
        return figures

    def drain(self) -> None:
        """Block the host until no thread has anything to do: before a capture, in which no event may be
        synchronized, on any thread."""
        self.writer.drain()
        self.reader.drain()
        self.collect()

    def close(self) -> None:
        """End the threads and give the file back. Blocks the host for the jobs that run. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for worker in (self.writer, self.reader):
            worker.end()
        for worker in (self.writer, self.reader):
            worker.join()
        try:
            self.collect()
        finally:
            self.spare.close()
            self.file.close()


def _extent_of(stored: Stored) -> Extent:
    """Where its bytes lie, of one that was written."""
    assert stored.extent is not None
    return stored.extent
