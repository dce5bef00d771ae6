"""The disk's threads as queues that a test steps: jobs run when somebody needs them, at once, or at random.

One invariant: a job runs in the calling thread, so a program is the same in every run.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Literal

from offload import OffloadEngine
from offload.device.base import Event
from offload.disk.tier import DiskTier
from offload.disk.worker import Job, Stored, Worker

DiskMode = Literal["late", "early", "random"]


class SteppedWorker(Worker[Stored]):
    """late: a write runs when the engine asks for it, a read when it is waited for. early: at once.

    without: titles of edges that are left out. errors: what jobs raised, whoever may look at them.
    """

    def __init__(
        self, name: str, mode: DiskMode, seed: int, without: Collection[str] = (), *, writes: bool
    ) -> None:
        super().__init__(name)
        self._mode = mode
        self._random = random.Random(seed)
        self._without = without
        self._writes = writes
        self._begun: Job[Stored] | None = None  # one thread has it, the other runs what else is asked for
        self.errors: list[BaseException] = []
        self.ran = 0

    def submit(self, job: Job[Stored], *, first: bool = False) -> None:
        super().submit(job, first=first)
        if self._mode == "early":
            self._run_queued()

    def wait(self, job: Job[Stored], order: str) -> None:
        if order not in self._without:
            self._run_to(job)

    def passed(self, job: Job[Stored], order: str) -> bool:
        if order in self._without:
            return True
        if self._begun is None and (
            (self._mode == "late" and self._writes)
            or (self._mode == "random" and self._random.random() < 0.5)
        ):
            self._run_to(job)
        return job.is_over

    def drain(self) -> None:
        self.finish()
        self._run_queued()

    def begin_next(self) -> Job[Stored]:
        """The next job has begun, as on a thread that is in the middle of it, until `finish`."""
        self._begun = job = self._queue.popleft()
        self._begin(job)
        return job

    def finish(self) -> None:
        if self._begun is not None:
            job, self._begun = self._begun, None
            self._run(job)

    def _run_to(self, job: Job) -> None:
        if job is self._begun:
            self.finish()
        while not job.is_over:
            self._run_next()

    def _run_queued(self) -> None:
        while self._queue:
            self._run_next()

    def _run(self, job: Job) -> None:
        super()._run(job)
        self.ran += 1
        if job.error is not None:
            self.errors.append(job.error)


def step_disk(
    engine: OffloadEngine, mode: DiskMode = "late", seed: int = 0, without: Collection[str] = ()
) -> DiskTier:
    """The engine's disk, its threads replaced by stepped ones. without: edges that are left out."""
    disk = engine.transfers.disk
    for worker in (disk.writer, disk.reader):
        worker.end()
        worker.join()
    disk.writer = SteppedWorker("write", mode, seed, without, writes=True)
    disk.reader = SteppedWorker("read", mode, seed + 1, without, writes=False)
    synchronize = disk.copies.synchronize

    def unless_left_out(event: Event, order: str) -> None:
        if order not in without:
            synchronize(event, order)

    disk.copies.synchronize = unless_left_out  # type: ignore[method-assign]
    return disk
