"""The place of every parameter: where its optimizer state lies, what steps it, and where its master is.

Places follow from the order and the sizes of whole parameters, not of their shards, and from two fractions:
so they are the same on every rank and in every run, and replicas get the same bits. One invariant: a
parameter has exactly one place, and everything that is asked about it is asked of the part that has it.
Nothing is pinned until all parameters that are added together have been accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.engine import OffloadEngine
from offload.errors import OffloadError
from offload.optim.classes import is_elementwise, is_fused_adam, made_for_cpu
from offload.optim.parts import CpuPart, HostOptions, StreamedPart
from offload.optim.ranks import is_split
from offload.optim.resident import ResidentPart
from offload.params.layout import layout_to_json
from offload.params.view import ParamView, local_of

__all__ = ["Place", "Placement", "PlacingOptions", "choose_offloaded", "choose_places", "may_fail_half_way"]


class Place(Enum):
    """Where a parameter's optimizer state is between steps, and who steps it."""

    GPU = "gpu"
    """On the device, stepped there: as usual."""
    CPU = "cpu"
    """On the host, stepped there: gradients and weights go out, weights come back."""
    STREAMED = "streamed"
    """On the host, stepped on the device: state comes in bucket by bucket and goes out again."""
    HOME = "home"
    """The parameter itself is on the host and the device is elsewhere: stepped where it is."""


def choose_offloaded(
    numels: Sequence[int], fraction: float, *, offloaded: int = 0, total: int = 0
) -> list[bool]:
    """Parameters leave in order until `fraction` of all elements is reached, so the last of them may pass it.

    offloaded, total: elements of parameters placed earlier, of which `offloaded` left; they count and are not
    placed again. A parameter without elements leaves unless the fraction is 0.
    Source: the order and the rule of Megatron-core's hybrid optimizer.
    """
    threshold = fraction * (total + sum(numels))
    answers = []
    for numel in numels:
        leaves = fraction > 0 if numel == 0 else offloaded < threshold
        offloaded += numel if leaves else 0
        answers.append(leaves)
    return answers


def choose_places(nbytes: Sequence[int], cpu_share: float) -> list[Place]:
    """CPU or STREAMED for each offloaded parameter, in order, so that after each of them the CPU's share of
    the bytes is as near as can be.

    Both places work through the model from its first layer on, so parts of it that are next to each other
    must be spread over both.
    """
    places, on_cpu, before = [], 0, 0
    for size in nbytes:
        before += size
        goes = abs(on_cpu + size - cpu_share * before) <= abs(on_cpu - cpu_share * before)
        on_cpu += size if goes else 0
        places.append(Place.CPU if goes else Place.STREAMED)
    return places


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacingOptions:
    """What decides about places, checked by the optimizer's constructor."""

    offload_fraction: float
    cpu_share: float | None
    cpu_cls: type[Optimizer]
    gpu_cls: type[Optimizer]
    kwargs: Mapping[str, Any]
    cpu_threads: int | None
    host: HostOptions


class Placement:
    """The parts of one optimizer, and which parameter is in which."""

    def __init__(self, engine: OffloadEngine, options: PlacingOptions) -> None:
        self._engine = engine
        self._options = options
        self.cpu_share = self._checked_share()
        """Of the offloaded elements, what the host steps."""
        self.members: list[ParamView] = []
        """Every parameter that was ever in a group, in the order of coming."""
        self.of: dict[int, ParamView] = {}
        """The same, by the parameter's id."""
        self.groups: dict[int, dict[str, Any]] = {}
        """The param group of each parameter that is in one now, by index."""
        self._place: dict[int, Place] = {}
        self._moved = False  # a parameter was found elsewhere since `_tied` was looked for
        self._tied: list[tuple[ParamView, ParamView]] = []
        self.cpu = CpuPart(engine, options.host, options.cpu_cls, options.kwargs)
        self.streamed = StreamedPart(engine, options.host)
        masters = options.host.masters_in_fp32
        self.on_gpu = ResidentPart(options.gpu_cls, options.kwargs, masters=masters)
        at_home = made_for_cpu(options.cpu_cls, options.kwargs)
        self.at_home = ResidentPart(options.cpu_cls, at_home, masters=masters)

    def __getitem__(self, member: ParamView) -> Place:
        return self._place[member.index]

    def is_hosted(self, member: ParamView) -> bool:
        """Whether the state of a parameter of the device is on the host."""
        return self._place[member.index] in (Place.CPU, Place.STREAMED)

    @property
    def present(self) -> list[ParamView]:
        """The parameters that are in a group now."""
        return [member for member in self.members if member.index in self.groups]

    # -- in --------------------------------------------------------------------------------------------------
    def is_grouped_as(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether the parameters, and the very groups that hold them, are those of the last `regroup`."""
        found = {self.of[id(p)].index: group for group in groups for p in group["params"] if id(p) in self.of}
        count = sum(len(group["params"]) for group in groups)
        return count == len(self.groups) == len(found) and all(
            self.groups.get(index) is group for index, group in found.items()
        )

    def regroup(self, groups: Sequence[dict[str, Any]], names: Mapping[int, str]) -> list[ParamView]:
        """Place the parameters that are new after those there are, and follow changes of groups; the new ones
        that are offloaded. names: by the parameter's id, for messages.

        A parameter that is in no group any more keeps its state and is not stepped. Blocks the host for
        pinning.
        Raises ValueError or HostBudgetError.
        """
        members = self._accepted(groups, names)
        movable = [member for member in members if self._place[member.index] is Place.GPU]
        before = [member for member in self.members if self._place[member.index] is not Place.HOME]
        leaves = choose_offloaded(
            [member.whole_numel for member in movable],
            self._options.offload_fraction,
            offloaded=sum(member.whole_numel for member in before if self.is_hosted(member)),
            total=sum(member.whole_numel for member in before),
        )
        offloaded = [member for member, goes in zip(movable, leaves, strict=True) if goes]
        self._refuse_shards(offloaded)
        sizes = [member.whole_numel * member.dtype.itemsize for member in offloaded]
        for member, place in zip(offloaded, choose_places(sizes, self.cpu_share), strict=True):
            self._place[member.index] = place if member.numel else Place.CPU
        parts: dict[Place, CpuPart | StreamedPart | ResidentPart] = {
            Place.CPU: self.cpu,
            Place.STREAMED: self.streamed,
            Place.GPU: self.on_gpu,
            Place.HOME: self.at_home,
        }
        for place, part in parts.items():
            part.add([member for member in members if self._place[member.index] is place])
        self.members.extend(members)
        self.of.update((id(member.parameter), member) for member in members)
        with self._engine.lock:
            self._engine.externals.register_parameters([member.parameter for member in members])
        self.groups = {self.of[id(p)].index: group for group in groups for p in group["params"]}
        self._moved = True
        for part in parts.values():
            part.regroup(self.groups)
        return offloaded

    def refresh(self) -> None:
        """Take over what the user's groups say now."""
        for part in (self.cpu, self.streamed, self.on_gpu, self.at_home):
            part.refresh()

    def changed_values(self) -> bool:
        """Whether the user's groups say something else to what is hosted than at the last `refresh`."""
        return self.cpu.changed_values() or self.streamed.changed_values()

    def _accepted(self, groups: Sequence[dict[str, Any]], names: Mapping[int, str]) -> list[ParamView]:
        device = self._engine.device
        members: list[ParamView] = []
        for parameter in (p for group in groups for p in group["params"] if id(p) not in self.of):
            index = len(self.members) + len(members)
            member = ParamView(parameter, index, device, names.get(id(parameter), ""))
            here = device.owns(local_of(parameter).detach())
            if not here and parameter.device.type != "cpu":
                raise ValueError(
                    f"{member} is on {parameter.device}, and the optimizer's device is {device.name}; "
                    "move it, or build one a device"
                )
            if not parameter.is_floating_point():
                raise ValueError(f"{member} is not of a floating-point type; leave it out, as a buffer")
            self._place[index] = Place.GPU if here else Place.HOME
            members.append(member)
        return members

    def _refuse_shards(self, offloaded: Sequence[ParamView]) -> None:
        cls = self._options.cpu_cls
        split = [] if is_elementwise(cls) else [member for member in offloaded if is_split(member.parameter)]
        if split:
            raise ValueError(
                f"{split[0]} is one rank's shard, and {cls.__name__} may look at whole parameters; give an "
                "elementwise optimizer such as torch.optim.AdamW, or offload_fraction=0, which steps the "
                "DTensor itself"
            )

    def _checked_share(self) -> float:
        """What can be streamed is streamed: W4 alone took 236.8 ms (1.08 of the bound) at share 0, and 282.9
        to 304.6 ms at shares of 0.4 to 0.6 (docs/log.md)."""
        options = self._options
        plain = not any(options.kwargs.get(key) for key in ("foreach", "differentiable"))
        if not (plain and is_fused_adam(options.cpu_cls) and options.gpu_cls is options.cpu_cls):
            if options.cpu_share not in (None, 1.0) and options.offload_fraction:
                raise ValueError(
                    f"cpu_share is {options.cpu_share}, but only torch's Adam and AdamW, the same on both "
                    "sides and not foreach, can be streamed; use one of them, or cpu_share=1"
                )
            return 1.0
        return 0.0 if options.cpu_share is None else options.cpu_share

    # -- about one parameter ---------------------------------------------------------------------------------
    def follow(self, member: ParamView, settle: Any) -> None:
        """Find the parameter's memory before a step. settle: ends every copy and step; called only if the
        elements lie in another order than before, because their state is then reordered too."""
        address = member.address
        before = member.follow()
        self._moved |= member.address != address
        if before is not None and self.is_hosted(member):
            settle()
            (self.cpu if self[member] is Place.CPU else self.streamed).reorder(member, before)

    def refuse_tied(self) -> None:
        """Raises OffloadError if two parameters share memory, and the CPU steps one: from a copy of the
        weights, made before the other's step, which would be lost."""
        if self._moved:
            self._tied = []
            reaching: list[ParamView] = []  # those whose memory ends behind the address looked at
            for member in sorted((m for m in self.present if m.numel and m.address), key=lambda m: m.address):
                reaching = [other for other in reaching if member.address < other.address + other.nbytes]
                self._tied += [
                    (other, member) for other in reaching if Place.CPU in (self[other], self[member])
                ]
                reaching.append(member)
            self._moved = False
        for first, second in self._tied:
            if first.parameter.requires_grad and second.parameter.requires_grad:
                raise OffloadError(
                    f"{first} and {second} share memory, and the CPU would step each from the same weights; "
                    "use one parameter for both (a.weight = b.weight), cpu_share=0, or offload_fraction=0"
                )

    def state_of(self, member: ParamView) -> Mapping[Any, Any]:
        """What its optimizer keeps. Of hosted ones views of host memory, which nothing may be writing."""
        if self[member] is Place.CPU:
            return self.cpu.state_of(member)
        if self[member] is Place.STREAMED:
            return self.streamed.state_of(member)
        resident = self._resident(member)
        assert resident.optimizer is not None
        return cast(Mapping[Any, Any], resident.optimizer.state.get(resident.inner[member.index], {}))

    def master_of(self, member: ParamView) -> Tensor:
        """What the optimizer steps: the float32 master, or the weights themselves. Masters follow the weights
        first. Blocks the host; nothing may be in flight."""
        if self.is_hosted(member):
            part = self.cpu if self[member] is Place.CPU else self.streamed
            if part is self.streamed and not part.has_master(member):
                return member.parameter
            part.refresh_master(member)
            return part.master(member)
        self._resident(member).refresh_master(member)
        return self._resident(member).inner[member.index]

    def reload_master(self, member: ParamView) -> None:
        """Make the whole master the weights, unless rounding it gives all of them. Blocks the host; nothing
        may be in flight."""
        hosted = self.cpu if self[member] is Place.CPU else self.streamed
        master: Tensor | None = None
        if self.is_hosted(member):
            master = hosted.master(member) if hosted.has_master(member) else None
        elif self._resident(member).has_master(member):
            master = local_of(self._resident(member).inner[member.index])
        if master is not None:
            weights = local_of(member.parameter).detach().to(master.device)
            if not torch.equal(master.to(weights.dtype).view(torch.int16), weights.view(torch.int16)):
                master.copy_(weights)

    def load(self, member: ParamView, state: Mapping[Any, Any], master: Tensor | None) -> None:
        """Replace state and master. A master counts at the next step where rounding it gives the weight.
        Nothing may be in flight."""
        if self.is_hosted(member):
            part = self.cpu if self[member] is Place.CPU else self.streamed
            shards = {key: local_of(v) if isinstance(v, Tensor) else v for key, v in state.items()}
            part.set_state(member, shards)
            if master is not None and part.has_master(member):
                part.master(member).copy_(local_of(master))
            return
        resident = self._resident(member)
        resident.load(member, state)
        if master is not None and resident.has_master(member):
            local_of(resident.inner[member.index]).copy_(local_of(master))

    def spread_count(self, member: ParamView) -> None:
        """The count of the parameter's first piece may have been written: it is that of all pieces."""
        part = self.cpu if self[member] is Place.CPU else self.streamed
        part.spread_count(member)

    def _resident(self, member: ParamView) -> ResidentPart:
        return self.on_gpu if self[member] is Place.GPU else self.at_home

    # -- about all of them -----------------------------------------------------------------------------------
    def step_resident(self, gradients: Mapping[int, Tensor]) -> None:
        """Step what is not hosted, on the current lane."""
        self.on_gpu.step(gradients)
        self.at_home.step(gradients)

    def sub_optimizers_on_host(self) -> list[Optimizer]:
        return self.cpu.optimizers + ([self.at_home.optimizer] if self.at_home.optimizer is not None else [])

    def describe(self) -> dict[str, Any]:
        """Where everything is: what a continuation with the same bits has to have again. Numbers and strings
        only."""
        parts = (self.cpu, self.streamed)
        return {
            "version": 1,
            "offload_fraction": self._options.offload_fraction,
            "cpu_share": self.cpu_share,
            "bucket_bytes": self._options.host.bucket_bytes,
            "places": [self[member].value for member in self.members],
            "layout": [layout_to_json([section.layout for section in part.sections]) for part in parts],
        }

    def close(self) -> None:
        """Give the host memory back. Nothing may be in flight."""
        self.cpu.close()
        self.streamed.close()


def may_fail_half_way(cls: type[Optimizer], kwargs: Mapping[str, Any]) -> bool:
    """Whether a step may raise after it has written: any but torch's fused kernels, which check all they are
    given first."""
    known = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    return not (cls in known and made_for_cpu(cls, kwargs).get("fused"))
