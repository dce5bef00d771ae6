"""When a capture begins and ends, and when a graph is replayed: torch tells nobody, so this file listens
where it happens.

`torch.cuda.graph` and `torch.cuda.make_graphed_callables` make their graphs inside, so the two methods of
torch.cuda.CUDAGraph that begin and end a capture are replaced while somebody watches, and put back after. A
graph's `replay` is replaced on the one graph, for as long as it lives.

Two invariants: a capture that was begun is ended, whatever a watcher raises, and what torch raises is raised;
listening keeps no graph alive, for a graph owns device memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from offload.device.base import CaptureWatcher


@contextmanager
def replaced_captures(
    watcher: CaptureWatcher, under_way: list[Any], concerns: Callable[[], bool]
) -> Iterator[None]:
    """Inside, the watcher is told of what torch.cuda.CUDAGraph captures.

    under_way: the graphs whose capture has begun and is not over. concerns: whether a capture that is about
        to begin is to be told of.
    """
    kind: Any = torch.cuda.CUDAGraph
    torch_begin, torch_end = kind.capture_begin, kind.capture_end

    def capture_begin(graph: Any, *arguments: Any, **keywords: Any) -> None:
        if not concerns():
            torch_begin(graph, *arguments, **keywords)
            return
        watcher.capture_begins(graph)
        under_way.append(graph)
        try:
            torch_begin(graph, *arguments, **keywords)
        except BaseException:
            over(graph, False)
            raise

    def capture_end(graph: Any) -> None:
        if graph not in under_way:
            torch_end(graph)
            return
        complete = False
        try:
            try:
                watcher.capture_ends(graph)
            finally:
                torch_end(graph)
            complete = True
        finally:
            over(graph, complete)

    def over(graph: Any, complete: bool) -> None:
        under_way.remove(graph)
        watcher.capture_over(graph, complete)

    kind.capture_begin, kind.capture_end = capture_begin, capture_end
    try:
        yield
    finally:
        kind.capture_begin, kind.capture_end = torch_begin, torch_end


def replace_replay(graph: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` and `after` around each replay of this graph, and around what others who listen do. The
    graph would keep itself alive through its own method, hence the weak reference: its private memory is to
    go when its owner lets go of it."""
    kind, reference = type(graph), weakref.ref(graph)
    # of another region that was open at the capture
    inner: Callable[[], None] | None = vars(graph).get("replay")

    def replay() -> None:
        alive = reference()
        assert alive is not None, "a replay of a graph that is gone"
        before()
        if inner is not None:
            inner()
        else:
            kind.replay(alive)
        after()

    graph.replay = replay
