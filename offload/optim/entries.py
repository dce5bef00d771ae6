"""`optimizer.state` as torch's users know it: live at any time between steps.

An entry is a view of the one home of a parameter's state: flat host memory, or the dictionary of the class
that steps it. It is the same object at every look until it is replaced or deleted, true however long it is
held, and what is written into it counts at once. An entry or a tensor of it that is replaced or deleted keeps
its values for whoever holds it. A look waits for the step under way. Tensors that are handed out are aliases,
so that it can be told whether somebody still holds one: while somebody does, `step()` ends when state is on
the host.

One invariant: there is no second copy of state to be compared with the first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from offload.optim.groups import Live
from offload.optim.parts import MASTER, Part
from offload.optim.placing import Placement
from offload.optim.resident import ResidentPart
from offload.params.view import ParamView

__all__ = ["MASTER", "Entry", "State"]


class _Home(Live):
    def pop(self, key: Any, *default: Any) -> Any:
        """A copy of what is taken out, whose memory is zero or another's after this."""
        if default and key not in self:
            return default[0]
        value = deepcopy(self[key])
        del self[key]
        return value


class Entry(_Home):
    """State of one parameter, until it is replaced or deleted: from then on the dictionary of what it had,
    for whoever holds it. Made of a mapping, as by who rebuilds what he was given, a plain dictionary."""

    def __new__(cls, *given: Any) -> Any:
        return super().__new__(cls) if len(given) == 2 else dict(*given)

    def __init__(self, state: State, member: ParamView) -> None:
        self.member = member
        self._state = state
        self._lent: weakref.WeakValueDictionary[Any, Tensor] = weakref.WeakValueDictionary()
        self._own: dict[Any, Any] | None = None  # once it is replaced

    @property
    def is_held(self) -> bool:
        """Whether somebody has one of its tensors."""
        return bool(self._lent)

    def _part(self) -> Part:
        """Where the state is, once nothing is in flight."""
        return self._state.looked_at(self)

    def replaced(self) -> None:
        """The parameter is about to have other state, or none. Nothing may be in flight."""
        own = dict(self)
        for key in own:
            self._unlend(key)
        if self._state.with_masters and MASTER in own:
            own[MASTER] = own[MASTER].clone()
        self._own = own

    @torch.no_grad()
    def _unlend(self, key: Any) -> None:
        """Whoever holds this tensor keeps its values: its memory is about to have others'."""
        if (alias := self._lent.pop(key, None)) is not None:
            alias.set_(alias.clone())  # type: ignore[call-overload]

    def __getitem__(self, key: Any) -> Any:
        if self._own is not None:
            return self._own[key]
        home = self._part().state_of(self.member)
        if key == MASTER and self._state.with_masters and home:
            return self._state.placed.master_of(self.member)
        value = home[key]
        if not isinstance(value, Tensor):
            return value
        if (alias := self._lent.get(key)) is None or alias.data_ptr() != value.data_ptr():
            alias = self._lent[key] = value.detach()
        return alias

    @torch.no_grad()
    def __setitem__(self, key: Any, value: Any) -> None:
        if self._own is not None:
            self._own[key] = value
            return
        part = self._part()
        if value is not self._lent.get(key):
            self._unlend(key)
        if key == MASTER and self._state.with_masters:
            self._state.placed.load_master(self.member, value)
        else:
            part.put(self.member, key, value)

    def __delitem__(self, key: Any) -> None:
        if self._own is not None:
            del self._own[key]
            return
        part = self._part()
        self._unlend(key)
        state = part.state_of(self.member)
        del state[key]
        if not state:
            part.set_state(self.member, {})

    def __iter__(self) -> Iterator[Any]:
        if self._own is not None:
            return iter(self._own)
        home = self._part().state_of(self.member)
        return iter([*home, *([MASTER] if home and self._state.with_masters else [])])

    def __len__(self) -> int:
        return sum(1 for _ in self)


class State(_Home):
    """Entries by parameter, and what a class or its user keeps under other keys.

    ready: waits for the step under way and takes over changed groups. rest: only waits. with_masters: entries
        show masters as "master_param".
    """

    def __init__(
        self, placed: Placement, ready: Callable[[], None], rest: Callable[[], None], *, with_masters: bool
    ) -> None:
        self.placed = placed
        self.with_masters = with_masters
        self._ready = ready
        self._rest = rest
        self._entries: dict[int, Entry] = {}
        self._read: dict[int, Entry] = {}  # looked at since the last step, or held

    def looked_at(self, entry: Entry) -> Part:
        self._rest()
        if entry.member.index not in self.placed.places:
            raise KeyError("the parameter has left the optimizer; look at `state` again")
        self._read[entry.member.index] = entry
        return self.placed.part_of(entry.member)

    def take_writes(self) -> None:
        """What was written since the last step counts. Nothing may be in flight. Raises ValueError."""
        for index, entry in list(self._read.items()):
            if index in self.placed.places:
                self.placed.part_of(entry.member).take_writes(entry.member)
            if not entry.is_held:
                del self._read[index]

    @property
    def is_read(self) -> bool:
        """Whether somebody looked since the last step, or holds a tensor of it."""
        return bool(self._read)

    def _member(self, key: Any) -> ParamView | None:
        """None for keys that are no parameter in a group: what they have is kept for whoever put it there."""
        self._rest()
        if isinstance(key, Tensor) and id(key) not in self.placed.of:
            self._ready()
        return self.placed.of.get(id(key))

    def __getitem__(self, key: Any) -> Any:
        if (member := self._member(key)) is None:
            return self.placed.named[key]
        part = self.placed.part_of(member)
        if isinstance(part, ResidentPart) and not self.with_masters:
            return part.made_state_of(member)
        if member.index not in self._entries:
            self._entries[member.index] = Entry(self, member)
        return self._entries[member.index]

    @torch.no_grad()
    def __setitem__(self, key: Any, value: Any) -> None:
        if (member := self._member(key)) is None:
            self.placed.named[key] = value
            return
        state = dict(value)
        self._replace(member)
        self.placed.load(member, state, state.pop(MASTER, None) if self.with_masters else None)
        if not isinstance(self.placed.part_of(member), ResidentPart):
            self.looked_at(self[key])  # it may be incomplete

    def __delitem__(self, key: Any) -> None:
        if (member := self._member(key)) is None:
            del self.placed.named[key]
            return
        if key not in self:
            raise KeyError(key)
        self._replace(member)
        self.placed.part_of(member).set_state(member, {})
        if member.index not in self.placed.groups:
            self.placed.has_left = True
            self._ready()

    def __contains__(self, key: object) -> bool:
        self._rest()
        if not isinstance(key, Tensor):
            return key in self.placed.named
        if (member := self.placed.of.get(id(key))) is None:
            return key in self.placed.named
        return bool(self.placed.part_of(member).state_of(member))

    def clear(self) -> None:
        for key in list(self):
            del self[key]

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401  (a look creates nothing)

    def __iter__(self) -> Iterator[Any]:
        members = [member.parameter for member in self.placed.members if member.parameter in self]
        return iter([*members, *(key for key in self.placed.named if not isinstance(key, Tensor))])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _replace(self, member: ParamView) -> None:
        """Whoever holds the parameter's entry keeps what it has now; the next look is at another."""
        self._read.pop(member.index, None)
        if (entry := self._entries.pop(member.index, None)) is not None:
            entry.replaced()

    def replace(self, value: Mapping[Any, Any]) -> None:
        """`optimizer.state = value`."""
        given = {key: dict(entry) if isinstance(key, Tensor) else entry for key, entry in value.items()}
        self.clear()
        self.update(given)

    def let_go(self) -> None:
        """Forget the entries of parameters that the optimizer has let go."""
        for index in self._entries.keys() - self.placed.places.keys():
            del self._entries[index]
