"""Which blocks are used next: as in one of the last steps, while this one goes as that did; else as after the
last two uses, the time before. And what a step's blocks compute between two uses, and how fast their weights
come, measured on the device.

One invariant: a prediction changes time, never results. A use that was not foretold is loaded when it comes,
and is foretold the next time. Nothing here waits: a step's events are read when a later step ends and they
have passed.

Two uses are looked at, not one, because a block is used in the forward and in the backward, and the pass is
part of a use. So the order of the backward, of its recomputes, of an evaluation in between and of
microbatches is learned as it is seen, and none has to be the mirror of another. They do not tell whether a
pipeline's next microbatch goes forward or backward, which its place in the step does. Of the steps that went
alike so far the one that came after a step such as the last is believed first, so kinds of steps in turn are
foretold, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from offload.device import Device, Event
from offload.ids import Owner
from offload.policy.streamed import Size
from offload.transfer.copier import Copier, Direction

_LONGEST = 1 << 14
"""Uses: a step of more, such as a generation that no step ends, is not known by its places."""

_STEPS = 4
"""That are remembered: two of each of two kinds in turn, or three kinds."""


class Pass(Enum):
    FORWARD = "forward"
    INFERENCE = "inference"  # a forward without gradients
    BACKWARD = "backward"
    OUTSIDE = "outside"  # an optimizer's step, a read of the loop's own


class Use(NamedTuple):
    block: int
    during: Pass


class Order:
    """The uses of one model's blocks, as they come."""

    def __init__(self) -> None:
        self._after: dict[tuple[Use | None, Use], Use] = {}
        self._before: Use | None = None
        self.now: Use | None = None
        self._steps: list[list[Use]] = []  # the last one first
        self._step: list[Use] = []  # this one
        self._alike: list[list[Use]] = []  # those that it goes as; the first foretells it

    def note(self, use: Use) -> bool:
        """A block is used. False where that goes on from the use before."""
        if use == self.now:
            return False
        if self.now is not None:
            self._after[self._before, self.now] = use
        self._before, self.now = self.now, use
        place = len(self._step)
        self._alike = [step for step in self._alike if step[place : place + 1] == [use]]
        if place < _LONGEST:
            self._step.append(use)
        return True

    def step_ends(self) -> None:
        """End the step: what is used from here on is of the next one."""
        if not self._step:
            return
        if len(self._step) < _LONGEST:
            self._steps = [self._step, *self._steps[: _STEPS - 1]]
        self._step = []
        after = [step for step, before in pairwise(self._steps) if before == self._steps[0]]
        self._alike = [*after, *self._steps]

    def expect(self, uses: Iterable[Use]) -> None:
        """The guess before anything is seen; what is seen is believed."""
        for use in uses:
            self.note(use)
        self._before = self.now = None
        self._step = []

    def coming(self) -> Iterator[int]:
        """Blocks in the order of their coming uses, as far as it is known; one may come twice."""
        if self._alike:
            step, place = self._alike[0], len(self._step)
            for ahead in range(min(len(self._after), len(step))):
                yield step[(place + ahead) % len(step)].block
            return
        before, now = self._before, self.now
        for _ in range(len(self._after)):
            if now is None or (use := self._after.get((before, now))) is None:
                return
            yield use.block
            before, now = now, use


_FIRST = 2
"""Steps before: in the first the order is learned, in the second what comes after the first one's end."""

_MOST = 4
"""Kinds of steps, by their number of uses, that a plan is made of: loops that never repeat make no more."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """uses: each with the seconds until the next one that were no wait for weights. bytes_per_s: of copies to
    the device."""

    uses: tuple[tuple[Use, float], ...]
    bytes_per_s: float

    def longest_pass(self, sizes: list[Size]) -> float:
        """Larger ratio, of the forward's and the backward's, of what the copies of all blocks take to what
        they compute."""
        computes, nbytes = defaultdict[Pass, float](float), defaultdict[Pass, int](int)
        for use, seconds in self.uses:
            computes[use.during] += seconds
            nbytes[use.during] += sizes[use.block].arriving
        ratios = (nbytes[each] / self.bytes_per_s / seconds for each, seconds in computes.items() if seconds)
        return max(ratios, default=0.0)


class _Sample(NamedTuple):
    """A use, and the points before and after its wait for its weights."""

    use: Use
    before: Event
    after: Event


class Measured:
    """One model's steps. tokens: of a forward's first tensor, rows of its last dimension; None before there
    was one."""

    def __init__(self, device: Device, copier: Copier) -> None:
        self._device, self._copier = device, copier
        self.tokens: int | None = None
        self._ended = self._uses = 0
        self._known: set[int] = set()  # uses of the steps that were measured
        self._samples: list[_Sample] = []
        self._copies: list[tuple[int, Event, Event]] = []
        self._watching = False
        self.is_awaited = False  # a step that is measured anew
        self._pending: tuple[list[_Sample], list[tuple[int, Event, Event]]] | None = None

    def look_at(self, arguments: Iterable[Any]) -> None:
        """Note how many tokens a block's forward has, by its arguments."""
        for each in arguments:
            if isinstance(each, torch.Tensor) and each.is_floating_point() and each.dim() > 1:
                self.tokens = each.numel() // max(1, each.shape[-1])
                return

    def measure_anew(self) -> None:
        """One of the next steps is measured, although one like it was."""
        self._known.clear()
        self.is_awaited = True

    def before_use(self) -> Event | None:
        self._uses += 1
        return self._device.record(self._device.compute, timed=True) if self._watching else None

    def after_use(self, use: Use, before: Event | None) -> None:
        if before is not None:
            after = self._device.record(self._device.compute, timed=True)
            self._samples.append(_Sample(use, before, after))

    def on_copy(self, direction: Direction, owner: Owner, nbytes: int, start: Event, end: Event) -> None:
        """Note a copy of a weight to the device (`CopyWatcher`)."""
        if direction is Direction.H2D and owner.client == "weights":
            self._copies.append((nbytes, start, end))

    def step_ended(self) -> MeasuredStep | None:
        """A step has ended: what an earlier one was measured to be, once it is known."""
        uses, self._uses = self._uses, 0
        samples, self._samples = self._samples, []
        copies, self._copies = self._copies, []
        found = None
        if self._pending is not None and self._have_passed(*self._pending):
            found, self._pending = self._step_of(*self._pending), None
            self.is_awaited &= found is None or not self._known
        if self._watching:
            self._watching = False
            self._copier.unwatch(self.on_copy)
            if len(samples) > 1 and copies:
                self._pending = samples, copies
                self._known.add(uses)
        self._ended += uses > 0
        new = uses not in self._known and len(self._known) < _MOST
        if self._ended >= _FIRST and new and self._pending is None:
            self._watching = True
            self._copier.watch(self.on_copy)
        return found

    def end(self) -> None:
        self._copier.unwatch(self.on_copy)

    def _have_passed(self, samples: list[_Sample], copies: list[tuple[int, Event, Event]]) -> bool:
        poll = self._device.poll
        return all(poll(sample.after) for sample in samples) and all(poll(end) for _, _, end in copies)

    def _step_of(self, samples: list[_Sample], copies: list[tuple[int, Event, Event]]) -> MeasuredStep | None:
        def ms(start: Event, end: Event) -> float:
            return max(0.0, self._device.elapsed_ms(start, end))

        copied_ms = sum(ms(start, end) for _, start, end in copies)
        nbytes = sum(nbytes for nbytes, _, _ in copies)
        if not copied_ms:
            return None
        uses = [sample.use for sample in samples]
        seconds = [ms(one.after, other.before) / 1e3 for one, other in pairwise(samples)]
        # the last one's compute: as long as its block took in its first use
        took = [each for use, each in zip(uses, seconds, strict=False) if use.block == uses[-1].block]
        seconds += took[:1] or [0.0]
        return MeasuredStep(tuple(zip(uses, seconds, strict=True)), nbytes / (copied_ms / 1e3))
