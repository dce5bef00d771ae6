"""The disk's threads: the order of their jobs, what is called off, and that no thread outlives its owner."""

from __future__ import annotations

import threading
import weakref

import pytest

from offload.disk.worker import Job, JobState, Worker
from tests.inside import has_work


class Gate:
    """A job that is in the middle of its run until the gate opens."""

    def __init__(self) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()
        self.job: Job[str] = Job(self._run, ["gate"])

    def _run(self, items: list[str]) -> None:
        self.begun.set()
        assert self.opened.wait(10)


@pytest.fixture
def worker() -> Worker[str]:
    made: Worker[str] = Worker("test")
    made.start()
    return made


def end(worker: Worker[str]) -> None:
    worker.end()
    worker.join()


def test_jobs_run_in_order_and_a_hurried_one_runs_next(worker: Worker[str]) -> None:
    ran: list[list[str]] = []
    gate = Gate()
    worker.submit(gate.job)
    assert gate.begun.wait(10)
    jobs = [Job(ran.append, [name]) for name in "abc"]
    for job in jobs:
        worker.submit(job)
    first = Job(ran.append, ["first"])
    worker.submit(first, first=True)
    worker.hurry(jobs[2])
    assert not worker.passed(jobs[0], "release")
    gate.opened.set()
    worker.wait(jobs[1], "release")
    assert ran == [["c"], ["first"], ["a"], ["b"]]
    assert worker.passed(jobs[0], "release")
    end(worker)


def test_a_called_off_item_is_left_out_and_a_job_without_items_never_runs(worker: Worker[str]) -> None:
    ran: list[list[str]] = []
    gate = Gate()
    worker.submit(gate.job)
    assert gate.begun.wait(10)
    job = Job(ran.append, ["a", "b", "c"])
    worker.submit(job)
    assert worker.call_off(job, "b")
    alone = Job(ran.append, ["d"])
    worker.submit(alone)
    assert worker.call_off(alone, "d")
    assert alone.state is JobState.CALLED_OFF
    assert not worker.call_off(gate.job, "gate"), "it has begun"
    gate.opened.set()
    worker.drain()
    assert ran == [["a", "c"]]
    assert not worker.call_off(job, "a"), "it is over"
    end(worker)


def test_what_a_job_raises_is_kept_for_who_looks_at_it(worker: Worker[str]) -> None:
    def fail(items: list[str]) -> None:
        raise ValueError(items[0])

    job = Job(fail, ["text"])
    worker.submit(job)
    worker.wait(job, "arrive")
    assert isinstance(job.error, ValueError)
    assert job.error.args == ("text",)
    after = Job(lambda items: None, ["x"])
    worker.submit(after)
    worker.wait(after, "arrive")
    assert after.error is None
    end(worker)


def test_ending_calls_off_what_is_queued_and_waits_for_what_runs(worker: Worker[str]) -> None:
    gate = Gate()
    worker.submit(gate.job)
    assert gate.begun.wait(10)
    queued: Job[str] = Job(lambda items: None, ["x"])
    worker.submit(queued)
    (thread,) = worker._threads
    worker.end()
    worker.wait(queued, "release")  # nobody waits for what never runs
    assert queued.state is JobState.CALLED_OFF
    assert thread.is_alive()
    gate.opened.set()
    worker.join()
    assert not thread.is_alive()


def test_two_threads_have_a_job_each_and_the_later_one_may_end_first() -> None:
    worker: Worker[str] = Worker("test", num_threads=2)
    worker.start()
    gates, last = [Gate(), Gate()], Job(lambda items: None, ["x"])
    for gate in gates:
        worker.submit(gate.job)
    worker.submit(last)
    assert all(gate.begun.wait(10) for gate in gates)
    gates[1].opened.set()
    worker.wait(last, "arrive")
    assert worker.passed(gates[1].job, "release")
    assert not worker.passed(gates[0].job, "release")
    assert has_work(worker)
    gates[0].opened.set()
    worker.drain()
    assert worker.passed(gates[0].job, "release")
    assert not has_work(worker)
    end(worker)
    assert worker._threads == []


def test_a_job_that_is_over_holds_nothing(worker: Worker[str]) -> None:
    class Owner:
        def run(self, items: list[str]) -> None: ...

    owner = Owner()
    reference = weakref.ref(owner)
    job = Job(owner.run, ["x"])
    worker.submit(job)
    worker.wait(job, "release")
    del owner
    assert reference() is None
    end(worker)
