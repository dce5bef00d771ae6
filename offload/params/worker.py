"""A thread that runs jobs one after the other, so that the training thread need not wait for them. The first
error is kept for the next call.

One invariant: after a job has failed no further job runs until `clear_error`; waiting threads are woken, and
the error is raised in the training thread. No exception in the training thread, at whatever point, leaves a
wait that never ends.

Buckets become ready in the order of the backward, last layers first, and the next forward wants the first
layers first. So when the thread is free, it steps, of the buckets whose gradients are there, the one that the
next forward needs first (`submit_bucket`): else nothing of what is left would be hidden behind the forward.
Before that it steps the rest of a parameter that it has begun: a gradient takes memory until all is stepped.
"""

from __future__ import annotations

import bisect
import itertools
import operator
import os
import queue
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NamedTuple

import torch

from offload.errors import OffloadError

Job = Callable[[], None]


def _nothing() -> None:
    pass


class Latch:
    """Opens once, and lets through whoever waits. Each of its calls is one of C, so an exception that a
    signal raises in a waiting thread leaves nothing locked, as it may in threading.Event."""

    def __init__(self, *, is_open: bool = False) -> None:
        self._lock = threading.Lock()
        if not is_open:
            self._lock.acquire()

    @property
    def is_open(self) -> bool:
        return not self._lock.locked()

    def open(self) -> None:
        self._lock.release()

    def wait(self) -> None:
        with self._lock:
            pass


class _Shared:
    """State that the thread and its owner both see. The thread holds no more than this, so an optimizer that
    is dropped ends its thread."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[Job, Job] | None] = queue.SimpleQueue()
        self.error: BaseException | None = None


class _Bucket(NamedTuple):
    """See `Worker.submit_bucket`. number: in the order of submission."""

    rank: int
    number: int
    parameters: tuple[int, int]
    is_ready: Callable[[], bool]
    step: Job
    done: Job


class Worker:
    """Starts its thread with the first job.

    cores: the processor cores it and the kernels it starts run on. threads: how many of torch's threads one
    kernel uses; None leaves the training thread its cores. before: run by the thread before it chooses a
    bucket, so that it chooses late; may block it.
    """

    def __init__(
        self,
        name: str,
        *,
        cores: Collection[int] = (),
        threads: int | None = None,
        before: Job = _nothing,
    ) -> None:
        self.name = name
        self._cores = frozenset(cores)
        self._threads = threads
        self._before = before
        self._shared = _Shared()
        self._end: weakref.finalize[..., Worker] | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()
        # by rank: the first ready one is the one to step, and nothing is asked of those behind it
        self._buckets: list[_Bucket] = []
        self._numbers = itertools.count()
        self._chosen: _Bucket | None = None  # seen by the thread only
        self._begun = -1  # the parameter that the last one ended with, or one before it

    def submit(self, job: Job, after: Job = _nothing) -> None:
        """Run `job` after those before it, then `after`, which also runs if the job fails or is dropped.
        Blocks the host: never, but for the start of the thread, once. Raises as `start`; neither will run
        then."""
        self.start()
        self._shared.jobs.put((job, after))

    def submit_bucket(
        self, rank: int, parameters: tuple[int, int], is_ready: Callable[[], bool], step: Job, done: Job
    ) -> None:
        """Run `step` once, and then `done`, which also runs if the step fails or is dropped. Blocks the host:
        never, but for the start of the thread, once. Raises as `start`; the bucket does not wait then.

        rank: in the order in which the next forward needs the buckets. is_ready: whether its gradients are
            there; never blocks, and raises where the device is lost. parameters: the first and the last one
            in it, of which other buckets may have parts.
        """
        self.start()  # first: a bucket without a job would be waited for for ever
        with self._lock:
            bucket = _Bucket(rank, next(self._numbers), parameters, is_ready, step, done)
            bisect.insort(self._buckets, bucket)
        self.submit(self._step_one, self._end_one)

    def _step_one(self) -> None:
        """Step the ready bucket with the rest of what is begun, else the one that is needed first; if none is
        ready, the one that was submitted first: the backward makes gradients in that order."""
        self._before()
        with self._lock:
            alone = len(self._buckets) == 1
            rest = (b for b in self._buckets if b.parameters[0] == self._begun)
            ready = (b for b in itertools.chain(rest, self._buckets) if alone or b.is_ready())
            self._chosen = chosen = self._remove(next(ready, None))
            if chosen.parameters[0] != self._begun:
                self._begun = chosen.parameters[1]
        chosen.step()

    def _end_one(self) -> None:
        """End the chosen bucket, or the one that was submitted first: a job that was dropped, or that failed
        before it chose, has chosen none."""
        chosen, self._chosen = self._chosen, None
        if chosen is None:
            with self._lock:
                chosen = self._remove(None)
        chosen.done()

    def _remove(self, bucket: _Bucket | None) -> _Bucket:
        """With the lock held. None: the one that was submitted first."""
        bucket = bucket or min(self._buckets, key=operator.attrgetter("number"))
        self._buckets.remove(bucket)
        return bucket

    @property
    def error(self) -> BaseException | None:
        return self._shared.error

    @property
    def is_of_parent(self) -> bool:
        """Predicate: this process was forked from the one that has the thread."""
        return self._process != os.getpid()

    def synchronize(self) -> None:
        """Block the host until every job has run, or one has failed and the rest are dropped. Does not raise:
        ask `error`."""
        if self._end is None or not self._end.alive or self.is_of_parent:
            return
        fence = Latch()
        self._shared.jobs.put((_nothing, fence.open))
        fence.wait()

    def clear_error(self) -> None:
        """Jobs may run again after an error, or after an exception that fell into a `submit`."""
        self.synchronize()
        self._buckets.clear()
        self._shared.error = None

    def close(self) -> None:
        """Run what is queued and end the thread. Blocks the host for that. Idempotent."""
        if self._end is not None:
            self._end()
            self._end = None

    def start(self) -> None:
        """Start the thread, so that no `submit` can fail. Blocks the host for the start, once. Raises
        OffloadError if it cannot, and in a forked child, where the thread is not."""
        if self.is_of_parent:
            raise OffloadError(
                f"{self.name} is a thread of process {self._process}, and this is {os.getpid()}, forked from "
                "it; build the optimizer in the process that steps it"
            )
        if self._end is not None:
            return
        count = self._threads if self._threads is not None else _default_threads(len(self._cores))
        started = Latch()
        thread = threading.Thread(
            target=_run, args=(self._shared, self._cores, count, started), name=self.name, daemon=True
        )
        before = torch.get_num_threads()
        try:
            thread.start()
        except RuntimeError as error:
            raise OffloadError(
                f"the system gives the process no thread for {self.name} beside its "
                f"{threading.active_count()} Python threads ({error}); "
                "raise the limit (ulimit -u, or pids.max of the container) and call again"
            ) from error
        # at exit too: a kernel must not outlive the interpreter
        self._end = weakref.finalize(self, _finish, self._shared, thread)
        started.wait()
        torch.set_num_threads(before)  # the thread's own number has also become that of threads to come


def _default_threads(cores: int) -> int:
    """Threads that torch would use on these cores, less two where there are many: the training thread and
    the autograd thread need theirs, and a kernel is as slow as the one of its threads that has to share a
    core."""
    count = min(torch.get_num_threads(), cores or torch.get_num_threads())
    return count - 2 if count > 4 else count


def _finish(shared: _Shared, thread: threading.Thread) -> None:
    shared.jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()


def _run(shared: _Shared, cores: frozenset[int], threads: int, started: Latch) -> None:
    if cores:
        with suppress(OSError):  # of this thread; the threads that its kernels start inherit it
            os.sched_setaffinity(0, cores)
    # the first look in a thread takes over what any thread has set last: not after the next line
    torch.get_num_threads()
    torch.set_num_threads(threads)
    started.open()
    while (item := shared.jobs.get()) is not None:
        job, after = item
        try:
            if shared.error is None:
                job()
        except BaseException as error:
            shared.error = error
        finally:
            after()
            del item, job, after  # they hold the optimizer's parts
