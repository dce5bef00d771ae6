"""Param groups: a value of a group has one home, the user's dictionary.

The optimizers inside step other tensors than the user's, so each needs groups of its own. These are views:
they have their own tensors and say how their class computes; every other key is read from and written to the
user's group at once. Where a worker steps while the user may already change the group, the view is of a
snapshot, taken as the step begins. Only classes that never write into a group are stepped by workers. Of a
class that is not torch's the list of groups is one object, whoever holds it (SAM's inner optimizer); groups
that such a class makes itself are its own, and the user's are views of them.

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

_OWN = IMPLEMENTATION_KEYS | {"params", "param_names"}
_TENSORS = frozenset({"params"})


if TYPE_CHECKING:
    _Base = dict[Any, Any]
else:

    class _Base(MutableMapping, dict):
        """All methods of a mapping go through the five that its class defines."""


class _View(_Base):
    """Param group with the values of another one, a `dict` to all. of: the user's group, its snapshot, or one
    that a class made itself. keys: what is the view's own."""

    def __init__(self, of: dict[str, Any], keys: frozenset[str] = _OWN) -> None:
        self.of = of
        self._keys = keys
        self._own: dict[str, Any] = {}

    def _home(self, key: str) -> dict[str, Any]:
        return self._own if key in self._keys else self.of

    def __getitem__(self, key: str) -> Any:
        return self._home(key)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._home(key)[key] = value

    def __delitem__(self, key: str) -> None:
        del self._home(key)[key]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._own, *(key for key in self.of if key not in self._keys)])

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


def follow_groups(
    optimizer: Optimizer | None,
    make: Callable[[list[Any]], Optimizer],
    tensors: Mapping[int, Sequence[Tensor]],
    groups: Sequence[UserGroup],
    *,
    live: bool,
    whole: bool = False,
) -> Optimizer:
    """The optimizer, made if there is none, with the user's groups in the user's order over its own tensors.

    tensors: what it steps of each parameter, by index. live: its groups are views of the user's, not of their
        snapshots. whole: the class is not torch's, and steps all: groups that it makes stay its own, and
        views share all but their tensors.
    """
    before: Any = optimizer.param_groups if optimizer is not None else []
    chosen = [each for each in groups if not each.indices or any(map(tensors.get, each.indices))]
    homes = [group.values if live else group.snapshot for group in chosen]
    views = _other_sides(homes, before, _TENSORS if whole else _OWN)
    for view, group in zip(views, chosen, strict=True):
        mine = [tensor for index in group.indices for tensor in tensors.get(index, ())]
        view.setdefault("params", [])[:] = mine
    if optimizer is None:
        optimizer = make(views)
    else:
        old = set(map(id, before))
        before[:] = [view for view in views if id(view) in old]
        for view in views:
            if id(view) not in old:
                optimizer.add_param_group(view)
    for view in views:
        if type(optimizer) is SGD and view["fused"] and any(map(_is_half_on_cpu, view["params"])):
            view["fused"] = False  # up to torch 2.13 that kernel leaves the weights as they are (#191763)
    if not whole or {*map(id, views)} == {*map(id, getattr(optimizer, "param_groups", ()))}:
        optimizer.param_groups[:] = views
    return optimizer


def adopted_groups(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]], parameters: Mapping[int, Tensor]
) -> list[dict[str, Any]]:
    """The user's groups, as a class that steps all has them: a group that it made itself gets a view.

    groups: the user's until now. parameters: the user's, by id of the tensor that is stepped. Raises
        ValueError where the class has other tensors, or no groups.
    """
    mine = getattr(optimizer, "param_groups", [{"params": [None]}])
    if not parameters.keys() >= {id(tensor) for inner in mine for tensor in inner["params"]}:
        raise ValueError(
            f"{type(optimizer).__name__} has no param_groups, or steps tensors that it was not given, as an "
            "optimizer among its arguments does; use offload_fraction=0"
        )
    found = _other_sides(mine, groups, _TENSORS)
    for group, inner in zip(found, mine, strict=True):
        if isinstance(group, _View):
            group.setdefault("params", [])[:] = [parameters[id(tensor)] for tensor in inner["params"]]
    return found


def _other_sides(groups: Sequence[Any], others: Sequence[Any], keys: frozenset[str]) -> list[Any]:
    """Of each group what it is a view of, or its view. others: those until now. keys: a new view's own."""
    known = {id(view.of): view for view in others if isinstance(view, _View)}
    return [
        group.of if isinstance(group, _View) else known.get(id(group)) or _View(group, keys)
        for group in groups
    ]


def _is_half_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in (torch.bfloat16, torch.float16)
