"""HybridDeviceOptimizer: a torch optimizer whose state lies on the host and whose step hides beside the
compute.

    optimizer = HybridDeviceOptimizer(model.parameters(), offload_fraction=1.0, lr=1e-4, model=model)
    with optimizer.no_sync(): loss_of(first).backward()
    loss_of(last).backward()                 # gradients leave as they are made
    optimizer.step()                         # returns at once; each module waits for its own weights in the
                                             next forward
    optimizer.zero_grad()

A parameter's state is in one of three places, see places.py. Parameters, moments and masters are the same
bits with and without overlap, for one layout.

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

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from offload.config import check_bytes, check_fraction
from offload.engine import OffloadEngine
from offload.errors import OffloadError
from offload.ids import Owner
from offload.optim.arrival import Arrivals
from offload.optim.classes import checked_class, defaults_of
from offload.optim.landing import Landing
from offload.optim.norms import ScalarDesk
from offload.optim.parameters import Managed
from offload.optim.parts import HostOptions
from offload.optim.places import Place
from offload.optim.placing import Placement, PlacingOptions, may_fail_half_way
from offload.optim.readers import Readers
from offload.optim.replayed import ReplayedReads
from offload.optim.state import MASTER, fill_state, load_state, state_dict_of
from offload.optim.stepped import SteppedOptimizer
from offload.optim.stepping import HostedSteps

__all__ = ["HybridDeviceOptimizer"]

logger = logging.getLogger(__name__)


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
        engine: OffloadEngine | None = None,
        model: nn.Module | None = None,
        cpu_share: float | None = None,
        bucket_bytes: int = 64 << 20,
        overlap_backward: bool | None = None,
        step_in_backward: bool = False,
        atomic_step: bool | None = None,
        max_grad_norm: float | None = None,
        cpu_threads: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Build the host side: pins its memory and fetches masters, which blocks the host.

        offload_fraction: share of the elements whose state leaves the device, in order.
        cpu_optimizer_cls, gpu_optimizer_cls: None is the other one, or torch.optim.AdamW. kwargs go to both.
        param_update_in_fp32: float32 masters of bf16 and fp16 parameters, in every place.
        pin_cpu_grads, pin_cpu_params: False takes pageable memory, whose copies block the thread that issues
            them.
        overlap_cpu_optimizer_d2h_h2d: False does everything within step(), on the calling thread, with one
            CPU optimizer.
        engine: whose lanes and host memory are used; None makes one on the parameters' device (simulated for
            CPU parameters).
        model: whose modules wait for their own weights. None: step() waits for all of them.
        cpu_share: of the offloaded elements, what the host steps; the rest is streamed through the device.
            None is 0 where both classes are torch's Adam or AdamW, and 1 elsewhere, where nothing can be
            streamed.
        bucket_bytes: master weights of one bucket.
        overlap_backward: let gradients land as the backward makes them. True is a promise: they are final
            then, and nothing reduces them later. None: promises that of one rank; with several, only what
            FSDP2 has reduced lands then, and the rest at step().
        step_in_backward: also step a bucket as soon as its gradients are final. A promise: step() follows,
            with the param groups as they are during the backward and the gradients as it made them, without
            clipping. A promise that is broken is an error.
        atomic_step: keep a copy of what the CPU steps until all of it is stepped, so that an error leaves the
            last whole step; without overlap and for 2 to 3 times the memory traffic. None: for classes other
            than torch's Adam, AdamW, SGD and Adagrad, whose fused kernels check everything before they write.
        max_grad_norm: clip by the global norm in every step; the norm is `last_grad_norm`. What the host
            steps stays unclipped in .grad.
        cpu_threads: of the CPU optimizer. None: as many as torch would use on the cores near the device, less
            two.

        Raises ValueError or HostBudgetError before anything has moved.
        """
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
        self._overlaps = overlap_cpu_optimizer_d2h_h2d and not self._atomic
        if self._atomic and overlap_cpu_optimizer_d2h_h2d and offload_fraction > 0:
            logger.warning(
                "%s is stepped whole before any weight returns, not overlapped, so that an error leaves the "
                "last whole step; "
                "atomic_step=False overlaps it",
                cpu_cls.__name__,
            )
        if not isinstance(step_in_backward, bool):
            raise ValueError(f"step_in_backward is {step_in_backward!r}, must be False, or True (a promise)")
        if step_in_backward and (not self._overlaps or max_grad_norm is not None):
            raise ValueError(
                "step_in_backward needs overlap, and no max_grad_norm: the norm is known only after the "
                "backward; leave one out"
            )
        self._step_in_backward = step_in_backward
        self._overlap_backward = overlap_backward
        if model is not None:
            self._refuse_replicas(model)
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
                overlap=self._overlaps,
            ),
        )
        self._given_engine = engine
        self._built = False
        self._has_state = False
        self._state: defaultdict[Tensor, Any] = defaultdict(dict)
        super().__init__(params, defaults)
        self._names = (
            {id(parameter): name for name, parameter in model.named_parameters()} if model is not None else {}
        )
        self._engine = engine if engine is not None else OffloadEngine(device=self._device_name())
        self._build()
        self._replayed = ReplayedReads(self._engine, self._arrive, self._rest, self._is_met)
        self._readers = Readers()
        self._arrivals: Arrivals | None = None
        self._model: nn.Module | None = None
        if model is not None:
            self.attach(model)

    # -- building --------------------------------------------------------------------------------------------
    def _device_name(self) -> str:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.device.type == "cuda":
                    return str(parameter.device)
        return "sim"

    def _build(self) -> None:
        engine = self._engine
        self._placed = Placement(engine, self._placing)
        self._steps = HostedSteps(engine, self._placed.cpu, self._placed.streamed, self._placing.cpu_threads)
        self._desk = ScalarDesk(engine.copier.of(Owner("optim", "clip factor")), engine.arena)
        promises = self._step_in_backward
        self._landing = Landing(
            engine.device,
            self._steps,
            self._placed.copies,
            self._placed.refresh_changed,
            step_early=promises,
            promised=bool(self._overlap_backward or promises),
        )
        self._clip: Tensor | None = None
        try:
            self._place_groups(self.param_groups)
        except BaseException:
            self._close_parts()  # what was pinned goes back to an engine that others use
            raise
        self._built = True

    def _place_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        offloaded = self._placed.add(groups, self._names)
        self._steps.index()
        if self._overlaps and (self._overlap_backward is not False or self._step_in_backward):
            self._landing.watch.watch(offloaded)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. New parameters are placed after those there are, by the same fraction. Blocks the host
        for pinning."""
        super().add_param_group(param_group)
        if not getattr(self, "_built", False):
            return
        try:
            self._rest()
            self._place_groups(self.param_groups[-1:])
        except BaseException:
            self.param_groups.pop()
            raise
        if self._model is not None:
            self.attach(self._model)

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

    def place_of(self, parameter: Tensor) -> Place:
        for member in self._placed.members:
            if member.parameter is parameter:
                return self._placed[member]
        raise ValueError("the tensor is not one of the optimizer's parameters")

    # -- state -----------------------------------------------------------------------------------------------
    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """By parameter, as torch's: what its optimizer keeps, and "master_param" with param_update_in_fp32.

        Empty before the first step, dummy step or load. Blocks the host for the step under way. Of offloaded
        parameters these are views of host memory that later steps change, of a DTensor's local shard;
        `state_dict()` copies, and has DTensors.
        """
        if not getattr(self, "_built", False):
            return self._state
        self._rest()
        self._state.clear()
        for member in self._placed.members if self._has_state else ():
            found = dict(self._placed.state_of(member))
            if found and self.param_update_in_fp32:
                found[MASTER] = self._placed.master_of(member)
            if found:
                self._state[member.parameter] = found
        return self._state

    @state.setter
    def state(self, value: Mapping[Tensor, Any]) -> None:
        self._state = defaultdict(dict, value)

    def dummy_step(self) -> None:
        """Fill `state` as a first step would, without changing a weight: so that a checkpoint can be loaded
        in place."""
        self._rest()
        self._placed.copies.refresh()
        fill_state(self.sub_optimizers)
        self._has_state = True

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with a copy of what is on the host, and "hybrid": places, share and layout. Numbers,
        strings and tensors only."""
        packed = super().state_dict()
        return state_dict_of(self, packed)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """State of the same parameters, from any split and any fraction, or from a plain torch optimizer of
        the class.

        Everything is checked before anything is changed; ValueError names the parameter. Blocks the host.
        """
        load_state(self, state_dict)

    # -- what state.py needs ---------------------------------------------------------------------------------
    @property
    def members(self) -> Sequence[Managed]:
        return self._placed.members

    @property
    def placed(self) -> Placement:
        return self._placed

    @property
    def needed_names(self) -> tuple[str, ...]:
        """State that a parameter cannot be without once it has any."""
        return ("step", "exp_avg", "exp_avg_sq") if self._placed.cpu.flat else ()

    @property
    def shaped_names(self) -> tuple[str, ...]:
        """State that has the shape of its parameter."""
        return (MASTER, "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")

    def begin_load(self, *, has_state: bool) -> None:
        """Come to rest, whatever was under way."""
        if self._steps.failed:
            self._steps.forgive()
        self._landing.early = {}
        self._steps.settle_host()
        self._landing.forget()
        self._has_state = has_state

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: its state lies in host memory of this "
            "process; save its state_dict(), "
            "and load it into one that is built where it is needed"
        )

    # -- the end ---------------------------------------------------------------------------------------------
    def close(self) -> None:
        """End the workers and give the host memory back; an engine that was made here is closed too. Blocks
        the host."""
        if not self._steps.failed:
            try:
                self._rest()
            except OffloadError as error:
                logger.warning("closing after a failed step: %s", error)
        if self._arrivals is not None:
            self._arrivals.close()
        self._replayed.close()
        self._close_parts()
        if self._given_engine is None:
            self._engine.close()

    def _close_parts(self) -> None:
        self._landing.watch.close()
        self._steps.close()
        self._placed.close()
        self._desk.close()
