"""HybridDeviceOptimizer: a torch optimizer whose state lies on the host, and whose copies and steps run
beside each other, beside the next forward, or beside the backward.

    optimizer = HybridDeviceOptimizer(model.parameters(), lr=1e-4, overlap="forward", model=model)

    loss_of(batch).backward()
    optimizer.step()                         # returns early; the first touch of a weight waits for it
    optimizer.zero_grad()

A parameter's state is in one of four places, see placing.py. Parameters, moments and masters are the same
bits with every overlap, for one layout.

With several ranks each steps what it has. Gradients are reduced by whoever spread the model
(DistributedDataParallel, FSDP2); DTensors' gradients that are a share of a sum are summed here, and their
norm is taken over the mesh here, as torch does. So after a reduction a nan or inf of one rank is every rank's
that has that element; a norm carries it to all ranks of the mesh, and torch's GradScaler reduces its findings
for DTensors. Nothing else is agreed on in a step: a rank whose unreduced gradients alone are bad steps, or
skips, alone.

One invariant: between two calls of this class every parameter and its state belong to the same step, or an
error has said why not.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from offload.client import Client
from offload.config import check_bytes, check_fraction
from offload.engine import OffloadEngine, default_engine
from offload.errors import OffloadError
from offload.optim.backward import BackwardSteps
from offload.optim.classes import checked_class, defaults_of
from offload.optim.parts import HostOptions
from offload.optim.placing import Place, Placement, PlacingOptions, may_fail_half_way
from offload.optim.ranks import several_ranks
from offload.optim.state import MASTER, ShownState, fill_state, matched, on_host, with_class_rules
from offload.optim.stepped import Overlap, SteppedOptimizer
from offload.optim.stepping import HostedSteps
from offload.optim.touch import WeightWatch
from offload.params.view import ParamView
from offload.telemetry.records import ClientStats

__all__ = ["HybridDeviceOptimizer"]

logger = logging.getLogger(__name__)

REPLACED = {"overlap_backward": "backward", "step_in_backward": "backward"}
"""Arguments of before, and the overlap that does what they asked for."""

_LIVING: weakref.WeakSet[HybridDeviceOptimizer] = weakref.WeakSet()
"""Those that are not closed."""


class HybridDeviceOptimizer(SteppedOptimizer):
    """See the module. The positional arguments, and what they mean, are those of Megatron-core's class of
    this name."""

    def __init__(
        self,
        params: Any,
        offload_fraction: float = 0.5,
        cpu_optimizer_cls: type[Optimizer] | None = None,
        gpu_optimizer_cls: type[Optimizer] | None = None,
        param_update_in_fp32: bool = False,
        pin_cpu_grads: bool = True,
        pin_cpu_params: bool = True,
        overlap_cpu_optimizer_d2h_h2d: bool = True,
        *,
        overlap: Overlap = "step",
        model: nn.Module | None = None,
        engine: OffloadEngine | None = None,
        cpu_share: float | None = None,
        bucket_bytes: int = 64 << 20,
        atomic_step: bool | None = None,
        max_grad_norm: float | None = None,
        cpu_threads: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Build the host side: pins its memory, which blocks the host.

        offload_fraction: share of the elements whose state leaves the device, in order.
        cpu_optimizer_cls, gpu_optimizer_cls: None is the other one, or torch.optim.AdamW. kwargs go to both.
        param_update_in_fp32: float32 masters of bf16 and fp16 parameters, in every place. Where rounding a
            master does not give the weight's bits, the weight counts.
        pin_cpu_grads, pin_cpu_params: False takes pageable memory, whose copies block the thread that issues
            them.
        overlap_cpu_optimizer_d2h_h2d: False does everything within step(), on the calling thread, with one
            CPU optimizer.
        overlap: what runs beside what.
            "step": copies and steps beside each other, inside step(), which blocks the host until the last is
                issued. Right in any loop that is right with torch's optimizer.
            "forward": also the weights' return, beside the next forward; needs `model`. As right: whoever
                touches a weight on its way waits for it. Not seen: a view taken before step() and read after
                it, a functional transform (torch.func) over a weight itself, C++ that reads a weight past
                torch's functions, a second lane that reads beside the step's without
                synchronize_parameters(). A compiled forward, a graph captured outside of the engine's region,
                and DTensors have step() wait.
            "backward": also gradients' way out, and steps, beside the backward. A promise: gradients are
                final when the backward has made them, step() follows, and groups, weights and state are left
                alone between. A break that can be seen is an error: a gradient written or made again,
                clipping, a GradScaler, zero_grad() without step(), changed groups, a weight touched. A write
                through `.data`, or by a kernel or collective that moves no version counter, is not seen.
        model: names weights in messages; with "forward" and "backward" its modules wait for their own
            weights.
        engine: whose lanes and host memory are used; None takes the process's own of the parameters' device
            (simulated for CPU parameters).
        cpu_share: of the offloaded elements, what the host steps; the rest is streamed through the device.
            None is 0 where both classes are torch's Adam or AdamW, and 1 elsewhere, where nothing can be
            streamed.
        bucket_bytes: master weights of one bucket.
        atomic_step: keep a copy of what the CPU steps until all of it is stepped, so that an error leaves the
            last whole step; without workers and for 2 to 3 times the memory traffic. None: for classes other
            than torch's Adam, AdamW, SGD and Adagrad, whose fused kernels check everything before they write.
        max_grad_norm: clip by the global norm in every step; the norm is `last_grad_norm`.
        cpu_threads: of the CPU optimizer. None: as many as torch would use on the cores near the device, less
            two.

        Raises ValueError or HostBudgetError before anything has moved.
        """
        for name, instead in REPLACED.items():
            if name in kwargs:
                raise ValueError(f'{name} was replaced: give overlap="{instead}", or leave it out for "step"')
        check_fraction("offload_fraction", offload_fraction)
        if cpu_share is not None:
            check_fraction("cpu_share", cpu_share)
        check_bytes("bucket_bytes", bucket_bytes, least=1024)
        if cpu_threads is not None and (
            isinstance(cpu_threads, bool) or not isinstance(cpu_threads, int) or cpu_threads < 1
        ):
            raise ValueError(
                f"cpu_threads is {cpu_threads!r}, must be a whole number of threads, 1 or more, or None to "
                "choose it"
            )
        cpu_cls = cpu_optimizer_cls or gpu_optimizer_cls or AdamW
        gpu_cls = gpu_optimizer_cls or cpu_optimizer_cls or AdamW
        cpu_cls, gpu_cls = (
            checked_class("cpu_optimizer_cls", cpu_cls, kwargs),
            checked_class("gpu_optimizer_cls", gpu_cls, kwargs),
        )
        defaults = {**defaults_of(cpu_cls, kwargs), **defaults_of(gpu_cls, kwargs)}
        del defaults["params"]
        if kwargs.get("capturable") and offload_fraction > 0:
            raise ValueError(
                "capturable=True is for an optimizer that lives on the device; leave it out, or set "
                "offload_fraction=0"
            )
        self.offload_fraction = float(offload_fraction)
        self.param_update_in_fp32 = param_update_in_fp32
        self.pin_cpu_grads, self.pin_cpu_params = pin_cpu_grads, pin_cpu_params
        self.overlap_cpu_optimizer_d2h_h2d = overlap_cpu_optimizer_d2h_h2d
        self.max_grad_norm = max_grad_norm
        self.last_grad_norm: Tensor | None = None
        self.sub_optimizer_kwargs = dict(kwargs)
        self._atomic = may_fail_half_way(cpu_cls, kwargs) if atomic_step is None else atomic_step
        self._workers = overlap_cpu_optimizer_d2h_h2d and not self._atomic
        if self._atomic and overlap_cpu_optimizer_d2h_h2d and offload_fraction > 0:
            logger.warning(
                "%s is stepped whole before any weight returns, not overlapped, so that an error leaves the "
                "last whole step; atomic_step=False overlaps it",
                cpu_cls.__name__,
            )
        self.overlap = self._checked_overlap(overlap, model)
        self._placing = PlacingOptions(
            offload_fraction=self.offload_fraction,
            cpu_share=cpu_share if cpu_share is None else float(cpu_share),
            cpu_cls=cpu_cls,
            gpu_cls=gpu_cls,
            kwargs=self.sub_optimizer_kwargs,
            cpu_threads=cpu_threads,
            host=HostOptions(
                bucket_bytes=bucket_bytes,
                pin_grads=pin_cpu_grads,
                pin_params=pin_cpu_params,
                masters_in_fp32=param_update_in_fp32,
                overlap=self._workers,
            ),
        )
        self._given_engine = engine
        self._built = False
        self._shown = ShownState(with_masters=param_update_in_fp32)
        super().__init__(params, defaults)
        self._model = model
        self._names = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
        self._engine = engine if engine is not None else default_engine(self._device_name())
        self._build()
        self._held = _HeldMemory(self._placed)
        self._engine.attach(self._held)

    # -- building --------------------------------------------------------------------------------------------
    def _checked_overlap(self, overlap: str, model: nn.Module | None) -> Overlap:
        if overlap not in get_args(Overlap):
            raise ValueError(f'overlap is {overlap!r}, must be "step", "forward" or "backward"')
        if overlap == "step":
            return "step"
        if overlap == "forward" and model is None:
            raise ValueError(
                'overlap="forward" needs model=, whose modules wait for their weights; give it, or use "step"'
            )
        if not self._workers and self.offload_fraction > 0:
            raise ValueError(
                f"overlap={overlap!r} needs workers; overlap_cpu_optimizer_d2h_h2d=False and an atomic step "
                'have none: leave them out, or use overlap="step"'
            )
        if overlap == "backward" and self.max_grad_norm is not None:
            raise ValueError(
                'overlap="backward" and max_grad_norm: the norm is known only after the backward; '
                "leave one out"
            )
        fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
        for name, module in model.named_modules() if model is not None else ():
            if isinstance(module, fsdp):
                raise ValueError(
                    f"overlap={overlap!r}: {name or 'the model'} is a FullyShardedDataParallel (FSDP1): its "
                    'flat parameter is read unseen; use overlap="step", or FSDP2'
                )
            replicas = isinstance(module, nn.parallel.DistributedDataParallel) and several_ranks()
            if overlap == "backward" and replicas:
                raise ValueError(
                    f'overlap="backward" promises final gradients, and {name or "the model"} is a '
                    f"DistributedDataParallel over {torch.distributed.get_world_size()} ranks, which reduces "
                    'them later; use overlap="forward"'
                )
        return "forward" if overlap == "forward" else "backward"

    def _device_name(self) -> str:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.device.type == "cuda":
                    return str(parameter.device)
        return "sim"

    def _build(self) -> None:
        engine, reference = self._engine, weakref.ref(self)
        self._placed = Placement(engine, self._placing)
        self._steps = HostedSteps(engine, self._placed.cpu, self._placed.streamed, self._placing.cpu_threads)
        self._watches = self.overlap == "forward" or (self.overlap == "backward" and self._model is not None)
        self._watch = WeightWatch(engine, self._steps) if self.overlap != "step" else None
        self._backward: BackwardSteps | None = None
        if self.overlap == "backward":
            self._backward = BackwardSteps(
                engine.device,
                self._steps,
                begin=lambda: _of(reference).begin(),
                is_grouped=lambda index: index in _of(reference)._placed.groups,
                watch=lambda bucket: _of(reference).stepped_in_backward(bucket),
            )
            self._steps.when_touched = self._backward.touched
        try:
            self._regroup()
        except BaseException:
            self._close_parts()  # what was pinned goes back to an engine that others use
            raise
        self._end = weakref.finalize(self, _end, self._steps, self._placed, self._backward)
        self._built = True

    def _regroup(self) -> None:
        self._refuse_shared()
        offloaded = self._placed.regroup(self.param_groups, self._names)
        self._steps.index()
        if self._backward is not None:
            self._backward.hook(offloaded)
        if self._watch is not None and self._model is not None:
            indices = {id(member.parameter): member.index for member in self._placed.members}
            self._watch.attach(self._model, indices)

    def _refuse_shared(self) -> None:
        """Raises ValueError for a parameter that another living optimizer has too, where one of the two steps
        it in the backward: two steps of one weight would run beside each other."""
        if self._shared() is not None:
            gc.collect()  # a learning-rate scheduler makes a circle of its optimizer, which outlives its drop
        if (shared := self._shared()) is not None:
            parameter, overlap = shared
            name = self._names.get(id(parameter), "a parameter")
            raise ValueError(
                f"{name} ({parameter.numel():,} elements of {parameter.dtype}) is stepped by another "
                f'optimizer, of overlap="{overlap}", and by this one, of overlap="{self.overlap}": a step in '
                "the backward would run beside the other's; close() the other one, leave the parameter out "
                'of one of them, or use overlap="forward" or "step" for both'
            )
        _LIVING.add(self)

    def _shared(self) -> tuple[Tensor, Overlap] | None:
        others = [other for other in _LIVING if other is not self]
        if self.overlap != "backward":
            others = [other for other in others if other.overlap == "backward"]
        mine = {id(p) for group in self.param_groups for p in group["params"]} if others else set()
        found = (
            (p, other.overlap)
            for other in others
            for group in other.param_groups
            for p in group["params"]
            if id(p) in mine
        )
        return next(found, None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. New parameters are placed after those there are, by the same fraction. Blocks the host
        for pinning."""
        super().add_param_group(param_group)
        if not getattr(self, "_built", False):
            return
        try:
            self._rest()
            self._regroup()
        except BaseException:
            self.param_groups.pop()
            raise

    # -- Megatron's attributes -------------------------------------------------------------------------------
    @property
    def cpu_optimizers(self) -> list[Optimizer]:
        """Of the host's parameters: one a bucket with overlap, one in all without; and one for parameters
        that live on the host."""
        return self._placed.sub_optimizers_on_host()

    @property
    def gpu_optimizer(self) -> Optimizer | None:
        """Of the parameters that stay; None if there are none."""
        return self._placed.on_gpu.optimizer

    @property
    def sub_optimizers(self) -> list[Optimizer]:
        """CPU optimizers, then the GPU's. Streamed parameters have none of their own."""
        return self.cpu_optimizers + ([self.gpu_optimizer] if self.gpu_optimizer is not None else [])

    @property
    def engine(self) -> OffloadEngine:
        return self._engine

    @property
    def cpu_share(self) -> float:
        """Of the offloaded elements, what the host steps."""
        return self._placed.cpu_share

    @property
    def host_bytes(self) -> int:
        """Host memory of state, masters and gradients."""
        return self._placed.cpu.host_bytes + self._placed.streamed.host_bytes

    @property
    def ring_bytes(self) -> int:
        """Device memory of the streamed buckets."""
        ring = self._placed.streamed.ring
        return ring.nbytes if ring is not None else 0

    @property
    def members(self) -> Sequence[ParamView]:
        return self._placed.members

    @property
    def placed(self) -> Placement:
        return self._placed

    def place_of(self, parameter: Tensor) -> Place:
        member = self._placed.of.get(id(parameter))
        if member is None:
            raise ValueError("the tensor is not one of the optimizer's parameters")
        return self._placed[member]

    # -- state -----------------------------------------------------------------------------------------------
    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """By parameter, as torch's: what its optimizer keeps, and "master_param" with param_update_in_fp32.

        Of a parameter that was not stepped or loaded there is none. Blocks the host for the step under way.
        Of offloaded parameters these are views of host memory that later steps change, of a DTensor's local
        shard; `state_dict()` copies, and has DTensors. What is written, replaced, added or taken out counts
        from the next step on.
        """
        if not getattr(self, "_built", False):
            return self._shown.shown
        self._settle_state()
        return self._shown.look(self._placed)

    @state.setter
    def state(self, value: Mapping[Tensor, Any]) -> None:
        if getattr(self, "_built", False):
            _ = self.state
        self._shown.replace(value)

    def _settle_state(self) -> None:
        """Wait for the step under way, then take over what the user has changed."""
        self._rest()
        self._check_groups()
        self._shown.take_writes(self._placed)
        for member in self._placed.present:
            self._placed.follow(member, self._steps.settle_host)

    def dummy_step(self) -> None:
        """Fill `state` as a first step would, without changing a weight: so that a checkpoint can be loaded
        in place."""
        self._settle_state()
        self._placed.refresh()
        for member in self._placed.members:
            self._placed.master_of(member)
        fill_state(self.sub_optimizers)
        self._shown.having.update(self._placed.groups)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with a copy of what is on the host, and "hybrid": places, share and layout. Numbers,
        strings and tensors only. All state is on the host once some of it is: torch.distributed.checkpoint
        takes one device only."""
        hooks, self._optimizer_state_dict_post_hooks = self._optimizer_state_dict_post_hooks, OrderedDict()
        try:
            packed = super().state_dict()
        finally:
            self._optimizer_state_dict_post_hooks = hooks
        order = (p for group in self.param_groups for p in group["params"])
        some = any(self._placed.is_hosted(member) for member in self._placed.members)
        for key, parameter in enumerate(order):
            if some and key in packed["state"]:
                member, found = self._placed.of[id(parameter)], packed["state"][key]
                packed["state"][key] = {name: on_host(member, name, value) for name, value in found.items()}
        packed["hybrid"] = self._placed.describe()
        for hook in hooks.values():
            packed = hook(self, packed) or packed
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """State of the same parameters, from any split and any fraction, or from a plain torch optimizer; the
        rules of the wrapped classes for what they load (`__setstate__`) hold.

        Everything is checked before anything is changed; ValueError names the parameter. Blocks the host.
        """
        loaded = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = hook(self, loaded) or loaded
        if not self._placed.is_grouped_as(self.param_groups):
            self._regroup()
        order = matched(self._placed, self.param_groups, loaded)
        self._forget_step()
        groups = deepcopy(loaded["param_groups"])
        for group, saved in zip(self.param_groups, groups, strict=True):
            names, parameters = group.get("param_names"), group["params"]
            group.clear()
            group.update({key: value for key, value in saved.items() if key != "params"})
            group["params"] = parameters
            if names is not None and "param_names" not in saved:
                group["param_names"] = names
        state = {order[key].parameter: dict(entry) for key, entry in loaded["state"].items() if key in order}
        classes = [self._placing.cpu_cls, self._placing.gpu_cls]
        with_class_rules(classes, self.param_groups, state, self.defaults)
        self._regroup()
        with torch.no_grad():
            for member in order.values():
                entry = state.get(member.parameter, {})
                master = entry.pop(MASTER, None)
                self._placed.load(member, entry, master)
                (self._shown.having.add if entry else self._shown.having.discard)(member.index)
        self._shown.forget()
        self._placed.refresh()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _forget_step(self) -> None:
        """Before state is loaded: wait for the step under way, and forget a failure."""
        if self._backward is not None:
            self._backward.start_over()
        if self._steps.failed:
            self._steps.forgive()
        self._steps.settle_host()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: its state lies in host memory of this "
            "process; save its state_dict(), and load it into one that is built where it is needed"
        )

    # -- the end ---------------------------------------------------------------------------------------------
    def close(self) -> None:
        """End the workers and give the host memory back; the default engine closes if nobody else uses it.
        Blocks the host. An optimizer that is dropped does the same, but closes no engine."""
        if not self._steps.failed:
            try:
                self._steps.settle_host()
            except OffloadError as error:
                logger.warning("closing after a failed step: %s", error)
        self._end.detach()
        self._close_parts()
        self._engine.detach(self._held)
        if self._given_engine is None:
            self._engine.close_unused()

    def _close_parts(self) -> None:
        _LIVING.discard(self)
        if self._backward is not None:
            self._backward.close()
        if self._watch is not None:
            self._watch.close()
        self._steps.close()
        self._placed.close()


class _HeldMemory(Client):
    """The client "optim" of the engine: reports the host and device memory that an optimizer holds."""

    name = "optim"

    def __init__(self, placed: Placement) -> None:
        self._placed = placed

    def end_step(self) -> ClientStats:
        cpu, streamed = self._placed.cpu, self._placed.streamed
        return ClientStats(
            lent_bytes=cpu.host_bytes + streamed.host_bytes,
            device_bytes=streamed.ring.nbytes if streamed.ring is not None else 0,
        )


def _of(reference: weakref.ref[HybridDeviceOptimizer]) -> HybridDeviceOptimizer:
    found = reference()
    assert found is not None
    return found


def _end(steps: HostedSteps, placed: Placement, backward: BackwardSteps | None) -> None:
    """The optimizer was dropped: its hooks go, its weights arrive, and its host memory goes back."""
    if backward is not None:
        backward.close()
    steps.end(placed.close)
