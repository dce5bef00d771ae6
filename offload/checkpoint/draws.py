"""What a forward draws from the generators that Python's and numpy's functions share.

One invariant: the recompute of a call that was looked at draws what its forward drew, and leaves both as it
found them.

Looked at are the first calls of a block, since reading the states takes tens of microseconds. A block that
draws is not recomputed any more from the next call on (net.py).
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["DrawsBefore"]


class DrawsBefore:
    """The states before one forward: built just before it, and `learn` called just after. Blocks the host:
    never."""

    __slots__ = ("_states",)

    def __init__(self) -> None:
        self._states = _states()

    def learn(self) -> str:
        """The forward is over: keep the states of those that it drew from. Returns their names; empty for
        none."""
        now = _states()
        self._states = {name: state for name, state in self._states.items() if now[name] != state}
        return " and ".join(self._states)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The recompute runs inside; at the end, by an exception too, every state is as it was found."""
        found = _states()
        try:
            _put(self._states)
            yield
        finally:
            _put({name: found[name] for name in self._states})


def _numpy() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def _states() -> dict[str, bytes]:
    states = {"Python's random": pickle.dumps(random.getstate())}
    if (numpy := _numpy()) is not None:
        states["numpy.random"] = pickle.dumps(numpy.get_state(legacy=False))
    return states


def _put(states: dict[str, bytes]) -> None:
    for name, state in states.items():
        put = _numpy().set_state if name == "numpy.random" else random.setstate
        put(pickle.loads(state))
