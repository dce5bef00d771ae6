"""Every parameter in its place: who keeps its state, who steps it, and where its master is found.

Places follow from the sizes of whole parameters, not of their shards: so they are the same on every rank, and
replicas get the same bits. One invariant: a parameter has exactly one place, and everything that is asked
about it is asked of the part that has it. Nothing has moved and nothing is pinned until all parameters that
are added together have been accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.engine import OffloadEngine
from offload.optim.classes import is_elementwise, is_fused_adam, made_for_cpu
from offload.optim.parameters import Managed, local_of
from offload.optim.parts import CpuPart, GroupCopies, HostOptions, StreamedPart, values_of
from offload.optim.places import Place, choose_offloaded, choose_places
from offload.optim.ranks import is_split
from offload.optim.resident import ResidentPart
from offload.optim.state import layouts_of, load_resident

__all__ = ["Placement", "PlacingOptions", "may_fail_half_way"]


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
        self.members: list[Managed] = []
        self._place: dict[int, Place] = {}
        self.copies = GroupCopies()
        self.cpu = CpuPart(engine, options.host, self.copies, options.cpu_cls, options.kwargs)
        self.streamed = StreamedPart(engine, options.host, self.copies)
        masters = options.host.masters_in_fp32
        self.on_gpu = ResidentPart(options.gpu_cls, options.kwargs, masters=masters)
        self.at_home = ResidentPart(
            options.cpu_cls, made_for_cpu(options.cpu_cls, options.kwargs), masters=masters
        )

    def __getitem__(self, member: Managed) -> Place:
        return self._place[member.index]

    def is_hosted(self, member: Managed) -> bool:
        """Whether the state of a parameter of the device is on the host."""
        return self._place[member.index] in (Place.CPU, Place.STREAMED)

    # -- in --------------------------------------------------------------------------------------------------
    def add(self, groups: Sequence[dict[str, Any]], names: Mapping[int, str]) -> list[Managed]:
        """Place the parameters of param groups after those there are; the offloaded ones. names: by the
        parameter's id, for messages.

        Blocks the host for pinning and for fetching masters. Raises ValueError or HostBudgetError.
        """
        group_of, members = self._accepted(groups, names)
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
        self.members.extend(members)
        with self._engine.lock:
            self._engine.externals.register_parameters([member.parameter for member in members])
        chosen = {
            place: [member for member in members if self._place[member.index] is place] for place in Place
        }
        self.cpu.add(chosen[Place.CPU], group_of)
        self.streamed.add(chosen[Place.STREAMED], group_of)
        for part, place in ((self.on_gpu, Place.GPU), (self.at_home, Place.HOME)):
            for group in groups:
                mine = [member for member in chosen[place] if group_of[member.index] is group]
                if mine:
                    self.copies.add(part.add(mine, values_of(group)), group)
        return offloaded

    def _accepted(
        self, groups: Sequence[dict[str, Any]], names: Mapping[int, str]
    ) -> tuple[dict[int, dict[str, Any]], list[Managed]]:
        device = self._engine.device
        group_of: dict[int, dict[str, Any]] = {}
        members: list[Managed] = []
        for group in groups:
            for parameter in group["params"]:
                index = len(self.members) + len(members)
                member = Managed(parameter, index, device, names.get(id(parameter), ""))
                here = device.owns(local_of(parameter).detach())
                if not here and parameter.device.type != "cpu":
                    raise ValueError(
                        f"{member} is on {parameter.device}, and the optimizer's device is {device.name}; "
                        "move it, or build one a device"
                    )
                if not parameter.is_floating_point():
                    raise ValueError(f"{member} is not of a floating-point type; leave it out, as a buffer")
                self._place[index] = Place.GPU if here else Place.HOME
                group_of[index] = group
                members.append(member)
        return group_of, members

    def _refuse_shards(self, offloaded: Sequence[Managed]) -> None:
        cls = self._options.cpu_cls
        split = [] if is_elementwise(cls) else [member for member in offloaded if is_split(member.parameter)]
        if split:
            raise ValueError(
                f"{split[0]} is one rank's shard, and {cls.__name__} may look at whole parameters; give an "
                "elementwise optimizer such as "
                "torch.optim.AdamW, or offload_fraction=0, which steps the DTensor itself"
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
                    "sides and not foreach, can be "
                    "streamed; use one of them, or cpu_share=1"
                )
            return 1.0
        return 0.0 if options.cpu_share is None else options.cpu_share

    # -- about one parameter ---------------------------------------------------------------------------------
    def state_of(self, member: Managed) -> Mapping[Any, Any]:
        """What its optimizer keeps. Of hosted ones views of host memory, which nothing may be writing."""
        if self[member] is Place.CPU:
            return self.cpu.state_of(member)
        if self[member] is Place.STREAMED:
            return self.streamed.state_of(member)
        resident = self._resident(member)
        assert resident.optimizer is not None
        return cast(Mapping[Any, Any], resident.optimizer.state.get(resident.inner[member.index], {}))

    def master_of(self, member: Managed) -> Tensor:
        """What the optimizer steps: the float32 master, or the weights themselves."""
        if self[member] is Place.CPU:
            return self.cpu.master(member)
        if self[member] is Place.STREAMED:
            return self.streamed.master(member) if self.streamed.has_master(member) else member.parameter
        return self._resident(member).inner[member.index]

    def load(self, member: Managed, state: Mapping[Any, Any], master: Tensor | None) -> None:
        """Replace state and master. Without a master, or a place for one, the weights count at the next step.
        Nothing may be in flight."""
        if self.is_hosted(member):
            part = self.cpu if self[member] is Place.CPU else self.streamed
            part.set_state(
                member,
                {
                    key: local_of(value) if isinstance(value, Tensor) else value
                    for key, value in state.items()
                },
            )
        else:
            resident = self._resident(member)
            assert resident.optimizer is not None
            load_resident(resident.optimizer, resident.inner[member.index], state)
        target = self.master_of(member)
        if master is None or target.dtype == member.dtype:
            member.version = -1
        else:
            local_of(target).copy_(local_of(master))
            member.version = member.parameter._version

    def _resident(self, member: Managed) -> ResidentPart:
        return self.on_gpu if self[member] is Place.GPU else self.at_home

    # -- about all of them -----------------------------------------------------------------------------------
    def step_resident(self, gradients: Mapping[int, Tensor], factor: Tensor | None) -> None:
        """Step what is not hosted, on the current lane."""
        self.on_gpu.step(gradients, factor)
        self.at_home.step(gradients, factor)

    def refresh_changed(self, settle: Callable[[], None]) -> bool:
        """Masters follow weights that somebody else wrote: a loaded state dict, an initialisation. Whether
        there were any.

        settle: brings everything to rest; called, and the host blocked, only where there are any. What has
            landed is lost then: weights arrive in the gradients' slots.
        """
        changed = [member for member in self.members if member.changed_outside()]
        if not changed:
            return False
        settle()
        on_cpu = [member for member in changed if self[member] is Place.CPU]
        if on_cpu:
            self.cpu.fetch_masters(on_cpu)
        self.streamed.fetch_masters([member for member in changed if self[member] is Place.STREAMED])
        for member in changed:
            if not self.is_hosted(member):
                self._resident(member).refresh(member)
            member.version = member.parameter._version
        return True

    def sub_optimizers_on_host(self) -> list[Optimizer]:
        return self.cpu.optimizers + ([self.at_home.optimizer] if self.at_home.optimizer is not None else [])

    def describe(self) -> dict[str, Any]:
        """Where everything is: what a continuation with the same bits has to have again. Numbers and strings
        only."""
        return {
            "version": 1,
            "offload_fraction": self._options.offload_fraction,
            "cpu_share": self.cpu_share,
            "bucket_bytes": self._options.host.bucket_bytes,
            "places": [self[member].value for member in self.members],
            "layout": layouts_of(self.cpu, self.streamed),
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
