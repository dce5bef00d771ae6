"""The plain attributes of a block whose forward is run a second time, and the random numbers that Python and
numpy draw in it, so that both end as after one forward.

One invariant: a recompute starts from the values that its forward had, and leaves what it found.

What a forward binds anew, and whether it draws, is learned in the first one: until then all is remembered,
later only that, which for most blocks is nothing. What a forward adds to a list or writes into an object is
not seen, and happens twice.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

__all__ = ["AttributesBefore"]

_ABSENT: Any = object()
_NOT_HELD: Any = object()
"""In place of a value that may lead to a graph: held, it would keep that of each forward before."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

_Generator = tuple[Callable[[], Any], Callable[[Any], None]]
"""What returns a random state, and what sets it."""


class _Changing(NamedTuple):
    attributes: list[tuple[ref[nn.Module], str]]
    generators: list[_Generator]


_changing: WeakKeyDictionary[nn.Module, _Changing] = WeakKeyDictionary()
"""By block: what its first forward has changed."""


class _Attribute(NamedTuple):
    """One of `owner` before a forward. value: `_ABSENT` where it was not there."""

    owner: nn.Module
    name: str
    value: Any

    def bind(self) -> None:
        if self.value is _ABSENT:
            vars(self.owner).pop(self.name, None)
        elif self.value is not _NOT_HELD:
            vars(self.owner)[self.name] = self.value

    def now(self) -> _Attribute:
        return self._replace(value=vars(self.owner).get(self.name, _ABSENT))


class AttributesBefore:
    """Those of `module`, and of all modules inside, before one forward of it: built just before, and `learn`
    called just after. Blocks the host: never."""

    __slots__ = ("_attributes", "_learns", "_module", "_states")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        known = _changing.get(module)
        self._learns = known is None
        generators = _generators() if known is None else known.generators
        self._states = [(generator, generator[0]()) for generator in generators]
        if known is None:
            self._attributes = _all_of(module)
            return
        places = ((owner(), name) for owner, name in known.attributes)
        found = (_Attribute(owner, name, None).now() for owner, name in places if owner is not None)
        self._attributes = [attribute._replace(value=_held(attribute.value)) for attribute in found]

    def learn(self) -> None:
        """The forward is over: keep what it has changed."""
        if not self._learns:
            return
        before = {(id(attribute.owner), attribute.name) for attribute in self._attributes}
        made = [
            attribute._replace(value=_ABSENT)
            for attribute in _all_of(self._module)
            if (id(attribute.owner), attribute.name) not in before
        ]
        changed = [
            attribute._replace(value=_held(attribute.value))
            for attribute in self._attributes
            if not _equal(attribute.value, attribute.now().value)
        ]
        self._attributes = [*changed, *made]
        self._states = [
            (generator, state)
            for generator, state in self._states
            if pickle.dumps(state) != pickle.dumps(generator[0]())
        ]
        _changing[self._module] = _Changing(
            [(ref(attribute.owner), attribute.name) for attribute in self._attributes],
            [generator for generator, _ in self._states],
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The recompute runs inside; at the end, by an exception too, everything is as it was found."""
        attributes = [attribute.now() for attribute in self._attributes]
        states = [(generator, generator[0]()) for generator, _ in self._states]
        try:
            for attribute in self._attributes:
                attribute.bind()
            for (_, put), state in self._states:
                put(state)
            yield
        finally:
            for attribute in attributes:
                attribute.bind()
            for (_, put), state in states:
                put(state)


def _all_of(module: nn.Module) -> list[_Attribute]:
    return [
        _Attribute(owner, name, value)
        for owner in module.modules()
        for name, value in vars(owner).items()
        if name not in _OF_EVERY_MODULE
    ]


def _generators() -> list[_Generator]:
    found: list[_Generator] = [(random.getstate, random.setstate)]
    numpy = sys.modules.get("numpy")
    return found if numpy is None else [*found, (numpy.random.get_state, numpy.random.set_state)]


def _equal(before: Any, now: Any) -> bool:
    return before is now or (_is_plain(before) and type(before) is type(now) and before == now)


def _held(value: Any) -> Any:
    if value is _ABSENT or _is_plain(value) or (isinstance(value, torch.Tensor) and value.grad_fn is None):
        return value
    return _NOT_HELD


def _is_plain(value: Any) -> bool:
    """Whether it leads to no other object but values like it."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype))
