"""Steps that begin while the backward still runs: `overlap="backward"`. The loop promises that a gradient is
final when its last backward has made it.

A bucket is stepped once the gradients of all its parameters are final. A gradient is final after the backward
of the parameter's last microbatch. The user or the schedule says which one that is (`last_microbatch`,
`no_sync`); else a parameter is expected to have as many backwards as in the step before. FSDP2 calls the
hooks after its reduction. One invariant: a broken promise that can be seen is an error before anything else
is stepped.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from offload.client import weakly
from offload.optim.host_part import HostBucket
from offload.optim.parts import may_be_reduced_in_place
from offload.optim.placing import Placement
from offload.optim.stepping import HostedSteps
from offload.optim.touch import SpentGradient, SteppedGradient, WeightWatch, watch
from offload.params.view import ParamView, is_laid_out_as, local_of
from offload.params.watched import HOME, has_own_storage
from offload.transfer.limits import Limits


def _versions(gradient: Tensor) -> tuple[int, int]:
    """Version counters of the tensor and of its local shard."""
    return gradient._version, local_of(gradient)._version


def _memory_of(gradient: Tensor) -> Tensor | None:
    """Tensor that the gradient is a view of, whose version its local shard has."""
    with torch._C.DisableTorchFunctionSubclass():
        return local_of(gradient)._base


def _refuse_spent(member: ParamView, _: Tensor) -> None:
    """Torch is about to add to the gradient."""
    SpentGradient.make_ready(member.parameter.grad)


class BackwardSteps:
    """The buckets that were stepped in one backward. Hooks call it on the thread that runs the backward.

    limits: of the engine, how many bytes of gradients may wait for their step on the device.
    begin: called before the first bucket of a backward is stepped: ends the last step, and takes over what
        the param groups say.
    """

    def __init__(
        self,
        limits: Limits,
        placed: Placement,
        steps: HostedSteps,
        watch: WeightWatch,
        begin: Callable[[], None],
    ) -> None:
        self._limits = limits
        self._placed = placed
        self._steps = steps
        self._watch = watch
        self._begin = begin
        self.last_microbatch: bool | None = None
        """Whether the backward to come is the last of its step; None: nobody says, the step before does."""
        self.stepped: set[HostBucket] = set()  # in this backward
        self._seen: Counter[int] = Counter()  # backwards of each parameter in this step
        self._expected: Counter[int] = Counter()
        # by parameter: its gradient and that one's versions, when it was stepped
        self._stamps: dict[int, tuple[weakref.ref[Tensor], tuple[int, int]]] = {}
        # stamps before a load of state
        self._used: dict[int, tuple[weakref.ref[Tensor], tuple[int, int]]] = {}
        # by id of the memory that gradients are views of, as FSDP2's are: its version, which is theirs. FSDP2
        # adds to one view after the bucket of another was stamped, which is no write to that one
        self._shared: dict[int, int] = {}
        # how many gradients of a bucket are final; empty before `begin`
        self._final: Counter[HostBucket] = Counter()
        self._spent: dict[int, tuple[weakref.ref[Tensor], list[HostBucket], int]] = {}  # by parameter
        self.behind_bytes_peak = 0
        """Of gradients on the device that waited for their step in the backward; who reads it starts anew."""
        self._next: HostBucket | None = None  # issued, and not seen to end
        self._handles: list[Any] = []

    def hook(self, members: Sequence[ParamView]) -> None:
        """Register hooks on the parameters. They hold this object weakly."""
        self._steps.when_touched = weakly(self.touched)
        accumulated = weakly(self.accumulated)
        for member in members:
            if member.parameter.requires_grad and member.parameter.is_leaf:
                if member.home is not None:
                    before = functools.partial(_refuse_spent, member)
                    self._handles.append(member.parameter.register_hook(before))
                hook = functools.partial(accumulated, member)
                self._handles.append(member.parameter.register_post_accumulate_grad_hook(hook))

    def accumulated(self, member: ParamView, _: Tensor) -> None:
        """A backward has added to the parameter's gradient. Blocks the host only if the last step is not yet
        issued."""
        self._seen[member.index] += 1
        grad = member.parameter.grad
        if grad is not None and (base := _memory_of(grad)) is not None:
            self._shared[id(base)] = base._version  # where it adds to one, all others' count it
        if (buckets := self._steps.buckets_of.get(member.index)) is None:
            return  # the optimizer has let it go
        if not self.stepped.isdisjoint(buckets):
            self.raise_if_stepped(
                f"{member} got another gradient (use no_sync() in all backwards but the last)"
            )
        last = self.last_microbatch
        if last is None:
            last = self._expected[member.index] == self._seen[member.index]
        # no hook runs in the replays of a graph, whose gradients these are: they are stepped in step()
        if not last or self._final_gradient(member) is None or member.device.is_capturing():
            return
        with torch.no_grad():
            if not self._final:
                self._begin()
                self._next = None
            for bucket in buckets:
                self._final[bucket] += 1
                if self._final[bucket] == len(bucket.members):
                    self._final[bucket] = 0
                    self._step(bucket)

    def _final_gradient(self, member: ParamView) -> Tensor | None:
        """None for a gradient that step() steps: one that was thrown away, or has another in its place, or
        will be reduced, or is of a parameter that was taken out of its group."""
        gradient = member.parameter.grad
        if (
            gradient is None
            or getattr(member.parameter, "decoupled_grad", None) is not None
            or member.index not in self._placed.places
            or may_be_reduced_in_place(gradient)
            or not is_laid_out_as(member.parameter, gradient)
        ):
            return None
        return gradient

    def _step(self, bucket: HostBucket) -> None:
        found = [(member, self._final_gradient(member)) for member in bucket.members]
        gradients = {member: gradient for member, gradient in found if gradient is not None}
        if len(gradients) < len(found):
            return
        flats = {member.index: member.flat_gradient(grad) for member, grad in gradients.items()}
        bucket.set_gradients(flats, self._steps)
        self.stepped.add(bucket)  # first: what breaks off here has begun a step
        self._steps.submit([bucket])
        for member, gradient in gradients.items():
            self._stamps[member.index] = weakref.ref(gradient), _versions(gradient)
            # a touch before step() breaks the promise
            self._watch.watch(member.index, member.parameter, gradient=False)
            mine = self._steps.buckets_of[member.index]
            plain = type(gradient) in (Tensor, SteppedGradient) and not gradient._is_view()
            own = plain and HOME not in vars(gradient)
            if member.home is not None and own and self.stepped.issuperset(mine):
                SpentGradient.spend(gradient, str(member))
                self._spent[member.index] = weakref.ref(gradient), mine, member.nbytes
            elif own or local_of(gradient) is not gradient:
                watch(gradient, self._steps, member.index, stepped=True)
        self._await_steps()

    def _await_steps(self) -> None:
        """Give back the memory of gradients whose steps have ended, in the order of the steps. While there
        are more than `gradients_behind_bytes` of others, the current lane waits for the next step, which
        blocks the host until that is issued. Order: [Order: weights back]."""
        device, steps = self._placed.members[0].device, self._steps
        limit = self._limits.gradients_behind_bytes
        self._free_spent()
        self.behind_bytes_peak = max(self.behind_bytes_peak, self._behind_bytes)
        while True:
            over = limit is not None and self._behind_bytes > limit
            self._next = self._next or steps.next_issued(block=over)
            event = None if self._next is None else self._next.returned
            if self._next is None or event is None or steps.failed or not (over or device.poll(event)):
                return
            steps.stalls.wait(device.compute, event, "weights back")
            self._next.drop_gradients()
            self._next = None
            self._free_spent()

    @property
    def _behind_bytes(self) -> int:
        """Bytes of gradients whose steps were not seen to end."""
        return sum(nbytes for *_, nbytes in self._spent.values())

    def _free_spent(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for index, (spent, buckets, _) in [*self._spent.items()]:
                if any(bucket.gradients for bucket in buckets):
                    continue
                if (gradient := spent()) is None or has_own_storage(gradient):
                    del self._spent[index]
                    if gradient is not None:
                        self._placed.members[0].device.free(gradient.untyped_storage())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not the last of their step; the one after it is."""
        before, self.last_microbatch = self.last_microbatch, False
        try:
            yield
        finally:
            self.last_microbatch = True if before is None else before

    def raise_if_stepped(self, what: str) -> None:
        """`what` happened, as a sentence: an error if anything was stepped in this backward."""
        if self.stepped:
            self._steps.fail(
                f"{what} after {len(self.stepped)} buckets had been stepped in the backward; they are a step "
                "ahead of the rest. Load the last state dict, and change param groups, gradients and weights "
                'before the backward, or use overlap="forward" or "step"'
            )

    def touched(self, index: int) -> None:
        """A parameter is read or written before step(): an error if this backward has stepped it."""
        if not self.stepped.isdisjoint(self._steps.buckets_of.get(index, ())):
            self.raise_if_stepped(
                f"the weights of parameter {index} were read or written before step(), or its gradient was "
                "written (use no_sync() in all backwards but the last)"
            )

    def check(self, gradients: Mapping[int, Tensor]) -> None:
        """Called by step(): check that the gradients are still the ones that were stepped, and that none was
        stepped before state was loaded."""
        for index, stamp in self._used.items():
            gradient = gradients.get(index)
            if gradient is not None and stamp[0]() is gradient and stamp[1] == _versions(gradient):
                self._steps.fail(
                    f"state was loaded after the gradient of parameter {index} had been stepped in the "
                    "backward, and step() would step it again. Load the last state dicts of model and "
                    'optimizer; load between step() and the next backward, or use overlap="forward" or "step"'
                )
        for bucket in self.stepped:
            for member in bucket.members:
                gradient, (stepped, (own, version)) = gradients.get(member.index), self._stamps[member.index]
                if gradient is not None:
                    version = self._shared.get(id(_memory_of(gradient)), version)
                if gradient is None or stepped() is not gradient or _versions(gradient) != (own, version):
                    self.raise_if_stepped(f"the gradient of {member} changed")

    def end_step(self) -> None:
        """The gradients are used; the counting begins anew."""
        if self._seen:
            self._expected = self._seen
        self.start_over()

    def start_over(self) -> None:
        """The gradients are used, or thrown away unused."""
        self._seen = Counter()
        self._stamps.clear()
        self._used.clear()
        self._shared.clear()
        self._final.clear()
        self.stepped.clear()

    def forget(self) -> None:
        """State is loaded, after a failure or instead of a step: gradients that were stepped are not to be
        stepped again."""
        used = dict(self._stamps)
        self.start_over()
        self._used = used

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
