"""When a capture begins and ends: torch tells nobody, so this file listens where it happens.

`torch.cuda.graph` and `torch.cuda.make_graphed_callables` make their graphs inside, so the two methods of
torch.cuda.CUDAGraph that begin and end a capture are replaced while somebody watches, and put back after.

One invariant: a capture that was begun is ended, whatever a watcher raises, and what torch raises is raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from offload.device.base import CaptureWatcher

__all__ = ["replaced_captures"]


class _Watcher(CaptureWatcher, Protocol):
    def concerns(self) -> bool:
        """Whether a capture that is about to begin is to be told of."""


@contextmanager
def replaced_captures(watcher: _Watcher) -> Iterator[None]:
    """Inside, the watcher is told of what torch.cuda.CUDAGraph captures."""
    kind: Any = torch.cuda.CUDAGraph
    torch_begin, torch_end = kind.capture_begin, kind.capture_end
    watched: list[Any] = []

    def capture_begin(graph: Any, *arguments: Any, **keywords: Any) -> None:
        if not watcher.concerns():
            torch_begin(graph, *arguments, **keywords)
            return
        watcher.capture_begins(graph)
        try:
            torch_begin(graph, *arguments, **keywords)
        except BaseException:
            watcher.capture_over(graph, False)
            raise
        watched.append(graph)

    def capture_end(graph: Any) -> None:
        if graph not in watched:
            torch_end(graph)
            return
        watched.remove(graph)
        complete = False
        try:
            try:
                watcher.capture_ends(graph)
            finally:
                torch_end(graph)
            complete = True
        finally:
            watcher.capture_over(graph, complete)

    kind.capture_begin, kind.capture_end = capture_begin, capture_end
    try:
        yield
    finally:
        kind.capture_begin, kind.capture_end = torch_begin, torch_end
