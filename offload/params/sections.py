"""Where each offloaded parameter lies: flat sections of host memory, cut into the buckets that move and are
stepped at once; the memory of one section; and a ring of slots on the device, through which buckets pass: one
comes in, one is worked on, one goes out.

A layout is numbers only, so that it can be written into a state dict and argued about with a pencil. One
invariant: a parameter is one unbroken range of one section, begins at a multiple of ALIGN elements, and is
cut only at such multiples. So a vectorised kernel meets the same whole vectors and the same short tail in a
cut parameter as in one tensor, and the bits of an elementwise optimizer do not depend on the cuts.

The bytes of a section (master weights, gradients and moments, one unbroken range each, in as few blocks as
their pinning allows) belong to it from its making to `close`; nothing is allocated in a step. A slot of the
ring is written again only behind the event of its last reader, which the slot keeps.

    section   an unbroken range of host memory for some parameters of one kind (dtype and place)
    bucket    a part of a section, 32 to 128 MiB of master weights: what one event covers and one CPU
              optimizer steps
    piece     what lies of one parameter in one bucket
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from offload.device import Device, Event, Lane
from offload.errors import HostBudgetError
from offload.memory.arena import Block, HostArena

ALIGN = 16
"""Elements: a 64-byte cache line of float32, and the widest vector of the CPU kernels (AVX-512)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [first, first + numel) of a parameter, which lie at [start, start + numel) of the section."""

    parameter: int
    first: int
    numel: int
    start: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements [start, end) of the section; both are multiples of ALIGN."""

    start: int
    end: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Section:
    """Parameters one after the other, each padded to a multiple of ALIGN."""

    parameters: tuple[tuple[int, int, int], ...]
    """(index, start, numel), in the order given."""
    numel: int
    buckets: tuple[Bucket, ...]


def round_up(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN


def lay_out(
    parameters: Sequence[tuple[int, int]], *, bucket_numel: int, section_numel: int, whole: bool
) -> tuple[Section, ...]:
    """Sections for parameters given as (index, numel), in that order.

    section_numel: a section ends before the parameter that would make it longer; one parameter that is longer
        gets a section of its own.
    whole: a parameter is one piece, for optimizers that look at a whole tensor; a bucket is then longer than
        `bucket_numel` where it must.
    """
    if bucket_numel < ALIGN:
        raise ValueError(f"bucket_numel is {bucket_numel:,}, must be at least {ALIGN}")
    sections: list[Section] = []
    chosen: list[tuple[int, int, int]] = []
    end = 0
    for index, numel in parameters:
        if chosen and end + round_up(numel) > section_numel:
            sections.append(_section(chosen, end, bucket_numel, whole))
            chosen, end = [], 0
        chosen.append((index, end, numel))
        end += round_up(numel)
    if chosen:
        sections.append(_section(chosen, end, bucket_numel, whole))
    return tuple(sections)


def _section(parameters: list[tuple[int, int, int]], numel: int, bucket_numel: int, whole: bool) -> Section:
    cuts = _cuts_between(parameters, numel, bucket_numel) if whole else _even_cuts(numel, bucket_numel)
    buckets: list[Bucket] = []
    for start, end in itertools.pairwise(cuts):
        pieces = []
        for index, at, length in parameters:
            first, last = max(start, at), min(end, at + length)
            if first < last or (length == 0 and start <= at and (at < end or end == numel)):
                pieces.append(Piece(index, first - at, max(0, last - first), first))
        buckets.append(Bucket(start, end, tuple(pieces)))
    return Section(tuple(parameters), numel, tuple(buckets))


def _even_cuts(numel: int, bucket_numel: int) -> list[int]:
    """Buckets of one length, so that none is a short rest that moves at a bad rate."""
    count = max(1, -(-numel // bucket_numel))
    length = max(ALIGN, round_up(-(-numel // count)))
    return [*range(0, max(1, numel), length), numel]


def _cuts_between(parameters: list[tuple[int, int, int]], numel: int, bucket_numel: int) -> list[int]:
    cuts = [0]
    for _, start, length in parameters:
        if length and start > cuts[-1] and start + length - cuts[-1] > bucket_numel:
            cuts.append(start)
    return [*cuts, numel]


def layout_to_json(sections: Sequence[Section]) -> list[dict[str, list[list[int]]]]:
    """For a state dict: lists and ints only."""
    return [
        {
            "parameters": [list(known) for known in section.parameters],
            "cuts": [[b.start, b.end] for b in section.buckets],
        }
        for section in sections
    ]


class FlatSpec(NamedTuple):
    """One flat of every section: its name, the bytes of one element, whether it is pinned, and whether it
    starts as zeros."""

    name: str
    element_bytes: int
    pinned: bool
    zero: bool = False


def free_bytes(arena: HostArena) -> int:
    """Free bytes of the host's budget: what nobody holds, and what this process holds and has not lent."""
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


RING_SLOTS = 3
"""Buckets on the device at most: one coming in, one being stepped, one going out."""


def slots_for(numel: int, largest: int, most: int = RING_SLOTS) -> int:
    """How many slots help buckets of `numel` elements together, the largest of `largest`: a small one beside
    it is not worth another."""
    return min(most, max(1, round(numel / largest))) if largest else 0


@dataclass(slots=True)
class Slot:
    """Device memory for one bucket, by name, and the event after which it may be written again."""

    flats: dict[str, Tensor]
    free: Event


class Ring:
    """Slots on the device, each as large as the largest bucket, the lane on which they come in, and the lane
    that steps them.

    flats: (name, bytes of one element). slots: `slots_for` the buckets. Allocated on `compute`; the
        first use of each slot is ordered behind that.
    """

    def __init__(
        self, device: Device, numel: int, flats: Sequence[tuple[str, int]], slots: int = RING_SLOTS
    ) -> None:
        self.device = device
        self.nbytes = slots * numel * sum(size for _, size in flats)
        self.lane: Lane = device.new_compute_lane("optimizer")
        self.inward: Lane = device.new_copy_lane("state in")
        """Of its own: what others fetch ahead on `h2d` waits there for memory, and state would behind it."""
        made = [{name: device.empty(numel * size) for name, size in flats} for _ in range(slots)]
        allocated = device.record(device.compute)
        self._slots = deque(Slot(each, allocated) for each in made)  # the one used longest ago first

    def wait_for_slot(self, most: int | None = None) -> None:
        """Block the host until the next slot is free, and fewer than `most` are used, so that no more buckets
        are queued in front of others' copies, and weights that return from the CPU are not delayed by them.
        most: 0 counts as 1; None for all."""
        slots = self._slots
        self.device.synchronize(slots[-min(len(slots), len(slots) if most is None else max(1, most))].free)

    def next_slot(self) -> Slot:
        """The slot used longest ago."""
        self._slots.rotate(-1)
        return self._slots[-1]
