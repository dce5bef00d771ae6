"""`optimizer.state`, and state dicts of the hybrid optimizer.

`optimizer.state` is a plain dictionary of plain ones, as torch's; its tensors are what steps read and write.
An entry of a class that keeps its own state is that class's dictionary. An entry of torch's Adam in flat
memory holds aliases of that memory. So whatever a loop does with dictionaries it may do here. Before a step,
if anybody has looked since the last one, what is not in its place is copied there. An alias that is in no
entry any more keeps its values for whoever holds it.

State dicts have torch's own form, with what a bitwise continuation also needs.

    {"state": {index: {"step", "exp_avg", ..., "master_param"}}, "param_groups": [...], "hybrid": {"places",
    "cpu_share", "layout", ...}}

Across ranks it is what torch.distributed.checkpoint expects: the state of a DTensor is a DTensor of the same
placements, its shard on the host. That library passes on "state" and "param_groups" alone.

One invariant: between two steps the dictionary alone says what state there is; memory follows it. What is
loaded is checked whole, names and shapes, before the first byte is changed.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.optim.classes import step_alone
from offload.optim.parts import MASTER, Part, copied, loaded_value, parts_of, refuse_incomplete
from offload.optim.placing import Placement
from offload.params.view import ParamView, local_of, sharded_like
from offload.params.watched import home_of


def _references(values: Iterable[Any]) -> Iterator[int]:
    return (sys.getrefcount(value) for value in values)


_ALONE = next(_references([object()]))
"""References of what one container has, as `_references` counts them."""


def _is_in(value: Any, place: Tensor) -> bool:
    """Return True if the value is the memory of `place`."""
    return isinstance(value, Tensor) and value.dtype == place.dtype and local_of(value).is_set_to(place)


class Placed(Protocol):
    """The parameters in the groups, and the parts that have their state; see Placement."""

    members: list[ParamView]

    @property
    def sole(self) -> Optimizer | None: ...

    def part_of(self, member: ParamView) -> Part: ...

    def inside(self) -> list[tuple[Optimizer, list[tuple[ParamView, Tensor]]]]: ...


class UserState:
    """The dictionary, and how memory follows it. Nothing may be in flight in any call but `note_step`.

    with_masters: entries show masters.

    | field | what | written by |
    |---|---|---|
    | all | the dictionary itself | anybody |
    | is_looked_at | whether somebody may have written into it since the last step | `look`, `take_over` |
    | is_held | whether somebody has it, an entry or a tensor of one in the step under way | `take_over` |
    | _is_shown | whether all that steps have made is in it | `note_step`, `show` |
    | _lent | aliases of flat memory and of masters, by index of the parameter and key | `_lend` |
    | _seen | entries of classes as they were when a step began or ended, by index | `_see` |
    """

    def __init__(self, placed: Placed, *, with_masters: bool) -> None:
        self.all: MutableMapping[Any, Any] = defaultdict(dict)
        self.is_looked_at = False
        self.is_held = False
        self._placed = placed
        self._with_masters = with_masters
        self._is_shown = True
        self._lent: dict[int, dict[Any, Tensor]] = {}
        self._seen: dict[int, dict[Any, Any]] = {}

    def note_step(self) -> None:
        """A step or a change of groups may make state that is not in the dictionary yet."""
        self._is_shown = False

    def look(self) -> MutableMapping[Any, Any]:
        """The dictionary, for somebody who may write into it."""
        self.show()
        self.is_looked_at = True
        return self.all

    def replace(self, value: MutableMapping[Any, Any]) -> None:
        """`optimizer.state = value`."""
        self.look()
        self.all = value

    def forget(self) -> None:
        """A class that steps all has loaded its state."""
        self.all = defaultdict(dict)
        self.is_looked_at, self._is_shown = True, False

    def load(self, entries: Mapping[ParamView, Mapping[Any, Any]], others: Mapping[Any, Any]) -> None:
        """Replace all state by copies of these entries, and of what is of no parameter."""
        inside = {member.index: tensor for _, tensors in self._placed.inside() for member, tensor in tensors}
        inner = [group for optimizer, _ in self._placed.inside() for group in optimizer.param_groups]
        group_of = {id(tensor): group for group in inner for tensor in group["params"]}
        self.all, self._is_shown, self.is_looked_at = defaultdict(dict, others), True, True
        for member, entry in entries.items():
            homes, tensor = self._homes(member), inside.get(member.index, member.parameter)
            group = group_of.get(id(tensor), {})  # its kernel may be another than the user's group names
            counts = tensor.device if group.get("fused") or group.get("capturable") else "cpu"
            self.all[member.parameter] = {
                key: value if key in homes else loaded_value(key, value, tensor, counts)
                for key, value in entry.items()
                if key != MASTER or self._shows_master(member)
            }
        self.take_over()

    def _shows_master(self, member: ParamView) -> bool:
        """Not of a weight that comes and goes and is its own master: no tensor is its memory."""
        own = member.home is not None and not self._placed.part_of(member).has_master(member)
        return self._with_masters and not own

    def _homes(self, member: ParamView) -> dict[Any, list[Tensor]]:
        """Where an entry's values lie that are not in memory of the class's own, by key."""
        part = self._placed.part_of(member)
        found: dict[Any, list[Tensor]] = part.homes(member)
        if self._shows_master(member):
            found = found | {MASTER: [local_of(part.master(member)).detach()]}
        return found

    # -- showing ---------------------------------------------------------------------------------------------
    def show(self) -> None:
        """Have in the dictionary what steps have made."""
        if self._is_shown:
            return
        made: dict[int, Any] = {}
        for optimizer, tensors in self._placed.inside():
            indices = {id(tensor): member.index for member, tensor in tensors}
            for key, entry in optimizer.state.items():
                if id(key) in indices:
                    made[indices[id(key)]] = entry
                else:
                    self.all[key] = entry
        self._fill(made)
        self._is_shown = True

    def _fill(self, made: Mapping[int, Any]) -> None:
        """Have in the dictionary, in the parameters' order, what classes have made and what is in memory."""
        for member in self._placed.members:
            kept = self._placed.part_of(member).kept(member)
            entry: Any = self.all.get(member.parameter)
            if member.index in made or (kept and entry is None):
                entry = self.all[member.parameter] = made.get(member.index, {})
            names = (*kept, *([MASTER] if self._shows_master(member) else [])) if entry or kept else ()
            if missing := [name for name in names if name not in entry]:
                homes = self._homes(member)
                for name in missing:
                    self._lend(member, entry, name, homes[name][0])
        self._see()

    def _lend(self, member: ParamView, entry: Any, key: Any, place: Tensor) -> None:
        alias = sharded_like(member.parameter.detach(), place.detach()) if key != "step" else place.detach()
        entry[key] = self._lent.setdefault(member.index, {})[key] = alias

    def _see(self) -> None:
        for _, tensors in self._placed.inside():
            for member, _ in tensors:
                entry = self.all.get(member.parameter)
                self._seen[member.index] = dict(entry) if isinstance(entry, dict) else {}

    # -- taking over -----------------------------------------------------------------------------------------
    @torch.no_grad()
    def take_over(self) -> None:
        """Adopt what was written since the last step. Raises ValueError if no step can be taken with it."""
        self.show()
        changed = self._changed()
        aliases = [alias for lent in self._lent.values() for alias in lent.values()] if changed else []
        memory = {local_of(alias).untyped_storage().data_ptr() for alias in aliases}
        values = [local_of(value) if isinstance(value, Tensor) else value for *_, value in changed]
        for at, value in enumerate(values):  # what a value refers to may be written first
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in memory:
                values[at] = value.clone()
        for member, _, key, places, _ in changed:
            if _is_in(self._lent.get(member.index, {}).get(key), places[0]):
                self._keep_values(member, key)
        for (member, entry, key, places, _), value in zip(changed, values, strict=True):
            for place in places:
                if isinstance(value, Tensor):
                    place.copy_(value)
                else:
                    place.fill_(value or 0)
            if key in entry:
                self._lend(member, entry, key, places[0])
            else:
                del self._lent[member.index][key]
        for member in self._placed.members:
            self._placed.part_of(member).note_state(member, "step" in (self.all.get(member.parameter) or ()))
        self._hand_on()
        self._fill({})
        del changed, values
        self.is_looked_at = self.is_held = self._has_holders()

    def _changed(self) -> list[tuple[ParamView, Any, Any, list[Tensor], Any]]:
        """Values that are not in their places: of which parameter, in which entry, under which key, to be
        written where."""
        found: list[tuple[ParamView, Any, Any, list[Tensor], Any]] = []
        for member in self._placed.members:
            part, entry = self._placed.part_of(member), self.all.get(member.parameter) or {}
            lent, homes = self._lent.get(member.index, {}), self._homes(member)
            if homes.keys() - {MASTER}:
                refuse_incomplete(member, entry, "its state")
            for key, places in homes.items():
                value = entry.get(key)
                if _is_in(value, places[0]):
                    for place in places[1:]:  # counts of one parameter's pieces
                        place.copy_(places[0])
                elif key in entry or (key in lent and key != MASTER):
                    if key == MASTER and not part.has_master(member):
                        value = places[0]
                    found.append((member, entry, key, places, value))
        return found

    def _keep_values(self, member: ParamView, key: Any) -> None:
        """Whoever holds this alias keeps its values: its memory is about to have others."""
        alias = self._lent[member.index][key]
        if next(_references([alias])) > _ALONE + 2:
            local_of(alias).set_(local_of(alias).clone())  # type: ignore[call-overload]

    def _hand_on(self) -> None:
        """Give each class the entries of its parameters; one that steps all of them gets the others, too."""
        for optimizer, tensors in self._placed.inside():
            inside = {id(member.parameter): (member, tensor) for member, tensor in tensors}
            given: dict[Any, Any] = {}
            for key, entry in self.all.items():
                if (found := inside.get(id(key))) is not None:
                    self._convert(*found, entry, is_own=optimizer.state.get(found[1]) is entry)
                    given[found[1]] = entry
                elif optimizer is self._placed.sole:
                    given[key] = entry
            optimizer.state.clear()
            optimizer.state.update(given)

    def _convert(self, member: ParamView, tensor: Tensor, entry: Any, *, is_own: bool) -> None:
        """Values as the class can step `tensor` with: on the host where that is, and with its strides. What
        was added to the class's own entry under a new key stays as it is."""
        seen = self._seen.get(member.index, {})
        for key, value in entry.items() if isinstance(entry, dict) else ():
            if not isinstance(value, Tensor) or value is seen.get(key) or (is_own and key not in seen):
                continue
            away = tensor.device.type == "cpu" and value.device != tensor.device
            lies = value.shape != tensor.shape or local_of(value).stride() == local_of(tensor).stride()
            if away or not lies:
                entry[key] = loaded_value(key, value, tensor, "cpu" if away else value.device)

    def _has_holders(self) -> bool:
        """Predicate: anybody but this object and the classes has the dictionary, an entry or its tensor."""
        entries = [entry for entry in self.all.values() if isinstance(entry, dict)]
        inside = [entry for optimizer, _ in self._placed.inside() for entry in optimizer.state.values()]
        kept = [*entries, *self._lent.values(), *self._seen.values()]
        tensors = [value for entry in kept for value in entry.values() if isinstance(value, Tensor)]
        known = Counter(map(id, [self.all, *entries, *inside, *tensors]))
        objects = list({id(each): each for each in [self.all, *entries, *tensors]}.values())
        del entries, inside, kept, tensors
        counts = _references(objects)
        return any(count > _ALONE + known[key] for key, count in zip(map(id, objects), counts, strict=True))

    # -- parameters ------------------------------------------------------------------------------------------
    def joined(self) -> None:
        """The groups have changed: new parameters may have state, the user's or the class's own, and
        memory may be new."""
        for optimizer, tensors in self._placed.inside():
            for member, tensor in tensors:
                if member.index not in self._seen and tensor in optimizer.state:
                    self.all.setdefault(member.parameter, optimizer.state[tensor])
        self.is_looked_at |= bool(self.all)

    def reordered(self, member: ParamView) -> None:
        """The parameter's memory lies in another order; whoever holds an alias sees that."""
        homes = self._homes(member)
        for key, alias in self._lent.get(member.index, {}).items():
            local_of(alias).set_(homes[key][0])  # type: ignore[call-overload]

    @torch.no_grad()
    def left(self, member: ParamView) -> None:
        """The parameter is in no group any more: its entry, which stays, has memory of its own."""
        for key in self._lent.get(member.index, {}):
            self._keep_values(member, key)
        self._lent.pop(member.index, None)


SHAPED = (MASTER, "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""State that has the shape of its parameter."""


def is_hooks(name: str, kind: str = "_hooks") -> bool:
    """Return True if an attribute of an optimizer has hooks."""
    return name.startswith("_optimizer_") and name.endswith(kind)


@contextmanager
def without_hooks(optimizer: Optimizer, kind: str = "_hooks") -> Iterator[None]:
    """The user's hooks are for state dicts that the user asks for."""
    own = vars(optimizer)
    hooks = {name: value for name, value in own.items() if is_hooks(name, kind)}
    own.update((name, OrderedDict()) for name in hooks)
    try:
        yield
    finally:
        own.update(hooks)


def copy_to_host(placed: Placement, groups: Sequence[Mapping[str, Any]], state: dict[Any, Any]) -> None:
    """Replace the entries of a state dict by copies on the host, as the next step writes the originals; none
    if nothing is offloaded."""
    if any(placed.is_offloaded(member) for member in placed.members):
        for key, parameter in enumerate(p for group in groups for p in group["params"]):
            if key in state:
                state[key] = {name: _copy(parameter, name, value) for name, value in state[key].items()}


def _copy(parameter: Tensor, key: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return copied(value)
    local = local_of(value).detach()
    # never by deepcopy, which takes all of the flat memory that an alias lies in
    made = copied(local).to("cpu") if parts_of(local) else local.to("cpu", copy=True)
    return made if key == "step" else sharded_like(parameter, made)


def paired(groups: Sequence[Mapping[str, Any]], loaded: Mapping[str, Any]) -> list[tuple[Any, Tensor]]:
    """Saved keys and the parameters they belong to. Raises ValueError for the state dict of another model."""
    for key in ("state", "param_groups"):
        if key not in loaded:
            raise ValueError(
                f"the state dict has no {key!r}, only {', '.join(map(repr, loaded))}; give what state_dict() "
                "returned"
            )
    saved = loaded["param_groups"]
    if len(groups) != len(saved):
        raise ValueError(
            f"the state dict has {len(saved)} param groups and the optimizer {len(groups)}; it is of another "
            "model"
        )
    for place, (group, other) in enumerate(zip(groups, saved, strict=True)):
        if len(group["params"]) != len(other["params"]):
            raise ValueError(
                f"param group {place} has {len(other['params'])} parameters in the state dict and "
                f"{len(group['params'])} in the optimizer; it is of another model"
            )
    keys = chain.from_iterable(group["params"] for group in saved)
    mine = chain.from_iterable(group["params"] for group in groups)
    return list(zip(keys, mine, strict=True))


def matched(
    placed: Placement, pairs: Sequence[tuple[Any, Tensor]], loaded: Mapping[str, Any]
) -> dict[Any, ParamView]:
    """Saved keys and parameters, but of those that are frozen. Raises ValueError for the state dict of
    another model or class."""
    order = {key: placed.of[id(parameter)] for key, parameter in pairs if id(parameter) in placed.of}
    for key, member in order.items():
        state = loaded["state"].get(key, {})
        for name, value in state.items() if placed.sole is None else ():  # else the class knows its shapes
            if isinstance(value, Tensor) and name in SHAPED and tuple(local_of(value).shape) != member.shape:
                raise ValueError(
                    f"{member} has shape {member.shape}, and its {name} in the state dict "
                    f"{tuple(value.shape)}; the state dict is of another model"
                )
        if state and not placed.cpu.whole:
            refuse_incomplete(member, state, "the state dict")
    return order


def with_class_rules(
    classes: Sequence[type[Optimizer]],
    groups: list[dict[str, Any]],
    state: dict[Tensor, dict[Any, Any]],
    defaults: Mapping[str, Any],
) -> None:
    """Change loaded groups and state, in place, as each class does in its `__setstate__`: AdamW decouples the
    weight decay, counts that are numbers become tensors, keys that older versions had not get their
    defaults."""
    for cls in dict.fromkeys(classes):
        loader = cls.__new__(cls)
        loader.__setstate__({"state": state, "param_groups": groups, "defaults": dict(defaults)})
    for group in groups:
        for key, value in defaults.items():
            group.setdefault(key, value)


def fill_state(optimizers: list[Optimizer]) -> None:
    """Make what each class makes in its first step, with weights and counts as they were: a step of zero
    gradients, taken back. Clones of streamed weights are stepped, since a write to these makes old what
    others read of them."""
    for optimizer in optimizers:
        groups, state = optimizer.param_groups, optimizer.state
        values = [dict(group) for group in groups]
        leaves = [leaf for group in groups for leaf in group["params"]]
        stepped = {leaf: leaf if home_of(leaf) is None else leaf.detach().clone() for leaf in leaves}
        before = [(leaf, leaf.grad, leaf.detach().clone()) for leaf in leaves if stepped[leaf] is leaf]
        empty = {leaf: one for leaf, one in stepped.items() if not state.get(leaf)}
        try:
            for group in groups:
                group["params"] = [stepped[leaf] for leaf in group["params"]]
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0
            for one in stepped.values():
                one.grad = None
            for one in empty.values():
                one.grad = torch.zeros_like(one)
            step_alone(optimizer)
        finally:
            for leaf, gradient, weights in before:
                leaf.grad = gradient
                leaf.data.copy_(weights)
            for group, said in zip(groups, values, strict=True):
                group.update(said)
            made = {leaf: state.pop(one) for leaf, one in empty.items() if one in state}
        for entry in made.values():
            if "step" in entry:
                entry["step"] *= 0
        state.update(made)
