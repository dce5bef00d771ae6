"""Which bucket a worker steps next: of those whose gradients are there, the one that the next forward needs
first.

A bucket that is stepped in the backward becomes ready in the order of the backward, last layers first, and
the next forward wants the first layers first. Taken in the order of their coming, the first layer's bucket is
stepped last, and nothing of what is left at the end of the backward is hidden behind the forward. One
invariant: every bucket put in is taken once, by the job that was submitted with it or by another.
"""

from __future__ import annotations

import bisect
import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass

from offload.optim.worker import Job, Worker

__all__ = ["Waiting"]


@dataclass(frozen=True, slots=True)
class _Entry:
    """place: in the order in which the next forward needs the buckets. came: in that of their coming.

    is_ready: whether its gradients are there; never blocks, and raises where the device is lost.
    """

    place: int
    came: int
    is_ready: Callable[[], bool]
    step: Job
    done: Job


class Waiting:
    """Buckets that wait for one worker. before: run by the worker before it chooses, so that it chooses late;
    may block the worker."""

    def __init__(self, worker: Worker, before: Job) -> None:
        self._worker = worker
        self._before = before
        self._lock = threading.Lock()
        # by place: the first ready one is the one to take, and nothing is asked of those behind it
        self._entries: list[_Entry] = []
        self._came = 0
        self._taken: _Entry | None = None  # seen by the worker's thread only

    def submit(self, place: int, is_ready: Callable[[], bool], step: Job, done: Job) -> None:
        """Have the worker run `step` once, and then `done`, which also runs if the step fails or is dropped.
        Blocks the host: never, but for the start of the worker, once. Raises OffloadError if it cannot start;
        the bucket does not wait then."""
        self._worker.start()  # first: a bucket without a job would be waited for for ever
        with self._lock:
            self._came += 1
            bisect.insort(
                self._entries,
                _Entry(place, self._came, is_ready, step, done),
                key=operator.attrgetter("place"),
            )
        self._worker.submit(self._step_one, self._end_one)

    def _step_one(self) -> None:
        self._before()
        with self._lock:
            self._taken = self._remove(self._chosen())
        self._taken.step()

    def _end_one(self) -> None:
        """Of a job that was dropped, or failed before it chose, nothing is taken yet: the bucket that came
        first ends with it."""
        taken, self._taken = self._taken, None
        if taken is None:
            with self._lock:
                taken = self._remove(self._first())
        taken.done()

    # -- inside, with the lock held --------------------------------------------------------------------------
    def _chosen(self) -> _Entry:
        """The ready one that is needed first; if none is ready, the one that came first: the backward makes
        gradients in that order."""
        if len(self._entries) == 1:
            return self._entries[0]
        return next((entry for entry in self._entries if entry.is_ready()), None) or self._first()

    def _first(self) -> _Entry:
        return min(self._entries, key=operator.attrgetter("came"))

    def _remove(self, entry: _Entry) -> _Entry:
        self._entries.remove(entry)
        return entry
