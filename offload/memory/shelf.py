"""Blocks that came back whole, by size, ready to be lent again as they are.

A steady step asks for the sizes of the step before. Cutting each block out of the free ranges and joining it
with its neighbours again was a large part of what a moved tensor costs the host (`scripts/bench_stage.py
--micro`); what lies here is lent without either. One invariant: what lies here is free, and is in no free
range; `drain` gives all of it back to them.

Not thread-safe: the arena holds its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import torch

from offload.memory.marks import Mark
from offload.memory.ranges import EQUALS_LOOKED_AT, Range

__all__ = ["Shelf", "Shelved"]


class Shelved(NamedTuple):
    """What a loan was made of. marks: what the next writer must wait for."""

    extents: tuple[torch.Tensor, ...]
    ranges: tuple[Range, ...]
    marks: tuple[Mark, ...]


class Shelf:
    """Free blocks by the bytes that they were asked for, longest free first."""

    def __init__(self) -> None:
        self.total_bytes = 0  # as ranges: padding included
        self.num_ranges = 0
        self._by_size: dict[int, deque[Shelved]] = {}

    def put(self, nbytes: int, block: Shelved) -> None:
        same = self._by_size.get(nbytes)
        if same is None:
            same = self._by_size[nbytes] = deque()
        same.append(block)
        self._count(block, 1)

    def take(self, nbytes: int) -> Shelved | None:
        """One of exactly that size, of the oldest ones that which nobody reads any more."""
        same = self._by_size.get(nbytes)
        if not same:
            return None
        at = 0
        for place, candidate in enumerate(islice(same, EQUALS_LOOKED_AT)):
            for mark in candidate.marks:
                if mark.event is not None:
                    break
            else:
                at = place
                break
        block = same[at]
        del same[at]
        self._count(block, -1)
        return block

    def drain(self) -> Iterator[Shelved]:
        """Take everything."""
        blocks = [block for same in self._by_size.values() for block in same]
        self._by_size.clear()
        self.total_bytes = self.num_ranges = 0
        yield from blocks

    def _count(self, block: Shelved, sign: int) -> None:
        for part in block.ranges:
            self.num_ranges += sign
            self.total_bytes += sign * (part.end - part.start)
