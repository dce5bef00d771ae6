"""What the parts of an optimizer have in common, each of which steps some of its parameters in its own way:
the user's param groups, and for parameters whose state is on the host, buckets of flat memory.

One invariant: all host memory, all slots of the ring and every sub-optimizer exist before a step begins; a
step only fills and moves them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.config import check_bytes
from offload.device import Event
from offload.engine import OffloadEngine
from offload.ids import Owner
from offload.optim.classes import IMPLEMENTATION_KEYS, state_names
from offload.params.layout import Bucket, Piece, lay_out
from offload.params.sections import FlatSpec, HostSection, check_budget
from offload.params.view import ParamView, laid_like, local_of, sharded_like, update_master
from offload.transfer.copier import OwnedCopies

__all__ = ["HostBucket", "HostOptions", "HostPart", "Part", "group_values", "loaded_value", "set_groups"]

SECTION_BYTES = 256 << 20
"""Master weights of one section. Four flats of it are one registration of 1 GiB, which takes 60 ms to pin,
before step 1."""

Groups = Mapping[int, Mapping[str, Any]]
"""The user's param group of each parameter, by index. A parameter in no group is left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """How the host side is built."""

    bucket_bytes: int
    pin_grads: bool = True
    pin_params: bool = True
    masters_in_fp32: bool = False
    overlap: bool = False

    def __post_init__(self) -> None:
        check_bytes("bucket_bytes", self.bucket_bytes, least=1024)

    def master_dtype(self, member: ParamView) -> torch.dtype:
        half = member.dtype in (torch.bfloat16, torch.float16)
        return torch.float32 if self.masters_in_fp32 and half else member.dtype


def group_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a param group says to any optimizer: not its parameters, nor how to compute. A copy, because a
    worker reads it while the user already changes the original."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key not in IMPLEMENTATION_KEYS and key not in ("params", "param_names")
    }


def set_groups(
    optimizer: Optimizer, tensors: Sequence[tuple[int, Tensor]], groups: Groups
) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Make the param groups of a sub-optimizer those of the user, over its own tensors, given with the
    parameters' indices. Returns each of its groups with the user's."""
    chosen: dict[int, tuple[Mapping[str, Any], list[Tensor]]] = {}
    for index, tensor in tensors:
        if (group := groups.get(index)) is not None:
            chosen.setdefault(id(group), (group, []))[1].append(tensor)
    originals = [group for group, _ in chosen.values()]
    before = [[*map(id, own["params"])] for own in optimizer.param_groups]
    if before == [[*map(id, mine)] for _, mine in chosen.values()]:  # the same dictionaries go on
        for own, group in zip(optimizer.param_groups, originals, strict=True):
            own.update(group_values(group))
    else:
        # what the class itself keeps in a group, as a count of steps, goes with the group's first tensor
        own_of = {id(tensor): own for own in optimizer.param_groups for tensor in own["params"]}
        optimizer.param_groups.clear()
        for group, mine in chosen.values():
            own = {key: value for key, value in own_of.get(id(mine[0]), {}).items() if key != "param_names"}
            optimizer.add_param_group({**own, **group_values(group), "params": mine})
    return list(zip(optimizer.param_groups, originals, strict=True))


def loaded_value(key: Any, value: Any, tensor: Tensor, count_device: torch.device | str) -> Any:
    """A copy of a value of loaded state, as the optimizer of `tensor` would have made it: in the tensor's
    dtype, on its device and with its strides; a count is float32, on `count_device`."""
    if not isinstance(value, Tensor):
        return deepcopy(value)
    if key == "step":
        return value.detach().to(device=count_device, dtype=torch.float32, copy=True)
    local = local_of(tensor)
    dtype = tensor.dtype if value.is_floating_point() else value.dtype
    copied = local_of(value).detach().to(device=local.device, dtype=dtype, copy=True)
    return sharded_like(tensor, laid_like(local, copied) if copied.shape == local.shape else copied)


class Part:
    """Parameters that are stepped in one way, by the user's param groups."""

    def __init__(self) -> None:
        self.members: dict[int, ParamView] = {}  # by index
        # what this part reads in a step, and the user's group that it is of
        self._values: list[tuple[dict[str, Any], Mapping[str, Any]]] = []

    def refresh(self) -> None:
        """Take over what the user's groups say now."""
        for values, original in self._values:
            values.update(group_values(original))

    def changed_values(self) -> bool:
        """Whether the user's groups say something else than at the last `refresh`."""
        return any(
            not _same(values.get(key), value)
            for values, original in self._values
            for key, value in group_values(original).items()
        )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


@dataclass(eq=False)
class HostBucket(ABC):
    """One bucket of one section: its part of the state on the host, its weights and gradients elsewhere.

    members: of each piece. master_dtype: of the arithmetic.
    """

    copies: OwnedCopies
    section: HostSection
    layout: Bucket
    members: Sequence[ParamView]
    master_dtype: torch.dtype

    def __post_init__(self) -> None:
        self.device = self.copies.device
        self.rank = 0
        """In the order in which a forward needs the buckets."""
        self.returned: Event | None = None
        """Recorded behind the new weights and the last use of the gradients."""
        self.done = threading.Event()  # no worker has it
        self.done.set()
        # of the step under way: the pieces that have a gradient, by position, their gradients and weights
        self.stepped: list[int] = []
        self.gradients: list[Tensor] = []
        self.weights: list[Tensor] = []

    def set_gradients(self, gradients: Mapping[int, Tensor]) -> None:
        """Keep the gradients until the step. gradients: flat, by parameter, made on the current lane. A
        parameter without one is not stepped. Blocks the host only while the step before is still at this
        bucket."""
        self.done.wait()
        self.stepped, self.gradients, self.weights = [], [], []
        for position, (piece, member) in enumerate(zip(self.layout.pieces, self.members, strict=True)):
            if (gradient := gradients.get(member.index)) is None:
                continue
            part = self._as_copied(gradient.narrow(0, piece.first, piece.numel), member)
            weights = member.flat.narrow(0, piece.first, piece.numel)
            for each in (part, weights):
                self.device.note_write(self.device.compute, each.view(torch.uint8))
            self.stepped.append(position)
            self.gradients.append(part)
            self.weights.append(weights)

    def has_any(self, indices: Container[int]) -> bool:
        """Whether one of these parameters has a piece in it."""
        return any(member.index in indices for member in self.members)

    def _as_copied(self, gradient: Tensor, member: ParamView) -> Tensor:
        """The gradient as it leaves, on the lane that made it."""
        return gradient

    def drop_gradients(self) -> None:
        """Release the gradients. Called once the lane that they were allocated on has waited for `returned`,
        or `returned` has passed."""
        self.gradients = []

    def flat(self, name: str, piece: Piece, dtype: torch.dtype | None = None) -> Tensor:
        """The piece's elements in a flat of the section. dtype: None is the master's."""
        return self.section.view(name, piece.start, piece.numel, dtype or self.master_dtype)

    @abstractmethod
    def state_of(self, position: int) -> dict[Any, Any]:
        """What the optimizer keeps of the piece; empty before the class has made it."""


B = TypeVar("B", bound=HostBucket)


class HostPart(Part, Generic[B]):
    """Parameters whose state is on the host, in sections by dtype, made in the order of the parameters.

    whole: a parameter is never cut, and its state is the class's own; else it is that of torch's Adam.
    """

    described: str
    """In messages."""

    def __init__(
        self, engine: OffloadEngine, options: HostOptions, new_bucket: Callable[..., B], *, whole: bool
    ) -> None:
        super().__init__()
        self.engine = engine
        self.options = options
        self.whole = whole
        self._new_bucket = new_bucket
        self.sections: list[HostSection] = []
        # of each parameter: its section, and where it starts there
        self.ranges: dict[int, tuple[HostSection, int]] = {}
        self.buckets: list[B] = []
        self._pieces_of: dict[int, list[tuple[B, int]]] = {}  # and its pieces, by bucket and position

    @abstractmethod
    def _specs(self, dtype: torch.dtype, master_dtype: torch.dtype) -> list[FlatSpec]:
        """The flats of a section of parameters of `dtype`."""

    @abstractmethod
    def regroup(self, groups: Groups) -> None:
        """The user's param groups are these now."""

    def add(self, members: Sequence[ParamView]) -> None:
        """Take over parameters: pin their memory, which blocks the host; `regroup` does the rest. Raises
        HostBudgetError, before anything is pinned."""
        kinds: dict[tuple[torch.dtype, torch.dtype], list[tuple[int, int]]] = {}
        for member in members:
            self.members[member.index] = member
            kind = member.dtype, self.options.master_dtype(member)
            kinds.setdefault(kind, []).append((member.index, member.numel))
        plan = [
            (layout, self._specs(dtype, master_dtype), master_dtype)
            for (dtype, master_dtype), chosen in kinds.items()
            for layout in lay_out(
                chosen,
                bucket_numel=self.options.bucket_bytes // master_dtype.itemsize,
                section_numel=max(self.options.bucket_bytes, SECTION_BYTES) // master_dtype.itemsize,
                whole=self.whole,
            )
        ]
        arena = self.engine.arena
        needed = sum(spec.element_bytes * layout.numel for layout, specs, _ in plan for spec in specs)
        check_budget(arena, needed, f"the {self.described} parameters")
        with ExitStack() as opened:  # if one cannot be made, those before it are closed
            sections = [
                opened.enter_context(closing(HostSection(arena, layout, specs))) for layout, specs, _ in plan
            ]
            opened.pop_all()
        self.sections.extend(sections)
        made: list[B] = []
        for section, (layout, _, master_dtype) in zip(sections, plan, strict=True):
            self.ranges.update((index, (section, start)) for index, start, _ in layout.parameters)
            for cut in layout.buckets:
                copies = self.engine.copier.of(Owner("optim", f"bucket {len(self.buckets) + len(made)}"))
                pieces_of = [self.members[piece.parameter] for piece in cut.pieces]
                made.append(self._new_bucket(copies, section, cut, pieces_of, master_dtype))
        made.sort(key=lambda bucket: bucket.layout.pieces[0].parameter)
        for bucket in made:
            for position, member in enumerate(bucket.members):
                self._pieces_of.setdefault(member.index, []).append((bucket, position))
        self.buckets.extend(made)

    def _make_moments(self, groups: Groups) -> None:
        """Room for the moments that the groups name: amsgrad may be asked for later, as a checkpoint does."""
        for section in self.sections:
            for index, _, _ in section.layout.parameters:
                for name in state_names(groups.get(index, {})):
                    if not section.has(name):
                        size = self.options.master_dtype(self.members[index]).itemsize
                        section.add([FlatSpec(name, size, self.options.pin_params, zero=True)])

    def _flats_of(self, member: ParamView) -> Iterator[tuple[str, Tensor]]:
        """The parameter's own range of each flat that has masters or moments, in its shape."""
        section, start = self.ranges[member.index]
        for name in ("master", *state_names({"amsgrad": True})):
            if section.has(name):
                flat = section.view(name, start, member.numel, self.options.master_dtype(member))
                yield name, member.shaped(flat)

    def has_master(self, member: ParamView) -> bool:
        """Whether a float32 master is stepped in place of the parameter."""
        return self.options.master_dtype(member) != member.dtype

    def master(self, member: ParamView) -> Tensor:
        """What the optimizer steps, in the parameter's shape; the parameter itself where that is."""
        return dict(self._flats_of(member)).get("master", member.parameter)

    def refresh_master(self, member: ParamView) -> None:
        """Make the master follow the device's weights. Blocks the host; nothing may be in flight."""
        master = self.master(member)
        if master is not member.parameter:
            weights = member.shaped(member.flat).to("cpu")
            if self.has_master(member):
                update_master(master, weights)
            else:
                master.copy_(weights)

    def reorder(self, member: ParamView, before: tuple[int, ...]) -> None:
        """The parameter's elements lie in another order in memory than by the strides `before`: its state
        follows. Blocks the host; nothing may be in flight."""
        for _, flat in self._flats_of(member):
            flat.copy_(flat.as_strided(member.shape, before, flat.storage_offset()).clone())

    def state_of(self, member: ParamView) -> Mapping[Any, Any]:
        """What its optimizer keeps: views of memory that nothing may be writing."""
        bucket, position = self._pieces_of[member.index][0]
        state, flats = bucket.state_of(position), {} if self.whole else dict(self._flats_of(member))
        return {key: flats.get(key, value) for key, value in state.items()}

    def set_state(self, member: ParamView, state: Mapping[Any, Any]) -> None:
        """Replace the state by values of the parameter's local shape; nothing may be in flight. Moments that
        the section has, and the state has not, start as zeros."""
        for bucket, position in self._pieces_of[member.index]:
            bucket.state_of(position)["step"].fill_(float(state.get("step", 0.0)))
        for name, flat in self._flats_of(member):
            if name in state:
                flat.copy_(local_of(state[name]))
            elif name != "master":
                flat.zero_()

    def copy_step_count(self, member: ParamView) -> None:
        """The count of the parameter's first piece may have been written: it is that of all pieces."""
        if not self.whole:
            first, *others = (bucket.state_of(at)["step"] for bucket, at in self._pieces_of[member.index])
            for count in others:
                count.copy_(first)

    @property
    def host_bytes(self) -> int:
        return sum(section.nbytes for section in self.sections)

    def close(self) -> None:
        for section in self.sections:
            section.close()
