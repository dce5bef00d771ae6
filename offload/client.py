"""What the engine asks of a feature, and the features that are attached to it.

One invariant: the engine knows a feature by this class only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any, ParamSpec
from weakref import WeakKeyDictionary

from offload.telemetry.records import ClientStats, StepStats

P = ParamSpec("P")


class Phase(Enum):
    """Part of a step. What knows that one begins calls `engine.on_phase`, where somebody listens."""

    STEP_BEGIN = "step_begin"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    STEP_END = "step_end"


class Client:
    """A feature that attaches to the engine and overrides the calls that it needs. The engine makes all calls
    but `step_ended` under its lock."""

    name: str
    """Names the client in figures and messages, and in the owner of each of its copies."""

    listens_only = False
    """True for a client that owns no bytes: the engine may close although it is attached."""

    def begin_step(self) -> None:
        """The first forward of a step begins."""

    def end_step(self) -> ClientStats:
        """End its own transfers, and no other client's. Returns its figures but for its copies, which the
        engine counts. Blocks the host: never."""
        return ClientStats()

    def step_ended(self, stats: StepStats) -> None:
        """Every client has ended the step. Called without the lock: it may communicate."""

    def engine_replaced(self, engine: Any) -> None:
        """The process has another engine, because this one, of which it is a client, was closed."""

    def capture_begins(self) -> None:
        """A capture is about to begin. Events that were recorded before it cannot be waited for inside."""

    def capture_ends(self) -> None:
        """A capture is about to end: the client issues the copies that the graph is to repeat."""


class Clients(WeakKeyDictionary[Client, None]):
    """Clients in the order in which they were attached. They are held weakly, so a dropped one detaches."""

    def capture_begins(self) -> None:
        for client in list(self):
            client.capture_begins()

    def capture_ends(self) -> None:
        for client in list(self):
            client.capture_ends()


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """Calls a bound method while its object lives, and else does nothing: for hooks, which must not keep the
    object alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: P.args, **keywords: P.kwargs) -> None:
        if (found := reference()) is not None:
            found(*arguments, **keywords)

    return call
