"""Steps that begin while the backward still runs, on the promise that a gradient is final when the backward
has made it: `overlap="backward"`.

A bucket is stepped once the gradients of all its parameters are final. A gradient is final after the backward
of the parameter's last microbatch. The user or the schedule says which one that is (`last_microbatch`,
`no_sync`); else a parameter is expected to have as many backwards as in the step before. FSDP2 calls the
hooks after its reduction. One invariant: a broken promise that can be seen is an error before anything else
is stepped.

What cannot be seen: a write through `.data`, or by a kernel or collective that moves no version counter,
between the hook and `step()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from offload.device import Device
from offload.optim.ranks import may_be_reduced_in_place
from offload.optim.stepping import HostBucket, HostedSteps
from offload.params.view import ParamView, is_laid_out_as, local_of

__all__ = ["BackwardSteps"]

Stamp = tuple[weakref.ref[Tensor], int, int]
"""A gradient as it was: the tensor, its version and its local shard's."""


def _stamp_of(gradient: Tensor) -> Stamp:
    return weakref.ref(gradient), gradient._version, local_of(gradient)._version


class BackwardSteps:
    """The buckets that were stepped in one backward. Hooks call it on the thread that runs the backward.

    begin: called before the first bucket of a backward goes: settles the last step, and takes over what the
        param groups say. is_grouped: whether the parameter of an index is in a group. watch: called with each
        bucket that has gone, whose weights are on their way. fail:
        raises, and refuses every later call.
    """

    def __init__(
        self,
        device: Device,
        steps: HostedSteps,
        *,
        begin: Callable[[], None],
        is_grouped: Callable[[int], bool],
        watch: Callable[[HostBucket], None],
    ) -> None:
        self._device = device
        self._steps = steps
        self._begin = begin
        self._is_grouped = is_grouped
        self._watch = watch
        self.last_microbatch: bool | None = None
        """Whether the backward to come is the last of its step; None: nobody says, the step before does."""
        self.stepped: dict[int, HostBucket] = {}  # in this backward, by id
        self._begun = False
        self._seen: dict[int, int] = {}  # backwards of each parameter in this step
        self._expected: dict[int, int] = {}
        self._stamps: dict[int, Stamp] = {}  # by parameter: its gradient as it was when it was stepped
        self._final: dict[int, int] = {}  # by bucket's id: how many of its gradients are final
        self._handles: list[Any] = []

    def hook(self, members: Sequence[ParamView]) -> None:
        """Register hooks on the parameters. They hold this object weakly."""
        reference = weakref.ref(self)
        for member in members:
            if member.parameter.requires_grad and member.parameter.is_leaf:
                hook = _Hook(reference, member)
                self._handles.append(member.parameter.register_post_accumulate_grad_hook(hook))

    def accumulated(self, member: ParamView) -> None:
        """Blocks the host only if the last step is not yet issued."""
        seen = self._seen.get(member.index, 0) + 1
        self._seen[member.index] = seen
        buckets = self._steps.buckets_of.get(member.index, ())
        if any(id(bucket) in self.stepped for bucket in buckets):
            self.broken(f"{member} got another gradient (use no_sync() in all backwards but the last)")
        last = self.last_microbatch
        if not (last or (last is None and self._expected.get(member.index) == seen)):
            return
        if member.parameter.grad is None or getattr(member.parameter, "decoupled_grad", None) is not None:
            return
        if self._device.is_capturing():
            return  # no hook runs in the replays, whose gradients these are: they are stepped in step()
        with torch.no_grad():
            if not self._begun:
                self._begin()
                self._begun = True
            for bucket in buckets:
                count = self._final.get(id(bucket), 0) + 1
                self._final[id(bucket)] = count % len(bucket.members)
                if count == len(bucket.members):
                    self._step(bucket)

    def _step(self, bucket: HostBucket) -> None:
        gradients: dict[int, Tensor] = {}
        for member in bucket.members:
            gradient = member.parameter.grad
            if gradient is None or not self._is_grouped(member.index):
                return  # thrown away since it was final, or its parameter was taken out
            if may_be_reduced_in_place(gradient) or not is_laid_out_as(member.parameter, gradient):
                return  # it is stepped in step(), when it is reduced
            gradients[member.index] = member.flat_gradient(gradient)
        for member in bucket.members:
            gradient = member.parameter.grad
            assert gradient is not None
            self._stamps[member.index] = _stamp_of(gradient)
        bucket.hold(gradients)
        self._steps.submit([bucket])
        self.stepped[id(bucket)] = bucket
        self._watch(bucket)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not the last of their step; the one after it is."""
        before, self.last_microbatch = self.last_microbatch, False
        try:
            yield
        finally:
            self.last_microbatch = True if before is None else before

    # -- the promise -----------------------------------------------------------------------------------------
    def broken(self, what: str) -> None:
        """`what` happened, as a sentence: an error if anything was stepped in this backward."""
        if self.stepped:
            self._steps.fail(
                f"{what} after {len(self.stepped)} buckets had been stepped in the backward; they are a step "
                "ahead of the rest. Load the last state dict, and change param groups, gradients and weights "
                'before the backward, or use overlap="forward" or "step"'
            )

    def touched(self, index: int) -> None:
        """A parameter is read or written before step(): an error if this backward has stepped it."""
        if any(id(bucket) in self.stepped for bucket in self._steps.buckets_of.get(index, ())):
            self.broken(
                f"the weights of parameter {index} were read or written before step() (use no_sync() in all "
                "backwards but the last)"
            )

    def check(self, gradients: Mapping[int, Tensor]) -> None:
        """Called by step(): check that the gradients are still the ones that were stepped."""
        for bucket in self.stepped.values():
            for member in bucket.members:
                gradient, stamp = gradients.get(member.index), self._stamps.get(member.index)
                if stamp is None or gradient is None or not _is_as_stamped(gradient, stamp):
                    self.broken(f"the gradient of {member} changed")

    def end_step(self) -> None:
        """The gradients are used; the counting begins anew."""
        if self._seen:
            self._expected = self._seen
        self.start_over()

    def start_over(self) -> None:
        """The gradients are used, or thrown away unused."""
        self._seen = {}
        self._begun = False
        self._stamps.clear()
        self._final.clear()
        self.stepped = {}

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _is_as_stamped(gradient: Tensor, stamp: Stamp) -> bool:
    reference, version, local_version = stamp
    return (
        reference() is gradient
        and gradient._version == version
        and local_of(gradient)._version == local_version
    )


class _Hook:
    __slots__ = ("_member", "_steps")

    def __init__(self, steps: weakref.ref[BackwardSteps], member: ParamView) -> None:
        self._steps = steps
        self._member = member

    def __call__(self, parameter: Tensor) -> None:
        steps = self._steps()
        if steps is not None:
            steps.accumulated(self._member)
