"""The host memory of one section: master weights, gradients and moments, one unbroken range each, in as few
blocks as their pinning allows.

One invariant: the bytes of a section belong to it from its making to `close`; nothing is allocated in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offload.device import Event
from offload.errors import HostBudgetError
from offload.memory.arena import Block, HostArena
from offload.params.layout import ALIGN, Section


class FlatSpec(NamedTuple):
    """One flat of every section: its name, the bytes of one element, whether it is pinned, and whether it
    starts as zeros."""

    name: str
    element_bytes: int
    pinned: bool
    zero: bool = False


def free_bytes(arena: HostArena) -> int:
    """Of the host's budget: what nobody holds, and what this process holds and has not lent."""
    return arena.budget.limit_bytes - arena.budget.used_bytes + max(0, arena.held_bytes - arena.lent_bytes)


def check_budget(arena: HostArena, nbytes: int, what: str, instead: str = "lower offload_fraction") -> None:
    """Raises HostBudgetError, before anything is pinned, if the budget has not `nbytes` left. instead: of
    another limit, for the message."""
    left = free_bytes(arena)
    if nbytes > left:
        raise HostBudgetError(
            f"{what} need {nbytes:,} bytes of host memory, and {left:,} of the host's "
            f"{arena.budget.limit_bytes:,} bytes are free; raise "
            f"host_limit_bytes, or {instead}"
        )


class HostSection:
    """A section's flats as uint8 tensors: `slot` is a range of one, `view` the same with a dtype."""

    def __init__(self, arena: HostArena, layout: Section, specs: Sequence[FlatSpec]) -> None:
        """Blocks the host for the pinning. Raises HostBudgetError."""
        self.layout = layout
        self._arena = arena
        self._blocks: list[Block] = []
        self._flats: dict[str, tuple[Tensor, int]] = {}
        self.add(specs)

    def add(self, specs: Sequence[FlatSpec]) -> None:
        """More flats, between two steps. Blocks the host for the pinning. Raises HostBudgetError."""
        numel = max(ALIGN, self.layout.numel)
        for pinned in (True, False):
            chosen = [spec for spec in specs if spec.pinned is pinned]
            if not chosen:
                continue
            sizes = [spec.element_bytes * numel for spec in chosen]
            if pinned:
                block = self._arena.contiguous(sum(sizes))
                self._blocks.append(block)
                memory = block.extents[0]
            else:
                memory = torch.empty(sum(sizes), dtype=torch.uint8)
            for spec, flat in zip(chosen, memory.split(sizes), strict=True):
                self._flats[spec.name] = flat, spec.element_bytes
                if spec.zero:
                    flat.zero_()  # a block may have been used before

    @property
    def nbytes(self) -> int:
        return sum(flat.numel() for flat, _ in self._flats.values())

    def has(self, name: str) -> bool:
        return name in self._flats

    def slot(self, name: str, start: int, numel: int) -> Tensor:
        """The bytes kept for elements [start, start + numel): uint8, 1-D."""
        flat, size = self._flats[name]
        return flat.narrow(0, start * size, numel * size)

    def view(self, name: str, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Elements of `dtype` from the beginning of the slot on, 1-D."""
        return self.slot(name, start, numel).narrow(0, 0, numel * dtype.itemsize).view(dtype)

    def close(self, *, after: Event | None = None, later: bool = False) -> None:
        """Give the blocks back. Nothing may use them any more but what ends before `after`. later: from a
        finaliser, which takes no lock."""
        self._flats.clear()
        for block in self._blocks:
            (self._arena.give_back_later if later else self._arena.give_back)(block, after)
        self._blocks.clear()
