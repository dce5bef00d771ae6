"""One step of the hybrid optimizer: gradients in, clipping, buckets to their workers, and who waits for what.

What is stepped where was decided before (placing.py), and the state's way in and out of the class is
hybrid.py's. One invariant: a step either begins with every gradient checked and every earlier promise kept,
or raises before anything is stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from offload.optim.awaited import AwaitedOptimizer
from offload.optim.cpu_step import CpuBucket, HostScalars
from offload.optim.landing import Landing
from offload.optim.norms import ScalarDesk, clip_factor, total_norm
from offload.optim.parameters import laid_out_as, settle_versions
from offload.optim.stepping import HostBucket

__all__ = ["SteppedOptimizer"]


class SteppedOptimizer(AwaitedOptimizer):
    """The step, for an heir that builds what is named here.

    _clip: factor of the coming step, from `clip_grad_norm_`. _atomic, _overlaps: how the host's buckets are
        stepped.
    _has_state: a step was made, or state was loaded. `_landing.early` has what was stepped in the backward on
        a promise.
    """

    max_grad_norm: float | None
    last_grad_norm: Tensor | None
    _landing: Landing
    _desk: ScalarDesk
    _clip: Tensor | None
    _atomic: bool
    _overlaps: bool
    _has_state: bool

    # -- backward --------------------------------------------------------------------------------------------
    @property
    def last_microbatch(self) -> bool | None:
        """Whether the backward to come is its step's last: for a schedule to set. None: as many as in the
        step before are expected."""
        return self._landing.watch.last_microbatch

    @last_microbatch.setter
    def last_microbatch(self, last: bool | None) -> None:
        self._landing.watch.last_microbatch = last

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside only accumulate; the first one after it is the step's last."""
        return self._landing.watch.no_sync()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a GradScaler's step() asks first: no. It has unscaled the gradients, or is about to, with a
        kernel that moves no version counter (torch 2.13, _amp_foreach_non_finite_check_and_unscale_), and
        only this question tells."""
        self._landing.distrust()
        return False

    # -- the step --------------------------------------------------------------------------------------------
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient. closure: evaluated once.

        With overlap and a model it returns when the work is issued; without a model it waits for the weights.
        Blocks the host while the last step is not yet issued, and for weights that somebody changed since.
        Raises OffloadError if a worker failed, or if a gradient cannot be used, before anything is stepped;
        CaptureError in a graph under capture, unless nothing is offloaded.
        """
        self._refuse_in_capture("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._landing.early:
            self._steps.settle()
        self._steps.raise_failure()
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        gradients = self._gradients()
        hosted = [member for member in self._placed.members if self._placed.is_hosted(member)]
        flats = {
            member.index: member.flat_gradient(gradients[member.index])
            for member in hosted
            if member.index in gradients
        }
        self._review(gradients)
        if self._overlaps:
            self._steps.start_workers()
        if not self._landing.early:  # else some of the step is under way, and the last one is settled
            self._steps.settle()
            if self._placed.refresh_changed(self._steps.settle_host):
                self._landing.forget()
            self._placed.copies.refresh()
        factor = self._factor()
        if self._overlaps:
            self._step_overlapped(gradients, flats, factor, self._landing.early)
        else:
            scalars = (
                self._desk.send(factor) if factor is not None and self._placed.cpu.buckets else HostScalars()
            )
            self._steps.step_inline(
                flats,
                scalars,
                factor,
                atomic=self._atomic,
                step_resident=lambda: self._placed.step_resident(gradients, factor),
            )
        stepped = [member for member in hosted if member.index in gradients]
        settle_versions(stepped)
        for member in self._placed.members:
            member.version = member.parameter._version
        self._has_state = True
        self._landing.forget()
        self._landing.early = {}
        self._landing.watch.end_step()

    def _review(self, gradients: Mapping[int, Tensor]) -> None:
        """Early steps that cannot count any more are an error."""
        landing = self._landing
        if landing.early:
            clips = self._clip is not None or self.max_grad_norm is not None
            broken = "clipping was asked for" if clips else landing.broken(landing.early.values(), gradients)
            if broken is not None:
                self._break(broken)

    def _gradients(self) -> dict[int, Tensor]:
        """By parameter. Collective where a DTensor's gradient lies otherwise than its parameter."""
        members = self._placed.members
        return {
            member.index: laid_out_as(member.parameter, found)
            for member in members
            if (found := member.gradient) is not None
        }

    def _break(self, what: str) -> None:
        self._steps.fail(
            f"{what} after {len(self._landing.early)} buckets had been stepped in the backward; they are a "
            "step ahead of the rest. "
            "Load the last state dict, and change param groups and gradients before the backward, or leave "
            "out step_in_backward"
        )

    def _factor(self) -> Tensor | None:
        factor, self._clip = self._clip, None
        if factor is None and self.max_grad_norm is not None:
            self.last_grad_norm = self._norm(2.0)
            factor = clip_factor(self.max_grad_norm, self.last_grad_norm)
        if factor is not None:
            device = self._engine.device
            device.note_write(device.compute, factor.reshape(1).view(torch.uint8))
        return factor

    def _norm(self, norm_type: float) -> Tensor:
        gradients = [gradient for member in self._placed.members if (gradient := member.gradient) is not None]
        return total_norm(gradients, norm_type, self._engine.device.torch_device)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, total: Tensor | None = None
    ) -> Tensor:
        """Clip the gradients of the coming step by their global norm, which is returned. Blocks the host:
        never.

        total: the norm, where it is known better, as over the stages of a pipeline. The norm of DTensors is
            over all ranks of their mesh, each of which must call. Unlike torch's function of this name it
            scales what is stepped: the .grad of an offloaded parameter, which may have left, keeps its values
            and need not leave again; that of one whose state is on the device is scaled by step().
        """
        self._refuse_in_capture("clip_grad_norm_()")
        if self._landing.early:  # on a promise
            self._break("clip_grad_norm_ was called")
        norm = total if total is not None else self._norm(norm_type)
        self.last_grad_norm = norm
        self._clip = clip_factor(max_norm, norm)
        return norm

    def _step_overlapped(
        self,
        gradients: Mapping[int, Tensor],
        flats: Mapping[int, Tensor],
        factor: Tensor | None,
        early: Mapping[int, HostBucket],
    ) -> None:
        """early: by id, what is stepped already."""
        steps = self._steps
        self._placed.step_resident(gradients, factor)
        chosen = [
            bucket
            for bucket in steps.in_order
            if id(bucket) not in early and any(m.index in flats for m in bucket.members)
        ]
        on_host = any(isinstance(bucket, CpuBucket) for bucket in chosen)
        scalars = self._desk.send(factor) if factor is not None and on_host else HostScalars()
        for bucket in chosen:
            mine = {member.index: flats[member.index] for member in bucket.members if member.index in flats}
            if not self._landing.has_landed(bucket, gradients):
                bucket.hold(mine)
        steps.submit(chosen, steps.release(chosen), scalars, factor)
        for bucket in (*early.values(), *chosen):
            steps.hold(bucket, gradients)
        if self._model is None or self._replayed.unseen:
            steps.arrive(None)
        else:
            steps.arrive(
                self._readers.unasked([member for member in self._placed.members if member.index in flats])
            )

    # -- masters ---------------------------------------------------------------------------------------------
    def update_fp32_param_by_new_param(self) -> None:
        """Make masters follow the weights now. It is done by itself for changes that torch can see; this is
        for `.data` and raw kernels."""
        self._rest()
        for member in self._placed.members:
            member.version = -1
        self._placed.refresh_changed(self._steps.settle_host)

    # -- gradients -------------------------------------------------------------------------------------------
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, for `decoupled_grad` too. Zeroing in place first orders compute behind what still reads
        the gradients."""
        if self._landing.early:
            self._break("zero_grad was called without step()")
        self._landing.forget()
        self._landing.watch.start_over()
        if not set_to_none and self._steps.in_order:
            self._refuse_in_capture("zero_grad(set_to_none=False)")
            self._steps.arrive(None)
            self._steps.order_gradients()
        for member in self._placed.members:
            decoupled = getattr(member.parameter, "decoupled_grad", None)
            if decoupled is not None:
                if set_to_none:
                    member.parameter.decoupled_grad = None  # type: ignore[attr-defined]
                else:
                    decoupled.zero_()
        super().zero_grad(set_to_none)
