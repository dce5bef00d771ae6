"""The offloaded parameters of one optimizer, as buckets: those the host steps, and those that are streamed
through the device.

One invariant: all host memory, all slots of the ring and every sub-optimizer exist before the first step; a
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
from offload.optim.buckets import Section, lay_out
from offload.optim.classes import IMPLEMENTATION_KEYS, is_fused_adam, made_for_cpu, state_names
from offload.optim.cpu_step import CpuBucket
from offload.optim.host import FlatSpec, HostSection, check_budget
from offload.optim.parameters import Managed, same_bits
from offload.optim.streamed_step import Ring, StreamedBucket

__all__ = ["CpuPart", "GroupCopies", "HostOptions", "StreamedPart"]

SECTION_BYTES = 256 << 20
"""Master weights of one section. Four flats of it are one registration of 1 GiB, which takes 60 ms to pin,
before step 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """How the host side is built."""

    bucket_bytes: int
    pin_grads: bool
    pin_params: bool
    masters_in_fp32: bool
    overlap: bool

    def master_dtype(self, member: Managed) -> torch.dtype:
        return (
            torch.float32
            if self.masters_in_fp32 and member.dtype in (torch.bfloat16, torch.float16)
            else member.dtype
        )


class GroupCopies:
    """Param groups of sub-optimizers, kept equal to the user's: a worker reads the copy while the user
    already changes the original."""

    def __init__(self) -> None:
        self._pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []  # copy, original

    def add(self, copy: dict[str, Any], original: dict[str, Any]) -> None:
        self._pairs.append((copy, original))

    def refresh(self) -> None:
        for copy, original in self._pairs:
            copy.update(values_of(original))

    def changed(self) -> list[str]:
        """Keys whose values differ now from those of the last `refresh`."""
        return sorted(
            {
                key
                for copy, original in self._pairs
                for key, value in values_of(original).items()
                if not _same(copy.get(key), value)
            }
        )


def values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a param group says to any optimizer: not its parameters, nor how to compute."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key not in IMPLEMENTATION_KEYS and key not in ("params", "param_names")
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


class _Part:
    """What both kinds of parts have: sections by dtype, made in the order of the parameters."""

    def __init__(self, engine: OffloadEngine, options: HostOptions, copies: GroupCopies) -> None:
        self.engine = engine
        self.options = options
        self.copies = copies
        self.members: dict[int, Managed] = {}
        self.sections: list[HostSection] = []
        # of each parameter: its section, and where it starts there
        self.places: dict[int, tuple[HostSection, int]] = {}

    def _layouts(
        self, members: Sequence[Managed], *, whole: bool
    ) -> Iterator[tuple[Section, torch.dtype, torch.dtype]]:
        kinds: dict[tuple[torch.dtype, torch.dtype], list[Managed]] = {}
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

    def moment(self, member: Managed, name: str) -> Tensor:
        """The parameter's own range of one flat, in its shape."""
        section, start = self.places[member.index]
        return member.shaped(section.view(name, start, member.numel, self.options.master_dtype(member)))

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
        self,
        engine: OffloadEngine,
        options: HostOptions,
        copies: GroupCopies,
        cls: type[Optimizer],
        kwargs: Mapping[str, Any],
    ) -> None:
        super().__init__(engine, options, copies)
        self._cls = cls
        self._kwargs = dict(kwargs)
        self.buckets: list[CpuBucket] = []
        self.optimizers: list[Optimizer] = []
        self._leaves_of: dict[int, list[tuple[CpuBucket, int]]] = {}
        self._scratch: Tensor | None = None
        self.flat = is_fused_adam(cls)

    def add(self, members: Sequence[Managed], group_of: Mapping[int, dict[str, Any]]) -> None:
        """Take over parameters: pin their memory, fetch their masters, make their optimizers. Blocks the host
        for all of it."""
        if not members:
            return
        self.members.update((member.index, member) for member in members)
        options = self.options
        layouts = list(self._layouts(members, whole=not self.flat))
        plan = []
        for layout, _, master in layouts:
            amsgrad = any(group_of[index].get("amsgrad") for index, _, _ in layout.parameters)
            names = state_names({"amsgrad": amsgrad}) if self.flat else ()
            plan.append(
                (
                    layout,
                    [
                        FlatSpec("master", master.itemsize, pinned=options.pin_params),
                        FlatSpec("grad", master.itemsize, pinned=options.pin_grads),
                        *(
                            FlatSpec(name, master.itemsize, pinned=options.pin_params, zero=True)
                            for name in names
                        ),
                    ],
                )
            )
        sections = self._make(plan, "the offloaded parameters")
        made: list[CpuBucket] = []
        for section, (layout, dtype, master) in zip(sections, layouts, strict=True):
            for cut in layout.buckets:
                owner = Owner("optim", f"bucket {len(self.buckets) + len(made)}")
                made.append(
                    CpuBucket(
                        self.engine.copier.of(owner),
                        section,
                        cut,
                        self.members,
                        master,
                        whole=not self.flat,
                        wide=not options.overlap,
                    )
                )
                if (
                    dtype != master
                    and options.overlap
                    and (self._scratch is None or self._scratch.numel() < cut.numel)
                ):
                    self._scratch = torch.empty(cut.numel, dtype=master)
        made.sort(key=lambda bucket: bucket.layout.pieces[0].parameter)
        for bucket in made:
            for place, member in enumerate(bucket.members):
                self._leaves_of.setdefault(member.index, []).append((bucket, place))
        self.fetch_masters(members)
        self._adopt(made, group_of)
        self.buckets.extend(made)

    @property
    def scratch(self) -> Tensor | None:
        return self._scratch

    def _adopt(self, made: Sequence[CpuBucket], group_of: Mapping[int, dict[str, Any]]) -> None:
        """With overlap an optimizer a bucket, so that copies and steps of different buckets go on together;
        without, one for all."""
        for bucket in made:
            kwargs = (
                made_for_cpu(self._cls, self._kwargs)
                if bucket.master_dtype.is_floating_point
                else self._kwargs
            )
            chosen: dict[int, tuple[dict[str, Any], list[Tensor]]] = {}
            for member, leaf in zip(bucket.members, bucket.leaves, strict=True):
                group = group_of[member.index]
                chosen.setdefault(id(group), (group, []))[1].append(leaf)
            optimizer = None if self.options.overlap or not self.optimizers else self.optimizers[0]
            for group, leaves in chosen.values():
                values = {**values_of(group), "params": leaves}
                if optimizer is None:
                    optimizer = self._cls([values], **kwargs)
                    self.optimizers.append(optimizer)
                else:
                    optimizer.add_param_group(values)
                self.copies.add(optimizer.param_groups[-1], group)
            assert optimizer is not None
            bucket.adopt(optimizer)

    def fetch_masters(self, members: Sequence[Managed]) -> None:
        """Make the device's weights the masters of `members`. Blocks the host for the copies, all issued
        before it waits."""
        chosen = {member.index for member in members}
        buckets = {id(bucket): bucket for index in chosen for bucket, _ in self._leaves_of[index]}
        arriving = [(bucket, bucket.fetch(chosen)) for bucket in buckets.values()]
        device = self.engine.device
        device.synchronize(device.record(device.d2h))
        for bucket, there in arriving:
            bucket.take_masters(there)

    def state_of(self, member: Managed) -> dict[Any, Any]:
        """The optimizer's state of one parameter: views where it lies in a section, else the class's own."""
        leaves = self._leaves_of[member.index]
        bucket, place = leaves[0]
        state = bucket.state_of(place)
        if not self.flat:
            return state
        return {key: self.moment(member, key) if key != "step" else value for key, value in state.items()}

    def master(self, member: Managed) -> Tensor:
        return self.moment(member, "master")

    def set_state(self, member: Managed, state: Mapping[Any, Any]) -> None:
        """Replace the state by values of the parameter's shape, or of any shape for a class of its own."""
        for bucket, place in self._leaves_of[member.index]:
            assert bucket.optimizer is not None
            leaf = bucket.leaves[place]
            if not self.flat:
                bucket.optimizer.state[leaf] = {
                    key: _like_leaf(value, key, leaf) for key, value in state.items()
                }
            elif not state:
                bucket.reset_state(place)
            else:
                bucket.optimizer.state[leaf]["step"].fill_(float(state["step"]))
        if self.flat:
            for name in self.state_of(member):
                if name in state and name != "step":
                    self.moment(member, name).copy_(state[name])


def _flat(shaped: Tensor) -> Tensor:
    return shaped.as_strided((shaped.numel(),), (1,), shaped.storage_offset())


def _like_leaf(value: Any, key: Any, leaf: Tensor) -> Any:
    """A loaded value as the leaf's optimizer would have made it: what has the leaf's shape gets its dtype, a
    count stays one."""
    if not isinstance(value, Tensor):
        return value
    if key != "step" and value.is_floating_point() and value.shape == leaf.shape:
        return torch.empty_like(leaf).copy_(value)
    return value.detach().to("cpu", copy=True)


class StreamedPart(_Part):
    """Parameters whose state is streamed through the device. weights_on_host: the parameters themselves
    too."""

    def __init__(
        self,
        engine: OffloadEngine,
        options: HostOptions,
        copies: GroupCopies,
        *,
        weights_on_host: bool = False,
    ) -> None:
        super().__init__(engine, options, copies)
        self._weights_on_host = weights_on_host
        self.buckets: list[StreamedBucket] = []
        self.ring: Ring | None = None
        self._pieces_of: dict[int, list[tuple[StreamedBucket, int]]] = {}
        self._values: dict[int, dict[str, Any]] = {}

    def add(self, members: Sequence[Managed], group_of: Mapping[int, dict[str, Any]]) -> None:
        """Take over parameters: pin their state's memory, make room for three buckets on the device. Blocks
        the host for all of it."""
        if not members:
            return
        self.members.update((member.index, member) for member in members)
        values: dict[int, dict[str, Any]] = {}
        for member in members:
            group = group_of[member.index]
            if id(group) not in self._values:
                self._values[id(group)] = values_of(group)
                self.copies.add(self._values[id(group)], group)
            values[member.index] = self._values[id(group)]
        layouts = list(self._layouts(members, whole=False))
        plan = []
        for layout, dtype, master in layouts:
            names = list(
                state_names(
                    {"amsgrad": any(group_of[index].get("amsgrad") for index, _, _ in layout.parameters)}
                )
            )
            specs = [
                FlatSpec(name, master.itemsize, pinned=self.options.pin_params, zero=True) for name in names
            ]
            if dtype != master:
                specs.append(FlatSpec("master", master.itemsize, pinned=self.options.pin_params))
            plan.append((layout, specs))
        made: list[StreamedBucket] = []
        for section, (layout, _, master) in zip(
            self._make(plan, "the streamed parameters"), layouts, strict=True
        ):
            for cut in layout.buckets:
                copies = self.engine.copier.of(Owner("optim", f"bucket {len(self.buckets) + len(made)}"))
                where = self._weights_on_host
                made.append(
                    StreamedBucket(copies, section, cut, self.members, master, values, weights_on_host=where)
                )
        made.sort(key=lambda bucket: bucket.layout.pieces[0].parameter)
        for bucket in made:
            for place, member in enumerate(bucket.members):
                self._pieces_of.setdefault(member.index, []).append((bucket, place))
        self.buckets.extend(made)
        self._make_ring()
        self.fetch_masters([member for member in members if self.has_master(member)])

    def _make_ring(self) -> None:
        """Slots for the largest bucket. Made anew when parameters are added, between steps."""
        numel = max(bucket.layout.numel for bucket in self.buckets)
        names = {name for bucket in self.buckets for name in bucket.names()}
        size = max(bucket.master_dtype.itemsize for bucket in self.buckets)
        also = ["weights", "grad"] if self._weights_on_host else ["grad"] if "master" in names else []
        flats = [(name, size) for name in (*sorted(names), *also)]
        self.ring = Ring(self.engine.device, numel, flats)

    def wait_for_slot(self) -> None:
        """Block the host until the ring has room for another bucket."""
        if self.ring is not None:
            self.ring.wait_for_slot()

    def has_master(self, member: Managed) -> bool:
        return self.options.master_dtype(member) != member.dtype

    def fetch_masters(self, members: Sequence[Managed]) -> None:
        """Make the device's weights the masters of `members`. Blocks the host: it is done once, or after
        weights were loaded."""
        for member in members:
            if self.has_master(member):
                master = self.master(member)
                weights = member.shaped(member.flat()).to("cpu")
                if not same_bits(_flat(master.to(member.dtype)), _flat(weights)):
                    device = self.engine.device
                    device.note_write(device.host, _flat(master).view(torch.uint8))
                    master.copy_(weights)

    def master(self, member: Managed) -> Tensor:
        return self.moment(member, "master")

    def state_of(self, member: Managed) -> dict[Any, Any]:
        bucket, place = self._pieces_of[member.index][0]
        moments = {name: self.moment(member, name) for name in bucket.names() if name != "master"}
        return {"step": bucket.steps[place], **moments}

    def set_state(self, member: Managed, state: Mapping[Any, Any]) -> None:
        for bucket, place in self._pieces_of[member.index]:
            bucket.steps[place].fill_(float(state["step"]) if state else 0.0)
        for name in self.state_of(member):
            if name != "step":
                target = self.moment(member, name)
                target.copy_(state[name]) if name in state else target.zero_()
