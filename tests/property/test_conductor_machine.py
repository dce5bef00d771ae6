"""The conductor against a model of it: requests, releases, phases and exceptions in any order.

Bytes and tokens are conserved, no request is without an answer, and none has two.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offload.client import Phase
from offload.conductor import (
    ActStagehandConductorAdapter,
    ConductorRuntime,
    PhaseOrderError,
    Pool,
    Reservation,
    ReservationKind,
    StagehandConductorAdapter,
    TransferToken,
)
from offload.conductor.phases import LEGAL_MOVES
from offload.transfer.copier import Denied, Direction, Priority
from tests.unit.conductor.sources import activations_runtime, knobs, weights_runtime

SOFT, HARD, PINNED = 80, 100, 60
OWNERS = ("weights", "activations", "optimizer")
FOUND = [4, 3, 3, 3]
CALLS = {
    Phase.STEP_BEGIN: "begin_step",
    Phase.FORWARD: "enter_forward",
    Phase.BACKWARD: "enter_backward",
    Phase.OPTIMIZER: "enter_optimizer",
    Phase.STEP_END: "end_step",
}


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        mib = 1 << 20
        self.allocated = 0
        self.conductor = ConductorRuntime(
            allocated=lambda: self.allocated,
            vram_soft_cap_mb=SOFT / mib,
            vram_hard_cap_mb=HARD / mib,
            pinned_cap_mb=PINNED / mib,
            telemetry_interval=0,
        )
        self.runtimes: list[Any] = [weights_runtime(*FOUND[:2]), activations_runtime(*FOUND[2:])]
        self.conductor.register(StagehandConductorAdapter(self.runtimes[0]))
        self.conductor.register(ActStagehandConductorAdapter(self.runtimes[1]))
        self.phase: Phase | None = None
        self.held: dict[int, Reservation] = {}
        self.gone: list[Reservation] = []
        self.tokens: list[TransferToken] = []
        self.dead: list[TransferToken] = []
        self.answers = 0

    # -- what may happen -------------------------------------------------------------------------------------
    @rule(phase=st.sampled_from(Phase))
    def announce(self, phase: Phase) -> None:
        call = getattr(self.conductor, CALLS[phase])
        goes_on = phase is self.phase and phase not in (Phase.STEP_BEGIN, Phase.STEP_END)
        if not goes_on and phase not in LEGAL_MOVES[self.phase]:
            try:
                call()
            except PhaseOrderError:
                return
            raise AssertionError(f"{phase} after {self.phase}")
        call()
        if not goes_on:
            ended = [number for number, one in self.held.items() if one.phase is self.phase is not None]
            self.gone += [self.held.pop(number) for number in ended]
            self.phase = phase

    @rule(
        owner=st.sampled_from(OWNERS),
        nbytes=st.integers(0, 120),
        kind=st.sampled_from(ReservationKind),
        pool=st.sampled_from(Pool),
        priority=st.sampled_from(Priority),
        for_phase=st.booleans(),
    )
    def reserve(
        self, owner: str, nbytes: int, kind: ReservationKind, pool: Pool, priority: Priority, for_phase: bool
    ) -> None:
        before = self.conductor.budget.granted_bytes(pool)
        answer = self.conductor.request(
            owner, nbytes, kind=kind, pool=pool, priority=priority, for_phase=for_phase
        )
        self.answers += 1
        after = self.conductor.budget.granted_bytes(pool)
        if isinstance(answer, Denied):
            assert after == before
            return
        self.held[answer.number] = answer
        assert 0 <= answer.granted <= nbytes
        if kind in (ReservationKind.HARD, ReservationKind.FLOOR):
            assert answer.granted == nbytes
        if after > before:  # more is promised: the cap holds
            used = after if pool is Pool.PINNED else after + self.allocated
            assert used <= (PINNED if pool is Pool.PINNED else HARD)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        assert self.conductor.release(self.held[number])
        self.gone.append(self.held.pop(number))

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        assert not self.conductor.release(data.draw(st.sampled_from(self.gone)))

    @rule(direction=st.sampled_from(Direction), priority=st.sampled_from(Priority), fails=st.booleans())
    def copy(self, direction: Direction, priority: Priority, fails: bool) -> None:
        slots = 2 if direction is Direction.D2H or self.phase is not Phase.OPTIMIZER else 1
        answer = self.conductor.acquire_transfer("weights", direction, priority)
        self.answers += 1
        in_flight = sum(token.direction is direction for token in self.tokens)
        suppressed = self.conductor.hints.suppress_speculative and priority is Priority.SPECULATIVE
        assert isinstance(answer, Denied) == (in_flight >= slots or suppressed)
        if not isinstance(answer, TransferToken):
            return
        if fails:
            try:
                raise RuntimeError("the copy failed")
            except RuntimeError:
                assert self.conductor.release_token(answer)
                self.dead.append(answer)
        else:
            self.tokens.append(answer)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        token = self.tokens.pop(data.draw(st.integers(0, len(self.tokens) - 1)))
        self.conductor.complete_transfer(token, 10, 1.0)
        assert self.conductor.release_token(token)
        self.dead.append(token)

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def arrive_again(self, data: st.DataObject) -> None:
        assert not self.conductor.release_token(data.draw(st.sampled_from(self.dead)))

    @rule(nbytes=st.integers(0, 130))
    def allocate(self, nbytes: int) -> None:
        self.allocated = nbytes

    # -- what always holds -----------------------------------------------------------------------------------
    @invariant()
    def tokens_are_conserved(self) -> None:
        for direction in Direction:
            expected = sum(token.direction is direction for token in self.tokens)
            assert self.conductor.transfers.in_flight(direction) == expected

    @invariant()
    def bytes_are_conserved(self) -> None:
        for pool in Pool:
            claims = 0
            for owner in OWNERS:
                mine = [one for one in self.held.values() if (one.owner, one.pool) == (owner, pool)]
                floors = sum(one.granted for one in mine if one.kind is ReservationKind.FLOOR)
                claims += max(floors, sum(one.granted for one in mine) - floors)
            assert self.conductor.budget.granted_bytes(pool) == claims
        assert {one.number for one in self.conductor.budget.held()} == set(self.held)

    @invariant()
    def every_request_has_one_answer(self) -> None:
        counts = self.conductor.counts
        assert counts.grants + counts.denials + counts.partials == self.answers

    @invariant()
    def attributes_are_never_above_what_was_found(self) -> None:
        now = knobs(*self.runtimes)
        assert all(value <= found for value, found in zip(now, FOUND, strict=True))

    def teardown(self) -> None:
        self.conductor.shutdown()
        assert knobs(*self.runtimes) == FOUND


TestConductor = Machine.TestCase
TestConductor.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
