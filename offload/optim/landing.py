"""What happens to a gradient that is final while the backward still runs: it leaves for the host, and on
request is stepped at once.

A bucket goes when the gradients of all its parameters are final. One invariant: a landing is only a start.
Whether it counts is asked at the step, of the gradient that is there then (`has_landed`); and a bucket that
was stepped early, on a promise, is asked for what has changed since (`broken`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor

from offload.device import Device
from offload.errors import OffloadError
from offload.optim.backward import BackwardWatch, Stamp, stamp_of
from offload.optim.cpu_step import CpuBucket, HostScalars
from offload.optim.parameters import Managed, is_laid_out_as, local_of
from offload.optim.parts import GroupCopies
from offload.optim.ranks import may_be_reduced_in_place
from offload.optim.stepping import HostBucket, HostedSteps

__all__ = ["Landing"]


class Landing:
    """The gradients of one backward. Its `watch` calls it on the thread that runs the backward.

    refresh: makes masters follow weights that somebody wrote, once all is at rest. step_early: step each
        bucket as soon as its gradients are final, on a promise.
    """

    def __init__(
        self,
        device: Device,
        steps: HostedSteps,
        copies: GroupCopies,
        refresh: Callable[[Callable[[], None]], bool],
        *,
        step_early: bool,
        promised: bool,
    ) -> None:
        self._device = device
        self._steps = steps
        self._copies = copies
        self._refresh = refresh
        self._step_early = step_early
        self.watch = BackwardWatch(self._is_final, promised=promised)
        self.early: dict[int, HostBucket] = {}  # stepped in this backward, by id
        self._begun = False
        self._stamps: dict[int, Stamp] = {}  # by parameter: its gradient as it was when it left
        self._final: dict[int, int] = {}  # by bucket's id: how many of its gradients are final

    def _is_final(self, member: Managed) -> None:
        """Blocks the host only if the last step is not yet issued."""
        parameter = member.parameter
        if parameter.grad is None or getattr(parameter, "decoupled_grad", None) is not None:
            return
        if self._device.is_capturing():
            return  # no hook runs in the replays, whose gradients these are: they leave at the step
        with torch.no_grad():
            if not self._begun:
                if self._step_early:
                    self._steps.start_workers()
                self._begun = True
                self._steps.settle()
                # it fetches weights into the gradients' slots, so it comes before any landing
                self._refresh(self._steps.settle_host)
                self._copies.refresh()
            for bucket in self._steps.buckets_of[member.index]:
                if id(bucket) in self.early:
                    raise OffloadError(
                        f"{member} got a gradient after its bucket had been stepped in this backward; use "
                        "no_sync() before the last one"
                    )
                count = self._final.get(id(bucket), 0) + 1
                self._final[id(bucket)] = count % len(bucket.members)
                if count == len(bucket.members):
                    self._leave(bucket)

    def _leave(self, bucket: HostBucket) -> None:
        self._steps.let_go()
        gradients: dict[int, Tensor] = {}
        for member in bucket.members:
            gradient = member.parameter.grad
            if gradient is None:  # thrown away since it was final
                return
            if may_be_reduced_in_place(gradient) or not is_laid_out_as(member.parameter, gradient):
                return  # it leaves at the step, when it is reduced
            gradients[member.index] = member.flat_gradient(gradient)
            self._stamps[member.index] = stamp_of(gradient)
        if isinstance(bucket, CpuBucket):
            bucket.hold(gradients)
            bucket.land(self._device.record(self._device.compute))
        elif self._step_early:
            bucket.hold(gradients)
        if self._step_early:
            self.early[id(bucket)] = bucket
            self._steps.submit([bucket], self._steps.release([bucket]), HostScalars(), None)

    # -- at the step -----------------------------------------------------------------------------------------
    def has_landed(self, bucket: HostBucket, gradients: Mapping[int, Tensor]) -> bool:
        """Whether the host has, or is getting, the very gradients that are there now."""
        return isinstance(bucket, CpuBucket) and all(
            self._is_as_it_left(member, gradients) for member in bucket.members
        )

    def written(self, buckets: Iterable[HostBucket]) -> str | None:
        """Whose weights somebody wrote, if anybody did, as a sentence."""
        changed = (member for bucket in buckets for member in bucket.members if member.changed_outside())
        return next((f"the weights of {member} were written" for member in changed), None)

    def broken(self, buckets: Collection[HostBucket], gradients: Mapping[int, Tensor]) -> str | None:
        """What has changed since these were, or could have been, stepped early, as a sentence."""
        changed = self._copies.changed() if buckets else []
        if changed:
            return f"the param groups' {', '.join(changed)} changed"
        if (written := self.written(buckets)) is not None:
            return written
        for bucket in buckets:
            for member in bucket.members:
                if not self._is_as_it_left(member, gradients):
                    return f"the gradient of {member} changed"
        return None

    def _is_as_it_left(self, member: Managed, gradients: Mapping[int, Tensor]) -> bool:
        gradient, stamp = gradients.get(member.index), self._stamps.get(member.index)
        if gradient is None or stamp is None:
            return False
        reference, version, local_version = stamp
        return (
            reference() is gradient
            and gradient._version == version
            and local_of(gradient)._version == local_version
        )

    def distrust(self) -> None:
        """Gradients were written, or are about to be, in a way that no version tells: none is as it left."""
        self._stamps.clear()

    def forget(self) -> None:
        """What landed counts no more; what was stepped early is for the caller to know."""
        self._begun = False
        self._stamps.clear()
        self._final.clear()
