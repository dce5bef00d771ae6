"""Mode "auto": what a step takes of the device beside saved tensors, and the limit that this leaves for them.

    phases  until a plan is followed, forwards and backwards of blocks are measured apart from what comes
            between the two: the head and the loss
    head    what these need beyond what a block needs; they claim it
    limit   for saved tensors and recomputes: the total less the rest, corrected by the peaks of later steps.
            Note: [The total]

One invariant: a limit of its own holds while a plan is followed, and the config's otherwise.

# Note: [The total]
# active bytes = saved tensors on the device + what recomputes hold beside them + the rest: weights,
# gradients, the working set. The engine counts the first two (`TransferEngine.claim`), torch's allocator the
# sum. So the rest is the difference of their peaks, and the engine's limit is the total less the rest. The
# two peaks need not come at one moment, and the rest is larger in one block than in another. So the first
# plan is made for less, and its first step measures the rest once more. Then the limit is lowered as soon as
# a step has nearly taken the total, and raised once several have stayed well below it, up to what the first
# measurement leaves: a plan for a higher limit may have its peak where the rest is larger. Once lowered, it
# rises under another plan only. Gradients that a backward makes anew are no part of the rest: the plan and
# the engine count them from each block's backward on (`Trace.growth`).
"""

from __future__ import annotations

from functools import partial
from math import inf

import torch

from offload.client import weakly
from offload.device import Device
from offload.engine import OffloadEngine
from offload.errors import DeviceTotalError, HostBudgetError
from offload.groups.group import HEAD
from offload.groups.manager import GroupsManager
from offload.policy.rule import NO_GROWTH, Growth, Trace
from offload.sizes import bytes_text
from offload.telemetry.records import StepStats
from offload.telemetry.speaker import Once, speaker
from offload.transfer.limits import CONFIG, Contributor
from offload.versions import queue_callback

logger = speaker(__name__)

BLOCKS = "blocks"
"""Phase of a step: forwards and backwards of blocks. HEAD is what comes between the two."""

_WORTH_A_CLAIM = 0.005
"""Of the total: a head that needs less beyond a block has no room of its own."""


_IN_FLIGHT = 1 / 8
"""Of the total: copies to the host under way at once, whose sources are on the device."""

_MAY_BE_REFUSED = 8
"""Steps without a plan in which the total may yet be found to be too small for any."""


class AutoMemory:
    """Memory figures of one engine. total: None where none was asked for. head_bytes: that the head and the
    loss need beyond what a block needs. is_measured: steps from now on, which resets torch's memory peaks at
    their begin. by_phase: and between their phases, too. peaks: of the last such step, active bytes at most
    by phase. has_no_room: the total is less than a step takes that recomputes every block.

    Nothing here blocks the host.
    """

    share: Contributor
    """Its part of the engine's limits, from `attach` on."""

    def __init__(self, total_bytes: int | None) -> None:
        self.total = None if total_bytes is None else TotalMemory(total_bytes)
        self.head_bytes = 0
        self.is_measured = True
        self.has_no_room = False
        self.refusal: DeviceTotalError | None = None
        self.by_phase = True
        self.peaks: dict[str, int] = {}
        self._highest = 0
        self._phase = ""
        self._phase_held = 0  # saved bytes at its begin
        self._rests: dict[str, int] = {}  # by phase: active bytes beside saved ones, at most
        self._peak_bytes = 0  # of the phases before
        self._fitted = False  # the step before, in its forwards and backwards
        self._limited = False
        self._unplanned = 0  # steps in a row
        self._said = Once()

    @property
    def limit_bytes(self) -> int | None:
        """For saved tensors and recomputes; None where there is no total, or no room within it."""
        return None if self.total is None else self.total.limit_bytes

    # -- a step ----------------------------------------------------------------------------------------------
    def begin_step(self, engine: OffloadEngine) -> None:
        """The first forward of a step begins."""
        found = None if engine.device.is_capturing() else engine.device.allocator_bytes()
        if found is None:
            return
        total_bytes = inf if self.total is None else self.total.total_bytes
        if found[1] > total_bytes and self.is_measured and self._fitted:
            if self._said.first("optimizer"):
                logger.warning(
                    f"active memory was at most {bytes_text(found[1])} between the end of a step's backward "
                    f"and the next forward, and device_total is {bytes_text(int(total_bytes))}: mode='auto' "
                    "does not lower the optimizer's step. Give a larger total, or use a HybridDeviceOptimizer"
                )
        elif found[1] > total_bytes and self._limited and not self.is_measured:
            self.is_measured = True  # a step has passed it although the plan was settled
            assert self.total is not None
            self.total.restart()
        if self.is_measured:
            engine.device.reset_allocator_peak()
            self._peak_bytes, self._phase, self._rests, self.peaks = 0, "", {}, {}
            self._highest = 0

    def take_peak(self, engine: OffloadEngine) -> int:
        """Active bytes at most of the step that ends; 0 where that is not known, since no step has begun with
        torch's peaks reset and this one has not risen above those before."""
        found = engine.device.allocator_bytes()
        peak_bytes = 0 if found is None else max(found[1], self._peak_bytes)
        if self._phase:
            self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), found[1] if found else 0)
        if peak_bytes <= self._highest:
            return 0
        self._highest = peak_bytes
        return peak_bytes

    def backward_begins(self, device: Device, gradients: object) -> None:
        """The backward has come to a model's last block. The peak is read as it ends: a loop may reset
        torch's behind it, as loggers do."""
        if torch._C._current_graph_task_id() != -1:
            queue_callback(partial(weakly(self._backward_ended), device))

    def _backward_ended(self, device: Device) -> None:
        if (found := device.allocator_bytes()) is not None:
            self._peak_bytes = max(self._peak_bytes, found[1])

    def phase_begins(self, engine: OffloadEngine, phase: str) -> int | None:
        """In the steps before a plan: what the phase that ends has needed beside saved tensors. Returns that
        of a head."""
        if phase == self._phase or self._limited or not (self.is_measured and self.by_phase):
            return None
        found, rest_bytes = engine.device.allocator_bytes(), None
        if found is None:
            return None
        if self._phase:
            counts = engine.transfers.counts
            held = counts.device_bytes_peak if self._phase == BLOCKS else self._phase_held
            rest_bytes = found[1] - held
            self._rests[self._phase] = max(self._rests.get(self._phase, 0), rest_bytes)
            self._peak_bytes = max(self._peak_bytes, found[1])
            self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), found[1])
            engine.device.reset_allocator_peak()
        was_head, self._phase = self._phase == HEAD, phase
        self._phase_held = engine.transfers.device_bytes
        return rest_bytes if was_head else None

    def step_ended(
        self, manager: GroupsManager, stats: StepStats, *, is_planned: bool, is_final: bool, vary: bool
    ) -> bool:
        """Correct the limit by the peaks of the step that ended. is_planned: it ran at the levels of a plan;
        is_final: and no other one will be made. vary: steps differ in lengths. Returns whether the plan
        still has room."""
        if self.total is None:
            return True
        engine, total = manager.engine, self.total
        counted_bytes = stats.device_bytes_peak
        found = engine.device.allocator_bytes()
        # of the simulated device no more is known
        peak_bytes = counted_bytes if found is None else max(found[1], self._peak_bytes)
        self._unplanned = 0 if is_planned else self._unplanned + 1
        # where a step of recomputes has no room, no_room() names both
        most_bytes = max(total.total_bytes, total.least_peak_bytes if self.has_no_room else 0)
        counts = is_planned or self.has_no_room or self._unplanned > _MAY_BE_REFUSED
        if peak_bytes > most_bytes and counts and self._said.first("passed"):
            logger.warning(
                f"a step had {bytes_text(peak_bytes)} on the device, and device_total is "
                f"{bytes_text(total.total_bytes)}: it took more than the steps that were measured, and "
                "others of its kind will. Later plans count it. Where the device does not have that much, "
                "give a smaller total"
            )
        if not self.is_measured:
            return True
        limit_bytes = engine.limits.device_limit_bytes
        logger.info(
            "auto: active peak %s of %s, %s of it saved or made again, under a limit of %s",
            bytes_text(peak_bytes),
            bytes_text(total.total_bytes),
            bytes_text(counted_bytes),
            limit_bytes if limit_bytes is None else bytes_text(limit_bytes),
        )
        self._fitted = peak_bytes <= total.total_bytes
        if not is_planned or limit_bytes is None:
            if self._rests and found is not None:
                self._rests[BLOCKS] = max(self._rests.get(BLOCKS, 0), found[1] - counted_bytes)
                self.head_bytes = max(0, self._rests.get(HEAD, 0) - self._rests[BLOCKS])
                if self.head_bytes < _WORTH_A_CLAIM * total.total_bytes:
                    self.head_bytes = 0
            rest_bytes = self._rests[BLOCKS] if self.head_bytes else peak_bytes - counted_bytes
            total.measured(peak_bytes, counted_bytes, rest_bytes, vary=vary)
        elif total.followed(peak_bytes, counted_bytes, limit_bytes, vary=vary):
            self.set_limit(total.limit_bytes or 0)
            manager.follower.limits_changed()
            return total.limit_bytes is not None
        elif is_final:  # a step of lengths that vary may be the highest so far
            self.is_measured = not total.is_settled or vary
        return True

    @property
    def is_known(self) -> bool:
        """Predicate: a plan can be made: there is no total, or a step was measured."""
        return self.total is None or self.total.rest_bytes is not None

    def measure(self) -> None:
        """From the next step on: others come than before. Where there was no room, there may be now."""
        self.is_measured = True
        if self.total is not None and self.has_no_room:
            self.total.rest_bytes, self.has_no_room = None, False

    # -- the limit -------------------------------------------------------------------------------------------
    def attach(self, engine: OffloadEngine) -> None:
        """Contribute to the limits of this engine, by which an input half leaves nothing of what it
        recomputed, until a plan says more, and no more is under way to the host than the total has room
        for."""
        self.share = engine.limits.contributor("auto", self)
        self.share.bound("again_room_bytes", 0)
        self._cap_copies()

    def _cap_copies(self) -> None:
        if self.total is not None:
            self.share.bound("max_spilling_bytes", round(_IN_FLIGHT * self.total.total_bytes))

    def set_limit(self, limit_bytes: int | None) -> None:
        """A plan is followed that is for this limit. It counts copies under way, so they have no cap of their
        own: the plan is made without one.

        Source: W2 within 22 GB, one H200, 2.75 GB under way at most: compute waited 0.39 s of a step of
            3.67 s that the plan said has no waits (`bench_stage.py --workload W2 --rows ours_auto
            --device-limit-gb 22`, November 2026).
        """
        self._limited = True
        # the total counts everything, so no limit of the config holds beside it
        self.share.bound("device_limit_bytes", limit_bytes, replaces=(CONFIG,))
        self.share.bound("max_spilling_bytes", limit_bytes)

    def count_growth(self, trace: Trace) -> Growth:
        """Take what the measured step came to have beside saved tensors out of the rest. Returns it, to be
        counted where it comes; none where there is no total."""
        total = self.total
        if total is None or total.rest_bytes is None:
            return NO_GROWTH
        growth = trace.growth(total.rest_bytes)
        if growth.most:
            self.head_bytes, least_bytes = max(0, growth.head - total.rest_bytes + growth.most), 0
            if self.head_bytes < _WORTH_A_CLAIM * total.total_bytes:
                self.head_bytes, least_bytes = 0, growth.head
            total.grows(growth.most, least_bytes)
        return growth

    def shift(self, nbytes: int) -> None:
        """So many bytes more are beside saved tensors from the next step on."""
        if self.total is not None:
            self.total.shift(nbytes)
            self.measure()

    def give_limit_back(self) -> None:
        """No plan is followed any more: copies under way have their cap again. Takes no lock."""
        if self._limited:
            self._limited = False
            self.share.bound("device_limit_bytes", None)
            self._cap_copies()

    def no_room(self, *, of_any_rank: bool = False) -> None:
        """The total is less than a step takes that recomputes every block that may be: that is done. It is an
        error of the next forward, once. of_any_rank: of those that decide together, so all raise."""
        assert self.total is not None
        self.is_measured, self.has_no_room = False, True
        least_bytes, total_bytes = self.total.least_peak_bytes, self.total.total_bytes
        if (least_bytes > total_bytes or of_any_rank) and self._said.first("no room"):
            takes = bytes_text(least_bytes) if least_bytes > total_bytes else "more on another rank"
            self.refusal = DeviceTotalError(
                f"device_total is {bytes_text(total_bytes)}, and a step takes {takes} with every "
                "block recomputed and its input on the host, which is what is done now: nothing is chosen. "
                "Give more than that, or fewer tokens a forward"
            )

    def check_rest(self, least_bytes: int) -> None:
        """So many bytes are on the device before the first block of step 2, optimizer state included and
        gradients left out. Where that is more than the total, it is an error of this forward."""
        if self.total is not None and least_bytes > self.total.total_bytes and self._said.first("no room"):
            self.refusal = DeviceTotalError(
                f"device_total is {bytes_text(self.total.total_bytes)}, and {bytes_text(least_bytes)} are on "
                "the device before the first block of step 2, gradients left out: no step fits. Give more "
                "than that, or move weights, gradients and optimizer state, too: offload.apply(model, "
                "optimizer=optimizer, mode='auto', device_total=...)"
            )

    def raise_refusal(self) -> None:
        """Raises DeviceTotalError where a step has shown that none fits, once."""
        error, self.refusal = self.refusal, None
        if error is not None:
            raise error


def pin_free(engine: OffloadEngine, wanted_bytes: int, most_bytes: int) -> bool:
    """Pin until so many bytes are free beside what is lent, so many more at most, as far as the budget goes.
    Returns whether that is all of it. For between steps. Blocks the host: 1 ms for each 17 MB."""
    arena = engine.arena
    held, wanted = arena.held_bytes, wanted_bytes + arena.lent_bytes
    wanted = min(wanted, arena.budget.limit_bytes)
    if not engine.device.pins or wanted <= held:
        return True
    try:
        engine.reserve_host(min(wanted, held + most_bytes))
    except HostBudgetError as error:  # other ranks hold it; what finds no block is counted and said
        logger.info("auto: not all host memory that was planned is pinned: %s", error)
        return False
    return wanted <= held + most_bytes


_AIM = 0.985
"""Of the total: the allocator rounds sizes up, and the order of two lanes is not the same in every step."""

_FIRST_AIM = 0.94
"""The same before a step under a plan was measured. A step that recomputes every block has its peaks at
different moments: on an H200 W2 had a rest of 8.4 GB in such a step, and 9.6 to 10.5 under plans. W1 took up
to 1.026 of its totals, 17 to 26 GB, in the first step under plans that were made for 0.95. Later, of plans
made for 0.96: W1 0.92 of 17 GB, W2 0.99 of 17 GB, a Llama 0.95 of 14 GB."""

_NEARLY = 0.99
"""Of the total: a step that takes more is taken to have passed it, since the next may: peaks of steps that
are alike differ by a hundredth and more (on an H200 W2 within 17 GB: 16.78 and 17.01; a Llama within 14 GB,
under a plan that was settled for 8 steps: 14.03)."""

_WELL_BELOW = 0.98
"""Of the total: a plan whose peaks stay below it has room for more, if the limit holds it back."""

_CALM_STEPS = 5
"""Steps under one limit before it is raised: the groups' plan tries two plans in the first of them."""

_VARIED_STEPS = 16
"""The same where lengths vary: the highest of so many steps is near that of the longest. Half of what is
missed is given then, and nothing once a step has passed the total."""

_SETTLED_STEPS = 8
"""Steps under one limit after which memory need not be measured any more."""

_LEAST = 0.9
"""Of what a step counts that recomputes every block: a plan for less would have to move what is dear."""

_BINDS = 0.97
"""Of the limit: a step that takes less was not held back by it."""


class TotalMemory:
    """rest_bytes: None before a step was measured. least_peak_bytes: active at most in a step that recomputes
    every block, as it was measured or as later steps tell."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.rest_bytes: int | None = None
        self.least_peak_bytes = 0
        self._least_bytes = 0  # that the engine counted in such a step
        self._least_rest_bytes = 0  # that it did not
        self._calm = 0  # steps under this limit
        self._highest_bytes = 0  # peak of these
        self._bound = False  # the limit held one of them back
        self._passed = False  # a step has passed the total, of lengths that vary or under this plan
        self._vary = False  # lengths of the last steps
        self._is_first = True  # no step under a plan was measured
        self._was_over = False  # the last step

    @property
    def limit_bytes(self) -> int | None:
        """What the total leaves for saved tensors and recomputes; None where it is much less than what a step
        takes of both that recomputes every block."""
        assert self.rest_bytes is not None
        if self._left_bytes(_AIM) < _LEAST * self._least_bytes:
            return None
        aim = _FIRST_AIM if self._is_first else _AIM
        return max(self._left_bytes(aim), round(_LEAST * self._least_bytes))

    def _left_bytes(self, aim: float) -> int:
        assert self.rest_bytes is not None
        return round(self.total_bytes * aim) - self.rest_bytes

    @property
    def is_settled(self) -> bool:
        return self._calm >= _SETTLED_STEPS

    def measured(self, peak_bytes: int, counted_bytes: int, rest_bytes: int, *, vary: bool = False) -> None:
        """A step has ended that recomputes every block, and has no limit. peak_bytes: active at most;
        counted_bytes: of them, what the engine counted at most. rest_bytes: what it does not count. vary:
        steps differ in lengths, so the most of them counts."""
        self.rest_bytes = max(rest_bytes, self.rest_bytes or 0) if vary else rest_bytes
        self.least_peak_bytes, self._least_bytes = peak_bytes, counted_bytes
        self._least_rest_bytes = self.rest_bytes
        self._is_first = True

    def grows(self, nbytes: int, least_bytes: int = 0) -> None:
        """Take so many bytes out of the rest, down to `least_bytes`, or put them back below 0: the engine
        counts them from here on."""
        assert self.rest_bytes is not None
        self.rest_bytes = self._least_rest_bytes = max(self.rest_bytes - nbytes, least_bytes)

    def shift(self, nbytes: int) -> None:
        """So many bytes more are beside saved tensors from here on."""
        if self.rest_bytes is not None:
            self.rest_bytes += nbytes
            self.least_peak_bytes += nbytes
            self._least_rest_bytes += nbytes

    def restart(self) -> None:
        """Another plan is followed from here on."""
        self._passed = self._passed and self._vary
        self._begin_again()

    def _begin_again(self) -> None:
        """Another limit holds from here on."""
        self._calm = self._highest_bytes = 0
        self._bound = False

    def followed(self, peak_bytes: int, counted_bytes: int, limit_bytes: int, *, vary: bool = False) -> bool:
        """A step under `limit_bytes` has ended. vary: steps differ in lengths. Returns whether the limit is
        another one now."""
        assert self.rest_bytes is not None
        self._calm += 1
        self._highest_bytes = max(self._highest_bytes, peak_bytes)
        self._bound = self._bound or counted_bytes > _BINDS * limit_bytes
        first, self._is_first = self._is_first, False
        over = peak_bytes > _NEARLY * self.total_bytes
        over_again, self._was_over = over and self._was_over, over
        if vary is not self._vary:
            self._vary, self._passed = vary, False
        self._passed = self._passed or (over and not first)
        may_rise = not self._passed and (self._calm >= _VARIED_STEPS if vary else not self.is_settled)
        under = (
            self._calm >= _CALM_STEPS
            and self._bound
            and self._highest_bytes < _WELL_BELOW * self.total_bytes
            and may_rise
        )
        if not (over or under or first):
            return False
        rest_bytes = self.rest_bytes
        if over or under or self._bound:
            rest_bytes = max(0, self._highest_bytes - limit_bytes)
            if not (over or vary):
                rest_bytes = max(rest_bytes, min(self._least_rest_bytes, self.rest_bytes))
        if over and over_again:  # a limit that holds nothing back falls a little in each step, to no effect
            rest_bytes = max(rest_bytes, peak_bytes - min(limit_bytes, counted_bytes))
        if vary and not over:  # a longer step may come
            rest_bytes = max(self.rest_bytes, rest_bytes) if first else (self.rest_bytes + rest_bytes) // 2
        if first:  # the two peaks need not come at one moment, so it is this at least
            rest_bytes = max(rest_bytes, peak_bytes - counted_bytes)
        changed, self.rest_bytes = rest_bytes != self.rest_bytes, rest_bytes
        if over:  # so a step of recomputes would take more than the one that was measured
            self.least_peak_bytes = max(self.least_peak_bytes, rest_bytes + self._least_bytes)
        if changed or first:
            self._begin_again()
        return changed or first
