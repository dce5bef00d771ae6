"""One step of the hybrid optimizer: it reads the gradients, clips them, gives buckets to their workers, and
orders later uses of weights behind the step.

placing.py has decided before what is stepped where; hybrid.py shows, saves and loads the state. One
invariant: a step either begins with every gradient checked and every promise kept, or raises before anything
is stepped; `overlap="step"` returns when every later use of a weight or gradient is ordered behind the step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.engine import OffloadEngine
from offload.optim.backward import BackwardSteps
from offload.optim.placing import Placement
from offload.optim.ranks import clip_, total_norm
from offload.optim.state import ShownState
from offload.optim.stepping import HostBucket, HostedSteps
from offload.optim.touch import AwaitedWeight, WeightWatch, arrived
from offload.params.view import count_write, laid_out_as

__all__ = ["Overlap", "SteppedOptimizer"]

Overlap = Literal["step", "forward", "backward"]


class SteppedOptimizer(Optimizer):
    """The step. A subclass builds the attributes that are declared here.

    overlap: see HybridDeviceOptimizer. _workers: whether buckets are stepped by workers, or all on the
        calling thread. _atomic: whether an error leaves the last whole step.
    """

    overlap: Overlap
    max_grad_norm: float | None
    last_grad_norm: Tensor | None
    _engine: OffloadEngine
    _placed: Placement
    _steps: HostedSteps
    _watch: WeightWatch | None
    _backward: BackwardSteps | None
    _shown: ShownState
    _names: dict[int, str]
    _atomic: bool
    _workers: bool
    _watches: bool

    # -- backward --------------------------------------------------------------------------------------------
    @property
    def last_microbatch(self) -> bool | None:
        """Whether the backward to come is its step's last: for a schedule to set. None: as many as in the
        step before are expected. Counts with overlap="backward" alone."""
        return self._backward.last_microbatch if self._backward is not None else None

    @last_microbatch.setter
    def last_microbatch(self, last: bool | None) -> None:
        if self._backward is not None:
            self._backward.last_microbatch = last

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside only accumulate; the first one after it is the step's last. Counts with
        overlap="backward" alone."""
        return self._backward.no_sync() if self._backward is not None else nullcontext()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a GradScaler's step() asks first: no. It has unscaled the gradients, or is about to, with a
        kernel that moves no version counter (torch 2.13, _amp_foreach_non_finite_check_and_unscale_)."""
        if self._backward is not None:
            self._backward.broken("a GradScaler changed the gradients")
        return False

    # -- the step --------------------------------------------------------------------------------------------
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient. closure: evaluated once.

        Blocks the host while the last step is not yet issued, and with overlap="step" until this one is.
        Raises OffloadError if a worker failed, or if a gradient cannot be used, before anything is stepped;
        CaptureError in a graph under capture, unless nothing is offloaded.
        """
        self._refuse_in_capture("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def begin(self) -> None:
        """End the last step, and take over what the user has changed since: groups, state, memory. Blocks the
        host until the last step is issued, and where state was written until it has ended."""
        if self._workers:
            self._steps.start_workers()
        self._steps.settle()
        for member in self._placed.members:
            if isinstance(member.parameter, AwaitedWeight):  # another optimizer's step of it
                arrived(member.parameter)
        self._check_groups()
        if self._shown.is_written():
            self._steps.settle_host()
            self._shown.take_writes(self._placed)
        for member in self._placed.present:
            self._placed.follow(member, self._steps.settle_host)
        self._placed.refuse_tied()
        self._placed.refresh()

    def _check_groups(self) -> None:
        if not self._placed.is_grouped_as(self.param_groups):
            self._steps.settle_host()
            self._regroup()

    def _regroup(self) -> None:
        raise NotImplementedError

    def _step(self) -> None:
        early = self._backward.stepped if self._backward is not None else {}
        if early:
            self._steps.raise_failure()
            self._check_promise()
        else:
            self.begin()
        gradients = self._gradients()
        if self._backward is not None:
            self._backward.check(gradients)
        members = self._placed.present
        hosted = [
            member for member in members if self._placed.is_hosted(member) and member.index in gradients
        ]
        coming = [bucket for bucket in self._steps.in_order if id(bucket) not in early]
        needed = {member.index for bucket in coming for member in bucket.members}
        if self.max_grad_norm is not None:
            self.clip_grad_norm_(self.max_grad_norm)
        flats = {
            member.index: member.flat_gradient(gradients[member.index])
            for member in hosted
            if member.index in needed
        }
        if self._workers:
            self._placed.step_resident(gradients)
            chosen = [bucket for bucket in coming if any(m.index in flats for m in bucket.members)]
            for bucket in chosen:
                bucket.hold(flats)
            self._steps.submit(chosen)
        else:
            resident = lambda: self._placed.step_resident(gradients)  # noqa: E731
            self._steps.step_inline(flats, atomic=self._atomic, step_resident=resident)
        count_write(hosted)
        self._shown.having.update(gradients)
        if self._backward is not None:
            self._backward.end_step()
        self._return()

    def _check_promise(self) -> None:
        """What has changed since buckets were stepped in the backward is an error."""
        assert self._backward is not None
        if not self._placed.is_grouped_as(self.param_groups) or self._placed.changed_values():
            self._backward.broken("the param groups changed")
        if self._shown.is_written():
            self._backward.broken("optimizer.state was read or written")
        if self.max_grad_norm is not None:
            self._backward.broken("clipping was asked for")

    def _return(self) -> None:
        """Order every later use of a weight behind its return: here, or at its first touch."""
        if self._watch is None or not self._watches or self._watch.replays_unseen:
            self._steps.arrive(None)
            return
        now = []
        for member in self._placed.members:
            if not self._steps.is_pending(member.index):
                continue
            if self._watch.can_watch(member.parameter):
                self._watch.watch(member.index, member.parameter, gradient=True)
            else:
                now.append(member.index)
        self._steps.arrive(now)

    def stepped_in_backward(self, bucket: HostBucket) -> None:
        """Watch the weights of a bucket that the backward steps: a touch before step() breaks the promise."""
        assert self._watch is not None
        for member in bucket.members:
            if self._watch.can_watch(member.parameter):
                self._watch.watch(member.index, member.parameter, gradient=False)

    def _gradients(self) -> dict[int, Tensor]:
        """By parameter. Collective where a DTensor's gradient lies otherwise than its parameter."""
        return {
            member.index: laid_out_as(member.parameter, found)
            for member in self._placed.present
            if (found := member.gradient) is not None
        }

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, total: Tensor | None = None
    ) -> Tensor:
        """Clip the gradients, in place as torch.nn.utils.clip_grad_norm_ does, by their global norm, which is
        returned. Blocks the host: never.

        total: the norm, where it is known better, as over the stages of a pipeline. The norm of DTensors is
            over all ranks of their mesh, each of which must call.
        """
        self._refuse_in_capture("clip_grad_norm_()")
        if self._backward is not None:
            self._backward.broken("clip_grad_norm_ was called")
        gradients = [found for member in self._placed.present if (found := member.gradient) is not None]
        arrived(gradients)
        with torch.no_grad():
            norm = total
            if norm is None:
                norm = total_norm(gradients, norm_type, self._engine.device.torch_device)
            if gradients:
                clip_(self._lay_out_gradients(), max_norm, norm)
        self.last_grad_norm = norm
        return norm

    def _lay_out_gradients(self) -> list[Tensor]:
        """The gradients, of DTensors summed where a rank has a share: a scaled sum is not the sum of scaled
        shares, bit for bit. Collective where a DTensor's gradient lies otherwise than its parameter."""
        found = []
        for member in self._placed.present:
            gradient = member.gradient
            if gradient is None:
                continue
            laid_out = laid_out_as(member.parameter, gradient)
            if laid_out is not gradient:
                member.gradient = laid_out
            found.append(laid_out)
        return found

    # -- readers ---------------------------------------------------------------------------------------------
    def synchronize_parameters(self) -> None:
        """Let the current lane's work from here on see the new weights. Blocks the host until the step under
        way has been issued. Raises OffloadError if it failed."""
        self._steps.raise_failure()
        self._steps.arrive(None)

    def _rest(self) -> None:
        """End every copy and step: after it the host may read and write weights, state and masters. Blocks
        the host."""
        if self._backward is not None:
            self._backward.broken("state was asked for before step()")
        self._steps.settle_host()

    def _refuse_in_capture(self, what: str) -> None:
        """Raise CaptureError for a call that uses workers or host state. An optimizer that keeps all state on
        the device may be captured."""
        if self._steps.in_order:
            self._engine.refuse_in_capture(f"the optimizer's {what}")

    def update_fp32_param_by_new_param(self) -> None:
        """New weights were written into the parameters: masters of parameters that differ are those, whole.
        Each step by itself takes over the elements that differ."""
        self._rest()
        with torch.no_grad():
            for member in self._placed.members:
                self._placed.reload_master(member)

    # -- gradients -------------------------------------------------------------------------------------------
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, for `decoupled_grad` too. Zeroing in place waits for what still reads the gradients."""
        if self._backward is not None:
            self._backward.broken("zero_grad was called without step()")
            self._backward.start_over()
        if not set_to_none and self._steps.in_order:
            self._refuse_in_capture("zero_grad(set_to_none=False)")
            self._steps.arrive(None)
        for member in self._placed.members:
            decoupled = getattr(member.parameter, "decoupled_grad", None)
            if decoupled is not None:
                if set_to_none:
                    member.parameter.decoupled_grad = None  # type: ignore[attr-defined]
                else:
                    decoupled.zero_()
        super().zero_grad(set_to_none)
