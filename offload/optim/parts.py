"""What the parts of an optimizer have in common, each of which steps some of its parameters in its own way.

One invariant: a parameter's state has one home, in its part. Who shows, loads or saves state asks there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.config import check_bytes
from offload.optim.groups import UserGroup
from offload.params.view import ParamView, inner_parts, laid_like, local_of, sharded_like, update_master

MASTER = "master_param"
"""Key of a float32 master in an entry of state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """How the host side is built."""

    bucket_bytes: int
    pin_grads: bool = True
    pin_params: bool = True
    masters_in_fp32: bool = False
    in_buckets: bool = True
    """What the host steps is stepped bucket by bucket, on a thread; else whole, as the class does."""
    flat: bool | None = None
    """Of one class that is not torch's, and steps all: whether the user gave parameters, not groups."""

    def __post_init__(self) -> None:
        check_bytes("bucket_bytes", self.bucket_bytes, least=1024)

    def master_dtype(self, member: ParamView) -> torch.dtype:
        half = member.dtype in (torch.bfloat16, torch.float16)
        return torch.float32 if self.masters_in_fp32 and half else member.dtype


def parts_of(tensor: Any) -> dict[str, Tensor]:
    """The tensors that a subclass has its values in, by attribute, as quantized state has; none of a plain
    tensor, or of a DTensor, which computes as one."""
    return {} if local_of(tensor) is not tensor else inner_parts(tensor)


def copied(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy of a value of state. A tensor subclass in it may have no clone(): its parts have."""
    memo = {} if memo is None else memo
    if type(value) is dict:
        return {key: copied(each, memo) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(each, memo) for each in value)
    if not isinstance(value, Tensor) or not (parts := parts_of(value)):
        return deepcopy(value, memo)
    kind, (_, context) = type(value), value.__tensor_flatten__()  # type: ignore[attr-defined]
    made = {name: copied(part, memo) for name, part in parts.items()}
    return kind.__tensor_unflatten__(made, context, value.size(), value.stride())  # type: ignore[attr-defined]


def loaded_value(key: Any, value: Any, tensor: Tensor, count_device: torch.device | str) -> Any:
    """A copy of a value of loaded state, as the optimizer of `tensor` would have made it: in the tensor's
    dtype, on its device and with its strides; a count is float32, on `count_device`."""
    if not isinstance(value, Tensor) or parts_of(value):
        return copied(value)
    if key == "step":
        return value.detach().to(device=count_device, dtype=torch.float32, copy=True)
    local = local_of(tensor)
    dtype = tensor.dtype if value.is_floating_point() else value.dtype
    made = local_of(value).detach().to(device=local.device, dtype=dtype, copy=True)
    return sharded_like(tensor, laid_like(local, made) if made.shape == local.shape else made)


def refuse_incomplete(member: ParamView, state: Mapping[Any, Any], where: str) -> None:
    """Raises ValueError where an Adam of torch would miss something; it makes nothing, or all."""
    missing = [name for name in ("step", "exp_avg", "exp_avg_sq") if name not in state]
    if missing and (len(missing) < 3 or where != "its state"):
        raise ValueError(
            f"{member} has no {', '.join(missing)} in {where}; it is of another optimizer class, and torch's "
            "Adam needs all of them"
        )


class Part(ABC):
    """Parameters that are stepped in one way, and the state of each."""

    def __init__(self, options: HostOptions) -> None:
        self.options = options
        self.members: dict[int, ParamView] = {}  # by index

    @abstractmethod
    def add(self, members: Sequence[ParamView]) -> None:
        """Take over parameters; `regroup` does the rest."""

    @abstractmethod
    def regroup(self, groups: Sequence[UserGroup]) -> None:
        """The user's param groups are these now."""

    def inside(self) -> list[tuple[Optimizer, list[tuple[ParamView, Tensor]]]]:
        """The optimizers whose classes keep the state themselves, and what each steps of which parameter."""
        return []

    def homes(self, member: ParamView) -> dict[str, list[Tensor]]:
        """Memory of state that no class keeps, by name: a count lies in several places."""
        return {}

    def kept(self, member: ParamView) -> Sequence[str]:
        """The names in `homes` of what the parameter has."""
        return ()

    def note_state(self, member: ParamView, has: bool) -> None:
        """Whether the parameter has the state that lies in `homes`; nothing where a class keeps it."""
        return

    def forget(self, member: ParamView) -> None:
        """The parameter has left its group. Nothing may be in flight."""
        del self.members[member.index]

    def moved(self, member: ParamView) -> None:
        """The host's copy of a weight that has a home is other memory. Nothing may be in flight."""
        return

    @abstractmethod
    def master(self, member: ParamView) -> Tensor:
        """What the optimizer steps, in the parameter's shape; the parameter itself where that is."""

    def has_master(self, member: ParamView) -> bool:
        """Whether a float32 master is stepped in place of the parameter."""
        return self.options.master_dtype(member) != member.dtype

    @torch.no_grad()
    def refresh_master(self, member: ParamView) -> None:
        """Make what is stepped in place of the parameter follow the device's weights. Blocks the host;
        nothing may be in flight."""
        master, weights = local_of(self.master(member)), local_of(member.parameter)
        if self.has_master(member):
            update_master(master, weights.detach().to(master.device))
        elif member.home is None and master is not weights:
            master.copy_(weights)

    @abstractmethod
    def reorder(self, member: ParamView, before: tuple[int, ...]) -> None:
        """The parameter's elements lie in another order in memory than by the strides `before`: its state
        follows. Blocks the host; nothing may be in flight."""
