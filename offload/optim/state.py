"""State dicts of the hybrid optimizer: torch's own form, so that it goes anywhere, and what a bitwise
continuation also needs.

    {"state": {index: {"step", "exp_avg", ..., "master_param"}}, "param_groups": [...], "hybrid": {"places",
    "cpu_share", "layout", ...}}

Across ranks it is what torch.distributed.checkpoint expects: the state of a DTensor is a DTensor of the same
placements, its shard on the host. That library passes on "state" and "param_groups" alone.

One invariant: what is loaded is checked whole, names and shapes, before the first byte is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.optim.buckets import layout_to_json
from offload.optim.parameters import Managed, local_of

if TYPE_CHECKING:
    from offload.optim.hybrid import HybridDeviceOptimizer

__all__ = ["fill_state", "layouts_of", "load_resident", "load_state", "sharded_like", "state_dict_of"]

MASTER = "master_param"


def state_dict_of(optimizer: HybridDeviceOptimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """`packed`, torch's own, with what lies in host buckets copied: the next step writes there.

    All of it is on the host once some of it is: torch.distributed.checkpoint takes one device only.
    """
    some = any(optimizer.placed.is_hosted(member) for member in optimizer.placed.members)
    for member in optimizer.placed.members:
        if some and member.index in packed["state"]:
            found = packed["state"][member.index]
            packed["state"][member.index] = {
                key: _on_host(member, key, value) for key, value in found.items()
            }
    packed["hybrid"] = optimizer.placed.describe()
    return packed


def _on_host(member: Managed, key: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return deepcopy(value)
    copied = value.detach().to("cpu", copy=True)
    return copied if key == "step" else sharded_like(member.parameter, copied)


def load_state(optimizer: HybridDeviceOptimizer, given: Mapping[str, Any]) -> None:
    """See HybridDeviceOptimizer.load_state_dict."""
    loaded = dict(given)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        loaded = hook(optimizer, loaded) or loaded
    order = _matched(optimizer, loaded)
    optimizer.begin_load(has_state=any(loaded["state"].values()))
    for group, saved in zip(optimizer.param_groups, deepcopy(loaded["param_groups"]), strict=True):
        names = group.get("param_names")
        group.update({key: value for key, value in saved.items() if key != "params"})
        if names is not None and "param_names" not in saved:
            group["param_names"] = names
    with torch.no_grad():
        for key, member in order.items():
            state = dict(loaded["state"].get(key, {}))
            master = state.pop(MASTER, None)
            optimizer.placed.load(member, state, master)
    optimizer.placed.copies.refresh()
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _matched(optimizer: HybridDeviceOptimizer, loaded: Mapping[str, Any]) -> dict[Any, Managed]:
    """Saved keys and the parameters they belong to. Raises ValueError for the state dict of another model or
    class."""
    for key in ("state", "param_groups"):
        if key not in loaded:
            raise ValueError(
                f"the state dict has no {key!r}, only {', '.join(map(repr, loaded))}; give what state_dict() "
                "returned"
            )
    groups, saved = optimizer.param_groups, loaded["param_groups"]
    if len(groups) != len(saved):
        raise ValueError(
            f"the state dict has {len(saved)} param groups and the optimizer {len(groups)}; it is of another "
            "model"
        )
    for place, (group, other) in enumerate(zip(groups, saved, strict=True)):
        if len(group["params"]) != len(other["params"]):
            raise ValueError(
                f"param group {place} has {len(other['params'])} parameters in the state dict and "
                f"{len(group['params'])} in the optimizer; "
                "it is of another model"
            )
    of = {id(member.parameter): member for member in optimizer.placed.members}
    keys = chain.from_iterable(group["params"] for group in saved)
    mine = chain.from_iterable(group["params"] for group in groups)
    order = {key: of[id(parameter)] for key, parameter in zip(keys, mine, strict=True)}
    for key, member in order.items():
        for name, value in loaded["state"].get(key, {}).items():
            if (
                isinstance(value, Tensor)
                and name in optimizer.shaped_names
                and tuple(local_of(value).shape) != member.shape
            ):
                raise ValueError(
                    f"{member} has shape {member.shape}, and its {name} in the state dict "
                    f"{tuple(value.shape)}; the state dict is of "
                    "another model"
                )
        missing = [
            name
            for name in optimizer.needed_names
            if loaded["state"].get(key) and name not in loaded["state"][key]
        ]
        if missing:
            raise ValueError(
                f"{member} has no {', '.join(missing)} in the state dict; it is of another optimizer class"
            )
    return order


def load_resident(optimizer: Optimizer, inner: Tensor, state: Mapping[Any, Any]) -> None:
    """State of one parameter that is stepped in place, in its dtype and on its device, except the count where
    torch keeps that on the host.
    """
    if not state:
        optimizer.state.pop(inner, None)
        return
    group = next(
        group for group in optimizer.param_groups if any(parameter is inner for parameter in group["params"])
    )
    on_device = bool(group.get("fused") or group.get("capturable"))
    placed: dict[Any, Any] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            placed[key] = deepcopy(value)
        elif key == "step":
            placed[key] = value.detach().to(
                device=inner.device if on_device else "cpu", dtype=torch.float32, copy=True
            )
        elif value.is_floating_point():
            placed[key] = sharded_like(inner, value.detach()).to(
                dtype=inner.dtype, device=inner.device, copy=True
            )
        else:
            placed[key] = value.detach().to(device=inner.device, copy=True)
    optimizer.state[inner] = placed


def sharded_like(parameter: Tensor, value: Tensor) -> Tensor:
    """A DTensor again, where the parameter is one and the value, wherever it lies, is of its local shard's
    shape."""
    if (
        local_of(parameter) is parameter
        or local_of(value) is not value
        or value.shape != local_of(parameter).shape
    ):
        return value
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    assert isinstance(parameter, DTensor)
    meta = TensorMeta(parameter.shape, parameter.stride(), value.dtype)
    # from_local would move it to the mesh's device; FSDP2 keeps shards on the host in this way too
    return DTensor(value, replace(parameter._spec, tensor_meta=meta), requires_grad=False)


def fill_state(optimizers: list[Optimizer]) -> None:
    """What each class makes in its first step, with weights and counts as they were: a step of zero
    gradients, taken back."""
    for optimizer in optimizers:
        empty = [
            leaf
            for group in optimizer.param_groups
            for leaf in group["params"]
            if not optimizer.state.get(leaf)
        ]
        before = [
            (leaf, leaf.grad, leaf.detach().clone())
            for group in optimizer.param_groups
            for leaf in group["params"]
        ]
        decays = [group.get("weight_decay") for group in optimizer.param_groups]
        chosen = {id(leaf) for leaf in empty}
        try:
            for group in optimizer.param_groups:
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0
            for leaf, _, _ in before:
                leaf.grad = torch.zeros_like(leaf) if id(leaf) in chosen else None
            optimizer.step()
        finally:
            with torch.no_grad():
                for leaf, gradient, weights in before:
                    leaf.grad = gradient
                    leaf.data.copy_(weights)
            for group, decay in zip(optimizer.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay
        for leaf in empty:
            step = optimizer.state[leaf].get("step")
            if isinstance(step, Tensor):
                step.zero_()
            elif step is not None:
                optimizer.state[leaf]["step"] = 0


def layouts_of(*parts: Any) -> list[Any]:
    return [layout_to_json([section.layout for section in part.sections]) for part in parts]
