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

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.engine import OffloadEngine, default_engine
from offload.errors import OffloadError
from offload.optim.classes import is_fused_adam
from offload.optim.parts import HostOptions, UserGroup
from offload.optim.state import UserState
from offload.optim.streamed_step import StreamedPart
from offload.params.view import ParamView, count_write, trains


class FSDPGPUOptimizerWrapper(Optimizer):
    """Steps `optimizer`'s parameters, which are on the host, on `device`.

    optimizer: torch's Adam or AdamW. Its param_groups stay the ones to change, its step hooks run, and its
        `state` is the one home of state: the moments in it are the pinned memory that steps read and write.
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
        self.__setstate__({"defaults": optimizer.defaults})  # what torch's constructor makes besides groups
        self._closes_engine = engine is None
        where = torch.device(device)
        self.engine = engine or default_engine("sim" if where.type == "cpu" else str(where))
        self._part = StreamedPart(self.engine, options, weights_on_host=True)
        self._placed = _Placed(self._part)
        self._state = UserState(self._placed, with_masters=False)
        self._next = 0  # index of the next parameter
        self._closed = False
        self._follow()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds the group to the optimizer."""
        self.optimizer.add_param_group(param_group)

    @property
    def ring_bytes(self) -> int:
        """All that a step needs on the device."""
        return self._part.ring_bytes

    def drop_ring(self) -> None:
        """Release the device memory for steps, between steps (`HybridDeviceOptimizer.drop_ring`)."""
        self._part.drop_ring()

    def make_ring(self) -> None:
        self._part.make_ring()

    # -- following the optimizer -----------------------------------------------------------------------------
    def _follow(self) -> None:
        """The optimizer's groups and state are the user's to change: new parameters get memory, those that
        left without state lose theirs, and values are those of now. Raises OffloadError once closed."""
        if self._closed:
            raise OffloadError("the wrapper was closed; step the optimizer itself, which has the state")
        known = {id(member.parameter): member for member in self._placed.members}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        new = enumerate((p for p in parameters if id(p) not in known), self._next)
        placed = ((at, p) for at, p in new if trains(p) or self.optimizer.state.get(p))
        made = [ParamView(p, at, self.engine.device, "") for at, p in placed]
        for member in made:
            if member.where.type != "cpu":
                raise ValueError(
                    f"{member} is on {member.where}, not on the host; step it with the optimizer itself, or "
                    "use CPUOffloadPolicy"
                )
        self._part.add(made)
        self._next = made[-1].index + 1 if made else self._next
        known.update((id(member.parameter), member) for member in made)
        groups = [
            UserGroup(group, [known[id(p)].index for p in group["params"] if id(p) in known])
            for group in self.optimizer.param_groups
        ]
        self._placed.members = [known.pop(id(p)) for p in parameters if id(p) in known]
        for member in known.values():
            self._state.left(member)
            self._part.forget(member)
            member.let_go()
        self._part.regroup(groups)
        self._state.all = self.optimizer.state
        self._state.is_looked_at = True  # it is the optimizer's own
        self._state.take_over()
        for member in self._placed.members:
            if (before := member.follow()) is not None:
                self._part.reorder(member, before)
                self._state.reordered(member)

    # -- the step --------------------------------------------------------------------------------------------
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient. Blocks the host until the new weights are
        there."""
        for hook in self.optimizer._optimizer_step_pre_hooks.values():
            hook(self.optimizer, (self.optimizer, closure), {})
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow()
        device = self.engine.device
        stepped = [member for member in self._placed.members if member.parameter.grad is not None]
        flats = {member.index: member.flat_gradient(member.parameter.grad) for member in stepped}  # type: ignore[arg-type]
        buckets = [bucket for bucket in self._part.buckets if bucket.has_any(flats)]
        for bucket in buckets:
            bucket.set_gradients(flats)
        released = device.record(device.compute)
        if not self._part.stateless.isdisjoint(flats):
            self._state.note_step()
        self._part.note_stepped(flats)
        try:
            for bucket in buckets:
                bucket.step(self._part.ring, released)
        finally:  # where one breaks off the caller's gradients and weights are in use until then, too
            device.synchronize(device.record(device.d2h))
            self._state.show()
        for bucket in buckets:
            bucket.drop_gradients()
        count_write(stepped)
        # what a scheduler of it looks at, to warn of a wrong order
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        for post_hook in self.optimizer._optimizer_step_post_hooks.values():
            post_hook(self.optimizer, (self.optimizer, closure), {})
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    # -- state dicts -----------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own, with copies of the tensors, which later steps write; DTensors where the
        parameters are."""
        found: dict[str, Any] = self.optimizer.state_dict()
        found["state"] = {key: _copied(entry) for key, entry in found["state"].items()}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the optimizer. Raises its errors before anything is changed here."""
        self.optimizer.load_state_dict(state_dict)
        self._follow()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: its state lies in host memory of this "
            "process; save its state_dict()"
        )

    def close(self) -> None:
        """Give the host memory back; the optimizer keeps a copy of its state. The default engine closes if
        nobody else uses it."""
        for parameter, entry in self.optimizer.state.items():
            self.optimizer.state[parameter] = _copied(entry)
        self._closed = True
        self._part.close()
        if self._closes_engine:
            self.engine.close_unused()


class _Placed:
    """All parameters are in one part. members: those in the groups, in their order."""

    sole = None

    def __init__(self, part: StreamedPart) -> None:
        self.members: list[ParamView] = []
        self._part = part

    def part_of(self, member: ParamView) -> StreamedPart:
        return self._part

    def inside(self) -> list[Any]:
        return []


def _copied(entry: dict[Any, Any]) -> dict[Any, Any]:
    """A copy whose tensors are on the host, where all but counts are."""
    return {
        key: (value.to("cpu", copy=True) if key == "step" else value.clone())
        if isinstance(value, Tensor)
        else copy.deepcopy(value)
        for key, value in entry.items()
    }
