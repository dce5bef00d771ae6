"""Slots for copies, in two pools: to the device and to the host.

One invariant: tokens are conserved. A slot is taken by `acquire` and free again after `release`, whatever
happened between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offload.conductor.budget import Counts
from offload.transfer.copier import DenialReason, Denied, Direction, Priority


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
        """Whether no slot is free, in either direction."""
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
