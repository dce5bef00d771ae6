"""Steps that start in the backward before anybody knows whether they will count, and are undone exactly where
they do not.

    gradients of a bucket are final    offer: its old weights are kept on the device, its state goes out to
                                       the other side
    step(), and nothing in the way     keep: the other side counts from now on; the old weights go when the
                                       new ones are waited for
    anything else                      undo: the old weights go back, the side that counts was not written,
                                       the bucket waits for step()

What is in the way: a clip factor other than exactly 1, param groups or gradients that changed since, a step
left out, weights or state that somebody wants to see before step(). One invariant: outside of the backward
nobody reads what an undecided step wrote, so undoing it leaves no trace but lost time.

Why a factor of 1 may be left out: x * 1.0 is x for every float that is not a nan, denormals too, since the
kernels flush none; and a norm that gives a factor of 1 is finite, so no gradient in it is a nan, but with
norms that count them (order 0) or a `total` that does not know of them. Those nans stay nans either way: what
Adam makes of a nan has lost its payload.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from offload.device import Device
from offload.errors import OffloadError
from offload.optim.cpu_step import HostScalars
from offload.optim.old_weights import OldWeights, nbytes_of
from offload.optim.parts import StreamedPart
from offload.optim.stepping import HostBucket, HostedSteps
from offload.optim.streamed_step import StreamedBucket

__all__ = ["UNDOABLE", "EarlyCounts", "EarlySteps", "StepInBackward", "checked_mode"]

logger = logging.getLogger(__name__)

StepInBackward = bool | Literal["undoable"]
UNDOABLE = "undoable"

QUIET_STEPS = 8
"""Steps in a row that would not have been undone, before steps start early again. A step that is undone sends
its state over the link twice, and runs that clip do so in many steps one after the other; a run that never
does loses nothing by the rule."""

SPARE_ROOM = 2
"""How many times a bucket's old weights have to fit beside themselves. When one bucket is offered a layer's
backward holds more of its own than when another is: with no spare room W4's peak rose by 1.3 buckets (one
H200, November 2026)."""


def checked_mode(
    mode: object, *, overlaps: bool, max_grad_norm: float | None, model: nn.Module | None
) -> StepInBackward:
    """The mode, if it can be exact with the other arguments. Raises ValueError."""
    if mode == UNDOABLE and isinstance(mode, str):
        if not overlaps or model is None:
            raise ValueError(
                f"step_in_backward={UNDOABLE!r} needs overlap, and model=: a forward before step() has to "
                "tell that it reads weights; give "
                "them, or leave step_in_backward out"
            )
        return "undoable"
    if not isinstance(mode, bool):
        raise ValueError(f"step_in_backward is {mode!r}, must be False, True (a promise) or {UNDOABLE!r}")
    if mode and (not overlaps or max_grad_norm is not None):
        raise ValueError(
            "step_in_backward needs overlap, and no max_grad_norm: the norm is known only after the "
            "backward; leave one out, or give "
            f"step_in_backward={UNDOABLE!r}"
        )
    return mode


@dataclass(slots=True)
class EarlyCounts:
    """Buckets, since the optimizer was made."""

    started: int = 0
    """Stepped in the backward, or given to the worker there."""
    no_room: int = 0
    """Left for step(), because their old weights did not fit."""
    undone: int = 0
    """Of those started."""


class EarlySteps:
    """The undecided buckets of one backward: `started`, by id.

    quiet_steps: see QUIET_STEPS. outside: places of the parameters of which a forward may be the reader and
        tell nobody; those that are read past their modules are known from the second step on.
    """

    def __init__(self, device: Device, steps: HostedSteps, streamed: StreamedPart) -> None:
        self._device = device
        self._steps = steps
        self._streamed = streamed
        self.started: dict[int, StreamedBucket] = {}
        self.counts = EarlyCounts()
        self.quiet_steps = QUIET_STEPS
        self.outside: Collection[int] = ()
        # of this backward, by id: could have started, whether they did or not
        self._final: dict[int, StreamedBucket] = {}
        self._rest = 0  # steps that must not be undone before the next start
        self._spoiled = False  # this step's would be undone
        self._given_up = False
        self._most_bytes = 0  # active on the device when a bucket was offered, without old weights
        self._old_bytes = 0
        self.asks = False
        """Whether the factor of the step under way decides about steps to come, and nobody has looked at it;
        see `ask`."""
        self._asked: HostScalars | None = None
        self._warned = False

    # -- in the backward -------------------------------------------------------------------------------------
    def begin(self) -> None:
        """A backward's first gradient is final, and the last step is settled. Blocks the host until the last
        step's buckets are stepped on the device: what they held is let go of then, so the bytes that are
        active do not depend on the worker's speed."""
        self._read_asked()
        ring = self._streamed.ring
        if ring is not None and self._rest == 0:
            self._steps.start_workers()
            self._device.synchronize(self._device.record(ring.lane))
            self._steps.let_go()

    def offer(self, bucket: StreamedBucket, gradients: Mapping[int, Tensor]) -> None:
        """Start the bucket's step, if it is likely to count and its old weights fit. Blocks the host: never.

        They fit where they, and SPARE_ROOM times as much, raise the bytes active on the device to no more
        than was active when an earlier bucket was offered, without old weights. What a layer's backward needs
        for itself comes on top of both: with layers alike the peak of the step is what it was, and a layer
        that needs more than those after it may raise it by the difference. In the next forward a layer's old
        weights are gone before its activations are there, as these were freed before those came.
        """
        if any(member.index in self.outside or member.changed_outside() for member in bucket.members):
            # who reads it may not say so; or weights were written since the last step, and step() has to look
            # at them first
            return
        self._final[id(bucket)] = bucket
        if self._rest > 0:
            return
        homes = bucket.weights()
        nbytes, active = nbytes_of(homes), self._device.active_bytes()
        self._most_bytes = max(self._most_bytes, active - self._old_bytes)
        if active + nbytes * (1 + SPARE_ROOM) > self._most_bytes:
            self.counts.no_room += 1
            return
        try:
            old = OldWeights(self._device, homes, lambda: self._given_up)
        except torch.OutOfMemoryError:
            self.counts.no_room += 1
            return
        self._old_bytes += nbytes
        self.counts.started += 1
        bucket.hold(gradients, old)
        self.started[id(bucket)] = bucket
        self._steps.submit([bucket], self._steps.release([bucket]), HostScalars(), None)

    def refuse_second(self, member: object) -> None:
        """The gradient of a parameter whose bucket was stepped early has been added to by a backward without
        a forward before it."""
        self.undo("a second backward")
        raise OffloadError(
            f"{member} got a gradient after its bucket had been stepped in this backward, and what made it "
            "may have read the new weights; "
            "the step is undone: call zero_grad() and run the backwards again, with no_sync() before the "
            "last one"
        )

    # -- between the backward and the step -------------------------------------------------------------------
    def before_reading(self, indices: Sequence[int] | None) -> None:
        """Somebody is about to read weights of these parameters, None for all: let it be those of the last
        whole step. See `undo`."""
        if not self._final:
            return
        of = self._steps.buckets_of
        if indices is None or any(
            id(bucket) in self._final for index in indices for bucket in of.get(index, ())
        ):
            self.undo("weights or state were asked for before step()")

    def undo(self, why: str) -> None:
        """Weights, state and counts of the last whole step, on every lane that waits for them; none starts
        early for a while.

        Blocks the host until the worker has left the buckets. Raises OffloadError if it had failed; all is
        undone then too.
        """
        if not self._final:
            return
        self._rest, self._spoiled = self.quiet_steps, True
        error, count = self._steps.error, len(self.started)
        self.take_back(why)
        self._final.clear()
        if error is None:
            error = self._steps.error  # met while we waited
        if error is not None and count:
            self._steps.forgive()
            raise OffloadError(
                f"a step that had started in the backward failed on a worker ({type(error).__name__}: "
                f"{error}); its {count} buckets are "
                "undone: weights and state are those of the last whole step. Call step() again, or "
                "zero_grad() to leave this one out"
            ) from error

    def take_back(self, why: str, *, weights: bool = True) -> None:
        """As `undo`, without its error. weights: put them back too. Order: [Order: undone] in
        old_weights.py."""
        if not self.started:
            return
        buckets, device, ring = list(self.started.values()), self._device, self._streamed.ring
        assert ring is not None
        self._given_up = True
        for bucket in buckets:
            bucket.done.wait()
        self._given_up = False
        with device.use_lane(ring.lane), torch.no_grad():
            for bucket in buckets:
                bucket.put_back(weights=weights)
        undone = device.record(ring.lane)
        lanes = [device.compute, *(bucket.old.lane for bucket in buckets if bucket.old is not None)]
        for lane in {id(lane): lane for lane in lanes}.values():
            device.wait(lane, undone, "undone")
        for bucket in buckets:
            bucket.stepped = undone
            bucket.old = None
        self.counts.undone += len(buckets)
        self._old_bytes = 0
        self.started.clear()
        logger.debug("%d buckets that were stepped in the backward are undone: %s", len(buckets), why)

    # -- at the step -----------------------------------------------------------------------------------------
    def review(self, why: str | None) -> None:
        """why: what is known to be in the way before the norm is, as a sentence. See `undo`."""
        if why is None:
            return
        if self.started and not self._warned and "gradient" in why:
            self._warned = True
            logger.warning(
                "%s between the backward and step(), and %d buckets that had started early are undone; a "
                "GradScaler and torch's "
                "clip_grad_norm_ do that in every step, the optimizer's clip_grad_norm_ does not. Nothing "
                "starts early until %d steps "
                "in a row would have been kept: without such steps leave step_in_backward out",
                why,
                len(self.started),
                self.quiet_steps,
            )
        self.undo(why)

    @property
    def final(self) -> Collection[HostBucket]:
        """Buckets whose steps started, or would have but for room and rest."""
        return self._final.values()

    def decided(self, factor: Tensor | None) -> dict[int, HostBucket]:
        """The buckets whose early steps count, by id, once the step's factor is made. See `undo`.

        Blocks the host until compute has made the factor, if anything has started. A worker that fails after
        this fails as in any step.
        """
        self._read_asked()
        self.asks = factor is not None and not self.started and not self._spoiled
        if not self.started:
            if factor is None and not self._spoiled:
                self._quiet(True)
            return {}
        exact = factor is None or self._is_one(factor)
        if not exact or self._steps.error is not None:
            self.undo("the gradients are clipped" if not exact else "a worker failed")
            return {}
        kept: dict[int, HostBucket] = dict(self.started)
        for bucket in self.started.values():
            bucket.keep()
        logger.debug(
            "%d buckets were stepped in the backward, %d could have been", len(kept), len(self._final)
        )
        self.started.clear()
        self._old_bytes = 0
        self._quiet(True)
        return kept

    def ask(self, scalars: HostScalars) -> None:
        """Look at the factor when it is there: at the next backward or step."""
        self._asked = scalars

    def forget(self) -> None:
        """The gradients are used, or thrown away."""
        self._final.clear()
        self._spoiled = False

    def _is_one(self, factor: Tensor) -> bool:
        device = self._device
        device.synchronize(device.record(device.compute))
        device.note_read(device.host, factor.reshape(1).view(torch.uint8))
        return float(factor) == 1.0

    def _read_asked(self) -> None:
        scalars, self._asked = self._asked, None
        if scalars is not None and scalars.event is not None and scalars.factor is not None:
            self._device.synchronize(scalars.event)
            self._device.note_read(self._device.host, scalars.factor.reshape(1).view(torch.uint8))
            self._quiet(float(scalars.factor) == 1.0)

    def _quiet(self, quiet: bool) -> None:
        """Count a step that would have been kept, or one that would not."""
        self._rest = max(0, self._rest - 1) if quiet else self.quiet_steps
