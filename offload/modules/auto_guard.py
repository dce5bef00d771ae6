"""Mode "auto": whether the steps under a plan are slower than the one before it, which recomputed every
block. A plan rests on what was measured; here the steps themselves are.

One invariant: a verdict is given once for a shape of step, from the first steps under its last plan: later
another clock may have made all steps slower.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import inf
from typing import NamedTuple

from offload.policy.actions import Action

__all__ = ["AutoGuard"]

_MARGIN = 1.05
"""What a step may take more than one that recomputes: two steps of the same kind differ by up to 4% on one
H200."""

_LOOKS = 4
"""Steps under the last plan, of which the least counts."""


class _Before(NamedTuple):
    """A step that has ended."""

    shape: Hashable
    is_planned: bool
    is_final: bool


class AutoGuard:
    """Of one rank. Times are device seconds of forwards and backwards, with what they waited for copies.

    recomputed_s: of the fastest step of this shape without a plan. planned_s: of the fastest under the last
    one, of those that were looked at.
    """

    def __init__(self) -> None:
        self.recomputed_s = self.planned_s = inf
        self._shape: Hashable = None
        self._looks = 0
        self._before: _Before | None = None

    def step_ended(
        self,
        shape: Hashable,
        *,
        is_planned: bool,
        is_final: bool,
        seconds_before: Mapping[Action, float] | None,
        stall_before_s: float,
    ) -> bool:
        """A step has ended, and the times of the one before it are known, or not. is_final: its plan was the
        last one. Returns whether the plan is now known to be slower than none."""
        before, self._before = self._before, _Before(shape, is_planned, is_final)
        if before is None or seconds_before is None:
            return False
        if before.shape != self._shape:
            self._shape, self._looks = before.shape, 0
            self.recomputed_s = self.planned_s = inf
        took_s = sum(seconds_before.values()) + stall_before_s
        if not before.is_planned:
            self.recomputed_s = min(self.recomputed_s, took_s)
        elif before.is_final and self._looks < _LOOKS:
            self._looks += 1
            self.planned_s = min(self.planned_s, took_s)
            return self._looks == _LOOKS and self.planned_s > _MARGIN * self.recomputed_s
        return False
