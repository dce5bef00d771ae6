"""The offloaded parameters of one optimizer, as buckets: those the host steps, and those that are streamed
through the device.

One invariant: all host memory, all slots of the ring and every sub-optimizer exist before a step begins; a
step only fills and moves them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.engine import OffloadEngine
from offload.ids import Owner
from offload.optim.classes import IMPLEMENTATION_KEYS, is_fused_adam, made_for_cpu, state_names
from offload.optim.cpu_step import CpuBucket
from offload.optim.streamed_step import StreamedBucket
from offload.params.layout import Section, lay_out
from offload.params.ring import Ring
from offload.params.sections import FlatSpec, HostSection, check_budget
from offload.params.view import ParamView, weights_win

__all__ = ["CpuPart", "Groups", "HostOptions", "StreamedPart", "group_values"]

SECTION_BYTES = 256 << 20
"""Master weights of one section. Four flats of it are one registration of 1 GiB, which takes 60 ms to pin,
before step 1."""

Groups = Mapping[int, Mapping[str, Any]]
"""The user's param group of each parameter, by index. A parameter in no group is left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """How the host side is built."""

    bucket_bytes: int
    pin_grads: bool
    pin_params: bool
    masters_in_fp32: bool
    overlap: bool

    def master_dtype(self, member: ParamView) -> torch.dtype:
        halves = (torch.bfloat16, torch.float16)
        return torch.float32 if self.masters_in_fp32 and member.dtype in halves else member.dtype


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
    before = list(optimizer.param_groups)
    if [list(map(id, own["params"])) for own in before] == [
        list(map(id, mine)) for _, mine in chosen.values()
    ]:
        for own, (group, _) in zip(before, chosen.values(), strict=True):
            own.update(group_values(group))
    else:
        # what the class itself keeps in a group, as a count of steps, goes with the group's first tensor
        own_of = {id(tensor): own for own in before for tensor in own["params"]}
        optimizer.param_groups.clear()
        for group, mine in chosen.values():
            own = {key: value for key, value in own_of.get(id(mine[0]), {}).items() if key != "param_names"}
            optimizer.add_param_group({**own, **group_values(group), "params": mine})
    originals = [group for group, _ in chosen.values()]
    return list(zip(optimizer.param_groups, originals, strict=True))


class _Part:
    """What both kinds of parts have: sections by dtype, made in the order of the parameters."""

    def __init__(self, engine: OffloadEngine, options: HostOptions) -> None:
        self.engine = engine
        self.options = options
        self.members: dict[int, ParamView] = {}
        self.sections: list[HostSection] = []
        # of each parameter: its section, and where it starts there
        self.places: dict[int, tuple[HostSection, int]] = {}
        # values that this part reads, and the user's group that they are of
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

    def _layouts(
        self, members: Sequence[ParamView], *, whole: bool
    ) -> Iterator[tuple[Section, torch.dtype, torch.dtype]]:
        kinds: dict[tuple[torch.dtype, torch.dtype], list[ParamView]] = {}
        for member in members:
            kinds.setdefault((member.dtype, self.options.master_dtype(member)), []).append(member)
        for (dtype, master_dtype), chosen in kinds.items():
            size = master_dtype.itemsize
            for layout in lay_out(
                [(member.index, member.numel) for member in chosen],
                bucket_numel=self.options.bucket_bytes // size,
                section_numel=max(self.options.bucket_bytes, SECTION_BYTES) // size,
                whole=whole,
            ):
                yield layout, dtype, master_dtype

    def _make(self, plan: Sequence[tuple[Section, Sequence[FlatSpec]]], what: str) -> list[HostSection]:
        needed = sum(spec.element_bytes * layout.numel for layout, specs in plan for spec in specs)
        check_budget(self.engine.arena, needed, what)
        made: list[HostSection] = []
        try:
            for layout, specs in plan:
                made.append(HostSection(self.engine.arena, layout, specs))
        except BaseException:
            for section in made:
                section.close()
            raise
        for section in made:
            self.places.update((index, (section, start)) for index, start, _ in section.layout.parameters)
        self.sections.extend(made)
        return made

    def _have_moments(self, groups: Groups) -> None:
        """Room for the moments that the groups name: amsgrad may be asked for later, as a checkpoint does."""
        for section in self.sections:
            for index, _, _ in section.layout.parameters:
                for name in state_names(groups.get(index, {})):
                    if not section.has(name):
                        size = self.options.master_dtype(self.members[index]).itemsize
                        section.add([FlatSpec(name, size, pinned=self.options.pin_params, zero=True)])

    def moment(self, member: ParamView, name: str) -> Tensor:
        """The parameter's own range of one flat, in its shape."""
        section, start = self.places[member.index]
        return member.shaped(section.view(name, start, member.numel, self.options.master_dtype(member)))

    def master(self, member: ParamView) -> Tensor:
        return self.moment(member, "master")

    def has_master(self, member: ParamView) -> bool:
        return self.options.master_dtype(member) != member.dtype

    def refresh_master(self, member: ParamView) -> None:
        """Make the master follow the device's weights. Blocks the host; nothing may be in flight."""
        if self.places[member.index][0].has("master"):
            weights = member.shaped(member.flat).to("cpu")
            if self.has_master(member):
                weights_win(self.master(member), weights)
            else:
                self.master(member).copy_(weights)

    def reorder(self, member: ParamView, before: tuple[int, ...]) -> None:
        """The parameter's elements lie in another order in memory than by the strides `before`: its state
        follows. Blocks the host; nothing may be in flight."""
        section, _ = self.places[member.index]
        for name in ("master", *state_names({"amsgrad": True})):
            if section.has(name):
                now = self.moment(member, name)
                now.copy_(now.as_strided(member.shape, before, now.storage_offset()).clone())

    @property
    def host_bytes(self) -> int:
        return sum(section.nbytes for section in self.sections)

    def close(self) -> None:
        for section in self.sections:
            section.close()
        self.sections.clear()


class CpuPart(_Part):
    """Parameters that the host steps."""

    def __init__(
        self, engine: OffloadEngine, options: HostOptions, cls: type[Optimizer], kwargs: Mapping[str, Any]
    ) -> None:
        super().__init__(engine, options)
        self._cls = cls
        self._kwargs = dict(kwargs)
        self.buckets: list[CpuBucket] = []
        self._leaves_of: dict[int, list[tuple[CpuBucket, int]]] = {}
        self.scratch: Tensor | None = None
        """Gradients of one bucket in the master's dtype."""
        self.flat = is_fused_adam(cls)

    @property
    def optimizers(self) -> list[Optimizer]:
        """With overlap one a bucket, so that copies and steps of different buckets go on together; else one
        for all."""
        return list(
            dict.fromkeys(bucket.optimizer for bucket in self.buckets if bucket.optimizer is not None)
        )

    def add(self, members: Sequence[ParamView]) -> None:
        """Take over parameters: pin their memory. Blocks the host for it. `regroup` makes their
        optimizers."""
        if not members:
            return
        self.members.update((member.index, member) for member in members)
        options = self.options
        layouts = list(self._layouts(members, whole=not self.flat))
        plan = []
        for layout, dtype, master in layouts:
            # rounding zero gives no weight but zero: the first step takes the weights over
            specs = [
                FlatSpec("master", master.itemsize, pinned=options.pin_params, zero=True),
                FlatSpec("grad", master.itemsize, pinned=options.pin_grads),
            ]
            if dtype != master:
                specs.append(FlatSpec("weight", dtype.itemsize, pinned=options.pin_params))
            for name in state_names({}) if self.flat else ():
                specs.append(FlatSpec(name, master.itemsize, pinned=options.pin_params, zero=True))
            plan.append((layout, specs))
        made: list[CpuBucket] = []
        how = {"whole": not self.flat, "wide": not options.overlap}
        sections = self._make(plan, "the offloaded parameters")
        for section, (layout, dtype, master) in zip(sections, layouts, strict=True):
            for cut in layout.buckets:
                copies = self.engine.copier.of(Owner("optim", f"bucket {len(self.buckets) + len(made)}"))
                made.append(CpuBucket(copies, section, cut, self.members, master, **how))
                needed = cut.numel if dtype != master and options.overlap else 0
                if needed > (0 if self.scratch is None else self.scratch.numel()):
                    self.scratch = torch.empty(needed, dtype=master)
        made.sort(key=lambda bucket: bucket.layout.pieces[0].parameter)
        for bucket in made:
            for place, member in enumerate(bucket.members):
                self._leaves_of.setdefault(member.index, []).append((bucket, place))
        self.buckets.extend(made)

    def regroup(self, groups: Groups) -> None:
        """The user's param groups are these now."""
        if self.flat:
            self._have_moments(groups)
        self._values = []
        sharing: list[list[CpuBucket]] = [[bucket] for bucket in self.buckets]
        if not self.options.overlap and self.buckets:
            sharing = [self.buckets]
        for buckets in sharing:
            tensors = [
                (member.index, leaf)
                for bucket in buckets
                for member, leaf in zip(bucket.members, bucket.leaves, strict=True)
            ]
            optimizer = next((bucket.optimizer for bucket in buckets if bucket.optimizer is not None), None)
            if optimizer is None:
                optimizer = self._new_optimizer(tensors)
            self._values += set_groups(optimizer, tensors, groups)
            for bucket in buckets:
                bucket.bind(optimizer)

    def _new_optimizer(self, tensors: Sequence[tuple[int, Tensor]]) -> Optimizer:
        kwargs = made_for_cpu(self._cls, self._kwargs) if tensors[0][1].is_floating_point() else self._kwargs
        return self._cls([tensor for _, tensor in tensors], **kwargs)

    def reorder(self, member: ParamView, before: tuple[int, ...]) -> None:
        super().reorder(member, before)
        for bucket, place in self._leaves_of[member.index]:
            bucket.relay(place)

    def spread_count(self, member: ParamView) -> None:
        """The count of the first piece is that of all."""
        if self.flat:
            counts = [bucket.state_of(place)["step"] for bucket, place in self._leaves_of[member.index]]
            for count in counts[1:]:
                count.copy_(counts[0])

    def state_of(self, member: ParamView) -> dict[Any, Any]:
        """The optimizer's state of one parameter: views where it lies in a section, else the class's own."""
        bucket, place = self._leaves_of[member.index][0]
        state = bucket.state_of(place)
        if not self.flat:
            return state
        return {key: self.moment(member, key) if key != "step" else value for key, value in state.items()}

    def set_state(self, member: ParamView, state: Mapping[Any, Any]) -> None:
        """Replace the state by values of the parameter's shape, or of any shape for a class of its own."""
        for bucket, place in self._leaves_of[member.index]:
            assert bucket.optimizer is not None
            leaf = bucket.leaves[place]
            if self.flat:
                bucket.optimizer.state[leaf]["step"].fill_(float(state["step"]) if state else 0.0)
            else:
                bucket.optimizer.state[leaf] = {
                    key: _like_leaf(value, key, leaf) for key, value in state.items()
                }
        if self.flat:
            _set_moments(self, member, state)


class StreamedPart(_Part):
    """Parameters whose state is streamed through the device. weights_on_host: the parameters themselves
    too."""

    def __init__(self, engine: OffloadEngine, options: HostOptions, *, weights_on_host: bool = False) -> None:
        super().__init__(engine, options)
        self._weights_on_host = weights_on_host
        self.buckets: list[StreamedBucket] = []
        self.ring: Ring | None = None
        self._ring_flats: tuple[int, list[tuple[str, int]]] = (0, [])
        self._pieces_of: dict[int, list[tuple[StreamedBucket, int]]] = {}

    def add(self, members: Sequence[ParamView]) -> None:
        """Take over parameters: pin their state's memory. Blocks the host for it. `regroup` makes room for
        three buckets on the device."""
        if not members:
            return
        self.members.update((member.index, member) for member in members)
        layouts = list(self._layouts(members, whole=False))
        plan = []
        for layout, dtype, master in layouts:
            names = [*state_names({}), *(["master"] if dtype != master else [])]
            pinned = self.options.pin_params
            plan.append(
                (layout, [FlatSpec(name, master.itemsize, pinned=pinned, zero=True) for name in names])
            )
        made: list[StreamedBucket] = []
        sections = self._make(plan, "the streamed parameters")
        for section, (layout, _, master) in zip(sections, layouts, strict=True):
            for cut in layout.buckets:
                copies = self.engine.copier.of(Owner("optim", f"bucket {len(self.buckets) + len(made)}"))
                how = {"weights_on_host": self._weights_on_host}
                made.append(StreamedBucket(copies, section, cut, self.members, master, **how))
        made.sort(key=lambda bucket: bucket.layout.pieces[0].parameter)
        for bucket in made:
            for place, member in enumerate(bucket.members):
                self._pieces_of.setdefault(member.index, []).append((bucket, place))
        self.buckets.extend(made)

    def regroup(self, groups: Groups) -> None:
        """The user's param groups are these now."""
        if not self.buckets:
            return
        self._have_moments(groups)
        values = {id(group): (group_values(group), group) for group in groups.values()}
        self._values = list(values.values())
        for bucket in self.buckets:
            bucket.groups = [
                values[id(groups[member.index])][0] if member.index in groups else {}
                for member in bucket.members
            ]
        self._make_ring()

    def _make_ring(self) -> None:
        """Slots for the largest bucket. Made anew where larger ones are needed, between steps."""
        numel = max(bucket.layout.numel for bucket in self.buckets)
        names = {name for bucket in self.buckets for name in bucket.names()}
        size = max(bucket.master_dtype.itemsize for bucket in self.buckets)
        also = ["weights", "grad"] if self._weights_on_host else ["grad"] if "master" in names else []
        flats = [(name, size) for name in (*sorted(names), *also)]
        if (numel, flats) != self._ring_flats:
            self._ring_flats = numel, flats
            self.ring = Ring(self.engine.device, numel, flats)

    def wait_for_slot(self) -> None:
        """Block the host until the ring has room for another bucket."""
        if self.ring is not None:
            self.ring.wait_for_slot()

    def spread_count(self, member: ParamView) -> None:
        """The count of the first piece is that of all."""
        counts = [bucket.steps[place] for bucket, place in self._pieces_of[member.index]]
        for count in counts[1:]:
            count.copy_(counts[0])

    def state_of(self, member: ParamView) -> dict[Any, Any]:
        bucket, place = self._pieces_of[member.index][0]
        moments = {name: self.moment(member, name) for name in state_names(bucket.groups[place])}
        return {"step": bucket.steps[place], **moments}

    def set_state(self, member: ParamView, state: Mapping[Any, Any]) -> None:
        for bucket, place in self._pieces_of[member.index]:
            bucket.steps[place].fill_(float(state["step"]) if state else 0.0)
        _set_moments(self, member, state)


def _set_moments(part: CpuPart | StreamedPart, member: ParamView, state: Mapping[Any, Any]) -> None:
    """Moments that the section has, and the state has not, start as zeros."""
    for name in state_names({"amsgrad": True}):
        if part.places[member.index][0].has(name):
            target = part.moment(member, name)
            if name not in state:
                target.zero_()
            elif (value := state[name]) is not target:
                target.copy_(value)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _like_leaf(value: Any, key: Any, leaf: Tensor) -> Any:
    """A loaded value as the leaf's optimizer would have made it: what has the leaf's shape gets its dtype, a
    count stays one."""
    if not isinstance(value, Tensor):
        return value
    if key != "step" and value.is_floating_point() and value.shape == leaf.shape:
        return torch.empty_like(leaf).copy_(value)
    return value.detach().to("cpu", copy=True)
