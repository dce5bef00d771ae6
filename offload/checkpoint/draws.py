"""What a forward draws from Python's and numpy's generators, and from those that are bound to attributes of
its block or stand in lists, tuples and dicts there.

One invariant: the recompute of a call that was looked at draws what its forward drew, and leaves every
generator as it found it.

Looked at are the first calls of a block, since reading the states takes 33 microseconds. A block that draws
is not recomputed any more from the next call on.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["DrawsBefore"]


class _Generator(NamedTuple):
    """One generator. name: for messages."""

    name: str
    read: Callable[[], Any]
    put: Callable[[Any], object]


class DrawsBefore:
    """The generators that a forward of `modules` may draw from: built just before it, and `learn` called just
    after. Blocks the host: never."""

    __slots__ = ("_states",)

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._states = [(generator, generator.read()) for generator in _generators(modules)]

    def learn(self) -> str:
        """The forward is over: keep the states of those that it drew from. Returns their names; empty for
        none."""
        self._states = [(one, state) for one, state in self._states if not _same(state, one.read())]
        return ", ".join(dict.fromkeys(generator.name for generator, _ in self._states))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The recompute runs inside; at the end, by an exception too, every state is as it was found."""
        found = [(generator, generator.read()) for generator, _ in self._states]
        try:
            for generator, state in self._states:
                generator.put(state)
            yield
        finally:
            for generator, state in found:
                generator.put(state)


def _generators(modules: Sequence[nn.Module]) -> Iterator[_Generator]:
    yield _Generator("Python's random", random.getstate, random.setstate)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        of_numpy = numpy.random
        yield _Generator("numpy.random", partial(of_numpy.get_state, legacy=False), of_numpy.set_state)
    for value in _bound_to(modules):
        name = f"a {type(value).__name__} of its own"
        if isinstance(value, torch.Generator):
            yield _Generator(name, value.get_state, value.set_state)
        elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
            yield _Generator(name, value.getstate, value.setstate)
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            yield _Generator(name, partial(value.get_state, legacy=False), value.set_state)
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            yield _Generator(name, partial(getattr, bits, "state"), partial(setattr, bits, "state"))


def _bound_to(modules: Sequence[nn.Module]) -> Iterator[object]:
    for module in modules:
        for value in vars(module).values():
            yield from (
                value.values()
                if isinstance(value, dict)
                else (value if isinstance(value, (list, tuple)) else (value,))
            )


def _same(one: Any, other: Any) -> bool:
    """Of two states: tensors, or dicts and tuples of numbers, texts and arrays."""
    if isinstance(one, torch.Tensor):
        with _disable_current_modes():
            return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(part, other[name]) for name, part in one.items())
    return bool(one.tobytes() == other.tobytes() if hasattr(one, "tobytes") else one == other)
