"""Promises of device memory and of pinned host memory, and slots for copies.

A reservation is bytes that are promised and not yet there: whoever has one allocates, then releases it, and
from then on the device's meter counts the bytes. Pinned memory has no meter, so its reservations last as long
as the memory. One invariant: nothing is allocated here, and what is granted never passes the cap of its kind.

    HARD      all of it or a denial
    SOFT      what is there: maybe less than was asked for
    BURST     as SOFT, beyond the soft cap up to the hard one
    FLOOR     all of it or a denial, up to the hard cap: what its owner may have whatever the others ask for.
              Its owner's later reservations are taken out of it first
    CEILING   no bytes: its owner's reservations stay below it

A priority has a share of the cap of its kind: a prefetch is denied while a required request still fits.
CRITICAL requests of every kind go up to the hard cap.

Slots are of two pools: for copies to the device and to the host. One invariant: tokens are conserved. A slot
is taken by `acquire` and free again after `release`, whatever happened between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from offload.client import Phase
from offload.conductor.config import ConductorConfig
from offload.transfer.copier import DenialReason, Denied, Direction, Priority

SHARES_PERCENT = (80, 90, 100, 100)
"""Of the cap of its kind: BACKGROUND, SPECULATIVE, REQUIRED, CRITICAL."""


class Pool(Enum):
    VRAM = "vram"
    PINNED = "pinned"


class ReservationKind(Enum):
    HARD = "hard"
    SOFT = "soft"
    BURST = "burst"
    FLOOR = "floor"
    CEILING = "ceiling"


_TO_HARD_CAP = (ReservationKind.BURST, ReservationKind.FLOOR)
_NO_CAP = 1 << 62
_PARTIAL = (ReservationKind.SOFT, ReservationKind.BURST)


@dataclass(slots=True)
class Counts:
    """Requests, of bytes and of slots, by how they ended; since the start."""

    grants: int = 0
    denials: int = 0
    partials: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """A promise, until it is released.

    nbytes: asked for. granted: promised; 0 of a CEILING. phase: at whose end it is released; None: by hand.
    """

    number: int
    owner: str
    pool: Pool
    kind: ReservationKind
    nbytes: int
    granted: int
    priority: Priority
    phase: Phase | None = None


class _Owned(NamedTuple):
    """Bytes of one owner in one pool: floors, all else, and the least ceiling."""

    floor: int
    others: int
    ceiling: int | None

    @property
    def claim(self) -> int:
        """Bytes that nobody else may have."""
        return max(self.floor, self.others)


class BudgetManager:
    """allocated: tells the bytes allocated on the device. config: with the caps of now."""

    def __init__(self, allocated: Callable[[], int], config: ConductorConfig, counts: Counts) -> None:
        self.allocated, self.counts = allocated, counts
        self.config, self.guest_bytes = config, 0
        self._held: dict[int, Reservation] = {}
        self._reported: dict[str, int] = {}  # pinned bytes, by owner
        self._numbers = 0

    # -- figures ---------------------------------------------------------------------------------------------
    @property
    def headroom_bytes(self) -> int:
        """Free bytes of the device, below the hard cap; negative above it."""
        return self.config.hard_bytes - self.allocated()

    def granted_bytes(self, pool: Pool, *, but: str | None = None) -> int:
        """Bytes that are promised or reported there, to all owners but one; of a floor and what was taken out
        of it, the larger."""
        owners = {one.owner for one in self._held.values() if one.pool is pool} - {but}
        reported = sum(self._reported.values()) if pool is Pool.PINNED else 0
        return reported + sum(self._owned(pool, owner).claim for owner in owners)

    def held(self) -> list[Reservation]:
        """Reservations that are not released, oldest first."""
        return list(self._held.values())

    # -- requests --------------------------------------------------------------------------------------------
    def request(
        self,
        owner: str,
        nbytes: int,
        *,
        kind: ReservationKind = ReservationKind.HARD,
        pool: Pool = Pool.VRAM,
        priority: Priority = Priority.REQUIRED,
        phase: Phase | None = None,
    ) -> Reservation | Denied:
        """Promise bytes, or say why not. Raises ValueError for a negative number. Blocks the host: never."""
        if nbytes < 0:
            raise ValueError(f"{owner} asks for {nbytes:,} bytes, must be 0 or more")
        is_ceiling = kind is ReservationKind.CEILING
        room, reason = self._room(pool, owner, kind, priority)
        partial = kind in _PARTIAL and 0 < room < nbytes
        if nbytes > room and not (partial or is_ceiling):
            self.counts.denials += 1
            return Denied(reason)
        granted = 0 if is_ceiling else min(room, nbytes)
        self.counts.partials += partial
        self.counts.grants += not partial
        self._numbers += 1
        held = Reservation(self._numbers, owner, pool, kind, nbytes, granted, priority, phase)
        self._held[held.number] = held
        return held

    def report_pinned(self, owner: str, nbytes: int) -> None:
        """Note what `owner` has pinned, in place of what it reported before: a fact, which no cap refuses."""
        self._reported[owner] = nbytes

    def release(self, reservation: Reservation | int) -> bool:
        """Take the promise back. One that is released, or is not known, is passed over: False."""
        number = reservation.number if isinstance(reservation, Reservation) else reservation
        return self._held.pop(number, None) is not None

    def phase_ended(self, phase: Phase) -> None:
        """Release what was promised for this phase."""
        for one in self.held():
            if one.phase is phase:
                self.release(one)

    # -- guests ----------------------------------------------------------------------------------------------
    def can_guest_allocate(self, nbytes: int, safety_margin_mb: float = 500) -> bool:
        """Predicate: somebody who makes no reservations may allocate so much on the device now, and `margin`
        MiB stay free below the hard cap."""
        return nbytes <= self.config.hard_bytes - self._used(Pool.VRAM) - round(safety_margin_mb * (1 << 20))

    def reserve_guest_bytes(self, nbytes: int) -> None:
        """Guests will allocate so many bytes more."""
        self.guest_bytes += nbytes

    def release_reserved_bytes(self, nbytes: int) -> None:
        """So many of the guests' bytes are allocated, or not wanted any more. Never below 0."""
        self.guest_bytes = max(0, self.guest_bytes - nbytes)

    # -- room ------------------------------------------------------------------------------------------------
    def _room(
        self, pool: Pool, owner: str, kind: ReservationKind, priority: Priority
    ) -> tuple[int, DenialReason]:
        """Bytes that the owner may have more, and why no more than that."""
        if pool is Pool.PINNED:
            cap, reason = self.config.pinned_bytes, DenialReason.PINNED_EXHAUSTED
        elif kind in _TO_HARD_CAP or priority is Priority.CRITICAL:
            cap, reason = self.config.hard_bytes, DenialReason.VRAM_HARD_CAP
        else:
            cap, reason = self.config.soft_bytes, DenialReason.VRAM_SOFT_CAP
        own, is_floor = self._owned(pool, owner), kind is ReservationKind.FLOOR
        same, other = (own.floor, own.others) if is_floor else (own.others, own.floor)
        room = _NO_CAP
        if cap is not None:
            # a floor is its owner's, whatever has come since
            most = cap * SHARES_PERCENT[priority] // 100 - self._used(pool, but=owner)
            room = max(most, other) - same
        if own.ceiling is not None and own.ceiling - same < room:
            return own.ceiling - same, DenialReason.CEILING_REACHED
        return room, reason

    def _owned(self, pool: Pool, owner: str) -> _Owned:
        held = [one for one in self._held.values() if one.pool is pool and one.owner == owner]
        floors = sum(one.granted for one in held if one.kind is ReservationKind.FLOOR)
        return _Owned(
            floors,
            sum(one.granted for one in held) - floors,
            min((one.nbytes for one in held if one.kind is ReservationKind.CEILING), default=None),
        )

    def _used(self, pool: Pool, *, but: str | None = None) -> int:
        """Bytes that are there and bytes that are promised, to all owners but one."""
        there = 0 if pool is Pool.PINNED else self.allocated() + self.guest_bytes
        return there + self.granted_bytes(pool, but=but)


@dataclass(slots=True, eq=False)
class TransferToken:
    """Permission for one copy. nbytes, ms: what it was, once it is complete."""

    number: int
    owner: str
    direction: Direction
    priority: Priority
    nbytes: int = 0
    ms: float = 0.0


class TransferManager:
    """slots: in each direction. allowed: of these, how many may be taken now. suppressed: prefetches are
    denied. beside: how many others have without a token."""

    def __init__(self, h2d_slots: int, d2h_slots: int, counts: Counts) -> None:
        self.slots = {Direction.H2D: h2d_slots, Direction.D2H: d2h_slots}
        self.allowed = dict(self.slots)
        self.suppressed = False
        self.counts = counts
        self.beside: Callable[[Direction], int] = lambda direction: 0
        self._held: dict[int, TransferToken] = {}
        self._numbers = 0
        self._moved: dict[Direction, tuple[int, float]] = {}

    def in_flight(self, direction: Direction) -> int:
        """Tokens that are not released, and what is beside them; it may be more than the slots."""
        return self.beside(direction) + sum(token.direction is direction for token in self._held.values())

    @property
    def all_full(self) -> bool:
        """Predicate: no slot is free, in either direction."""
        return all(self.in_flight(direction) >= slots for direction, slots in self.allowed.items())

    def refusal(self, direction: Direction, priority: Priority) -> DenialReason | None:
        """Why a copy gets no slot now; None where it gets one."""
        if self.suppressed and priority is Priority.SPECULATIVE:
            return DenialReason.PHASE_RULE_SUPPRESSED_SPECULATIVE
        full = self.in_flight(direction) >= self.allowed[direction]
        return DenialReason[f"{direction.name}_SLOTS_EXHAUSTED"] if full else None

    def acquire(self, owner: str, direction: Direction, priority: Priority) -> TransferToken | Denied:
        """A slot, or why there is none. A required copy goes ahead all the same. Blocks the host: never."""
        if (reason := self.refusal(direction, priority)) is not None:
            self.counts.denials += 1
            return Denied(reason)
        self.counts.grants += 1
        self._numbers += 1
        token = TransferToken(self._numbers, owner, direction, priority)
        self._held[token.number] = token
        return token

    def complete(self, token: TransferToken, nbytes: int, ms: float) -> None:
        """The copy is over: what it moved, and how long it took. Of a token that was released, nothing."""
        if token.number in self._held:
            token.nbytes, token.ms = nbytes, ms
            moved_bytes, moved_ms = self._moved.get(token.direction, (0, 0.0))
            self._moved[token.direction] = moved_bytes + nbytes, moved_ms + ms

    def release(self, token: TransferToken) -> bool:
        """Free the slot. One that was released is passed over: False."""
        return self._held.pop(token.number, None) is not None

    def bytes_per_s(self, direction: Direction) -> float | None:
        """Mean rate of the copies that were completed with a duration; None before one was."""
        moved_bytes, moved_ms = self._moved.get(direction, (0, 0.0))
        return moved_bytes / moved_ms * 1000 if moved_ms > 0 else None
