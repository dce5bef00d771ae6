"""How captures and replays of torch.cuda.CUDAGraph are listened to, with a class of the same methods in its
place."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch

from offload.device import Graph
from offload.device.base import replace_replay, replaced_captures


class FakeGraph:
    def __init__(self, log: list[str], refuse: str = "") -> None:
        self.log = log
        self.refuse = refuse

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        self._do(f"torch begins {pool} {capture_error_mode}")

    def capture_end(self) -> None:
        self._do("torch ends")

    def replay(self) -> None:
        self._do("torch replays")

    def _do(self, what: str) -> None:
        self.log.append(what)
        if self.refuse and self.refuse in what:
            raise RuntimeError(f"{what} and fails")


class Watcher:
    def __init__(self, log: list[str], *, refuse: str = "") -> None:
        self.log = log
        self.refuse = refuse

    def capture_begins(self, graph: Graph) -> None:
        self.log.append("begins")

    def capture_ends(self, graph: Graph) -> None:
        self.log.append("ends")
        if self.refuse:
            raise ValueError(self.refuse)

    def capture_over(self, graph: Graph, complete: bool) -> None:
        self.log.append(f"over {complete}")


def watched(watcher: Watcher, *, concerned: bool = True) -> AbstractContextManager[None]:
    return replaced_captures(watcher, [], lambda: concerned)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    begin, end = FakeGraph.capture_begin, FakeGraph.capture_end
    yield []
    assert (FakeGraph.capture_begin, FakeGraph.capture_end) == (begin, end), (
        "torch's own methods were not put back"
    )


def test_watcher_hears_of_a_capture_around_torchs_own_calls(log: list[str]) -> None:
    graph = FakeGraph(log)
    under_way: list[Graph] = []
    with replaced_captures(Watcher(log), under_way, lambda: True):
        graph.capture_begin("pool", capture_error_mode="relaxed")
        assert under_way == [graph]
        graph.capture_end()
        assert under_way == []
    assert log == ["begins", "torch begins pool relaxed", "ends", "torch ends", "over True"]


def test_capture_on_another_device_is_left_alone(log: list[str]) -> None:
    graph = FakeGraph(log)
    with watched(Watcher(log), concerned=False):
        graph.capture_begin()
        graph.capture_end()
    assert log == ["torch begins None global", "torch ends"]


@pytest.mark.parametrize("refused", ["begins", "ends"])
def test_capture_that_torch_refuses_is_over_and_not_complete(log: list[str], refused: str) -> None:
    graph = FakeGraph(log, refuse=f"torch {refused}")
    with watched(Watcher(log)):
        if refused == "ends":
            graph.capture_begin()
        with pytest.raises(RuntimeError, match=f"torch {refused}.* and fails"):
            (graph.capture_begin if refused == "begins" else graph.capture_end)()
    assert log[-1] == "over False"


def test_capture_is_ended_although_its_watcher_raises(log: list[str]) -> None:
    graph = FakeGraph(log)
    with watched(Watcher(log, refuse="not joined")):
        graph.capture_begin()
        with pytest.raises(ValueError, match="not joined"):
            graph.capture_end()
    assert log[-2:] == ["torch ends", "over False"]


def test_watched_replay_calls_before_and_after_and_does_not_keep_the_graph(log: list[str]) -> None:
    graph = FakeGraph(log)
    replace_replay(graph, lambda: log.append("before"), lambda: log.append("after"))
    graph.replay()
    assert log == ["before", "torch replays", "after"]
    reference = weakref.ref(graph)
    gc.disable()
    try:
        del graph
        assert reference() is None
    finally:
        gc.enable()


def test_a_replay_that_two_regions_watch_is_told_to_both(log: list[str]) -> None:
    """Of two engines, of a manager and of an optimizer: the second to listen took the place of the first."""
    graph = FakeGraph(log)
    for name in ("one", "two"):
        replace_replay(graph, partial(log.append, f"before {name}"), partial(log.append, f"after {name}"))
    graph.replay()
    assert log == ["before two", "before one", "torch replays", "after one", "after two"]
