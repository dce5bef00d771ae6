"""The random numbers that a block whose forward is run a second time draws from Python's and numpy's
generators, and from those that are bound to its attributes.

One invariant: a recompute draws the numbers that its forward drew, and leaves every generator as it found it.

All are looked at around every forward, because one may draw where none before did. To read the state that a
library's functions share takes 27 microseconds of numpy and 6 of Python (a CPU, November 2026; the forward of
a layer of W5's stack at a width of 64 takes 190). So of these two the memory that holds the state is
compared, and the state read only where that is not what it was at the last read.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from operator import eq
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["GeneratorsBefore"]

_HEADER_BYTES = object.__basicsize__  # holds the count of references
_MT19937_BYTES = 4 * 624 + 4  # numpy's struct: the key, and the position in it


class _Generator(Protocol):
    """same: whether the state is still the one that `read` gave."""

    def read(self) -> Any: ...

    def put(self, state: Any) -> object: ...

    def same(self, state: Any) -> bool: ...


class GeneratorsBefore:
    """Those that a block may draw from, before one forward of it: built just before, and `learn` called just
    after. values: that are bound to its modules. Blocks the host: never."""

    __slots__ = ("_states",)

    def __init__(self, values: Iterable[dict[str, Any]]) -> None:
        self._states = [(generator, generator.read()) for generator in _generators(values)]

    def learn(self) -> None:
        """The forward is over: keep the states of those that it drew from."""
        self._states = [
            (generator, state) for generator, state in self._states if not generator.same(state)
        ]

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


def _generators(values: Iterable[dict[str, Any]]) -> Iterator[_Generator]:
    yield _pythons()
    types: set[type] = {torch.Generator, random.Random}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        types.add(numpy.random.Generator)
        yield _numpys()
    for bound in values:
        if types.isdisjoint(map(type, bound.values())):
            continue
        for value in bound.values():
            if type(value) is torch.Generator:
                yield _Bound(value.get_state, value.set_state, _tensors_same)
            elif type(value) is random.Random:
                yield _Bound(value.getstate, value.setstate, eq)
            elif type(value) in types:
                bits = value.bit_generator
                yield _Bound(partial(getattr, bits, "state"), partial(setattr, bits, "state"), _same)


class _Bound(NamedTuple):
    """One that is bound to an attribute."""

    read: Callable[[], Any]
    put: Callable[[Any], object]
    equal: Callable[[Any, Any], bool]

    def same(self, state: Any) -> bool:
        return self.equal(state, self.read())


class _Shared:
    """One that the functions of a library share. mark: what is equal as long as the state is; None where that
    cannot be told."""

    def __init__(
        self, read: Callable[[], Any], put: Callable[[Any], object], mark: Callable[[], object]
    ) -> None:
        self._read = read
        self._put = put
        self._mark = mark
        self._last: tuple[object, Any] = None, None

    def read(self) -> tuple[object, Any]:
        mark, last = self._mark(), self._last
        if mark is not None and last[0] == mark:
            return last
        found = mark, self._read()
        if self._mark() == mark:  # else another thread draws
            self._last = found
        return found

    def put(self, state: tuple[object, Any]) -> None:
        self._put(state[1])

    def same(self, state: tuple[object, Any]) -> bool:
        return _same(state[1], self._read()) if state[0] is None else self._mark() == state[0]


@cache
def _pythons() -> _Shared:
    shared = vars(random)["_inst"]
    return _Shared(random.getstate, random.setstate, partial(_python_mark, shared))


@cache
def _numpys() -> _Shared:
    import numpy.random

    shared: Any = numpy.random.mtrand._rand
    draws = numpy.random.RandomState(0)
    draws.standard_normal()
    before = _numpy_mark(draws)
    draws.standard_normal()  # made along with the one before, so no bits are drawn
    sees_all = _numpy_mark(draws) != before
    mark = partial(_numpy_mark, shared) if sees_all else lambda: None
    return _Shared(partial(numpy.random.get_state, legacy=False), numpy.random.set_state, mark)


def _python_mark(generator: Any) -> object:
    return _memory_of(generator), generator.gauss_next


def _numpy_mark(generator: Any) -> object:
    """The generator's own memory has the normal that is left of a pair, and where its bits come from."""
    bits = generator._bit_generator
    if type(bits).__name__ != "MT19937":
        return None
    return _memory_of(generator), ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)


def _memory_of(value: object) -> bytes:
    return ctypes.string_at(id(value) + _HEADER_BYTES, type(value).__basicsize__ - _HEADER_BYTES)


def _same(one: Any, other: Any) -> bool:
    """Of two states of one of numpy's generators: dicts of numbers, texts and arrays."""
    if type(one) is dict:
        return one.keys() == other.keys() and all(_same(part, other[name]) for name, part in one.items())
    return bool(one.tobytes() == other.tobytes() if hasattr(one, "tobytes") else one == other)


def _tensors_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    with _disable_current_modes():
        return torch.equal(one, other)
