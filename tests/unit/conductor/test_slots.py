"""Slots: two pools, typed denials, tokens that come back."""

from __future__ import annotations

import pytest

from offload.conductor.budget import Counts, TransferManager, TransferToken
from offload.transfer.copier import DenialReason, Denied, Direction, Priority

H2D, D2H = Direction.H2D, Direction.D2H
REQUIRED, SPECULATIVE = Priority.REQUIRED, Priority.SPECULATIVE


def taken(answer: TransferToken | Denied) -> TransferToken:
    assert isinstance(answer, TransferToken), answer
    return answer


@pytest.mark.req("S1-19", "S1-21", "S1-22")
def test_each_direction_has_slots_of_its_own_and_a_denial_of_its_own() -> None:
    slots = TransferManager(2, 1, Counts())
    for _ in range(2):
        taken(slots.acquire("weights", H2D, REQUIRED))
    assert slots.acquire("weights", H2D, REQUIRED) == Denied(DenialReason.H2D_SLOTS_EXHAUSTED)
    assert not slots.all_full
    taken(slots.acquire("activations", D2H, Priority.BACKGROUND))
    assert slots.all_full
    assert slots.acquire("activations", D2H, REQUIRED) == Denied(DenialReason.D2H_SLOTS_EXHAUSTED)
    assert slots.counts == Counts(grants=3, denials=2)


@pytest.mark.req("S1-20")
def test_a_token_comes_back_once_and_a_second_release_frees_nobody_elses_slot() -> None:
    slots = TransferManager(1, 1, Counts())
    first = taken(slots.acquire("a", H2D, REQUIRED))
    assert slots.release(first)
    second = taken(slots.acquire("b", H2D, REQUIRED))
    assert not slots.release(first)
    assert slots.in_flight(H2D) == 1
    assert slots.release(second)
    assert slots.in_flight(H2D) == 0


@pytest.mark.req("S1-23")
def test_a_prefetch_in_a_suppressed_phase_is_denied_for_that_and_nothing_else_is() -> None:
    slots = TransferManager(2, 2, Counts())
    slots.suppressed = True
    expected = Denied(DenialReason.PHASE_RULE_SUPPRESSED_SPECULATIVE)
    assert slots.acquire("a", H2D, SPECULATIVE) == expected
    taken(slots.acquire("a", H2D, REQUIRED))
    taken(slots.acquire("a", D2H, Priority.BACKGROUND))


def test_a_copy_that_goes_ahead_without_a_slot_is_in_flight_all_the_same() -> None:
    slots = TransferManager(1, 1, Counts())
    first = taken(slots.acquire("a", H2D, REQUIRED))
    slots.beside = lambda direction: int(direction is H2D)
    assert (slots.in_flight(H2D), slots.in_flight(D2H)) == (2, 0)
    slots.release(first)
    assert isinstance(slots.acquire("a", H2D, SPECULATIVE), Denied)  # the other still has the only slot


@pytest.mark.req("S1-26")
def test_completed_copies_tell_the_rate_of_their_direction() -> None:
    slots = TransferManager(2, 2, Counts())
    assert slots.bytes_per_s(H2D) is None
    first, second = (taken(slots.acquire("a", H2D, REQUIRED)) for _ in range(2))
    slots.complete(first, 3_000, 2.0)
    slots.complete(second, 1_000, 2.0)
    assert slots.bytes_per_s(H2D) == pytest.approx(4_000 / 0.004)
    assert slots.bytes_per_s(D2H) is None
    assert (first.nbytes, first.ms) == (3_000, 2.0)
    slots.release(first)
    slots.complete(first, 10**9, 1.0)  # too late: it is over
    assert slots.bytes_per_s(H2D) == pytest.approx(1e6)
