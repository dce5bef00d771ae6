"""When a graph is replayed: its own `replay` is replaced, on the one graph and for as long as it lives.

One invariant: listening keeps no graph alive, for a graph owns device memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["replace_replay"]


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
