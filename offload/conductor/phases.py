"""Phases of a step, and which limits hold in each.

    STEP_BEGIN -> FORWARD <-> BACKWARD -> OPTIMIZER -> STEP_END -> STEP_BEGIN

FORWARD and BACKWARD may take turns, as in a pipeline's 1F1B, and a step may end in any phase, as one that
raised does. One invariant: each transition is told to every listener once, in the order of registration, also
where one of them raises.

Limits follow three rules:

    1   in BACKWARD with pressure above 80%: prefetches are suppressed, the prefetch window is 1
    2   in OPTIMIZER: prefetches are suppressed, one slot to the device
    3   all slots are full in more than 3 consecutive checks: the window shrinks by one a check, to 1

Pressure is allocated device memory over the hard cap, in whole bytes. A check is one request for a slot, as
it finds the slots: between two phases of a step there are at most two boundaries, so that more than three
would never come. One invariant, of V0: within a step hints only tighten.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from offload.client import Phase
from offload.conductor.config import ConductorConfig
from offload.errors import OffloadError

_ORDER = tuple(Phase)

LEGAL_MOVES: Mapping[Phase | None, frozenset[Phase]] = {
    None: frozenset({Phase.STEP_BEGIN}),
    Phase.STEP_BEGIN: frozenset({Phase.FORWARD, Phase.STEP_END}),
    Phase.FORWARD: frozenset({Phase.BACKWARD, Phase.STEP_END}),
    Phase.BACKWARD: frozenset({Phase.FORWARD, Phase.OPTIMIZER, Phase.STEP_END}),
    Phase.OPTIMIZER: frozenset({Phase.STEP_END}),
    Phase.STEP_END: frozenset({Phase.STEP_BEGIN}),
}
"""None: no step has begun yet."""

_CALLS = ("begin_step()", "enter_forward()", "enter_backward()", "enter_optimizer()", "end_step()")


class PhaseOrderError(OffloadError):
    """A phase was announced that cannot follow the one before; nothing has changed."""


class PhaseCoordinator:
    """phase: None before the first step. durations: seconds by phase, of the step under way or the last one;
    of phases that take turns, their sum."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.phase: Phase | None = None
        self.durations: dict[Phase, float] = {}
        self._clock = clock
        self._began = 0.0
        self._listeners: list[Callable[[Phase], None]] = []

    def listen(self, listener: Callable[[Phase], None]) -> None:
        """Tell `listener` of every transition from now on, after those registered before."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[Phase], None]) -> None:
        """Undo `listen`. Idempotent."""
        self._listeners[:] = [other for other in self._listeners if other != listener]

    def enter(self, phase: Phase) -> None:
        """A phase begins, and the one before it is over. One that is under way goes on: the next microbatch's
        FORWARD is no transition. Raises PhaseOrderError, and what a listener raised, after all were told."""
        if phase is self.phase and phase not in (Phase.STEP_BEGIN, Phase.STEP_END):
            return
        if phase not in LEGAL_MOVES[self.phase]:
            before = "before the first begin_step()" if self.phase is None else f"in {self.phase.name}"
            legal = ", ".join(_CALLS[_ORDER.index(move)] for move in Phase if move in LEGAL_MOVES[self.phase])
            raise PhaseOrderError(
                f"{_CALLS[_ORDER.index(phase)]} {before}: a step goes from STEP_BEGIN by FORWARD and "
                f"BACKWARD, which may take turns, to OPTIMIZER and STEP_END; legal from here: {legal}"
            )
        now = self._clock()
        if phase is Phase.STEP_BEGIN:
            self.durations = {}
        elif self.phase is not None:
            self.durations[self.phase] = self.durations.get(self.phase, 0.0) + now - self._began
        self.phase, self._began = phase, now
        with ExitStack() as told:
            for listener in reversed(self._listeners):
                told.callback(listener, phase)

    def reach(self, phase: Phase) -> None:
        """`enter`, by way of the phases between: for one that was seen to begin, rather than announced."""
        while self.phase is not phase:
            legal, place = LEGAL_MOVES[self.phase], -1 if self.phase is None else _ORDER.index(self.phase)
            if phase in legal:
                following = phase
            elif Phase.STEP_END in legal and _ORDER.index(phase) <= place:
                following = Phase.STEP_END
            else:
                following = _ORDER[(place + 1) % len(_ORDER)]
            self.enter(following)


PRESSURE_PERCENT = 80

FULL_CHECKS = 3
"""Consecutive ones that change nothing yet."""

DEFAULT_WINDOW = 4
"""What shrinks where no runtime has a window of its own: prefetches of one client in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeLimitHints:
    """Limits that runtimes are to keep to. prefetch_window_cap: blocks fetched ahead; None: as many as they
    do."""

    max_inflight_h2d: int
    max_inflight_d2h: int
    prefetch_window_cap: int | None = None
    suppress_speculative: bool = False


def is_pressed(allocated_bytes: int, hard_bytes: int) -> bool:
    """Predicate: pressure is above PRESSURE_PERCENT, and not at it."""
    return allocated_bytes * 100 > hard_bytes * PRESSURE_PERCENT


class PolicyBridge(Protocol):
    """Rules that turn phases and checks into hints."""

    def begin_step(self, window: int | None) -> None: ...

    def check(self, *, all_full: bool) -> bool: ...

    def enter(self, phase: Phase, allocated_bytes: int, hard_bytes: int) -> None: ...

    def hints(self) -> RuntimeLimitHints: ...


class HeuristicPolicyBridgeV0:
    """The source's letter: window and suppression are as they were tightened until the next STEP_BEGIN."""

    def __init__(self, *, h2d_slots: int, d2h_slots: int) -> None:
        self._slots = h2d_slots, d2h_slots
        self._full_checks = 0
        self._phase: Phase | None = None
        self.begin_step(None)

    def _start_anew(self) -> None:
        self._cap: int | None = None
        self._suppressed = False

    def begin_step(self, window: int | None) -> None:
        """window: the largest of the runtimes', which rule 3 starts from; None where none has one."""
        self._window = DEFAULT_WINDOW if window is None else window
        self._start_anew()

    def check(self, *, all_full: bool) -> bool:
        """A slot is requested. Whether the window shrinks by it (rule 3)."""
        self._full_checks = self._full_checks + 1 if all_full else 0
        before = self._window if self._cap is None else self._cap
        if self._full_checks <= FULL_CHECKS or before <= 1:
            return False
        self._cap = before - 1
        return True

    def enter(self, phase: Phase, allocated_bytes: int, hard_bytes: int) -> None:
        """A phase begins, with so much allocated."""
        self._phase = phase
        if phase is Phase.BACKWARD and is_pressed(allocated_bytes, hard_bytes):
            self._suppressed, self._cap = True, 1
        if phase is Phase.OPTIMIZER:
            self._suppressed = True

    def hints(self) -> RuntimeLimitHints:
        """Limits that hold now."""
        h2d, d2h = self._slots
        return RuntimeLimitHints(
            max_inflight_h2d=1 if self._phase is Phase.OPTIMIZER else h2d,
            max_inflight_d2h=d2h,
            prefetch_window_cap=self._cap,
            suppress_speculative=self._suppressed,
        )


class TurnsPolicyBridge(HeuristicPolicyBridgeV0):
    """Window and suppression start anew as a phase begins: under 1F1B the first backward that is short of
    memory would suppress the prefetches of every forward that follows. Within a turn they only tighten."""

    def enter(self, phase: Phase, allocated_bytes: int, hard_bytes: int) -> None:
        """A phase begins, as of HeuristicPolicyBridgeV0; its turn starts anew."""
        if phase is not self._phase:
            self._start_anew()
        super().enter(phase, allocated_bytes, hard_bytes)


def bridge_of(config: ConductorConfig) -> PolicyBridge:
    """The config's own."""
    kind = TurnsPolicyBridge if config.bridge == "turns" else HeuristicPolicyBridgeV0
    return kind(h2d_slots=config.h2d_slots, d2h_slots=config.d2h_slots)
