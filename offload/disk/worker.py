"""The disk's threads, which run jobs from one queue, some for its writes and some for its reads; what they
run: a piece from host memory to the file, and back; the counts of both; and what the tier knows of a block.

Jobs begin in the order of the queue, and end in any. One invariant: a job that was called off never runs, and
a job that has begun runs to its end. What the threads and the host hand to each other is ordered by `wait`
and `passed`, each with the title of its note.

A thread takes no lock of the engine and changes nothing that the engine reads before the job
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
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from offload.device.base import Device, Event
from offload.disk.file import Extent, Extents, SpillFile
from offload.memory.arena import Block

T = TypeVar("T")


class JobState(Enum):
    QUEUED = auto()
    RUNNING = auto()
    ENDED = auto()  # with or without an error
    CALLED_OFF = auto()  # never ran


@dataclass(slots=True, eq=False)
class Job(Generic[T]):
    """One write or one read, of several items at once. run: called with those that are left when it begins.
    error: what it raised."""

    run: Callable[[list[T]], None] | None
    items: list[T]
    state: JobState = JobState.QUEUED
    error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self.state is JobState.ENDED or self.state is JobState.CALLED_OFF


class Worker(Generic[T]):
    """A queue and its threads, which hold nothing but the queue: who owns the worker can be dropped.

    context: entered by each thread for its whole life. num_threads: jobs that may run at once.
    """

    def __init__(
        self,
        name: str,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        num_threads: int = 1,
    ) -> None:
        self.name = name
        self.num_threads = num_threads
        self._context = context
        self._changed = threading.Condition()
        self._queue: deque[Job[T]] = deque()
        self._num_running = 0
        self._stopping = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads. Raises RuntimeError where the system gives none."""
        for _ in range(self.num_threads):
            thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def submit(self, job: Job[T], *, first: bool = False) -> None:
        """Run the job after those in the queue, or before them. Blocks the host: never."""
        with self._changed:
            if first:
                self._queue.appendleft(job)
            else:
                self._queue.append(job)
            self._changed.notify_all()

    def call_off(self, job: Job[T], item: T) -> bool:
        """Return True if the job has not begun and will run without the item; without any it is called off.
        Blocks the host: never."""
        with self._changed:
            if job.state is not JobState.QUEUED:
                return False
            job.items.remove(item)
            if not job.items:
                self._queue.remove(job)
                job.state, job.run = JobState.CALLED_OFF, None
            return True

    def hurry(self, job: Job[T]) -> None:
        """Somebody waits for the job: it is the next one, unless it has begun. Blocks the host: never."""
        with self._changed:
            if job.state is JobState.QUEUED and self._queue[0] is not job:
                self._queue.remove(job)
                self._queue.appendleft(job)

    def wait(self, job: Job[T], order: str) -> None:
        """Block the host until the job is over. order: the title of the note that this edge belongs to."""
        with self._changed:
            self._changed.wait_for(lambda: job.is_over)

    def passed(self, job: Job[T], order: str) -> bool:
        """Return True if the job is over. Blocks the host: never. order: as of `wait`."""
        return job.is_over

    def drain(self) -> None:
        """Block the host until every job is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue and not self._num_running)

    def end(self) -> None:
        """Call off what is queued; each thread ends after the job that it runs. Blocks the host: never. For a
        finaliser, too."""
        with self._changed:
            self._stopping = True
            for job in self._queue:
                job.state, job.run, job.items = JobState.CALLED_OFF, None, []
            self._queue.clear()
            self._changed.notify_all()

    def join(self) -> None:
        """Block the host until the threads have ended, after `end`."""
        while self._threads:
            thread = self._threads.pop()
            if thread is not threading.current_thread():
                thread.join()

    def _work(self) -> None:
        with self._context():
            while self._run_next():
                pass

    def _run_next(self) -> bool:
        """Run a job, or wait for one. False: the worker ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopping)
            if not self._queue:
                return False
            job = self._queue.popleft()
            self._begin(job)
        self._run(job)
        return True

    def _begin(self, job: Job[T]) -> None:
        job.state = JobState.RUNNING
        self._num_running += 1

    def _run(self, job: Job[T]) -> None:
        run, job.run = job.run, None
        items, job.items = job.items, []
        assert run is not None
        try:
            run(items)
        except BaseException as error:  # the engine raises it where the job is looked at
            job.error = error
        del run, items  # what they hold may be dropped by whoever sees that the job is over
        with self._changed:
            job.state = JobState.ENDED
            self._num_running -= 1
            self._changed.notify_all()


class DiskSettings(NamedTuple):
    """Settings that a disk was made with; the fields are those of OffloadConfig."""

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
    """State that the tier has of one block, from its spill until no job of it is left.

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
        """Return what was counted since the last call, by the fields of StepStats. Blocks the host: never."""
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
