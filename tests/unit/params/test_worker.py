"""Which of the waiting buckets a worker takes: ready before needed, needed before come."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import pytest

from offload.errors import OffloadError
from offload.params.worker import Worker


class Desk:
    """A worker that starts with the first call of `run`, and what it did."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.ready: set[int] = set()
        self.asked = 0
        self.lost = False
        self.log: list[str] = []
        self.parameters: dict[int, tuple[int, int]] = {}  # by place; else one of its own
        self.worker = Worker("test", before=before)
        self._gate = threading.Event()
        self.worker.submit(lambda: self._gate.wait() and None, lambda: None)

    def put(self, *places: int, step: Callable[[int], None] = lambda place: None) -> None:
        for place in places:

            def one(place: int = place) -> None:
                self.log.append(f"step {place}")
                step(place)

            def done(place: int = place) -> None:
                self.log.append(f"done {place}")

            parameters = self.parameters.get(place, (place, place))
            self.worker.submit_bucket(place, parameters, functools.partial(self.is_ready, place), one, done)

    def is_ready(self, place: int) -> bool:
        self.asked += 1
        if self.lost:
            raise RuntimeError("the device is lost")
        return place in self.ready

    def run(self) -> list[str]:
        self._gate.set()
        self.worker.synchronize()
        self.worker.close()
        return self.log

    def steps(self) -> list[int]:
        return [int(entry.split()[1]) for entry in self.run() if entry.startswith("step")]


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_of_the_ready_buckets_the_one_that_the_forward_needs_first_is_taken(desk: Desk) -> None:
    desk.put(3, 2, 1, 0)  # as a backward makes them
    desk.ready = {0, 1, 2, 3}
    assert desk.steps() == [0, 1, 2, 3]


def test_while_none_is_ready_they_are_taken_as_they_came(desk: Desk) -> None:
    desk.put(3, 2, 1, 0)
    assert desk.steps() == [3, 2, 1, 0]


def test_one_that_becomes_ready_meanwhile_goes_past_those_that_wait(desk: Desk) -> None:
    desk.put(4, 3, 2, 1, step=lambda place: desk.ready.update({1, 2} if place == 4 else {}))
    assert desk.steps() == [4, 1, 2, 3]


def test_a_parameter_that_is_begun_is_ended_first(desk: Desk) -> None:
    """Its gradient takes memory until then. What it ends with another one in begins nothing."""
    desk.parameters = {3: (20, 30), 4: (30, 30), 5: (30, 40), 6: (40, 40)}
    desk.ready = {3, 4, 5, 6}
    desk.put(6, 5, 4, 3, 2, 1, step=lambda place: desk.ready.update({1, 2} if place == 3 else {}))
    assert desk.steps() == [3, 4, 5, 1, 2, 6]


def test_it_is_asked_after_the_wait_for_room_and_not_before() -> None:
    """Or a choice made early would be one of what was ready then."""
    desk = Desk(before=lambda: desk.ready.add(0))
    desk.put(1, 0)
    assert desk.steps() == [0, 1]


def test_each_is_done_once_also_those_after_a_failure() -> None:
    def step(place: int) -> None:
        if place == 1:
            raise RuntimeError("boom")

    desk = Desk()
    desk.ready = {0, 1, 2}
    desk.put(2, 1, 0, step=step)
    assert desk.run() == ["step 0", "done 0", "step 1", "done 1", "done 2"]
    assert isinstance(desk.worker.error, RuntimeError)


def test_a_failure_before_the_choice_ends_one_of_them() -> None:
    def fails() -> None:
        raise RuntimeError("no room")

    desk = Desk(before=fails)
    desk.put(1, 0)
    assert desk.run() == ["done 1", "done 0"]


def test_each_is_done_also_where_asking_whether_one_is_ready_fails(desk: Desk) -> None:
    """CUDA repeats the error of a broken context at every question: the thread died of it, and whoever waited
    for a bucket hung."""
    desk.lost = True
    desk.put(2, 1, 0)
    assert desk.run() == ["done 2", "done 1", "done 0"]
    assert "the device is lost" in str(desk.worker.error)


def test_no_more_is_asked_than_a_choice_needs(desk: Desk) -> None:
    """A model of 7 G parameters has 440 buckets, and a question costs the thread that trains the lock of the
    interpreter."""
    desk.ready = set(range(50))
    desk.put(*range(50))
    assert desk.steps() == list(range(50))
    assert desk.asked <= 50


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_bucket_whose_worker_cannot_start_is_refused_and_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waited without a job: a later job took it, and the last bucket of that step was never done."""
    worker, log = Worker("test"), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(
            OffloadError,
            match=(
                r"no thread for test beside its \d+ Python threads \(can't start new thread\); "
                r"raise the limit"
            ),
        ):
            worker.submit_bucket(
                0, (0, 0), lambda: True, lambda: log.append("step 0"), lambda: log.append("done 0")
            )
    worker.submit_bucket(1, (0, 0), lambda: True, lambda: log.append("step 1"), lambda: log.append("done 1"))
    worker.synchronize()
    worker.close()
    assert log == ["step 1", "done 1"]
