"""Where each offloaded parameter lies: flat sections of host memory, cut into the buckets that move and are
stepped at once.

Numbers only, so that the layout can be written into a state dict and argued about with a pencil. One
invariant: a parameter is one unbroken range of one section, begins at a multiple of ALIGN elements, and is
cut only at such multiples. So a vectorised kernel meets the same whole vectors and the same short tail in a
cut parameter as in one tensor, and the bits of an elementwise optimizer do not depend on the cuts.

    section   an unbroken range of host memory for some parameters of one kind (dtype and place)
    bucket    a part of a section, 32 to 128 MiB of master weights: what one event covers and one CPU
              optimizer steps
    piece     what lies of one parameter in one bucket
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

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
