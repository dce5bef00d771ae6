"""One step of the hybrid optimizer: it reads the gradients, clips them, gives buckets to their workers, and
orders later uses of weights behind the step.

placing.py has decided before what is stepped where; hybrid.py has the public class. One invariant: step()
checks every gradient and every promise of `overlap` before it steps anything, and raises then. With
`overlap="step"` step() returns when every later use of a weight or gradient is ordered behind the step.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from offload.client import Client, Phase, weakly
from offload.device import device_bytes
from offload.engine import OffloadEngine
from offload.optim.backward import BackwardSteps
from offload.optim.parts import clip_, total_norm
from offload.optim.placing import Place, Placement, PlacingOptions
from offload.optim.resident import ResidentPart
from offload.optim.state import UserState
from offload.optim.stepping import HostedSteps
from offload.optim.touch import AwaitedWeight, WeightWatch, await_all
from offload.params.view import ParamView, count_write, laid_out_as
from offload.telemetry.records import ClientStats

Overlap = Literal["step", "forward", "backward"]

GRADIENTS_BEHIND_BYTES, GRADIENTS_BEHIND_SHARE = 2 << 30, 16
"""Of gradients on the device whose step in the backward has not ended, a sixteenth of a GPU's memory: the
link is behind by then. It has these to do while compute waits, or has no gradients, as in the next forward. A
7 B on one H100: 2,407 ms with 2 GiB, 2,311 with 7 (scripts/bench_weights.py --work full). Without a GPU it is
2 GiB."""

_OPEN: weakref.WeakSet[StepRunner] = weakref.WeakSet()
"""Runners of all optimizers that are not closed."""


def checked_overlap(overlap: str, model: nn.Module | None, *, has_workers: bool, clips: bool) -> Overlap:
    """The argument, if it can be exact. Raises ValueError that says what to use instead."""
    if overlap not in get_args(Overlap):
        raise ValueError(f'overlap is {overlap!r}, must be "step", "forward" or "backward"')
    if overlap == "step":
        return "step"
    if overlap == "forward" and model is None:
        raise ValueError(
            'overlap="forward" needs model=, whose modules wait for their weights; give it, or use "step"'
        )
    if not has_workers:
        raise ValueError(
            f"overlap={overlap!r} needs workers; overlap_cpu_optimizer_d2h_h2d=False, an atomic step (of all "
            "but torch's fused kernels, unless atomic_step=False) and a class that is not of torch.optim "
            'have none: leave them out, or use overlap="step"'
        )
    if overlap == "backward" and clips:
        raise ValueError(
            'overlap="backward" and max_grad_norm: the norm is known only after the backward; leave one out'
        )
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for name, module in model.named_modules() if model is not None else ():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"overlap={overlap!r}: {name or 'the model'} is a module of torch.jit, whose code reads "
                'weights unseen; use overlap="step"'
            )
        if isinstance(module, fsdp):
            raise ValueError(
                f"overlap={overlap!r}: {name or 'the model'} is a FullyShardedDataParallel (FSDP1): its "
                'flat parameter is read unseen; use overlap="step", or FSDP2'
            )
        if overlap == "backward" and isinstance(module, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f'overlap="backward" promises final gradients, and {name or "the model"} is a '
                'DistributedDataParallel, which reduces them later; use overlap="forward"'
            )
    return "forward" if overlap == "forward" else "backward"


def open_runners() -> list[StepRunner]:
    """Runners of all optimizers that are not closed."""
    return list(_OPEN)


def stepped_by_open_ones(*, in_backward: bool) -> Iterator[Tensor]:
    """The parameters of all optimizers that are not closed, or of those that step in the backward."""
    for runner in list(_OPEN):
        if runner.overlap == "backward" or not in_backward:
            yield from (member.parameter for member in runner.placed.members)


class StepRunner(Client):
    """The parts of one optimizer and its steps; the engine's client "optim".

    groups: gives the user's param groups; must not keep the optimizer alive. atomic: whether an error leaves
        the last whole step. waits: step() returns when all is on the host again. Blocks the host for pinning.
        Raises ValueError or HostBudgetError.
    """

    name = "optim"

    def __init__(
        self,
        engine: OffloadEngine,
        options: PlacingOptions,
        groups: Callable[[], list[dict[str, Any]]],
        *,
        overlap: Overlap,
        model: nn.Module | None,
        atomic: bool,
        waits: bool,
    ) -> None:
        self.overlap = overlap
        self.last_grad_norm: Tensor | None = None
        self._engine = engine
        self._groups = groups
        self._model = model
        self._waits = waits
        self._atomic = atomic
        self.placed = Placement(engine, options)
        self.state = UserState(self.placed, with_masters=options.host.masters_in_fp32)
        self.placed.when_left = weakly(self.state.left)
        self.steps = HostedSteps(engine, self.placed.cpu, self.placed.streamed, options.cpu_threads)
        self._watch = WeightWatch(engine, self.steps)
        begin = weakly(self._begin)
        self.backward = BackwardSteps(engine.limits, self.placed, self.steps, self._watch, begin)
        self._limits = engine.limits.contributor("optim", self)
        if overlap == "backward":
            self.placed.streamed.in_backward = True
            total = device_bytes(engine.device.torch_device)
            behind = GRADIENTS_BEHIND_BYTES if total is None else total // GRADIENTS_BEHIND_SHARE
            self._limits.bound("gradients_behind_bytes", behind)
        try:
            self.regroup()
            self.state.note_step()  # what constructors have made
        except BaseException:
            self.end()  # what was pinned goes back to an engine that others use
            raise
        engine.attach(self)

    def regroup(self) -> None:
        """Follow the user's param groups; nothing may be in flight. Blocks the host for pinning. Raises
        ValueError or HostBudgetError."""
        self.state.show()
        named = self._model.named_parameters() if self._model is not None else ()
        self._names = {id(p): name for name, p in named}
        self._refuse_shared()
        offloaded = self.placed.regroup(self._groups(), self._names)
        self.state.joined()
        self.steps.index()
        if self.overlap == "backward":
            self.backward.hook(offloaded)
        if self.overlap != "step" and self._model is not None:
            indices = {id(member.parameter): member.index for member in self.placed.members}
            self._watch.attach(self._model, indices)

    def _refuse_shared(self) -> None:
        """Raises ValueError for a parameter that another open optimizer has too, where one of the two steps
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
        _OPEN.add(self)

    def _shared(self) -> tuple[Tensor, Overlap] | None:
        mine = {id(p) for group in self._groups() for p in group["params"]}
        found = (
            (p, other.overlap)
            for other in list(_OPEN)
            if other is not self and "backward" in (other.overlap, self.overlap)
            for group in other._groups()
            for p in group["params"]
            if id(p) in mine
        )
        return next(found, None)

    def follow_user(self) -> None:
        """Take over what the user has changed since the last step: groups, state, memory. Blocks the host
        where groups or state were."""
        if not self.placed.is_grouped_as(self._groups()):
            self.steps.finish_on_host()
            self.regroup()
        self.state.is_held = False
        if self.state.is_looked_at:
            self.steps.finish_on_host()
            self.state.take_over()
        for member in self.placed.members:
            if self.placed.follow(member, self.steps.finish_on_host):
                self.state.reordered(member)

    # -- the step --------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        """End the last step, and take over what the user has changed since. Blocks the host until the last
        step is issued."""
        self.steps.start_workers()
        self.steps.finish()
        for member in self.placed.members:
            if isinstance(member.parameter, AwaitedWeight):  # another optimizer's step of it
                await_all(member.parameter)
        self.follow_user()
        self.placed.refuse_shared_memory()
        self.placed.refresh()

    def step(self, max_grad_norm: float | None, *given: Any, **named: Any) -> Any:
        """See HybridDeviceOptimizer.step. max_grad_norm: None does not clip. given: a closure first."""
        loss, whole = None, self.placed.whole
        if whole is None and (given[1:] or named):
            raise TypeError(f"step() takes a closure alone here, not {(*given[1:], *named)}")
        if given and whole is None:
            with torch.enable_grad():
                loss = given[0]()
        sees = None if given and whole is not None else self._engine.on_phase  # its closure runs a backward
        if sees is not None:
            sees(Phase.OPTIMIZER)
        try:
            with self.steps.stepping:
                if whole is not None:
                    return self._step_whole(whole, max_grad_norm, *given, **named)
                with torch.no_grad():
                    self._step(max_grad_norm)
            return loss
        finally:
            if sees is not None:
                sees(Phase.STEP_END)

    def called(self, method: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call a method of the one optimizer's class, and return what it returns. It finds weights, gradients
        and state of now, and its writes are the model's."""
        with self.steps.stepping:
            self.take_changes()
            whole = self.placed.whole
            assert whole is not None
            whole.fetch(self._gradients())
            try:
                return method(*arguments, **keywords)
            finally:
                whole.give_back()
                self.placed.adopt(self._groups())
                self.state.note_step()

    def _step_whole(self, whole: ResidentPart, max_grad_norm: float | None, *given: Any, **named: Any) -> Any:
        """The class's own step, as it is alone, closure and all."""
        errors: list[BaseException] = []

        @torch.no_grad()
        def fetch() -> None:
            if max_grad_norm is not None:
                self.clip(max_grad_norm, 2.0, None)
            whole.fetch(self._gradients())
            self.steps.torn = True

        def evaluate() -> Any:
            try:
                whole.give_back()
                self.steps.torn = False  # whoever looks finds all in its place
                self.state.note_step()
                try:
                    loss = given[0]()
                    if self.state.is_looked_at:
                        self.state.take_over()
                except BaseException as error:
                    errors.append(error)
                    raise
                self.state.note_step()
                fetch()
            except BaseException:  # the host is about to write what these copies read, or write, too
                self.steps.settle()
                raise
            return loss

        with torch.no_grad():
            self._begin()
        self.state.note_step()
        try:
            fetch()
            first = [evaluate] if given and callable(given[0]) else given[:1]
            found = whole.step(*first, *given[1:], atomic=self._atomic, not_ours=errors, **named)
        except BaseException as error:
            self.steps.torn &= not (whole.undone or isinstance(error, Exception))
            raise
        self.steps.torn = False
        gradients = self._gradients()
        with torch.no_grad():
            self._end_step(gradients, [member for member in self.placed.members if member.index in gradients])
        return found

    def _step(self, max_grad_norm: float | None) -> None:
        stepped = self.backward.stepped
        if stepped:
            self.steps.raise_failure()
            changed = any(group.is_changed() for group in self.placed.user_groups)
            if changed or not self.placed.is_grouped_as(self._groups()):
                self.backward.raise_if_stepped("the param groups changed")
            if max_grad_norm is not None:
                self.backward.raise_if_stepped("clipping was asked for")
        else:
            self._begin()
        if max_grad_norm is not None:
            self.clip(max_grad_norm, 2.0, None)
        gradients = self._gradients()
        self.backward.check(gradients)
        self.state.note_step()
        buckets = [bucket for bucket in self.steps.in_order if bucket not in stepped]
        needed = {member.index for bucket in buckets for member in bucket.members}
        offloaded = [
            member
            for member in self.placed.members
            if self.placed.is_offloaded(member) and member.index in gradients
        ]
        flats = {
            member.index: self._flat_gradient(member, gradients[member.index])
            for member in offloaded
            if member.index in needed
        }
        buckets = [bucket for bucket in buckets if bucket.has_any(flats)]
        submits = False
        try:
            for bucket in buckets:
                bucket.set_gradients(flats, self.steps)
            submits, self.steps.torn = not self.placed.resident, True
            for part in self.placed.resident:  # what is in no bucket, on the current lane
                part.fetch(gradients)
                part.step(atomic=self._atomic and part is self.placed.on_host)
            submits = True
            self.steps.submit(buckets)
            self._end_step(gradients, offloaded)
        except BaseException as error:
            if submits and not self.steps.failed:  # the step is made whole
                self.steps.resume(buckets)
                self._end_step(gradients, offloaded)
            elif submits or isinstance(error, Exception):  # which says itself what it leaves
                self.steps.torn = False
            for bucket in buckets if not submits else ():
                bucket.is_due = False
            self.steps.settle()
            raise

    def _flat_gradient(self, member: ParamView, gradient: Tensor) -> Tensor:
        """Where the gradient waits on the host, its bytes there, which its buckets take as they are."""
        in_use = self.backward.stepped  # the ring is, and nobody may wait for all
        lent = None if in_use else member.lent_gradient(gradient, self.steps.awaiting(member.index))
        if lent is None:
            return member.flat_gradient(gradient)
        if self.placed[member] is Place.STREAMED and not self.placed.streamed.takes_lent:
            self.steps.end_on_host()
            self.placed.streamed.takes_lent = True
            self.placed.streamed.make_ring()
        return lent

    def _end_step(self, gradients: Mapping[int, Tensor], offloaded: Sequence[ParamView]) -> None:
        """All that a step writes has been issued."""
        count_write(offloaded)
        self.placed.note_stepped(gradients)
        self.backward.end_step()
        self._order_readers()
        if self.state.is_held or self._waits:
            self.steps.end_on_host()
            self.state.show()
        self.steps.torn = False

    def _order_readers(self) -> None:
        """Order every later use of a weight behind its return: at its first touch, or here for the weights
        whose touch cannot be seen. Without `model` all are ordered here."""
        now = None  # all
        if self.overlap != "step" and self._model is not None and not self._watch.replays_unseen:
            now = [
                member.index
                for member in self.placed.members
                if self.steps.is_pending(member.index)
                and not self._watch.watch(member.index, member.parameter, gradient=True)
            ]
        self.steps.await_weights(now)

    def clip(self, max_norm: float, norm_type: float, total: Tensor | None) -> Tensor:
        """See HybridDeviceOptimizer.clip_grad_norm_."""
        gradients = [found for member in self.placed.members if (found := member.gradient) is not None]
        await_all(gradients)
        device = self._engine.device.torch_device
        norm = total if total is not None else total_norm(gradients, norm_type, device)
        # summed where a rank has a share: a scaled sum is not the sum of scaled shares, bit for bit
        laid_out = self._gradients()
        for member in self.placed.members:
            if member.index in laid_out:
                member.gradient = laid_out[member.index]
        clip_(list(laid_out.values()), max_norm, norm)
        self.last_grad_norm = norm
        return norm

    def _gradients(self) -> dict[int, Tensor]:
        """Gradients by parameter, laid out as it. Collective where a DTensor's gradient lies otherwise."""
        return {
            member.index: laid_out_as(member.parameter, found)
            for member in self.placed.members
            if (found := member.gradient) is not None
        }

    def drop_gradients(self, set_to_none: bool) -> None:
        """Clear, for HybridDeviceOptimizer.zero_grad, what only this optimizer has: steps in the backward and
        `decoupled_grad`."""
        self.backward.raise_if_stepped("zero_grad was called without step()")
        self.backward.start_over()
        if not set_to_none and self.steps.in_order:
            self.refuse_in_capture("zero_grad(set_to_none=False)")
            self.steps.await_weights()
        for member in self.placed.members:
            if (decoupled := getattr(member.parameter, "decoupled_grad", None)) is not None:
                if set_to_none:
                    member.parameter.decoupled_grad = None  # type: ignore[attr-defined]
                else:
                    decoupled.zero_()

    def take_changes(self) -> None:
        """Wait for the step under way, then take over what the user has changed."""
        self.rest()
        self.follow_user()

    def parameters(self) -> Iterator[Tensor]:
        return (member.parameter for member in self.placed.members)

    def views(self) -> Iterator[Tensor]:
        """Aliases of parameters and gradients that are kept between steps."""
        yield from (member.flat for member in self.placed.members)
        for bucket in self.steps.in_order:
            yield from (*bucket.weights, *bucket.gradients)

    def rest(self) -> None:
        """End every copy and step: after it the host may read and write weights, state and masters. Blocks
        the host."""
        self.backward.raise_if_stepped("state was asked for before step()")
        self.steps.finish_on_host()

    def keep(self, nbytes: int) -> int:
        """So much of what is streamed may stay on the device from the next step on, a bucket or none of it.
        Returns how much does. Blocks the host. Raises torch.OutOfMemoryError; less stays then."""
        streamed = self.placed.streamed
        self.rest()
        streamed.resident_most_bytes = nbytes
        if streamed.buckets:
            streamed.make_ring()
        return streamed.resident_bytes

    def forget_step(self) -> None:
        """Before state is loaded: wait for the step under way, and forget a failure."""
        self.backward.forget()
        self.steps.clear_error()
        self.steps.finish_on_host()

    def refuse_in_capture(self, what: str) -> None:
        """Raise CaptureError for a call that uses workers or host state. An optimizer that keeps all state on
        the device may be captured."""
        if self.steps.in_order or self.placed.on_host.memory.buckets:
            self._engine.refuse_in_capture(f"the optimizer's {what}")

    def end_step(self) -> ClientStats:
        behind_bytes, self.backward.behind_bytes_peak = self.backward.behind_bytes_peak, 0
        self.steps.stalls, stall_count, stall_ms = self.steps.stalls.end_step()
        hides = self.overlap != "step"  # else step() itself waits, and compute has nothing else to do
        return ClientStats(
            lent_bytes=self.placed.host_bytes,
            device_bytes=self.placed.streamed.ring_bytes + self.placed.streamed.resident_bytes + behind_bytes,
            stall_ms=stall_ms if hides else 0.0,
            stall_count=stall_count if hides else 0,
        )

    def capture_begins(self) -> None:
        """Nothing in flight may be waited for in the capture."""
        if self.overlap != "step":
            self.steps.finish_on_host()

    def capture_ends(self) -> None:
        """Each replay of the graph waits for the step before it."""
        capture = self._engine.transfers.capture
        if self.overlap != "step" and capture is not None:
            capture.before_replay.append(weakly(self.steps.await_weights))

    def end(self) -> None:
        """The optimizer was closed or dropped: its hooks go, its weights arrive, and its host memory goes
        back. Blocks the host."""
        _OPEN.discard(self)
        self._limits.end()
        self.backward.close()
        self._watch.close()
        self.steps.end(self.placed.close)
