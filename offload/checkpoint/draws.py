"""Generators of random numbers that others share: torch's of a device, which a recompute puts back in every
call (surroundings.py), and those of Python's and numpy's functions: a forward that moves one of these is not
recomputed from the next call on (net.py).

One invariant: states are equal as long as the generators are. To read Python's or numpy's takes tens of
microseconds.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch


class SharedGenerator(NamedTuple):
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]

    def get_state(self) -> bytes:
        return pickle.dumps(self.read())

    def set_state(self, state: bytes) -> None:
        self.write(pickle.loads(state))


def shared_generators() -> list[SharedGenerator]:
    found = [SharedGenerator("Python's random", random.getstate, random.setstate)]
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    if numpy is not None:
        found.append(SharedGenerator("numpy.random", partial(numpy.get_state, legacy=False), numpy.set_state))
    return found


class _ByModule:
    """The generator of a device whose module in torch has no list of them."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self.get_state = partial(module.get_rng_state, device)
        self.set_state = partial(module.set_rng_state, device=device)


def generator_of(device: torch.device) -> Any:
    """torch's default generator of a device, by its `get_state` and `set_state`."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())
    return generators[device.index] if generators and device.index is not None else _ByModule(module, device)
