"""Phases of a step: which one it is, who is told, and how long each took.

    STEP_BEGIN -> FORWARD <-> BACKWARD -> OPTIMIZER -> STEP_END -> STEP_BEGIN

FORWARD and BACKWARD may take turns, as in a pipeline's 1F1B, and a step may end in any phase, as one that
raised does. One invariant: each transition is told to every listener once, in the order of registration, also
where one of them raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from offload.client import Phase
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
        """Undo `listen`, once or again."""
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
