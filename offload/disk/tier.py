"""Saved tensors continue from pinned host memory to a file, and are back in host memory before the copy to
the device that wants them.

A block of saved bytes has host bytes from its spill on. The writer's thread waits for the spill, writes the
bytes to an extent of the file, and the engine then gives the host bytes back to the arena. `look_ahead` has
the reader's thread read the next ones in the order of the coming reads, into host blocks of the arena again.
`bring` is called before each restore; only there can the host be blocked, by a reader that comes before its
bytes. Nothing else of the step waits for the disk: without a free host block a tensor stays on the device.

One invariant: a block that can be read has its bytes in its host block, or else in its extent.

# [Order: write]
# hazard  RAW: the writer's thread reads host bytes that `d2h` has not finished writing.
# edge    the writer's thread synchronizes the spill's event before it writes to the file.
# alive   the block's host bytes, until the engine has seen that the write is over.
# proof   tests/property/test_disk_edges.py, edge "write"
#
# [Order: release]
# hazard  WAR: `d2h` writes the next tensor's bytes into host bytes that a thread still writes to the file.
#         WAW: a thread still fills them from the file, for a block that was freed. RAW: the extent of a block
#         without host bytes is read before it is written.
# edge    host bytes go back to the arena only once the job that uses them is seen to be over. Only a block
#         without host bytes is read from the file.
# alive   the Stored holds the host block until then, also of a block that was freed.
# proof   tests/property/test_disk_edges.py, edge "release"
#
# [Order: refill]
# hazard  WAR, WAW: the reader's thread fills host bytes that a lane still copies from or to for their last
#         user.
# edge    the reader's thread synchronizes every event that the host block was lent with before it reads.
# alive   the Stored holds the host block until the block takes it.
# proof   tests/property/test_disk_edges.py, edge "refill"
#
# [Order: arrive]
# hazard  RAW: `h2d` copies from host bytes that the reader's thread has not filled.
# edge    `bring` gives a block its host bytes only once their read is over; a required one waits for that.
# alive   the Stored, until the block has the host bytes.
# proof   tests/property/test_disk_edges.py, edge "arrive"
#
# [Order: extent]
# hazard  WAR, WAW: the writer's thread writes a tensor into an extent that a thread still reads or writes for
#         a block that was freed.
# edge    an extent is free again only once the last job on it is seen to be over.
# alive   the Stored holds the extent until then.
# proof   tests/property/test_disk_edges.py, edge "extent"

Host bytes that were read back are given back to the arena with the event of their copy to the device, as all
others are: [Order: reuse] of transfer/engine.py.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from offload.device.base import Device, Event, HostMemory
from offload.disk.file import Extent, Extents, SpillFile
from offload.disk.stored import DiskCounts, DiskSettings, Spilled, Stored
from offload.disk.worker import Job, JobState, Worker
from offload.errors import OffloadError
from offload.memory.arena import Block, HostArena
from offload.memory.free_ranges import round_up
from offload.memory.growth import PAGE_BYTES

__all__ = ["DEFAULT_AHEAD_BYTES", "DiskTier"]

logger = logging.getLogger(__name__)

DEFAULT_AHEAD_BYTES = 4 << 30
"""Window over coming reads where none was set: what a disk of 7 GB/s reads in half a second. Never more than
a quarter of the host limit, so that saves find host memory beside it."""

_GB = 1e9


class DiskTier:
    """The disk of one engine. Callers hold the engine's lock; its two threads take no lock of the engine.

    arena: lends what reads fill. settings: its directory and limit are those of SpillFile, which raises
        ValueError.
    """

    def __init__(self, device: Device, arena: HostArena, settings: DiskSettings) -> None:
        self._device = device
        self._arena = arena
        self.settings = settings
        self.file = SpillFile(settings.directory, settings.limit_bytes)
        self.extents = Extents(self.file)
        # a thread's own lane: on the simulated device who synchronizes takes the time that it waited
        context = partial(device.use_lane, device.new_compute_lane("disk"))
        self.writer, self.reader = Worker("offload-disk-write", context), Worker("offload-disk-read", context)
        for worker in (self.writer, self.reader):
            weakref.finalize(self, worker.end).atexit = False
            worker.start()
        self._writes: deque[Stored] = deque()  # in the order in which they end
        self._freed: list[Stored] = []  # blocks that were freed while a job ran
        self._ahead: dict[Stored, None] = {}  # with host bytes that could be read again, soonest first
        self._spare: dict[int, HostMemory] = {}  # beside the arena, by the id of the block made of it
        self._used_spare: list[tuple[Block, Event | None]] = []  # and the last use
        self._num_blocks = 0
        self._totals = DiskCounts()  # ever; each field has one thread that writes it
        self._totals_before = DiskCounts()  # when the step began
        self._refused_bytes = 0  # in this step, while writes were waiting
        self._offered_bytes = 0
        self._step_began = time.monotonic()
        self._warned: set[str] = set()
        self._closed = False

    # -- out -------------------------------------------------------------------------------------------------
    def put(self, blocks: Iterable[Spilled]) -> None:
        """Write these to the file once their spill has passed. Blocks the host: never. Order: [Order:
        write]."""
        for block in blocks:
            assert block.host is not None
            stored = block.stored = Stored(block, block.nbytes)
            stored.write = Job(partial(self._write, stored, block.host, block.event))
            self._num_blocks += 1
            self._offered_bytes += block.nbytes
            self._writes.append(stored)
            self.writer.submit(stored.write)

    def collect(self) -> None:
        """Give back the host bytes of what has been written. Blocks the host: never. Raises what a thread met
        and no disk answers for. Order: [Order: release], [Order: extent]."""
        writes = self._writes
        while writes:
            job = writes[0].write
            if job is not None and not self.writer.passed(job, "release"):
                break
            self._end_write(writes.popleft())
        if self._freed:
            freed, self._freed = self._freed, []
            for stored in freed:
                self._end(stored)
        if self._spare:
            self._release_spare()

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
            self._warn(
                "write",
                "%s: its %s bytes could not be written to %s (%s): %s. Such tensors stay in host memory, and "
                "on the device where that is full; free some space, or raise disk_limit_bytes",
                block.label,
                f"{block.nbytes:,}",
                self.file.directory,
                self.file.file_system,
                job.error.strerror or job.error,
            )
        elif not stored.is_ahead:
            self._release_host(block)

    # -- back ------------------------------------------------------------------------------------------------
    def look_ahead(self, blocks: Iterable[Spilled]) -> None:
        """Have the next ones in host memory: read them, or call off their write. Blocks the host: never.

        blocks: in the order in which they will be read.
        """
        self.collect()
        room = self.ahead_bytes
        for block in blocks:
            room -= block.nbytes
            if room < 0:
                return
            stored = block.stored
            if stored is None:
                continue
            if block.host is None:
                if stored.read is None and not self._start_read(block, stored):
                    return
            elif stored.write is not None and self.writer.call_off(stored.write):
                self._forget_written(block)
                continue
            if not stored.is_ahead:
                stored.is_ahead = True
                self._ahead[stored] = None

    @property
    def ahead_bytes(self) -> int:
        """The window over coming reads."""
        if self.settings.ahead_bytes is not None:
            return self.settings.ahead_bytes
        return min(DEFAULT_AHEAD_BYTES, self._arena.budget.limit_bytes // 4)

    def bring(self, blocks: Sequence[Spilled], *, required: bool) -> bool:
        """Whether all these have host bytes now. What is missing is being read when this returns False.

        required: True blocks the host until all have, and raises OffloadError for one that cannot be read.
        Order: [Order: arrive].
        """
        missing = [block for block in blocks if block.host is None]
        if not missing:
            return True
        self.collect()
        for block in missing:
            stored = block.stored
            assert stored is not None
            if stored.read is None and not self._start_read(block, stored, required=required):
                return False
        if required:
            began = time.monotonic()
            for block in missing:
                assert block.stored is not None
                assert block.stored.read is not None
                self.reader.hurry(block.stored.read)
                self.reader.wait(block.stored.read, "arrive")
            self._totals.blocked_s += time.monotonic() - began
        return all([self._take_read(block, required=required) for block in missing])

    def _take_read(self, block: Spilled, *, required: bool) -> bool:
        """Whether the block has its host bytes now, because its read is over."""
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

    def _start_read(self, block: Spilled, stored: Stored, *, required: bool = False) -> bool:
        """Whether the block's bytes are being read: a host block was there."""
        assert stored.extent is not None
        host = self._arena.take(block.nbytes)
        if host is None and required:
            host = self._make_room(block)
        if host is None:
            return False
        stored.host = host
        stored.read = Job(partial(self._read, stored.extent, host))
        self.reader.submit(stored.read, first=required)
        return True

    def _make_room(self, block: Spilled) -> Block:
        """A host block for a reader that waits, where the arena has none: of what would be read last, of what
        is being written, else beside the arena for as long as it takes. Blocks the host."""
        for stored in reversed([*self._ahead]):
            other = stored.block
            if other is not None and other.host is not None and stored.write is None:
                self._release_host(other)
                if (host := self._arena.take(block.nbytes)) is not None:
                    return host
        for stored in [*self._writes]:
            if stored.write is not None:
                self.writer.wait(stored.write, "release")
                self.collect()
                if (host := self._arena.take(block.nbytes)) is not None:
                    return host
        self._warn(
            "spare",
            "%s: host memory has no room for its %s bytes, which its reader waits for; they are pinned "
            "beside the limit until they are on the device. Raise host_limit_bytes",
            block.label,
            f"{block.nbytes:,}",
        )
        memory = self._device.host_memory(round_up(block.nbytes, PAGE_BYTES), self._arena.registration_bytes)
        extents, left = [], block.nbytes
        for piece in memory.pieces:
            extents.append(piece[: min(left, piece.numel())])
            left -= extents[-1].numel()
        host = Block(block.nbytes, tuple(extents), (), (), ())
        self._spare[id(host)] = memory
        return host

    # -- ends ------------------------------------------------------------------------------------------------
    def dropped(self, block: Spilled) -> None:
        """The block's device bytes were dropped after its last reader: its host bytes go back if the file has
        them, after the copy that read them. Order: [Order: reuse]."""
        stored = block.stored
        assert stored is not None
        stored.is_ahead = False
        if stored.write is None and stored.extent is not None and block.host is not None:
            self._release_host(block)
        else:
            self._ahead.pop(stored, None)

    def forget(self, block: Spilled) -> None:
        """The block was freed, or is on the device for good: its host bytes and its extent go back, after the
        jobs on them. Blocks the host: never. Order: [Order: release], [Order: extent]."""
        stored, block.stored = block.stored, None
        assert stored is not None
        self._num_blocks -= 1
        self._ahead.pop(stored, None)
        if block.host is not None:
            stored.host, stored.event, block.host = block.host, block.event, None
        stored.block = None
        self._end(stored)

    def _end(self, stored: Stored) -> None:
        """Give back what a forgotten block had, once no job is left that uses it."""
        jobs = [
            (worker, job)
            for worker, job in ((self.writer, stored.write), (self.reader, stored.read))
            if job is not None and not worker.call_off(job)
        ]
        under_way = not all(job.is_over for _, job in jobs)
        if stored.host is not None and all([worker.passed(job, "release") for worker, job in jobs]):
            self._give_back(stored.host, stored.event)
            stored.host = stored.event = None
        if stored.extent is not None and all([worker.passed(job, "extent") for worker, job in jobs]):
            self.extents.give_back(stored.extent)
            stored.extent = None
        if under_way:
            self._freed.append(stored)
            return
        stored.write = stored.read = None
        for _, job in jobs:
            if job.error is not None and not isinstance(job.error, OSError):
                raise job.error

    def _forget_written(self, block: Spilled) -> None:
        """The block's write was called off: it stays in host memory to its end."""
        stored, block.stored = block.stored, None
        assert stored is not None
        stored.write = stored.block = None
        self._num_blocks -= 1

    def _drop_read(self, stored: Stored) -> None:
        assert stored.host is not None
        stored.read = None
        self._give_back(stored.host, None)
        stored.host = None

    def _release_host(self, block: Spilled) -> None:
        host, block.host = block.host, None
        assert host is not None
        assert block.stored is not None
        block.stored.is_ahead = False
        self._ahead.pop(block.stored, None)
        self._give_back(host, block.event)

    def _give_back(self, host: Block, event: Event | None) -> None:
        if id(host) not in self._spare:
            self._arena.give_back(host, event)
        else:
            self._used_spare.append((host, event))

    def _release_spare(self) -> None:
        """Unpin what was pinned beside the arena, once its copies have passed."""
        device = self._device
        if device.is_capturing():
            return
        used, self._used_spare = self._used_spare, []
        for host, event in used:
            if event is None or device.poll(event):
                self._spare.pop(id(host)).release()
            else:
                self._used_spare.append((host, event))

    # -- the step --------------------------------------------------------------------------------------------
    def end_step(self) -> DiskCounts:
        """The step's counts; new ones begin. Warns once if tensors stayed on the device because the disk is
        slower than the step. Blocks the host: never."""
        self.collect()
        now = time.monotonic()
        totals, before = replace(self._totals), self._totals_before
        self._totals_before = totals
        counts = DiskCounts(
            write_bytes=totals.write_bytes - before.write_bytes,
            write_s=totals.write_s - before.write_s,
            read_bytes=totals.read_bytes - before.read_bytes,
            read_s=totals.read_s - before.read_s,
            blocked_s=totals.blocked_s - before.blocked_s,
            peak_bytes=self.extents.lent_peak_bytes,
        )
        self.extents.reset_peak()
        step_s = max(now - self._step_began, 1e-9)
        if self._refused_bytes:
            rate = counts.write_bytes / counts.write_s if counts.write_s else 0.0
            self._warn(
                "slow",
                "the disk writes %.2f GB/s to %s (%s) and the step saved %.2f GB/s: host memory was full "
                "and %s bytes stayed on the device. Save less, raise host_limit_bytes, or use a faster disk",
                rate / _GB,
                self.file.directory,
                self.file.file_system,
                (self._offered_bytes + self._refused_bytes) / step_s / _GB,
                f"{self._refused_bytes:,}",
            )
        self._refused_bytes = self._offered_bytes = 0
        self._step_began = now
        return counts

    def drain(self) -> None:
        """Block the host until no thread has anything to do: before a capture, in which no event may be
        synchronized, on any thread."""
        self.writer.drain()
        self.reader.drain()
        self.collect()

    @property
    def in_use(self) -> bool:
        """Whether a block that can be read has its bytes here."""
        return self._num_blocks > 0

    def close(self) -> None:
        """End both threads and give the file back. Blocks the host for the jobs that run. Idempotent."""
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
            for _, event in self._used_spare:
                if event is not None:
                    self._device.synchronize(event)
            for memory in self._spare.values():
                memory.release()
            self._spare.clear()
            self.file.close()

    def _warn(self, once: str, message: str, *arguments: object) -> None:
        if once not in self._warned:
            self._warned.add(once)
            logger.warning(message, *arguments)

    # -- on the threads --------------------------------------------------------------------------------------
    def _write(self, stored: Stored, host: Block, spilled: Event) -> None:
        self._synchronize(spilled, "write")
        for part in host.extents:
            self._device.note_read(self._device.host, part)
        extent = self.extents.take(stored.nbytes)
        began = time.monotonic()
        try:
            self.file.write(host.extents, extent.start)
        except BaseException:
            self.extents.give_back(extent)
            raise
        stored.extent = extent
        self._totals.write_s += time.monotonic() - began
        self._totals.write_bytes += stored.nbytes

    def _read(self, extent: Extent, host: Block) -> None:
        for last_use in host.after:
            self._synchronize(last_use, "refill")
        for part in host.extents:
            self._device.note_write(self._device.host, part)
        began = time.monotonic()
        self.file.read(host.extents, extent.start)
        self._totals.read_s += time.monotonic() - began
        self._totals.read_bytes += extent.nbytes

    def _synchronize(self, event: Event, order: str) -> None:
        """Block this thread until the event has passed. order: as of Worker.wait."""
        self._device.synchronize(event)
