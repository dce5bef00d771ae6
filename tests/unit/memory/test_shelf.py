"""The shelf: a block that came back is lent again as it was, and nothing on it is lost."""

from __future__ import annotations

import torch

from offload.memory.marks import Mark
from offload.memory.ranges import Range
from offload.memory.shelf import Shelf, Shelved


def shelved(start: int, nbytes: int, *marks: Mark) -> Shelved:
    return Shelved((torch.empty(nbytes, dtype=torch.uint8),), (Range(0, start, start + nbytes),), marks)


class _Event:
    pass


def test_a_block_is_taken_by_its_exact_size_only() -> None:
    shelf = Shelf()
    block = shelved(0, 1024)
    shelf.put(1000, block)
    assert shelf.take(1024) is None
    assert shelf.take(999) is None
    assert shelf.take(1000) is block
    assert shelf.take(1000) is None
    assert shelf.total_bytes == shelf.num_ranges == 0


def test_of_equals_the_one_that_nobody_reads_goes_first_and_else_the_oldest() -> None:
    shelf = Shelf()
    oldest, read, idle = shelved(0, 512, Mark(_Event())), shelved(512, 512, Mark(_Event())), shelved(1024, 512)
    for block in (oldest, read, idle):
        shelf.put(512, block)
    assert [shelf.take(512) for _ in range(3)] == [idle, oldest, read]


def test_draining_gives_every_block_back_once_and_counts_nothing_any_more() -> None:
    shelf = Shelf()
    blocks = [shelved(512 * at, 512) for at in range(3)]
    for at, block in enumerate(blocks):
        shelf.put(512 - at, block)
    assert (shelf.total_bytes, shelf.num_ranges) == (3 * 512, 3)
    assert list(shelf.drain()) == blocks
    assert list(shelf.drain()) == []
    assert shelf.total_bytes == shelf.num_ranges == 0
