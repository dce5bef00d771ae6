"""What the parts of an optimizer have in common, each of which steps some of its parameters in its own way:
the user's param groups, and what they have to know of the other ranks.

One invariant: a parameter's state has one home, in its part. Who shows, loads or saves state asks there. A
value of a param group has one home, the user's dictionary: between two steps nothing that a group says is
kept anywhere else.

The optimizers inside step other tensors than the user's, so each needs groups of its own. These are views:
they have their own tensors and say how their class computes; every other key is read from and written to the
user's group at once. Where a worker steps while the user may already change the group, the view is of a
snapshot, taken as the step begins. Only classes that never write into a group are stepped by workers. Of a
class that is not torch's the list of groups is one object, whoever holds it (SAM's inner optimizer); groups
that such a class makes itself are its own, and the user's are views of them.

Of the other ranks: whether there are any, whose a gradient still is, and the norm of gradients that are
spread over them. Nothing here waits for another rank beyond torch's own collectives, so a rank that has
failed, or has no optimizer, blocks none. Collectives of a step (a norm over shards) run in the order of the
param groups, which is the same on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer

from offload.config import check_bytes
from offload.optim.classes import IMPLEMENTATION_KEYS
from offload.params.view import ParamView, inner_parts, laid_like, local_of, sharded_like, update_master


def several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def may_be_reduced_in_place(gradient: Tensor) -> bool:
    """Return True if a plain gradient is a view of a buffer that somebody may still reduce, as
    DistributedDataParallel with gradient_as_bucket_view does: collectives move no version counter, so a copy
    made now could not be told from the reduced one."""
    return local_of(gradient) is gradient and gradient._is_view() and several_ranks()


def is_split(parameter: Tensor) -> bool:
    """Return True if this rank has a part of the parameter only."""
    if local_of(parameter) is parameter:
        return False
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return any(not place.is_replicate() and mesh.size(at) > 1 for at, place in enumerate(placements))


def total_norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm of all gradients as one vector, 0-dim, as torch.nn.utils.get_total_norm; of half precision in
    float32. Blocks the host: never. A DTensor counts whole: its norm is reduced over its mesh, by collectives
    that every rank of the mesh must take part in; so every rank gets the same number, a nan or inf of any of
    them in it. Plain gradients count as they are here: who splits a model in other ways reduces their norms
    himself, and gives clip_grad_norm_ the `total`. Tensors of several meshes, or of both kinds, may be
    mixed."""
    norm_type = float(norm_type)
    if not gradients:
        return torch.zeros((), device=device)
    kinds: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms = [_norm_of_one_mesh(chosen, norm_type).to(device) for chosen in kinds.values()]
    joined: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return joined


def _norm_of_one_mesh(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """The operations and the order of torch.nn.utils.get_total_norm, and so its bits and its collectives."""
    norms: list[Tensor] = []
    for kind in dict.fromkeys((gradient.device, gradient.dtype) for gradient in gradients):
        chosen = [gradient for gradient in gradients if (gradient.device, gradient.dtype) == kind]
        widened = {"dtype": torch.float32} if kind[1].itemsize < 4 else {}
        norms += torch._foreach_norm(chosen, norm_type, **widened)
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    whole: Tensor = total if local_of(total) is total else total.full_tensor()
    return whole


def clip_(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients in place as torch.nn.utils.clip_grads_with_norm_: by max_norm / (norm + 1e-6), at most
    1. Blocks the host only for gradients that lie elsewhere than the norm."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    shards = [local_of(gradient).detach() for gradient in gradients]
    for device, dtype in dict.fromkeys((shard.device, shard.dtype) for shard in shards):
        chosen = [shard for shard in shards if (shard.device, shard.dtype) == (device, dtype)]
        torch._foreach_mul_(chosen, factor.to(device))


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
        """Return True if the user's group says something else than at the last `refresh`."""
        return any(not _same(self.snapshot.get(key), value) for key, value in self._now().items())

    def needs_moments(self) -> bool:
        """Return True if amsgrad was switched since the last `refresh`."""
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
    """Other side of each group: its source or its view. others: those until now. keys: a new view's own."""
    known = {id(view.of): view for view in others if isinstance(view, _View)}
    return [
        group.of if isinstance(group, _View) else known.get(id(group)) or _View(group, keys)
        for group in groups
    ]


def _is_half_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in (torch.bfloat16, torch.float16)


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
        """Note whether the parameter has the state that lies in `homes`; nothing where a class keeps it."""
        return

    def forget(self, member: ParamView) -> None:
        """The parameter has left its group. Nothing may be in flight."""
        del self.members[member.index]

    def moved(self, member: ParamView) -> None:
        """The host's copy of a weight that has a home is other memory. Nothing may be in flight."""
        return

    @abstractmethod
    def master(self, member: ParamView) -> Tensor:
        """Tensor that the optimizer steps, in the parameter's shape; the parameter itself where that is."""

    def has_master(self, member: ParamView) -> bool:
        """Return True if a float32 master is stepped in place of the parameter."""
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
