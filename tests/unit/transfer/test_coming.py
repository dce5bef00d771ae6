"""The coming reads of one chunk against a plain model: blocks are saved, fetched, dropped, read in any
order, and die."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest
import torch

from offload.ids import ChunkId, GroupId
from offload.transfer.block import BlockState, DeviceBlock
from offload.transfer.coming import ComingReads

GROUP = GroupId(ChunkId(0, 0), 0, "group")
PIECE = 3


def away(slot: int, nbytes: int) -> DeviceBlock:
    """A block whose only copy is on the host, saved once and not read."""
    block = DeviceBlock(GROUP, slot, 0, nbytes, torch.UntypedStorage(nbytes), deque())
    block.state, block.device_bytes = BlockState.SPILLED, None
    block.readers = block.unread = 1
    return block


def expected(blocks: Sequence[DeviceBlock]) -> ComingReads:
    coming = ComingReads(GROUP.chunk)
    coming.expect(blocks)
    return coming


def read(block: DeviceBlock) -> None:
    block.pass_no += 1
    block.unread = 0


def fetch(coming: ComingReads, room: int = 1 << 30, piece_bytes: int = 1 << 30) -> list[int]:
    """Slots that are fetched."""
    found = coming.look(coming.ahead_bytes + room, piece_bytes)
    if found is None:
        return []
    fetched, _, sizes = found
    held = [torch.UntypedStorage(block.nbytes) for block in fetched]
    for block, home in zip(fetched, held, strict=True):
        block.state, block.device_bytes = BlockState.RESTORED, home
        block.refer_to(home)
    coming.take(sizes)
    return [block.slot for block in fetched]


def follow_reader(coming: ComingReads) -> None:
    assert coming.look(0, PIECE) is None


def drop(block: DeviceBlock) -> None:
    block.state, block.device_bytes = BlockState.SPILLED, None


@pytest.mark.parametrize("seed", range(40))
def test_bytes_ahead_are_those_between_the_reader_and_the_fetch_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)
    blocks: list[DeviceBlock | None] = [away(slot, chance.randint(1, 5)) for slot in range(12)]
    sizes = [block.nbytes for block in blocks if block is not None]
    coming = expected([block for block in blocks if block is not None])
    counted: dict[int, int] = {}  # by position, what was ahead when it was looked at
    for _ in range(80):
        living = [block for block in blocks if block is not None]
        if not living:
            break
        block = chance.choice(living)
        act = chance.choice(("fetch", "fetch", "read", "die", "drop", "drop", "back"))
        if act == "fetch":
            before = coming._fetched
            unread = {other.slot for other in living if other.unread}
            assert unread.issuperset(fetch(coming, chance.randint(1, 20), PIECE))
            for at in range(before, coming._fetched):
                counted[at] = sizes[at] if at in unread else 0
        elif act == "read" and block.unread:
            read(block)
        elif act == "die":
            block.free()
            blocks[block.slot] = None
        elif act == "drop" and block.state is BlockState.RESTORED:
            drop(block)
        elif act == "back":
            coming.look_back()
        del block, living
        follow_reader(coming)
        assert coming.ahead_bytes == sum(counted[at] for at in range(coming._reader, coming._fetched))
    for last in blocks:
        if last is not None:
            last.free()
    follow_reader(coming)
    assert coming.ahead_bytes == 0


def test_one_that_died_since_it_was_fetched_takes_no_room_when_it_is_looked_at_again() -> None:
    first, second, third = (away(slot, 10) for slot in range(3))
    coming = expected([first, second, third])
    assert fetch(coming) == [0, 1, 2]
    drop(first)
    second.free()
    coming.look_back()
    assert coming.ahead_bytes == 0
    assert fetch(coming) == [0]
    assert coming.ahead_bytes == 20
    read(first)
    follow_reader(coming)
    assert coming.ahead_bytes == 10


def test_one_that_has_been_read_is_not_fetched_again_for_the_one_before_it() -> None:
    """Read out of turn, and alive: an input half's handles live until the weight half, a retained graph's as
    long as their graph."""
    first, second = away(0, 10), away(1, 10)
    coming = expected([first, second])
    assert fetch(coming) == [0, 1]
    read(second)
    drop(second)
    drop(first)
    coming.look_back()
    assert fetch(coming) == [0]
    assert coming.ahead_bytes == 10


@pytest.mark.parametrize(("before", "storages", "ahead"), [(0, 1, 0), (1, 1, 0), (0, 2, 10)])
def test_the_reader_is_past_what_many_layers_save_with_its_first_read(
    before: int, storages: int, ahead: int
) -> None:
    """A rotary table is one. Of several storages that stay, counted as one block, each is read in turn.
    before: reads by another backward, in the same pass."""
    table, rest = away(0, 10), [away(slot, 10) for slot in range(1, 4)]
    table.storages, table.readers, table.unread = storages, 4, 4 - before
    coming = expected([table, *rest])
    assert fetch(coming, 20) == [0, 1]
    assert coming.ahead_bytes == 20
    table.unread -= 1
    follow_reader(coming)
    assert coming.ahead_bytes == 10 + ahead
    read(rest[0])
    follow_reader(coming)
    assert coming.ahead_bytes == (ahead and 20), "the reader stands before it"
    table.unread = 0
    follow_reader(coming)
    assert coming.ahead_bytes == 0
