"""Adapters: they pass hints on to a runtime as the attributes that it reads, and ask for its copies.

    StagehandConductorAdapter       weights: engine._max_inflight, scheduler.policy.prefetch_window
    ActStagehandConductorAdapter    activations: transfer._max_h2d, transfer._max_d2h
    SquareQConductorAdapter         INT8 slabs: no attributes; reports pinned memory

A runtime is known by these attributes alone, and runs without an adapter as it does. Writes are plain
attribute writes by the thread that announces the phase, which is the one that trains: no lock is needed. One
invariant: an attribute is never above what `attach` found, and is that again after `detach`.
"""

from __future__ import annotations

from typing import Any, Protocol

from offload.client import Phase
from offload.conductor.budget import TransferToken
from offload.conductor.config import MIB
from offload.conductor.phases import RuntimeLimitHints
from offload.transfer.copier import Denied, Direction, Priority

Answer = TransferToken | Denied | None


class Arbiter(Protocol):
    """The part of a conductor that an adapter calls."""

    def acquire_transfer(self, owner: str, direction: Direction, priority: Priority) -> Answer: ...

    def report_pinned(self, owner: str, nbytes: int) -> None: ...


class ConductorAdapter:
    """Adapter of one runtime. `register` of the conductor attaches it, `unregister` and `shutdown` detach it.

    runtime: whose attributes it writes. name: in telemetry, and of its requests. window: blocks that it
    fetches ahead where nothing caps them; None where it has no such number.
    """

    name = "runtime"

    def __init__(self, runtime: Any = None) -> None:
        self.runtime = runtime
        self._conductor: Arbiter | None = None
        self._found: dict[str, tuple[Any, Any]] = {}  # by attribute: its object, and its value before

    # -- as the conductor calls it ---------------------------------------------------------------------------
    def attach(self, conductor: Arbiter) -> None:
        """Note what the attributes are. Raises ValueError where the adapter has a conductor already."""
        if self._conductor is not None:
            raise ValueError(f"the adapter {self.name!r} is registered already; unregister it there first")
        self._found = {name: (holder, getattr(holder, name)) for holder, name in self.knobs()}
        self._conductor = conductor

    def detach(self) -> None:
        """Put back what `attach` found. Idempotent."""
        for name, (holder, value) in self._found.items():
            setattr(holder, name, value)
        self._found, self._conductor = {}, None

    def on_phase(self, phase: Phase) -> None:
        """A phase begins."""

    def apply_hints(self, hints: RuntimeLimitHints, phase: Phase | None) -> None:
        """Write what holds now."""

    def knobs(self) -> list[tuple[Any, str]]:
        """The attributes that it writes: objects, and names on them."""
        return []

    @property
    def window(self) -> int | None:
        return None

    def snapshot(self) -> dict[str, int | None]:
        """Values of the attributes; nothing without any."""
        return {name.strip("_"): getattr(holder, name) for name, (holder, _) in self._found.items()}

    # -- for subclasses --------------------------------------------------------------------------------------
    def _tighten(self, name: str, value: int | None) -> None:
        """Write what `attach` found there, or `value` where that is less; None is no bound. A runtime without
        one, which bounds itself by bytes, gets none but 0."""
        holder, found = self._found[name]
        if found is None:
            setattr(holder, name, None if value else value)
        else:
            setattr(holder, name, found if value is None else min(found, value))

    def _ask(self, direction: Direction, priority: Priority) -> Answer:
        conductor = self._conductor
        return None if conductor is None else conductor.acquire_transfer(self.name, direction, priority)


class StagehandConductorAdapter(ConductorAdapter):
    """Tunes the prefetch of a runtime that streams weights."""

    name = "stagehand"

    def knobs(self) -> list[tuple[Any, str]]:
        return [(self.runtime.engine, "_max_inflight"), (self.runtime.scheduler.policy, "prefetch_window")]

    @property
    def window(self) -> int | None:
        found: int = self._found["prefetch_window"][1]
        return found

    def apply_hints(self, hints: RuntimeLimitHints, phase: Phase | None) -> None:
        self._tighten("_max_inflight", hints.max_inflight_h2d)
        self._tighten("prefetch_window", 1 if hints.suppress_speculative else hints.prefetch_window_cap)

    def request_block_load(self) -> Answer:
        """A block that compute waits for: denied, it is loaded all the same. None: nobody arbitrates."""
        return self._ask(Direction.H2D, Priority.REQUIRED)

    def request_prefetch(self) -> Answer:
        """A block that nobody waits for yet: denied, it is skipped. None: nobody arbitrates."""
        return self._ask(Direction.H2D, Priority.SPECULATIVE)


class ActStagehandConductorAdapter(ConductorAdapter):
    """Tunes spills and restores of a runtime that moves activations. With no slot to the host (cap 0) a spill
    is kept on the device, and not waited for."""

    name = "activation_stagehand"

    def knobs(self) -> list[tuple[Any, str]]:
        return [(self.runtime.transfer, "_max_d2h"), (self.runtime.transfer, "_max_h2d")]

    def apply_hints(self, hints: RuntimeLimitHints, phase: Phase | None) -> None:
        nothing_leaves = hints.suppress_speculative and phase is Phase.OPTIMIZER
        self._tighten("_max_d2h", 0 if nothing_leaves else hints.max_inflight_d2h)
        self._tighten("_max_h2d", hints.max_inflight_h2d)

    def request_spill(self) -> Answer:
        """A tensor that could leave: denied, it stays. None: nobody arbitrates."""
        return self._ask(Direction.D2H, Priority.BACKGROUND)

    def request_restore(self) -> Answer:
        """A tensor that its reader waits for: denied, it is fetched all the same. None: nobody arbitrates."""
        return self._ask(Direction.H2D, Priority.REQUIRED)


class SquareQConductorAdapter(ConductorAdapter):
    """Reports the pinned memory behind INT8 slabs, and asks for them. It has no attributes to write.

    pinned_mb: MiB behind the slabs.
    """

    name = "squareq"

    def __init__(self, pinned_mb: float = 256) -> None:
        super().__init__()
        self._pinned_bytes = round(pinned_mb * MIB)

    def attach(self, conductor: Arbiter) -> None:
        super().attach(conductor)
        self.report_pinned(self._pinned_bytes)

    def detach(self) -> None:
        self.report_pinned(0)
        super().detach()

    def report_pinned(self, nbytes: int) -> None:
        """From here on so many bytes are pinned behind the slabs."""
        if self._conductor is not None:
            self._conductor.report_pinned(self.name, nbytes)

    def request_slab_load(self) -> Answer:
        """A slab that compute waits for: denied, it is loaded all the same. None: nobody arbitrates."""
        return self._ask(Direction.H2D, Priority.REQUIRED)

    def request_lookahead(self) -> Answer:
        """A slab that nobody waits for yet: denied, it is skipped. None: nobody arbitrates."""
        return self._ask(Direction.H2D, Priority.SPECULATIVE)
