"""Threads that run jobs from one queue: the disk has some for its writes and some for its reads.

Jobs begin in the order of the queue, and end in any. One invariant: a job that was called off never runs, and
a job that has begun runs to its end. What the threads and the host hand to each other is ordered by `wait`
and `passed`, each with the title of its note.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

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
        """Whether the job has not begun and will run without the item; without any it is called off. Blocks
        the host: never."""
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
        """Whether the job is over. Blocks the host: never. order: as of `wait`."""
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
