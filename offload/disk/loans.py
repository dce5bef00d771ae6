"""What saved blocks have of host memory and of the file, and how both go back.

Host bytes and extents go back when a block no longer needs them, and after the jobs on them: a block may be
freed while a thread moves its bytes. One invariant: every Stored has its job, its host bytes and its extent
until no thread uses them.

A reader that finds no host block gets host memory beside the arena, for one tensor's bytes, until they are on
the device. Nothing of it is unpinned before its last copy has passed, and nothing while a graph is captured.

# [Order: release]
# hazard  WAR: `d2h` writes the next tensor's bytes into host bytes that a thread still writes to the file.
#         WAW: a thread still fills them from the file, for a block that was freed, when `d2h` or another
#         reader's thread fills them for the next. RAW: the extent of a block without host bytes is read
#         before it is written.
# edge    host bytes go back to the arena only once the job that uses them is seen to be over. Only a block
#         without host bytes is read from the file.
# alive   the Stored holds the host block until then, also of a block that was freed.
# proof   tests/property/test_disk_edges.py, edge "release"
#
# [Order: extent]
# hazard  WAR, WAW: a writer's thread writes a tensor into an extent that a thread still reads or writes for
#         a block that was freed.
# edge    an extent is free again only once the last job on it is seen to be over.
# alive   the Stored holds the extent until then.
# proof   tests/property/test_disk_edges.py, edge "extent"
"""

from __future__ import annotations

import weakref
from functools import partial

from offload.device.base import Device, Event, HostMemory
from offload.disk.file import Extents, SpillFile
from offload.disk.worker import FileCopies, Spilled, Stored, Worker
from offload.memory.arena import Block, HostArena
from offload.memory.free_ranges import round_up
from offload.memory.growth import PAGE_BYTES


class SpareMemory:
    """Blocks that are no arena's. False while there are none."""

    def __init__(self, device: Device, registration_bytes: int) -> None:
        self._device = device
        self._registration_bytes = registration_bytes
        self._memory: dict[int, HostMemory] = {}  # by the id of the block that was made of it
        self._used: list[tuple[Block, Event | None]] = []  # and the last use

    def __contains__(self, host: Block) -> bool:
        return id(host) in self._memory

    def __bool__(self) -> bool:
        return bool(self._memory)

    def take(self, nbytes: int) -> Block:
        """Pin a block of its own. Blocks the host for that. Raises HostBudgetError if the system refuses."""
        memory = self._device.host_memory(round_up(nbytes, PAGE_BYTES), self._registration_bytes)
        extents, left = [], nbytes
        for piece in memory.pieces:
            extents.append(piece[: min(left, piece.numel())])
            left -= extents[-1].numel()
        host = Block(nbytes, tuple(extents), (), (), ())
        self._memory[id(host)] = memory
        return host

    def give_back(self, host: Block, event: Event | None) -> None:
        """End the loan, as HostArena.give_back does. Blocks the host: never."""
        self._used.append((host, event))

    def release_passed(self) -> None:
        """Unpin what nobody uses any more. Blocks the host for the unpinning."""
        if self._device.is_capturing():
            return
        used, self._used = self._used, []
        for host, event in used:
            if event is None or self._device.poll(event):
                self._memory.pop(id(host)).release()
            else:
                self._used.append((host, event))

    def close(self) -> None:
        """Unpin everything. Blocks the host for the last copies."""
        for _, event in self._used:
            if event is not None:
                self._device.synchronize(event)
        self._used.clear()
        for memory in self._memory.values():
            memory.release()
        self._memory.clear()


THREADS = 2
"""Calls of each direction that the disk has at once: while one thread sees to the end of its call and to the
next one, the disk moves the other's. On a disk that moves 6 GB/s two threads write and read 1.07 of what one
does in calls of 32 MiB of one tensor each, and 1.14 and 1.19 where a call has eight tensors."""


class DiskLoans:
    """The base of DiskTier: its parts, and the ends of what they lend. Callers hold the engine's lock; the
    threads take no lock of the engine.

    arena: lends what reads fill. file: closed by the subclass.
    """

    def __init__(self, device: Device, arena: HostArena, file: SpillFile) -> None:
        self._arena = arena
        self.file = file
        self.extents = Extents(file)
        self.copies = FileCopies(device, file, self.extents)
        # a thread's own lane: on the simulated device who synchronizes takes the time that it waited
        context = partial(device.use_lane, device.new_compute_lane("disk"))
        self.writer: Worker[Stored] = Worker("offload-disk-write", context, THREADS)
        self.reader: Worker[Stored] = Worker("offload-disk-read", context, THREADS)
        for worker in (self.writer, self.reader):
            weakref.finalize(self, worker.end).atexit = False
            worker.start()
        self._freed: list[Stored] = []  # blocks that were freed while a job ran
        self._ahead: dict[Stored, None] = {}  # with host bytes that could be read again, soonest first
        self.spare = SpareMemory(device, arena.registration_bytes)
        self._num_blocks = 0

    @property
    def in_use(self) -> bool:
        """Predicate: a block that can be read has its bytes in this tier."""
        return self._num_blocks > 0

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
        if stored.read is None:
            stored.host, stored.event, block.host = block.host, block.event, None
        stored.block = None
        self._end(stored)

    def _end(self, stored: Stored) -> None:
        """Give back what a forgotten block had, once no job is left that uses it."""
        jobs = [
            (worker, job)
            for worker, job in ((self.writer, stored.write), (self.reader, stored.read))
            if job is not None and not worker.call_off(job, stored)
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

    def _drop_read(self, stored: Stored) -> None:
        assert stored.host is not None
        stored.read, stored.is_ahead = None, False
        self._ahead.pop(stored, None)
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
        if host in self.spare:
            self.spare.give_back(host, event)
        else:
            self._arena.give_back(host, event)

    def _keep_ahead(self, stored: Stored) -> None:
        if not stored.is_ahead:
            stored.is_ahead = True
            self._ahead[stored] = None
