"""Param groups: a value of a group has one home, the user's dictionary.

The optimizers inside step other tensors than the user's, so each needs groups of its own. These are views:
they have their own tensors and say how their class computes; every other key is read from and written to the
user's group at once. Where a worker steps while the user may already change the group, the view is of a
snapshot, taken as the step begins. Only classes that never write into a group are stepped by workers.

One invariant: between two steps nothing that a group says is kept anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from offload.optim.classes import IMPLEMENTATION_KEYS

__all__ = ["UserGroup", "follow_groups", "index_of"]

_OWN = IMPLEMENTATION_KEYS | {"params", "param_names"}


if TYPE_CHECKING:
    _Base = dict[Any, Any]
else:

    class _Base(MutableMapping, dict):
        """All methods of a mapping go through the five that its class defines."""


class _View(_Base):
    """Param group of an optimizer inside, a `dict` to all. of: the user's group, or its snapshot."""

    def __init__(self, of: dict[str, Any]) -> None:
        self.of = of
        self._own: dict[str, Any] = {}

    def _home(self, key: str) -> dict[str, Any]:
        return self._own if key in _OWN else self.of

    def __getitem__(self, key: str) -> Any:
        return self._home(key)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._home(key)[key] = value

    def __delitem__(self, key: str) -> None:
        del self._home(key)[key]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._own, *(key for key in self.of if key not in _OWN)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def copy(self) -> dict[Any, Any]:
        return dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (dict(self),)


@dataclass(eq=False)
class UserGroup:
    """One of the user's param groups. values: the dictionary itself. indices: of its parameters, in order."""

    values: dict[str, Any]
    indices: list[int]
    snapshot: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.refresh()

    def _now(self) -> dict[str, Any]:
        return {key: value for key, value in self.values.items() if key not in _OWN}

    def refresh(self) -> None:
        """Take the values that the step to come is made with."""
        self.snapshot.clear()
        for key, value in self._now().items():
            self.snapshot[key] = value.clone() if isinstance(value, Tensor) else value

    def is_changed(self) -> bool:
        """Whether the user's group says something else than at the last `refresh`."""
        return any(not _same(self.snapshot.get(key), value) for key, value in self._now().items())

    def needs_moments(self) -> bool:
        """Whether amsgrad was switched since the last `refresh`."""
        return bool(self.snapshot.get("amsgrad")) != bool(self.values.get("amsgrad"))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def index_of(groups: Sequence[UserGroup]) -> dict[int, dict[str, Any]]:
    """The snapshot that holds for each parameter, by index."""
    return {index: group.snapshot for group in groups for index in group.indices}


def follow_groups(
    optimizer: Optimizer | None,
    make: Callable[[list[Any]], Optimizer],
    tensors: Mapping[int, Sequence[Tensor]],
    groups: Sequence[UserGroup],
    *,
    live: bool,
) -> Optimizer:
    """The optimizer, made if there is none, with the user's groups in the user's order over its own tensors.

    tensors: what it steps of each parameter, by index. live: its groups are views of the user's, not of their
        snapshots.
    """
    before: Any = optimizer.param_groups if optimizer is not None else []
    known: dict[int, _View] = {id(view.of): view for view in before}
    views: list[_View] = []
    for group in groups:
        mine = [tensor for index in group.indices for tensor in tensors.get(index, ())]
        if mine or not group.indices:
            home = group.values if live else group.snapshot
            view = known.get(id(home)) or _View(home)
            view["params"] = mine
            views.append(view)
    if optimizer is None:
        optimizer = make(views)
    else:
        before[:] = [view for view in views if id(view.of) in known]
        for view in views:
            if id(view.of) not in known:
                optimizer.add_param_group(view)
    for view in views:
        if type(optimizer) is SGD and view["fused"] and any(map(_is_half_on_cpu, view["params"])):
            view["fused"] = False  # up to torch 2.13 that kernel leaves the weights as they are (#191763)
    optimizer.param_groups = [*views]
    return optimizer


def _is_half_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in (torch.bfloat16, torch.float16)
