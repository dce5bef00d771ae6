"""What a link carries, from copies that were timed while training ran.

A copy that runs beside one of the other direction is slower than one alone. So each is compared with what a
link of the rates that are thought would have carried in its time, and how much it carried is a factor of
these. One invariant: copies that went at the rates that are thought leave them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from offload.policy.actions import Rates

__all__ = ["Copied", "seen_rates"]

_FEWEST = 4
"""Copies of one direction from which its rate is told."""


class Copied(NamedTuple):
    """One copy of one direction: its bytes, and when it began and ended."""

    nbytes: int
    start_s: float
    end_s: float


def seen_rates(
    thought: Rates, out: Sequence[Copied], back: Sequence[Copied], least_bytes: int
) -> Rates | None:
    """The rates at which these copies went; None where too few did. out, back: of each direction, in the
    order in which the link ran them. least_bytes: a smaller copy is not counted, since it takes as long to
    issue as to run; it slows the other direction all the same."""
    factors = [
        _factor(own, other, least_bytes, alone, beside)
        for own, other, alone, beside in (
            (out, back, thought.d2h_bytes_per_s, thought.shared[0]),
            (back, out, thought.h2d_bytes_per_s, thought.shared[1]),
        )
    ]
    d2h, h2d = factors
    if d2h is None or h2d is None:
        return None
    duplex = thought.duplex_bytes_per_s
    return replace(
        thought,
        d2h_bytes_per_s=thought.d2h_bytes_per_s * d2h,
        h2d_bytes_per_s=thought.h2d_bytes_per_s * h2d,
        duplex_bytes_per_s=None if duplex is None else duplex * (d2h + h2d) / 2,
    )


def _factor(
    own: Sequence[Copied], other: Sequence[Copied], least_bytes: int, alone: float, beside: float
) -> float | None:
    """What the counted copies carried over what was thought, at these rates alone and beside the others."""
    counted = carried = 0
    expected = 0.0
    first = 0  # of the others that may reach into this copy or a later one
    for nbytes, start_s, end_s in own:
        while first < len(other) and other[first].end_s <= start_s:
            first += 1
        beside_s, at = 0.0, first
        while at < len(other) and other[at].start_s < end_s:
            beside_s += min(end_s, other[at].end_s) - max(start_s, other[at].start_s)
            at += 1
        if nbytes >= least_bytes:
            counted, carried = counted + 1, carried + nbytes
            expected += beside_s * beside + (end_s - start_s - beside_s) * alone
    return carried / expected if counted >= _FEWEST and expected > 0 else None
