"""State of the hybrid optimizer as torch's users know it: `state`, which may be written, and state dicts in
torch's own form, with what a bitwise continuation also needs.

    {"state": {index: {"step", "exp_avg", ..., "master_param"}}, "param_groups": [...], "hybrid": {"places",
    "cpu_share", "layout", ...}}

Across ranks it is what torch.distributed.checkpoint expects: the state of a DTensor is a DTensor of the same
placements, its shard on the host. That library passes on "state" and "param_groups" alone.

One invariant: what is loaded is checked whole, names and shapes, before the first byte is changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.errors import OffloadError
from offload.optim.parts import HostPart
from offload.optim.placing import Placement
from offload.params.view import ParamView, local_of, sharded_like

__all__ = ["MASTER", "ShownState", "copy_to_host", "fill_state", "matched", "with_class_rules"]

MASTER = "master_param"
SHAPED = (MASTER, "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""State that has the shape of its parameter."""


class ShownState:
    """What `optimizer.state` returns: one dictionary, the same at every look, whose tensors are the real ones
    or views of them. So a write into a tensor counts at once; entries that were replaced, added or taken out
    since the last look count from the next `take_writes` on.

    with_masters: show them as "master_param". having: indices of the parameters that have state.
    """

    def __init__(self, *, with_masters: bool) -> None:
        self._with_masters = with_masters
        self.having: set[int] = set()
        self.shown: defaultdict[Tensor, Any] = defaultdict(dict)
        self._as_read: dict[Tensor, dict[Any, Any]] = {}  # at the last look
        self._looked = False  # since the last `take_writes`: counts may have been written

    def look(self, placed: Placement) -> defaultdict[Tensor, Any]:
        """Blocks the host; nothing may be in flight, and nothing written."""
        self.shown.clear()
        for member in placed.members:
            found = dict(placed.part_of(member).state_of(member)) if member.index in self.having else {}
            if found and self._with_masters:
                found[MASTER] = placed.master_of(member)
            if found:
                self.shown[member.parameter] = found
        self._note()
        self._looked = True
        return self.shown

    def _note(self) -> None:
        self._as_read = {parameter: dict(entry) for parameter, entry in self.shown.items()}
        self._looked = False

    def replace(self, value: Mapping[Tensor, Any]) -> None:
        """`optimizer.state = value`, after a look."""
        self.shown = value if isinstance(value, defaultdict) else defaultdict(dict, value)

    def is_written(self) -> bool:
        """Whether somebody put other values into the dictionary, or looked, and may have written a count."""
        shown = {parameter: entry for parameter, entry in self.shown.items() if entry}
        return (
            self._looked
            or shown.keys() != self._as_read.keys()
            or any(_differs(entry, self._as_read[parameter]) for parameter, entry in shown.items())
        )

    def take_writes(self, placed: Placement) -> None:
        """Make what was written count. Nothing may be in flight. Raises OffloadError for tensors in no
        group."""
        shown = {parameter: entry for parameter, entry in self.shown.items() if entry}
        foreign = [parameter for parameter in shown if id(parameter) not in placed.of]
        if foreign:
            raise OffloadError(
                f"state has entries of {len(foreign):,} tensors, the first of shape "
                f"{tuple(foreign[0].shape)}, in no param group"
            )
        for member in placed.members:
            entry, before = shown.get(member.parameter), self._as_read.get(member.parameter)
            if entry is None and before is not None:
                placed.load(member, {}, None)
                self.having.discard(member.index)
            elif entry is not None:
                if before is None or _differs(entry, before):
                    state = {key: value for key, value in entry.items() if key != MASTER}
                    if placed.is_offloaded(member):
                        _refuse_incomplete(placed, member, state, "its state")
                    given = entry.get(MASTER)
                    placed.load(member, state, given if before and given is not before.get(MASTER) else None)
                elif isinstance(part := placed.part_of(member), HostPart):
                    part.copy_step_count(member)
                self.having.add(member.index)
        self._note()

    def forget(self) -> None:
        """State was loaded: what was shown is of before."""
        self.shown.clear()
        self._note()


def _differs(entry: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    return entry.keys() != before.keys() or any(value is not before[key] for key, value in entry.items())


def _refuse_incomplete(placed: Placement, member: ParamView, state: Mapping[Any, Any], where: str) -> None:
    missing = [name for name in ("step", "exp_avg", "exp_avg_sq") if name not in state]
    if missing and not placed.cpu.whole:
        raise ValueError(
            f"{member} has no {', '.join(missing)} in {where}; it is of another optimizer class, and torch's "
            "Adam needs all of them"
        )


def copy_to_host(placed: Placement, groups: Sequence[Mapping[str, Any]], state: dict[Any, Any]) -> None:
    """Replace the entries of a state dict by copies on the host, as the next step writes the originals; none
    if nothing is offloaded."""
    order = (p for group in groups for p in group["params"])
    offloaded = any(placed.is_offloaded(member) for member in placed.members)
    for key, parameter in enumerate(order):
        if offloaded and key in state:
            member = placed.of[id(parameter)]
            state[key] = {name: _copy(member, name, value) for name, value in state[key].items()}


def _copy(member: ParamView, key: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return deepcopy(value)
    copied = value.detach().to("cpu", copy=True)
    return copied if key == "step" else sharded_like(member.parameter, copied)


def matched(
    placed: Placement, groups: Sequence[Mapping[str, Any]], loaded: Mapping[str, Any]
) -> dict[Any, ParamView]:
    """Saved keys and the parameters they belong to. Raises ValueError for the state dict of another model or
    class."""
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
    order = {key: placed.of[id(parameter)] for key, parameter in zip(keys, mine, strict=True)}
    for key, member in order.items():
        state = loaded["state"].get(key, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and name in SHAPED and tuple(local_of(value).shape) != member.shape:
                raise ValueError(
                    f"{member} has shape {member.shape}, and its {name} in the state dict "
                    f"{tuple(value.shape)}; the state dict is of another model"
                )
        if state:
            _refuse_incomplete(placed, member, state, "the state dict")
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
    """What each class makes in its first step, with weights and counts as they were: a step of zero
    gradients, taken back."""
    for optimizer in optimizers:
        groups = optimizer.param_groups
        before = [(leaf, leaf.grad, leaf.detach().clone()) for group in groups for leaf in group["params"]]
        decays = [(group, group["weight_decay"]) for group in groups if "weight_decay" in group]
        empty = [leaf for leaf, _, _ in before if not optimizer.state.get(leaf)]
        try:
            for group, _ in decays:
                group["weight_decay"] = 0.0
            for leaf, _, _ in before:
                leaf.grad = None
            for leaf in empty:
                leaf.grad = torch.zeros_like(leaf)
            optimizer.step()
        finally:
            for leaf, gradient, weights in before:
                leaf.grad = gradient
                leaf.data.copy_(weights)
            for group, decay in decays:
                group["weight_decay"] = decay
        for leaf in empty:
            if "step" in (state := optimizer.state[leaf]):
                state["step"] *= 0
