"""The coming reads of one chunk against a plain model: records are saved, fetched, dropped, read in any
order, and die."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch

from offload.ids import ChunkId, GroupId
from offload.saved.coming import ComingReads
from offload.transfer.record import Record, RecordState

GROUP = GroupId(ChunkId(0, 0), 0, "group")
PIECE = 3


def away(slot: int, nbytes: int) -> Record:
    """A record whose only copy is on the host, saved once and not read."""
    record = Record(GROUP, slot, 0, nbytes, torch.UntypedStorage(nbytes), deque())
    record.state = RecordState.SPILLED
    record.handles = record.unread = 1
    return record


def read(record: Record) -> None:
    record.pass_no += 1
    record.unread = 0


def fetch(coming: ComingReads, room: int = 1 << 30, piece_bytes: int = 1 << 30) -> list[int]:
    """Slots that are fetched."""
    look = coming.look(room, piece_bytes)
    if look is None:
        return []
    held = [torch.UntypedStorage(record.nbytes) for record in look.fetch]
    for record, home in zip(look.fetch, held, strict=True):
        record.state, record.device_bytes = RecordState.RESTORED, home
        record.refer_to(home)
    coming.take(look)
    return [record.slot for record in look.fetch]


def drop(record: Record) -> None:
    record.state, record.device_bytes = RecordState.SPILLED, None


@pytest.mark.parametrize("seed", range(40))
def test_bytes_ahead_are_those_between_the_reader_and_the_fetch_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)
    records: list[Record | None] = [away(slot, chance.randint(1, 5)) for slot in range(12)]
    sizes = [record.nbytes for record in records if record is not None]
    coming = ComingReads([record for record in records if record is not None])
    counted: dict[int, int] = {}  # by position, what was ahead when it was looked at
    for _ in range(80):
        living = [record for record in records if record is not None]
        if not living:
            break
        record = chance.choice(living)
        act = chance.choice(("fetch", "fetch", "read", "die", "drop", "drop", "back"))
        if act == "fetch":
            before = coming._fetched
            unread = {other.slot for other in living if other.unread}
            assert unread.issuperset(fetch(coming, chance.randint(1, 20), PIECE))
            for at in range(before, coming._fetched):
                counted[at] = sizes[at] if at in unread else 0
        elif act == "read" and record.unread:
            read(record)
        elif act == "die":
            records[record.slot] = None
        elif act == "drop" and record.state is RecordState.RESTORED:
            drop(record)
        elif act == "back":
            coming.look_back()
        del record, living
        coming.follow_reader()
        assert coming.ahead_bytes == sum(counted[at] for at in range(coming._reader, coming._fetched))
    records.clear()
    coming.follow_reader()
    assert coming.ahead_bytes == 0


def test_one_that_died_since_it_was_fetched_takes_no_room_when_it_is_looked_at_again() -> None:
    first, second, third = (away(slot, 10) for slot in range(3))
    coming = ComingReads([first, second, third])
    assert fetch(coming) == [0, 1, 2]
    drop(first)
    del second
    coming.look_back()
    assert coming.ahead_bytes == 0
    assert fetch(coming) == [0]
    assert coming.ahead_bytes == 20
    read(first)
    coming.follow_reader()
    assert coming.ahead_bytes == 10


def test_one_that_has_been_read_is_not_fetched_again_for_the_one_before_it() -> None:
    """Read out of turn, and alive: an input half's handles live until the weight half, a retained graph's as
    long as their graph."""
    first, second = away(0, 10), away(1, 10)
    coming = ComingReads([first, second])
    assert fetch(coming) == [0, 1]
    read(second)
    drop(second)
    drop(first)
    coming.look_back()
    assert fetch(coming) == [0]
    assert coming.ahead_bytes == 10
