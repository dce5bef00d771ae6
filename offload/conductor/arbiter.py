"""Conductor: the arbiter of one engine. It stands behind admission, so every copy of every client is asked
for there, and it follows the phases that the clients see.

    slots        a client that copies in a direction has one slot there, whatever the number of its pieces,
                 until the last of them has passed. So alone no client is denied for a slot
    two clients  where others copy to the device too, or did in this step or the last, a prefetch waits until
                 its client has less than `slot_mb` queued: copies of a direction are first in, first out, so
                 that is what a required one behind them waits for
    far ahead    while compute is not yet where the last request was made, nothing is denied but what takes
                 memory: no copy that is asked for now begins before compute gets here, and what is on the
                 link by then nobody knows. There `slot_mb` bounds kind_ahead_bytes of transfer/limits.py
                 while several kinds come in: clients count it by themselves, in the order of their reads
    suppressed   one prefetch of each client is in flight: the window is 1
    OPTIMIZER    no saved tensor leaves; it is kept, and nobody waits. The one slot to the device is for a
                 HybridDeviceOptimizer while it copies; weights and gradients that torch's own steps have the
                 usual ones

A required copy goes ahead with or without a slot. So does a spill while memory is short: to keep its bytes
would raise the peak that it is to lower. One invariant: whatever fails in here, the copy is made as without a
conductor.

A phase changes answers, and one bound of transfer/limits.py, which is lifted before a plan is made: a plan
that was made with the cap of a phase would keep to it for a whole step.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from offload.client import Client, Phase
from offload.conductor.config import ConductorConfig
from offload.conductor.phases import is_pressed
from offload.conductor.runtime import ConductorRuntime
from offload.device import Event, device_bytes
from offload.engine import OffloadEngine, default_engine
from offload.ids import Owner
from offload.telemetry.records import ClientStats, StepStats
from offload.telemetry.speaker import Once, speaker
from offload.transfer.copier import DenialReason, Denied, Direction, Lease, Priority

logger = speaker(__name__)


_SAVE_TENSORS = ("groups", "watermark")  # clients


class _Piece:
    """The Lease of one piece, from its request until its copy has passed."""

    def __init__(
        self, of: Conductor, inner: Lease, nbytes: int, direction: Direction, client: str, priority: Priority
    ) -> None:
        self._conductor, self.inner, self.key = of, inner, (client, direction)
        self.nbytes, self.priority = nbytes, priority

    def done(self, event: Event | None) -> None:
        self.inner.done(event)
        self._conductor._issued(self, event)


class _EngineClient(Client):
    """The conductor as its engine's steps see it."""

    name = "conductor"
    listens_only = True

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    def begin_step(self) -> None:
        self._conductor._saw(Phase.STEP_BEGIN)

    def end_step(self) -> ClientStats:
        self._conductor._let_saves_leave(True)
        self._conductor._came.clear()
        return ClientStats()

    def engine_replaced(self, engine: OffloadEngine) -> None:
        self._conductor._move_to(engine)

    def step_ended(self, stats: StepStats) -> None:
        kinds = stats.by_kind
        for kind, one in kinds.items():
            self._conductor.report_pinned(kind, one.lent_bytes)
        self._conductor._bound_ahead(sum(one.in_bytes > 0 for one in kinds.values()) > 1)


class Conductor(ConductorRuntime):
    """Arbiter of one engine, from now on until `shutdown`.

    config: None for the caps of the engine's device, and no telemetry, with `fields` in their place. engine:
    None for the process's own; where the process gets another one, because that was closed, it goes there.
    Phases are those that clients see: forwards, backwards, optimizers. From the first call of `begin_step` on
    they are the user's. Runtimes of other systems are registered as with ConductorRuntime, whose arguments
    `allocated` and `rules` it takes. Raises ValueError where the engine has a conductor already. Blocks the
    host: never.
    """

    def __init__(
        self, config: ConductorConfig | None = None, *, engine: OffloadEngine | None = None, **fields: Any
    ) -> None:
        self.engine = engine = default_engine() if engine is None else engine
        allocated, rules = fields.pop("allocated", self._allocated_bytes), fields.pop("rules", None)
        if config is None:
            config, fields = ConductorConfig.of_device(device_bytes(engine.device.torch_device), **fields), {}
        super().__init__(config, allocated=allocated, rules=rules, **fields)
        if not self._enabled:
            return
        if isinstance(engine.copier.admission, Conductor):
            raise ValueError("this engine has a Conductor already; use that one, or shutdown() it first")
        self._by_hand, self._saves_leave, self._said = False, True, Once()
        self._client = _EngineClient(self)
        self._arbitrate(engine)

    def _arbitrate(self, engine: OffloadEngine) -> None:
        self.engine, self._inner, self._several = engine, engine.copier.admission, False
        # what each client has in flight in each direction, with its event once it is issued
        self._pieces: defaultdict[tuple[str, Direction], dict[_Piece, Event | None]] = defaultdict(dict)
        self._came: set[tuple[str, Direction]] = set()  # in this step
        self.transfers.beside = self._num_clients
        self._reached: Event | None = None  # where compute was to be at the last request
        self._limits = engine.limits.contributor(_EngineClient.name, self)
        engine.attach(self._client)
        engine.copier.admission, engine.on_phase = self, self._saw

    def _leave(self) -> None:
        self.engine.copier.admission, self.engine.on_phase = self._inner, None
        self.engine.detach(self._client)

    def _move_to(self, engine: OffloadEngine) -> None:
        """The process has another engine, and that of before was closed: nothing is in flight there."""
        with self._lock:
            if isinstance(engine.copier.admission, Conductor):
                self.shutdown()
                return
            devices = (each.device.torch_device for each in (self.engine, engine))
            before, now = (ConductorConfig.of_device(device_bytes(device)) for device in devices)
            if self.config == before:  # with the caps of that one
                self.config = self.budget.config = now
            self._leave()
            self._limits.end()
            self._saves_leave = True
            self._arbitrate(engine)

    def shutdown(self) -> None:
        """Shut down as ConductorRuntime does; the engine is as it was."""
        if self._enabled:
            self._leave()
            super().shutdown()
            self._limits.end()

    def _allocated_bytes(self) -> int:
        """The simulated device counts none: there the saved bytes count."""
        device = self.engine.device
        return device.active_bytes() if device.pins else self.engine.transfers.device_bytes

    def _say_failed(self, error: Exception) -> None:
        if self._said.first("failed"):
            logger.warning(
                f"the conductor failed ({type(error).__name__}: {error}): this copy, or phase, goes on as "
                "without one; a rule or an adapter of your own raised, or its telemetry_file cannot be "
                "written"
            )

    # -- phases ----------------------------------------------------------------------------------------------
    def begin_step(self, step: int | None = None) -> None:
        """Begin a step as ConductorRuntime does; from now on phases are the user's."""
        self._by_hand = True
        super().begin_step(step)

    def _saw(self, phase: Phase) -> None:
        """Some client saw it begin; of STEP_END, that its optimizer's step has returned."""
        before = self.coordinator.phase
        ended = phase is Phase.STEP_END and before is not Phase.OPTIMIZER
        if self._by_hand or before is phase or ended:
            return
        try:
            with self._lock:
                self.coordinator.reach(phase)
        except Exception as error:
            self._say_failed(error)

    def _push_hints(self) -> None:
        super()._push_hints()
        self._let_saves_leave(not (self.phase is Phase.OPTIMIZER and self.hints.suppress_speculative))

    def _let_saves_leave(self, leave: bool) -> None:
        if leave is not self._saves_leave:
            self._saves_leave = leave
            self._limits.bound("max_spilling_bytes", None if leave else 0)

    def _bound_ahead(self, several: bool) -> None:
        """Bound each kind, where several come in: none has more than `slot_mb` fetched ahead of its
        reader."""
        if several is not self._several:
            self._several = several
            self._limits.bound("kind_ahead_bytes", self.config.slot_bytes if several else None)

    def snapshots(self) -> dict[str, dict[str, int | None]]:
        """Values as of ConductorRuntime; of the engine's own clients, what holds for them."""
        found, hints, clients = super().snapshots(), self.hints, {client for client, _ in self._pieces}
        h2d, d2h = hints.max_inflight_h2d, hints.max_inflight_d2h if self._saves_leave else 0
        if "weights" in clients:
            found.setdefault("stagehand", {"max_inflight": h2d, "prefetch_window": self._window()})
        if clients.intersection(_SAVE_TENSORS):
            found.setdefault("activation_stagehand", {"max_d2h": d2h, "max_h2d": h2d})
        return found

    # -- as Admission ----------------------------------------------------------------------------------------
    def ask(self, nbytes: int, direction: Direction, owner: Owner, priority: Priority) -> Lease | Denied:
        """Answer a request, as Admission. A copy in a capture is not arbitrated: its events cannot be asked
        for."""
        inner = self._inner.ask(nbytes, direction, owner, priority)
        if self.engine.device.is_capturing():
            return inner
        lease, reason = (inner.lease, inner.reason) if isinstance(inner, Denied) else (inner, None)
        piece = _Piece(self, lease, nbytes, direction, owner.client, priority)
        try:
            with self._lock:
                return self._answer(piece, reason)
        except Exception as error:
            self._say_failed(error)
            return inner

    def _answer(self, piece: _Piece, reason: DenialReason | None) -> Lease | Denied:
        """reason: why the engine's own admission has denied it."""
        device, (client, direction) = self.engine.device, piece.key
        self._reap(direction)
        is_near = self._reached is None or device.poll(self._reached)
        self._reached = device.record(device.compute)
        if is_near:
            self._check()
        if reason is None:
            reason = self._refusal(piece, is_near)
        self.counts.denials += reason is not None
        self.counts.grants += reason is None
        answer = None if reason is None else Denied(reason, piece)
        self._trace("slot", client, answer, direction=direction.value, priority=piece.priority.name)
        if reason is not None and piece.priority < Priority.REQUIRED:
            piece.inner.done(None)
            return Denied(reason)
        self._pieces[piece.key][piece] = None
        self._came.add(piece.key)
        return piece if answer is None else answer

    def _refusal(self, piece: _Piece, is_near: bool) -> DenialReason | None:
        (client, direction), mine = piece.key, self._pieces[piece.key]
        is_ahead, suppressed = piece.priority is Priority.SPECULATIVE, self.hints.suppress_speculative
        window, ahead = self._window(), sum(each.priority is piece.priority for each in mine)
        takes_memory = suppressed and self.phase is not Phase.OPTIMIZER
        if is_ahead and window is not None and ahead >= window and (is_near or takes_memory):
            rule = DenialReason.PHASE_RULE_SUPPRESSED_SPECULATIVE
            return rule if suppressed else DenialReason.H2D_SLOTS_EXHAUSTED
        if not is_near:
            return None
        if not mine:
            full = self.transfers.refusal(direction, Priority.REQUIRED)
            if self.phase is Phase.OPTIMIZER and not self._pieces["optim", direction]:
                slots = self.transfers.slots[direction]
                full = full if self.transfers.in_flight(direction) >= slots else None
            spills = direction is Direction.D2H and client in _SAVE_TENSORS
            return None if full is not None and spills and self._is_short() else full
        queued = piece.nbytes + sum(each.nbytes for each in mine)
        came = sum(way is direction for _, way in self._came | {piece.key})
        others = self._several or came > 1 or self.transfers.in_flight(direction) > 1
        crowded = is_ahead and others and queued > self.config.slot_bytes
        return DenialReason.H2D_SLOTS_EXHAUSTED if crowded else None

    def _window(self) -> int | None:
        """Prefetches of one client in flight; None for as many as its own caps have room for."""
        return 1 if self.hints.suppress_speculative else self.hints.prefetch_window_cap

    def _is_short(self) -> bool:
        """Predicate: bytes that are kept instead of sent may be missing, since saved bytes have a limit,
        somebody watches the device, or rule 1 would hold."""
        limits = self.engine.limits
        is_bounded = limits.device_limit_bytes is not None or bool(limits.watchers)
        return is_bounded or is_pressed(self.budget.allocated(), self.config.hard_bytes)

    def _issued(self, piece: _Piece, event: Event | None) -> None:
        """The piece is on its lane, until `event` has passed; None: it is over."""
        with self._lock:
            mine = self._pieces[piece.key]
            if piece in mine and mine[piece] is None:
                mine[piece] = event
                if event is None:
                    del mine[piece]

    def _reap(self, direction: Direction) -> None:
        """Let go of what has passed."""
        poll = self.engine.device.poll
        for (_, way), mine in self._pieces.items():
            for piece, event in [*mine.items()] if way is direction else ():
                if event is None or not poll(event):
                    break  # a lane is first in, first out
                del mine[piece]

    def _num_clients(self, direction: Direction) -> int:
        """Number of the engine's clients that copy there: each has one slot."""
        return sum(way is direction and bool(mine) for (_, way), mine in self._pieces.items())
