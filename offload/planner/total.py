"""Which limit on saved tensors keeps a step within a total of device memory.

# Note: [The total]
# active bytes = saved tensors on the device + what recomputes hold beside them + the rest: weights,
# gradients, the working set. The engine counts the first two (`TransferEngine.claim`), torch's allocator the
# sum. So the rest is the difference of their peaks, and the engine's limit is the total less the rest. The
# two peaks need not come at one moment, and the rest is larger in one block than in another. So the first
# plan is made for less, and its first step measures the rest once more. Then the limit is lowered as soon as
# a step has nearly taken the total, and raised once several have stayed well below it, up to what the first
# measurement leaves: where each backward makes its gradients anew the rest grows towards the step's end, and
# a plan for a higher limit may have its peak there. Once lowered, it rises under another plan only.
"""

from __future__ import annotations

_AIM = 0.985
"""Of the total: the allocator rounds sizes up, and the order of two lanes is not the same in every step."""

_FIRST_AIM = 0.9
"""The same before a step under a plan was measured. A step that recomputes every block has its peaks at
different moments: on an H200 W2 had a rest of 8.4 GB in such a step, and 9.6 to 10.5 under plans. W1 took up
to 1.026 of its totals, 17 to 26 GB, in the first step under plans that were made for 0.95."""

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
