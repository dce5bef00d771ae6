"""The states of the generators that Python's and numpy's functions share: a forward that moves one is not
recomputed from the next call on, and its recompute starts from the states of before it (net.py).

One invariant: bytes are equal as long as the states are.
"""

from __future__ import annotations

import pickle
import random
import sys
from typing import Any

__all__ = ["generator_states", "put_generator_states"]


def generator_states() -> dict[str, bytes]:
    """By generator. Takes tens of microseconds."""
    states = {"Python's random": pickle.dumps(random.getstate())}
    if (numpy := _numpy()) is not None:
        states["numpy.random"] = pickle.dumps(numpy.get_state(legacy=False))
    return states


def put_generator_states(states: dict[str, bytes]) -> None:
    for name, state in states.items():
        put = _numpy().set_state if name == "numpy.random" else random.setstate
        put(pickle.loads(state))


def _numpy() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)
