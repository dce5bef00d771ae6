"""State dicts of the hybrid optimizer: torch's own form, with what a bitwise continuation also needs.

    {"state": {index: {"step", "exp_avg", ..., "master_param"}}, "param_groups": [...], "hybrid": {"places",
    "cpu_share", "layout", ...}}

Across ranks it is what torch.distributed.checkpoint expects: the state of a DTensor is a DTensor of the same
placements, its shard on the host. That library passes on "state" and "param_groups" alone.

One invariant: what is loaded is checked whole, names and shapes, before the first byte is changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.optim.classes import step_alone
from offload.optim.entries import MASTER
from offload.optim.parts import copied, parts_of, refuse_incomplete
from offload.optim.placing import Placement
from offload.params.home import home_of
from offload.params.view import ParamView, local_of, sharded_like

SHAPED = (MASTER, "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""State that has the shape of its parameter."""


def is_hooks(name: str, kind: str = "_hooks") -> bool:
    """Whether an attribute of an optimizer has hooks."""
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
    """What each class makes in its first step, with weights and counts as they were: a step of zero
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
