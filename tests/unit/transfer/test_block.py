"""The state machine of a block: what is legal, what is refused and in which words, and what happens to it
when nobody can read it any more."""

from __future__ import annotations

import itertools
import re
from collections import deque

import pytest
import torch

from offload.errors import OffloadError, RecordStateError
from offload.ids import ChunkId, GroupId
from offload.saved.handles import Record
from offload.transfer.block import LEGAL_MOVES, BlockState, DeviceBlock

S = BlockState
LEGAL = {
    (S.RESIDENT, S.SPILLING),
    (S.RESIDENT, S.RESTORED),
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


def block_in(state: BlockState) -> DeviceBlock:
    storage = torch.empty(4096, dtype=torch.uint8).untyped_storage()
    block = DeviceBlock(GroupId(ChunkId(1, 4), 2, "core_attn"), 0, 0, 4096, storage, deque())
    block.state = state
    return block


@pytest.mark.parametrize(
    ("start", "end"), [move for move in ALL if move in LEGAL], ids=lambda state: state.name
)
def test_a_legal_move_is_made(start: BlockState, end: BlockState) -> None:
    block = block_in(start)
    block.move_to(end)
    assert block.state is end


@pytest.mark.parametrize(
    ("start", "end"), [move for move in ALL if move not in LEGAL], ids=lambda state: state.name
)
def test_any_other_move_is_refused_and_changes_nothing(start: BlockState, end: BlockState) -> None:
    block = block_in(start)
    with pytest.raises(RecordStateError, match=f"cannot move {start.name} -> {end.name}; legal from here: "):
        block.move_to(end)
    assert block.state is start


def test_the_error_names_the_tensor_its_bytes_and_the_way_out() -> None:
    with pytest.raises(RecordStateError) as caught:
        block_in(S.SPILLING).move_to(S.RESTORED)
    assert str(caught.value) == (
        "s1m4/core_attn#2[0] (4,096 bytes) cannot move SPILLING -> RESTORED; legal from here: RELEASED, "
        "RESIDENT, SPILLED"
    )
    with pytest.raises(RecordStateError, match=re.escape("RELEASED -> SPILLING; legal from here: none")):
        block_in(S.RELEASED).move_to(S.SPILLING)
    assert issubclass(RecordStateError, OffloadError)


def test_every_state_may_end_and_none_comes_back_from_the_end() -> None:
    assert set(LEGAL_MOVES) == set(S)
    assert all(S.RELEASED in moves for state, moves in LEGAL_MOVES.items() if state is not S.RELEASED)
    assert LEGAL_MOVES[S.RELEASED] == frozenset()


@pytest.mark.parametrize(
    "state", [state for state in S if state is not S.RELEASED], ids=lambda state: state.name
)
def test_a_block_whose_record_died_goes_to_the_engine_once_and_holds_nothing(state: BlockState) -> None:
    block = block_in(state)
    record = Record(block, None, 0)
    del record
    block.free()
    assert list(block.freed_blocks) == [block]
    assert (block.state, block.nbytes, block.device_bytes) == (state, 4096, None)


def test_a_released_block_leaves_nothing_to_the_engine() -> None:
    block = block_in(S.RELEASED)
    block.free()
    assert not block.freed_blocks


def test_a_block_prints_whose_bytes_it_names() -> None:
    assert repr(block_in(S.SPILLED)) == "DeviceBlock(s1m4/core_attn#2[0], 4,096 bytes, SPILLED)"
