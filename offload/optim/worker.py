"""A thread of its own for what must not hold up the training thread: jobs one after the other, and the first
error kept for the next call.

One invariant: after a job has failed no further job runs until `forgive`; whoever waits is woken, and the
error is raised in the training thread, where somebody can act on it.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Collection

import torch

from offload.errors import OffloadError

__all__ = ["Job", "Worker"]

Job = Callable[[], None]


class _Shared:
    """What the thread and its owner both see. The thread holds no more than this, so an optimizer that is
    dropped ends its thread."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[Job, Job] | None] = queue.SimpleQueue()
        self.idle = threading.Condition()
        self.unfinished = 0
        self.error: BaseException | None = None


class Worker:
    """Starts its thread with the first job.

    cores: the processor cores it and the kernels it starts run on. threads: how many of torch's threads one
    kernel uses; None leaves the training thread its cores.
    """

    def __init__(self, name: str, *, cores: Collection[int] = (), threads: int | None = None) -> None:
        self.name = name
        self._cores = frozenset(cores)
        self._threads = threads
        self._shared = _Shared()
        self._thread: threading.Thread | None = None
        self._end: weakref.finalize[..., Worker] | None = None

    def submit(self, job: Job, after: Job) -> None:
        """Run `job` after those before it, then `after`, which also runs if the job fails or is dropped.
        Blocks the host: never, but for the start of the thread, once. Raises as `start`; neither will run
        then."""
        self.start()
        with self._shared.idle:
            self._shared.unfinished += 1
        self._shared.jobs.put((job, after))

    @property
    def error(self) -> BaseException | None:
        return self._shared.error

    def synchronize(self) -> None:
        """Block the host until every job has run, or one has failed and the rest are dropped. Does not raise:
        ask `error`."""
        with self._shared.idle:
            self._shared.idle.wait_for(lambda: self._shared.unfinished == 0)

    def forgive(self) -> None:
        """Jobs may run again after an error."""
        self.synchronize()
        self._shared.error = None

    def close(self) -> None:
        """Run what is queued and end the thread. Blocks the host for that. Idempotent."""
        if self._end is not None:
            self._end()
            self._end = None
            self._thread = None

    def start(self) -> None:
        """Have the thread, so that no `submit` can fail. Blocks the host for the start, once. Raises
        OffloadError if it cannot."""
        if self._thread is not None:
            return
        count = self._threads if self._threads is not None else _default_threads(len(self._cores))
        started = threading.Event()
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
        started.wait()
        torch.set_num_threads(before)  # the thread's own number has also become that of threads to come
        self._thread = thread
        # at exit too: a kernel must not outlive the interpreter
        self._end = weakref.finalize(self, _finish, self._shared, thread)


def _default_threads(cores: int) -> int:
    """As many as torch would use on these cores, less two where there are many: the training thread and the
    autograd thread need theirs, and a kernel is as slow as the one of its threads that has to share a
    core."""
    count = min(torch.get_num_threads(), cores or torch.get_num_threads())
    return count - 2 if count > 4 else count


def _finish(shared: _Shared, thread: threading.Thread) -> None:
    shared.jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()


def _run(shared: _Shared, cores: frozenset[int], threads: int, started: threading.Event) -> None:
    if cores:
        try:  # of this thread; the threads that its kernels start inherit it
            os.sched_setaffinity(0, cores)
        except OSError:
            cores = frozenset()
    # the first look in a thread takes over what any thread has set last: not after the next line
    torch.get_num_threads()
    torch.set_num_threads(threads)
    started.set()
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
            with shared.idle:
                shared.unfinished -= 1
                if shared.unfinished == 0 or shared.error is not None:
                    shared.idle.notify_all()
