"""FSDPGPUOptimizerWrapper: FSDP2 keeps its shards on the host (CPUOffloadPolicy), and the optimizer still
steps on the GPU.

    fully_shard(model, offload_policy=CPUOffloadPolicy())
    optimizer = FSDPGPUOptimizerWrapper(torch.optim.AdamW(model.parameters(), lr=1e-4), "cuda")

Weights, gradients and moments come in bucket by bucket, are stepped, and weights and moments go out again:
the streamed place, for weights that live on the host too. One invariant: on the device there are never more
than the three buckets of the ring.

What it relies on in FSDP2 (tests/unit/optim/test_fsdp_step.py holds torch to it): before the backward
returns, the host has waited for the events of the gradients' copies, made on `reduce_scatter_stream`; and
shards are read, on `all_gather_copy_in_stream`, only by forwards that are issued after step(), which returns
when the new weights are on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from offload.engine import OffloadEngine
from offload.engines import default_engine
from offload.optim.classes import is_fused_adam
from offload.optim.parts import HostOptions
from offload.optim.streamed_step import StreamedPart
from offload.params.view import ParamView, count_write, sharded_like

__all__ = ["FSDPGPUOptimizerWrapper"]


class FSDPGPUOptimizerWrapper:
    """Steps `optimizer`'s parameters, which are on the host, on `device`.

    optimizer: torch's Adam or AdamW. Its param_groups stay the ones to change; state that it has is taken
        over.
    device: a CUDA device; "cpu" is the simulated one. engine: whose lanes and host memory are used; None
        takes the process's own of the device.
    bucket_bytes: weights of one bucket. Blocks the host for pinning the moments' memory. Raises ValueError or
        HostBudgetError first.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device | str,
        *,
        engine: OffloadEngine | None = None,
        bucket_bytes: int = 64 << 20,
    ) -> None:
        if not is_fused_adam(type(optimizer)):
            raise ValueError(
                f"optimizer is a {type(optimizer).__name__}, and only torch's Adam and AdamW can be "
                "streamed; use one of them"
            )
        options = HostOptions(bucket_bytes=bucket_bytes)
        self.optimizer = optimizer
        self._closes_engine = engine is None
        where = torch.device(device)
        self._engine = engine or default_engine("sim" if where.type == "cpu" else str(where))
        self._part = StreamedPart(self._engine, options, weights_on_host=True)
        self._members: dict[int, ParamView] = {}  # by the parameter's id
        self._groups: dict[int, dict[str, Any]] = {}  # of each parameter that is in one now, by index
        self._follow_groups()
        self._take_state()

    def _follow_groups(self) -> None:
        """The optimizer's groups are the user's to change: new parameters get memory, values are those of
        now."""
        pairs = [(p, group) for group in self.optimizer.param_groups for p in group["params"]]
        new = [p for p, _ in pairs if id(p) not in self._members]
        made = [ParamView(p, len(self._members) + n, self._engine.device, "") for n, p in enumerate(new)]
        for member in made:
            if member.where.type != "cpu":
                raise ValueError(
                    f"{member} is on {member.where}, not on the host; step it with the optimizer itself, or "
                    "use CPUOffloadPolicy"
                )
        self._part.add(made)
        self._members.update((id(member.parameter), member) for member in made)
        self._groups = {self._members[id(p)].index: group for p, group in pairs}
        self._part.regroup(self._groups)
        for member in self._members.values():
            if (before := member.follow()) is not None:
                self._part.reorder(member, before)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own."""
        self.optimizer.add_param_group(param_group)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def ring_bytes(self) -> int:
        """All that a step needs on the device."""
        return self._part.ring_bytes

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient. Blocks the host until the new weights are
        there."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_state()
        self._follow_groups()
        device = self._engine.device
        flats = {
            member.index: member.flat_gradient(member.parameter.grad)
            for member in self._members.values()
            if member.parameter.grad is not None and member.index in self._groups
        }
        buckets = [bucket for bucket in self._part.buckets if bucket.has_any(flats)]
        for bucket in buckets:
            bucket.set_gradients(flats)
        released = device.record(device.compute)
        try:
            for bucket in buckets:
                bucket.step(self._part.ring, released)
        finally:  # where one breaks off the caller's gradients and weights are in use until then, too
            device.synchronize(device.record(device.d2h))
        for bucket in buckets:
            bucket.drop_gradients()
        count_write([member for member in self._members.values() if member.index in flats])
        # what a scheduler of it looks at, to warn of a wrong order
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's own after steps on the host, with copies of the moments; DTensors where the
        parameters are."""
        self._take_state()
        self._follow_groups()
        for member in self._members.values():
            state = self._part.state_of(member)
            if member.index not in self._groups or float(state["step"]) == 0:
                continue
            moments = {
                name: sharded_like(member.parameter.detach(), value.clone())
                for name, value in state.items()
                if name != "step"
            }
            self.optimizer.state[member.parameter] = {"step": state["step"].to("cpu", copy=True), **moments}
        found: dict[str, Any] = self.optimizer.state_dict()
        self.optimizer.state.clear()  # a second copy of the moments
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's own. Raises its errors before anything is changed here."""
        self.optimizer.load_state_dict(state_dict)
        self._follow_groups()
        for member in self._members.values():
            self._part.set_state(member, {})
        self._take_state()

    def _take_state(self) -> None:
        """State that the optimizer has, as after a load of its own, is the part's from here on."""
        for member in self._members.values():
            if state := self.optimizer.state.get(member.parameter):
                self._part.set_state(member, state)
        self.optimizer.state.clear()

    def close(self) -> None:
        """Give the host memory back; the default engine closes if nobody else uses it."""
        self._part.close()
        if self._closes_engine:
            self._engine.close_unused()
