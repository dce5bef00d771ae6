"""ConductorRuntime: the source system's conductor, for runtimes that it knows by adapters.

    conductor = ConductorRuntime(vram_hard_cap_mb=23500)
    conductor.register(StagehandConductorAdapter(weights_runtime))

    conductor.begin_step(step)
    conductor.enter_forward();   loss = model(batch)
    conductor.enter_backward();  loss.backward()
    conductor.enter_optimizer(); optimizer.step()
    conductor.end_step()

It tracks and constrains: it allocates no memory, copies nothing, and decides no order. Runtimes ask; what is
denied and required goes ahead all the same. One invariant: every request has one answer at once.

    phases.py   which phase it is, and its limits     adapters.py   runtimes
    budget.py   promises of memory, slots for copies  arbiter.py    the engine's own clients

TelemetryHub writes one JSON line every so many steps. One invariant: a line has the fields that its writer
gave it, and `events` beside them where they are traced.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from offload.client import Phase
from offload.conductor.adapters import ConductorAdapter
from offload.conductor.budget import (
    BudgetManager,
    Counts,
    Pool,
    Reservation,
    ReservationKind,
    TransferManager,
    TransferToken,
)
from offload.conductor.config import MIB, ConductorConfig
from offload.conductor.phases import PhaseCoordinator, PolicyBridge, bridge_of
from offload.config import config_or_fields
from offload.telemetry.records import JsonLines
from offload.transfer.copier import DenialReason, Denied, Direction, Priority

_MOST_EVENTS = 100_000  # between two lines; of more, the latest


class TelemetryHub:
    """last: line of the last step, written or not. Raises ValueError for a file that cannot be written."""

    def __init__(self, config: ConductorConfig) -> None:
        self.last: dict[str, Any] | None = None
        self.traces = config.debug_event_trace
        self._every = config.telemetry_interval
        self._events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self._steps = 0
        self._lines = JsonLines(config.telemetry_file if self._every else None, off="telemetry_interval=0")

    def event(self, what: str, **fields: Any) -> None:
        """Record an event, where events are traced."""
        if self.traces:
            self._events.append({"event": what, **fields})

    def step_ended(self, line: dict[str, Any]) -> None:
        """A step is over, with this line. Raises OSError where it cannot be written."""
        self.last = line
        self._steps += 1
        if self._every and self._steps % self._every == 0:
            if self.traces:
                line["events"] = list(self._events)
                self._events.clear()
            self._lines.write(line)


_TIMED = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


class ConductorRuntime:
    """See the module. Any thread may ask; phases are announced by the thread that trains.

    config: None for the defaults, with `fields` in their place. allocated: tells the allocated bytes of the
        device; None asks torch, which has none without a GPU. rules: a bridge of your own; None for the
        config's.
    Disabled, it has no parts, its calls do nothing, and requests for slots are answered with None.

    coordinator, budget, transfers, bridge, telemetry: its parts. adapters: registered ones, in that order.
    hints: what holds now.
    """

    def __init__(
        self,
        config: ConductorConfig | None = None,
        *,
        allocated: Callable[[], int] | None = None,
        rules: PolicyBridge | None = None,
        **fields: Any,
    ) -> None:
        self.config = config = config_or_fields(ConductorConfig, config, fields, type(self).__name__)
        self._enabled = config.enabled
        if not self._enabled:
            return
        self._lock = threading.RLock()
        self.step = -1
        self._number: int | None = None
        self.counts = Counts()
        self.budget = BudgetManager(allocated or torch.cuda.memory_allocated, config, self.counts)
        self.transfers = TransferManager(config.h2d_slots, config.d2h_slots, self.counts)
        self.bridge = bridge_of(config) if rules is None else rules
        self.telemetry = TelemetryHub(config)
        self.adapters: list[ConductorAdapter] = []
        self.hints = self.bridge.hints()
        self.coordinator = PhaseCoordinator()
        self._before: Phase | None = None
        self.coordinator.listen(self._entered)

    @property
    def phase(self) -> Phase | None:
        """None before the first step, and where it is disabled."""
        return self.coordinator.phase if self._enabled else None

    # -- adapters --------------------------------------------------------------------------------------------
    def register(self, adapter: ConductorAdapter) -> None:
        """Tell the adapter of phases and hints, after those registered before. Disabled, it does nothing.
        Raises ValueError for one that is registered already."""
        if self._enabled:
            with self._lock:
                adapter.attach(self)
                self.adapters.append(adapter)
                self.coordinator.listen(adapter.on_phase)
                adapter.apply_hints(self.hints, self.phase)

    def unregister(self, adapter: ConductorAdapter) -> None:
        """Detach it: its runtime's attributes are as they were. Idempotent."""
        if self._enabled and adapter in self.adapters:
            with self._lock:
                self.adapters.remove(adapter)
                self.coordinator.unlisten(adapter.on_phase)
                adapter.detach()

    # -- a step ----------------------------------------------------------------------------------------------
    def begin_step(self, step: int | None = None) -> None:
        """A step begins. step: its number in the telemetry; None counts on. Raises PhaseOrderError, as all of
        these do, where the order cannot be, and nothing has changed then."""
        self._enter(Phase.STEP_BEGIN, step)

    def enter_forward(self) -> None:
        """A forward begins; in one that is under way it does nothing."""
        self._enter(Phase.FORWARD)

    def enter_backward(self) -> None:
        """A backward is about to begin: call it before `backward()`, or rule 1 cannot act on it."""
        self._enter(Phase.BACKWARD)

    def enter_optimizer(self) -> None:
        """The optimizer's step is about to begin."""
        self._enter(Phase.OPTIMIZER)

    def end_step(self) -> None:
        """The step is over, in whichever phase. Raises OSError where its line cannot be written."""
        self._enter(Phase.STEP_END)

    def shutdown(self) -> None:
        """End the step, and detach every adapter. From here on it is disabled. Idempotent."""
        if not self._enabled:
            return
        with self._lock, ExitStack() as undone:
            undone.callback(setattr, self, "_enabled", False)
            for adapter in self.adapters:
                undone.callback(self.unregister, adapter)
            if self.phase not in (None, Phase.STEP_END):
                self.coordinator.enter(Phase.STEP_END)

    def _enter(self, phase: Phase, number: int | None = None) -> None:
        """number: of the step that begins; None counts on."""
        if self._enabled:
            with self._lock:
                self._number = number
                self.coordinator.enter(phase)

    def _entered(self, phase: Phase) -> None:
        """First of the coordinator's listeners."""
        before, self._before = self._before, phase
        if before is not None:
            self.budget.phase_ended(before)
        if phase is Phase.STEP_BEGIN:
            self.step = self.step + 1 if self._number is None else self._number
            windows = [adapter.window for adapter in self.adapters]
            self.bridge.begin_step(max((window for window in windows if window is not None), default=None))
        allocated = self.budget.allocated()
        self.bridge.enter(phase, allocated, self.config.hard_bytes)
        self.telemetry.event("phase", phase=phase.value, step=self.step, allocated_bytes=allocated)
        self._push_hints()
        if phase is Phase.STEP_END:
            self.telemetry.step_ended(self._line(allocated))

    def _push_hints(self) -> None:
        self.hints = hints = self.bridge.hints()
        self.transfers.suppressed = hints.suppress_speculative
        self.transfers.allowed[Direction.H2D] = hints.max_inflight_h2d
        self.transfers.allowed[Direction.D2H] = hints.max_inflight_d2h
        for adapter in self.adapters:
            adapter.apply_hints(hints, self.phase)

    def _line(self, allocated: int) -> dict[str, Any]:
        """The source system's fields, and no other."""
        seconds, counts = self.coordinator.durations, self.counts
        return {
            "step_id": self.step,
            "vram_allocated_mb": allocated / MIB,
            "vram_headroom_mb": (self.config.hard_bytes - allocated) / MIB,
            "pinned_granted_mb": self.budget.granted_bytes(Pool.PINNED) / MIB,
            "h2d_inflight": self.transfers.in_flight(Direction.H2D),
            "d2h_inflight": self.transfers.in_flight(Direction.D2H),
            "grant_count": counts.grants,
            "deny_count": counts.denials,
            "partial_count": counts.partials,
            "phase_durations": {phase.value: seconds.get(phase, 0.0) for phase in _TIMED},
            "runtime_snapshots": self.snapshots(),
        }

    def snapshots(self) -> dict[str, dict[str, int | None]]:
        """Values of the runtimes' attributes, by adapter; of those that have any."""
        return {adapter.name: found for adapter in self.adapters if (found := adapter.snapshot())}

    # -- memory ----------------------------------------------------------------------------------------------
    def request(
        self,
        owner: str,
        nbytes: int,
        *,
        kind: ReservationKind = ReservationKind.HARD,
        pool: Pool = Pool.VRAM,
        priority: Priority = Priority.REQUIRED,
        for_phase: bool = False,
    ) -> Reservation | Denied:
        """A promise of memory, or why there is none (`budget.py`). for_phase: it is released at the end of
        the phase under way. Blocks the host: never."""
        if not self._enabled:
            return Denied(DenialReason.CONDUCTOR_DISABLED)
        with self._lock:
            phase = self.phase if for_phase else None
            answer = self.budget.request(owner, nbytes, kind=kind, pool=pool, priority=priority, phase=phase)
            self._trace("reservation", owner, answer, kind=kind.value, pool=pool.value, nbytes=nbytes)
            return answer

    def release(self, reservation: Reservation) -> bool:
        """Take the promise back. One that is released, or is not known, is passed over: False."""
        if not self._enabled:
            return False
        with self._lock:
            return self.budget.release(reservation)

    def report_pinned(self, owner: str, nbytes: int) -> None:
        """Note what `owner` has pinned now, in place of what it reported before."""
        if self._enabled:
            with self._lock:
                self.budget.report_pinned(owner, nbytes)

    # -- copies ----------------------------------------------------------------------------------------------
    def acquire_transfer(
        self, owner: str, direction: Direction, priority: Priority
    ) -> TransferToken | Denied | None:
        """A slot for one copy, or why there is none. None: it is disabled, and nobody arbitrates. Blocks the
        host: never."""
        if not self._enabled:
            return None
        with self._lock:
            self._check()
            answer = self.transfers.acquire(owner, direction, priority)
            self._trace("slot", owner, answer, direction=direction.value, priority=priority.name)
            return answer

    def complete_transfer(self, token: TransferToken, nbytes: int, ms: float) -> None:
        """The copy is over: what it moved, and how long it took."""
        if self._enabled:
            with self._lock:
                self.transfers.complete(token, nbytes, ms)

    def release_token(self, token: TransferToken) -> bool:
        """Free the slot. One that was released is passed over: False."""
        if not self._enabled:
            return False
        with self._lock:
            return self.transfers.release(token)

    def _check(self) -> None:
        """Rule 3: a slot is requested."""
        if self.bridge.check(all_full=self.transfers.all_full):
            self._push_hints()

    def _trace(self, what: str, owner: str, answer: object, **fields: Any) -> None:
        if self.telemetry.traces:
            outcome = answer.reason.name if isinstance(answer, Denied) else "granted"
            if isinstance(answer, Reservation):
                fields["granted"] = answer.granted
            self.telemetry.event(what, owner=owner, outcome=outcome, **fields)
