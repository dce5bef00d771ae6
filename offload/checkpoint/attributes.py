"""The plain attributes of a block whose forward is run a second time, so that they end as after one forward.

One invariant: a recompute starts from the values that its forward had, and leaves what it found.

They are looked at in every forward, because one may bind what none before did. What a forward adds to a list
or writes into an object is not seen, and happens twice.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["AttributesBefore"]

logger = logging.getLogger(__name__)

_ABSENT: Any = object()
_NOT_HELD: Any = object()
"""In place of a value that may lead to a graph: held, it would keep that of each forward before."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

_PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)

_said: set[tuple[type, str]] = set()


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
    """Those of the modules of a block before one forward of it: built just before, and `learn` called just
    after. Blocks the host: never."""

    __slots__ = ("_attributes", "_before")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._attributes: list[_Attribute] = []
        self._before = [(owner, vars(owner).copy()) for owner in modules]

    def learn(self) -> None:
        """The forward is over: keep what it has changed. Says once for each class and attribute that it
        cannot be kept."""
        before, self._before = self._before, []
        self._attributes = [bound for owner, values in before for bound in _bound_anew(owner, values)]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The recompute runs inside; at the end, by an exception too, everything is as it was found."""
        found = [attribute.now() for attribute in self._attributes]
        try:
            for attribute in self._attributes:
                attribute._replace(value=_held(attribute.value)).bind()  # a recompute may add to a list
            yield
        finally:
            for attribute in found:
                attribute.bind()


def _bound_anew(owner: nn.Module, before: dict[str, Any]) -> Iterator[_Attribute]:
    now = vars(owner)
    if before.keys() == now.keys() and all(map(is_, before.values(), now.values())):
        return
    for name in (before.keys() | now.keys()) - _OF_EVERY_MODULE:
        value = before.get(name, _ABSENT)
        if _equal(value, now.get(name, _ABSENT)):
            continue
        held = _held(value)
        if held is _NOT_HELD and (type(owner), name) not in _said:
            _said.add((type(owner), name))
            logger.warning(
                "attribute %r of a %s is bound anew in a forward that is recomputed, and was a %s, which is "
                "not kept for each recompute: one that reads it finds what is bound by then. Numbers, "
                "tensors, arrays, and lists, tuples, sets and dicts of these are kept",
                name,
                type(owner).__name__,
                type(value).__name__,
            )
        yield _Attribute(owner, name, held)


def _equal(before: Any, now: Any) -> bool:
    return before is now or (_is_plain(before) and type(before) is type(now) and before == now)


def _held(value: Any) -> Any:
    """The value without a graph: a recompute needs none, since it only makes again what was saved."""
    if value is _ABSENT or value is _NOT_HELD or _is_plain(value):
        return value
    if isinstance(value, torch.Tensor):
        return value if value.grad_fn is None else value.detach().requires_grad_()
    if type(value) in (list, tuple, set, frozenset):
        parts = [_held(part) for part in value]
        return _NOT_HELD if any(part is _NOT_HELD for part in parts) else type(value)(parts)
    if type(value) is dict:
        held = {name: _held(part) for name, part in value.items()}
        return _NOT_HELD if any(part is _NOT_HELD for part in held.values()) else held
    numpy = sys.modules.get("numpy")
    is_array = (
        numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and not value.dtype.hasobject
    )
    return value if is_array else _NOT_HELD


def _is_plain(value: Any) -> bool:
    """Whether it leads to no other object but values like it."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, _PLAIN)
