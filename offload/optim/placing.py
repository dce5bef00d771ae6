"""The place of every parameter: where its optimizer state lies, what steps it, and where its master is.

Places follow from the order and the sizes of whole parameters, not of their shards, and from two fractions:
so they are the same on every rank and in every run, and replicas get the same bits. One invariant: a
parameter has exactly one place, and everything that is asked about it is asked of the part that has it.
Nothing is pinned until all parameters that are added together have been accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from offload.config import check_fraction
from offload.engine import OffloadEngine
from offload.errors import OffloadError
from offload.optim.classes import ELEMENTWISE, is_fused_adam, kernel_named, steps_each_alone, with_kernel
from offload.optim.cpu_step import CpuPart
from offload.optim.parts import HostOptions, UserGroup, adopted_groups, is_split
from offload.optim.resident import ResidentPart
from offload.optim.streamed_step import StreamedPart
from offload.params.sections import layout_to_json
from offload.params.view import ParamView, local_of, trains
from offload.params.watched import home_of


class Place(Enum):
    """Where a parameter's optimizer state is between steps, and who steps it."""

    GPU = "gpu"
    """On the device, stepped there: as usual."""
    CPU = "cpu"
    """On the host, stepped there: gradients and weights go out, weights come back."""
    STREAMED = "streamed"
    """On the host, stepped on the device: state comes in bucket by bucket and goes out again."""
    FROZEN = "frozen"
    """Nowhere: the parameter has not trained yet."""
    HOST_RESIDENT = "home"
    """The parameter itself is on the host and the device is elsewhere: stepped where it is. The value is what
    state dicts of version 1 have."""


def choose_offloaded(
    numels: Sequence[int], fraction: float, *, offloaded: int = 0, total: int = 0
) -> list[bool]:
    """Parameters leave in order until `fraction` of all elements is reached, so the last of them may pass it.
    offloaded, total: elements of parameters placed earlier, of which `offloaded` left; they count and are not
    placed again. A parameter without elements leaves unless the fraction is 0. Source: the order and the rule
    of Megatron-core's hybrid optimizer."""
    threshold = fraction * (total + sum(numels))
    answers = []
    for numel in numels:
        leaves = fraction > 0 if numel == 0 else offloaded < threshold
        offloaded += numel if leaves else 0
        answers.append(leaves)
    return answers


def choose_places(nbytes: Sequence[int], cpu_share: float) -> list[Place]:
    """CPU or STREAMED for each offloaded parameter, in order, so that after each of them the CPU's share of
    the bytes is as near as can be. Both places work through the model from its first layer on, so parts of it
    that are next to each other must be spread over both."""
    places, on_cpu, before = [], 0, 0
    for size in nbytes:
        before += size
        goes = abs(on_cpu + size - cpu_share * before) <= abs(on_cpu - cpu_share * before)
        on_cpu += size if goes else 0
        places.append(Place.CPU if goes else Place.STREAMED)
    return places


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacingOptions:
    """Options that decide about places. Raises ValueError for what cannot be."""

    offload_fraction: float
    cpu_share: float | None
    cpu_cls: type[Optimizer]
    gpu_cls: type[Optimizer]
    kwargs: Mapping[str, Any]
    cpu_threads: int | None
    host: HostOptions

    def __post_init__(self) -> None:
        check_fraction("offload_fraction", self.offload_fraction)
        if self.cpu_share is not None:
            check_fraction("cpu_share", self.cpu_share)
        threads = self.cpu_threads
        if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
            raise ValueError(
                f"cpu_threads is {threads!r}, must be a whole number of threads, 1 or more, or None to "
                "choose it"
            )
        unfit = {
            "capturable": "capturable=True is for an optimizer that lives on the device",
            "differentiable": "differentiable=True keeps the step in autograd's graph, and a step on the "
            "host leaves it",
        }
        for name, why in unfit.items():
            if self.kwargs.get(name) and self.offload_fraction > 0:
                raise ValueError(f"{why}; leave it out, or set offload_fraction=0")

    def arguments_of(self, cls: type[Optimizer]) -> dict[str, Any]:
        """Arguments that the class is made with, in each part: one kernel steps all once some state leaves
        the device."""
        return with_kernel(cls, self.kwargs) if self.offload_fraction else dict(self.kwargs)

    def refuse_kernel(self, group: Mapping[str, Any]) -> None:
        """Raises ValueError for a group of a class of torch that names another kernel than all are stepped
        with once some state leaves the device."""
        named, cls = kernel_named(group), self.cpu_cls
        ours = kernel_named(self.arguments_of(cls))
        if self.offload_fraction and named not in (None, ours) and steps_each_alone(cls):
            raise ValueError(
                f"a param group asks for {cls.__name__}'s {named} kernel, and all groups are stepped with "
                f"the {ours or 'default'} one: give fused= and foreach= to the constructor, for all"
            )


class Placement:
    """The parts of one optimizer, and which parameter is in which."""

    def __init__(self, engine: OffloadEngine, options: PlacingOptions) -> None:
        self._engine = engine
        self._options = options
        self.cpu_share = self._checked_share()
        """Share of the offloaded elements that the host steps."""
        self.members: list[ParamView] = []
        """Every parameter that was in a group at the last `regroup`, in the order of the groups."""
        self.of: dict[int, ParamView] = {}
        """The members, by the parameter's id."""
        self.user_groups: list[UserGroup] = []
        classes = options.cpu_cls, options.gpu_cls
        self._waits = all(steps_each_alone(cls) and cls is not Adagrad for cls in classes)
        self.loaded: set[int] = set()
        """Parameters of which state was loaded, by id."""
        self._next = 0  # index of the next parameter
        self.places: dict[int, Place] = {}
        """Place of each parameter, by index."""
        self.when_left: Callable[[ParamView], None] = lambda member: None
        """Called with a parameter that is in no group any more, before its state's memory goes."""
        self._moved = False  # a parameter was found elsewhere since `_sharing_memory` was looked for
        self._sharing_memory: list[tuple[ParamView, ParamView]] = []
        of_cpu, of_gpu = ((cls, options.arguments_of(cls)) for cls in classes)
        self.cpu = CpuPart(engine, options.host, *of_cpu)
        self.streamed = StreamedPart(engine, options.host)
        one = options.cpu_cls is options.gpu_cls and not options.offload_fraction
        self.on_gpu = ResidentPart(engine, *of_gpu, options.host, on_host=False)
        self.on_host = self.on_gpu if one else ResidentPart(engine, *of_cpu, options.host, on_host=True)
        self._parts: dict[Place, CpuPart | StreamedPart | ResidentPart] = {
            Place.CPU: self.cpu if options.host.in_buckets else self.on_host,
            Place.STREAMED: self.streamed,
            Place.GPU: self.on_gpu,
            Place.HOST_RESIDENT: self.on_host,
        }

    def __getitem__(self, member: ParamView) -> Place:
        return self.places[member.index]

    def part_of(self, member: ParamView) -> CpuPart | StreamedPart | ResidentPart:
        return self._parts[self.places[member.index]]

    def is_offloaded(self, member: ParamView) -> bool:
        """Return True if the state of a parameter of the device is on the host."""
        return self.places[member.index] in (Place.CPU, Place.STREAMED)

    def is_grouped_as(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Return True if the very groups, and the parameters in them, are those of the last `regroup`, in the
        same order and with the same moments."""
        return len(groups) == len(self.user_groups) and all(
            known.values is group and self._indices(group) == known.indices and not known.needs_moments()
            for known, group in zip(self.user_groups, groups, strict=True)
        )

    def _indices(self, group: Mapping[str, Any]) -> list[int]:
        """Indices of the group's parameters that have a place, or are to get one: -1."""
        return [self.of[id(p)].index if id(p) in self.of else -1 for p in group["params"] if self._counts(p)]

    def regroup(self, groups: list[dict[str, Any]], names: Mapping[int, str]) -> list[ParamView]:
        """Place the parameters that are new after those there are, and follow changes of groups; the new ones
        that are offloaded. names: by the parameter's id, for messages. A parameter that is in no group any
        more is let go; its entry of state stays the user's. Blocks the host for pinning. Raises ValueError or
        HostBudgetError."""
        members = self._accepted(groups, names)
        movable = [member for member in members if self.places[member.index] is Place.GPU]
        before = [member for member in self.members if self.places[member.index] is not Place.HOST_RESIDENT]
        leaves = choose_offloaded(
            [member.whole_numel for member in movable],
            self._options.offload_fraction,
            offloaded=sum(member.whole_numel for member in before if self.is_offloaded(member)),
            total=sum(member.whole_numel for member in before),
        )
        offloaded = [member for member, goes in zip(movable, leaves, strict=True) if goes]
        cls = self._options.cpu_cls
        split = [] if cls in ELEMENTWISE else [member for member in offloaded if is_split(member.parameter)]
        if split:
            raise ValueError(
                f"{split[0]} is one rank's shard, and {cls.__name__} may look at whole parameters; give an "
                "elementwise optimizer such as torch.optim.AdamW, or offload_fraction=0, which steps the "
                "DTensor itself"
            )
        sizes = [member.whole_numel * member.dtype.itemsize for member in offloaded]
        for member, place in zip(offloaded, choose_places(sizes, self.cpu_share), strict=True):
            self.places[member.index] = place if member.numel else Place.CPU
        for member in members:  # of a streamed weight the class would be given a copy
            if member.home is not None and self.part_of(member) is self.on_host is not self.on_gpu:
                raise ValueError(
                    f"{member} is streamed by apply(weights=...), and {cls.__name__} steps copies of whole "
                    "parameters here: give a class of torch.optim, atomic_step=False, or offload_fraction=0, "
                    "or apply without weights="
                )
        for part in self.parts:
            part.add([member for member in members if self.part_of(member) is part])
        self._next = members[-1].index + 1 if members else self._next
        self.of.update((id(member.parameter), member) for member in members)
        with self._engine.lock:
            stay = [p for group in groups for p in group["params"] if home_of(p) is None]
            self._engine.externals.register_parameters(stay)
        self._moved = True
        self.user_groups = self._grouped(groups)
        by_index = {member.index: member for member in (*self.members, *members)}
        self.members = [by_index.pop(i) for group in self.user_groups for i in group.indices if i in by_index]
        for member in by_index.values():  # they have left; the last of a section frees memory
            self.when_left(member)
            self.part_of(member).forget(member)
            del self.of[id(member.parameter)], self.places[member.index]
            member.let_go()
        for part in self.parts:
            part.regroup(self.user_groups)
        self.adopt(groups)
        return offloaded

    def _grouped(self, groups: Sequence[dict[str, Any]]) -> list[UserGroup]:
        """The user's groups; frozen parameters are in none of ours."""
        return [UserGroup(group, self._indices(group)) for group in groups]

    def adopt(self, groups: list[dict[str, Any]]) -> None:
        """Have in the user's groups, in place, those that a class which steps all has made itself."""
        for optimizer, pairs in self.whole.inside() if self.whole is not None else ():
            parameters = {id(tensor): member.parameter for member, tensor in pairs}
            groups[:] = adopted_groups(optimizer, groups, parameters)
            self.user_groups = self._grouped(groups)

    @property
    def parts(self) -> list[CpuPart | StreamedPart | ResidentPart]:
        return list(dict.fromkeys(self._parts.values()))

    @property
    def resident(self) -> list[ResidentPart]:
        """The parts that step whole tensors; first the one whose step may be undone."""
        return [part for part in dict.fromkeys((self.on_host, self.on_gpu)) if part.optimizer is not None]

    def refresh(self) -> None:
        """Take over what the user's groups say now, for the step to come."""
        for group in self.user_groups:
            group.refresh()

    @property
    def sole(self) -> Optimizer | None:
        """The one optimizer of a class that is not torch's."""
        return next((part.optimizer for part in self.resident if part.may_write_all), None)

    @property
    def whole(self) -> ResidentPart | None:
        """The part that has all parameters, of a class that is not torch's: it is called as it is alone."""
        return next((part for part in self.resident if self._options.host.flat is not None), None)

    def inside(self) -> list[tuple[Optimizer, list[tuple[ParamView, Tensor]]]]:
        """The optimizers whose classes keep the state themselves, and what each steps of which parameter."""
        return [found for part in self.parts for found in part.inside()]

    def _counts(self, parameter: Tensor) -> bool:
        """Predicate: the parameter has a place. One that is frozen gets it once it trains, has a gradient or
        state is loaded for it; but Adagrad makes state of all as it is made, and others may look at all."""
        found = id(parameter) in self.of or id(parameter) in self.loaded
        return found or not self._waits or trains(parameter)

    def _accepted(self, groups: Sequence[dict[str, Any]], names: Mapping[int, str]) -> list[ParamView]:
        device = self._engine.device
        members: list[ParamView] = []
        new = [p for group in groups for p in group["params"] if id(p) not in self.of]
        for index, parameter in enumerate(new, self._next):  # frozen ones are counted, as the user does
            if not self._counts(parameter):
                continue
            member = ParamView(parameter, index, device, names.get(id(parameter), ""))
            here = member.home is not None or device.owns(local_of(parameter).detach())
            if not here and parameter.device.type != "cpu":
                raise ValueError(
                    f"{member} is on {parameter.device}, and the optimizer's device is {device.name}; "
                    "move it, or build one a device"
                )
            if not parameter.is_floating_point():
                raise ValueError(
                    f"{member} is not of a floating-point type; leave it out, as a buffer, or use "
                    "offload_fraction=0"
                )
            self.places[index] = Place.GPU if here else Place.HOST_RESIDENT
            members.append(member)
        return members

    def _checked_share(self) -> float:
        """Check cpu_share. None streams all that can be: W4 alone took 236.8 ms (1.08 of the bound) at share
        0, and 282.9 to 304.6 ms at shares of 0.4 to 0.6 (docs/log.md)."""
        options = self._options
        plain = with_kernel(options.cpu_cls, options.kwargs).get("fused")
        if not (plain and is_fused_adam(options.cpu_cls) and options.gpu_cls is options.cpu_cls):
            if options.cpu_share not in (None, 1.0) and options.offload_fraction:
                raise ValueError(
                    f"cpu_share is {options.cpu_share}, but only torch's Adam and AdamW, the same on both "
                    "sides and with its fused kernel, can be streamed; use one of them, or cpu_share=1"
                )
            return 1.0
        return float(options.cpu_share or 0.0)

    def follow(self, member: ParamView, finish: Callable[[], None]) -> bool:
        """Find the parameter's memory before a step; whether the elements lie in another order than before,
        and their state with them. finish: ends every copy and step; called only then."""
        address = member.address
        before = member.follow()
        if member.address != address:
            self._moved = True
            if member.home is not None:
                finish()
                self.part_of(member).moved(member)
        if before is not None:
            finish()
            self.part_of(member).reorder(member, before)
        return before is not None

    def refuse_shared_memory(self) -> None:
        """Raises OffloadError if two parameters share memory, and the CPU steps one: from a copy of the
        weights, made before the other's step, which would be lost."""
        if self._moved:
            self._sharing_memory = []
            reaching: list[ParamView] = []  # those whose memory ends behind the address looked at
            for member in sorted((m for m in self.members if m.numel and m.address), key=lambda m: m.address):
                reaching = [other for other in reaching if member.address < other.address + other.nbytes]
                self._sharing_memory += [
                    (other, member) for other in reaching if Place.CPU in (self[other], self[member])
                ]
                reaching.append(member)
            self._moved = False
        for first, second in self._sharing_memory:
            if first.parameter.requires_grad and second.parameter.requires_grad:
                raise OffloadError(
                    f"{first} and {second} share memory, and the CPU would step each from the same weights; "
                    "use one parameter for both (a.weight = b.weight), cpu_share=0, or offload_fraction=0"
                )

    def master_of(self, member: ParamView) -> Tensor:
        """Tensor that the optimizer steps: the float32 master, or the weights themselves. Masters follow the
        weights first. Blocks the host; nothing may be in flight."""
        part = self.part_of(member)
        part.refresh_master(member)
        return part.master(member)

    def reload_master(self, member: ParamView) -> None:
        """Make the whole master the weights, unless rounding it gives all of them. Blocks the host; nothing
        may be in flight."""
        if self.part_of(member).has_master(member):
            master = local_of(self.part_of(member).master(member))
            weights = local_of(member.parameter).detach().to(master.device)
            if not torch.equal(master.to(weights.dtype).view(torch.int16), weights.view(torch.int16)):
                master.copy_(weights)

    def note_stepped(self, indices: Collection[int]) -> None:
        """These parameters have been stepped, so they have state."""
        self.cpu.note_stepped(indices)
        self.streamed.note_stepped(indices)

    @property
    def host_bytes(self) -> int:
        """Host memory of weights, gradients, masters and moments."""
        return sum(part.host_bytes for part in (self.cpu, self.streamed, self.on_host.memory))

    def describe(self) -> dict[str, Any]:
        """Where everything is: what a continuation with the same bits has to have again. Numbers and strings
        only."""
        parts = (self.cpu, self.streamed)
        return {
            "version": 1,
            "offload_fraction": float(self._options.offload_fraction),
            "cpu_share": self.cpu_share,
            "bucket_bytes": self._options.host.bucket_bytes,
            "places": [self[member].value for member in self.members],
            "layout": [layout_to_json([section.layout for section in part.sections]) for part in parts],
        }

    def close(self) -> None:
        """Give the host memory back. Nothing may be in flight."""
        for part in (self.cpu, self.streamed, self.on_host.memory):
            part.close()
