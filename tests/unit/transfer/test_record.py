"""The state machine of a record: what is legal, what is refused and in which words, and what a dead record
leaves behind."""

from __future__ import annotations

import itertools
import re
from collections import deque

import pytest
import torch

from offload.errors import OffloadError, RecordStateError
from offload.ids import ChunkId, GroupId
from offload.transfer.record import LEGAL_MOVES, Record, RecordState, Remains

S = RecordState
LEGAL = {
    (S.RESIDENT, S.SPILLING),
    (S.RESIDENT, S.RELEASED),
    (S.SPILLING, S.SPILLED),
    (S.SPILLING, S.RESIDENT),
    (S.SPILLING, S.RELEASED),
    (S.SPILLED, S.RESTORING),
    (S.SPILLED, S.RELEASED),
    (S.RESTORING, S.RESTORED),
    (S.RESTORING, S.RELEASED),
    (S.RESTORED, S.SPILLED),
    (S.RESTORED, S.RELEASED),
}
ALL = list(itertools.product(S, S))


def record_in(state: RecordState, estate: deque[Remains] | None = None) -> Record:
    storage = torch.empty(4096, dtype=torch.uint8).untyped_storage()
    record = Record(
        GroupId(ChunkId(1, 4), 2, "core_attn"), 0, 0, 4096, storage, deque() if estate is None else estate
    )
    record.state = state
    return record


@pytest.mark.parametrize(
    ("start", "end"), [move for move in ALL if move in LEGAL], ids=lambda state: state.name
)
def test_a_legal_move_is_made(start: RecordState, end: RecordState) -> None:
    record = record_in(start)
    record.move_to(end)
    assert record.state is end


@pytest.mark.parametrize(
    ("start", "end"), [move for move in ALL if move not in LEGAL], ids=lambda state: state.name
)
def test_any_other_move_is_refused_and_changes_nothing(start: RecordState, end: RecordState) -> None:
    record = record_in(start)
    with pytest.raises(RecordStateError, match=f"cannot move {start.name} -> {end.name}; legal from here: "):
        record.move_to(end)
    assert record.state is start


def test_the_error_names_the_tensor_its_bytes_and_the_way_out() -> None:
    with pytest.raises(RecordStateError) as caught:
        record_in(S.SPILLING).move_to(S.RESTORED)
    assert str(caught.value) == (
        "s1m4/core_attn#2[0] (4,096 bytes) cannot move SPILLING -> RESTORED; legal from here: RELEASED, "
        "RESIDENT, SPILLED"
    )
    with pytest.raises(RecordStateError, match=re.escape("RELEASED -> SPILLING; legal from here: none")):
        record_in(S.RELEASED).move_to(S.SPILLING)
    assert issubclass(RecordStateError, OffloadError)


def test_every_state_may_end_and_none_comes_back_from_the_end() -> None:
    assert set(LEGAL_MOVES) == set(S)
    assert all(S.RELEASED in moves for state, moves in LEGAL_MOVES.items() if state is not S.RELEASED)
    assert LEGAL_MOVES[S.RELEASED] == frozenset()


@pytest.mark.parametrize(
    "state", [state for state in S if state is not S.RELEASED], ids=lambda state: state.name
)
def test_a_dying_record_leaves_its_state_and_its_bytes_to_the_engine(state: RecordState) -> None:
    estate: deque[Remains] = deque()
    record = record_in(state, estate)
    del record
    assert [(remains.state, remains.nbytes) for remains in estate] == [(state, 4096)]


def test_a_released_record_leaves_nothing_when_it_dies() -> None:
    estate: deque[Remains] = deque()
    record = record_in(S.RELEASED, estate)
    del record
    assert not estate


def test_a_record_prints_whose_bytes_it_names() -> None:
    assert repr(record_in(S.SPILLED)) == "Record(s1m4/core_attn#2[0], 4,096 bytes, SPILLED)"
