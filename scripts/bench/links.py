"""The rates of the host link, measured in the run whose rows are judged by them.

Pinned copies on two side streams: each direction alone, then both at once; by one GPU, or by several in step.
One invariant: the rate is bytes over device time by events, after a warm-up copy of each buffer, and both
directions start behind one event when they run together.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

_BYTES = 256 << 20
_COPIES = 12
_REPEATS = 3
LINE_UPS = 1 + 3 * _REPEATS
"""How often `measure_links` lines up with others; a rank that only watches has to do it as often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Bytes per second."""

    d2h: float
    h2d: float
    duplex_d2h: float
    duplex_h2d: float
    measured: bool = True

    @property
    def duplex(self) -> float:
        """Both directions together."""
        return self.duplex_d2h + self.duplex_h2d

    @property
    def duplex_s(self) -> float:
        """Seconds of one run of `Copies` both ways."""
        return _COPIES * _BYTES / min(self.duplex_d2h, self.duplex_h2d)


SIMULATED = LinkRates(d2h=55e9, h2d=55e9, duplex_d2h=50e9, duplex_h2d=50e9, measured=False)
"""Stand-ins for a machine without a GPU: they prove the arithmetic and are no measurement."""


class Copies:
    """Whole copies of pinned memory both ways, on two side streams.

    line_up: a barrier over the ranks that copy at the same time, called before each run (of 60 ms).
    """

    def __init__(self, line_up: Callable[[], None] | None = None) -> None:
        host = [torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        device = [torch.randint(0, 255, (_BYTES,), dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._line_up = line_up
        self._lanes = [torch.cuda.Stream(), torch.cuda.Stream()]
        # (destination, source) of D2H and of H2D
        self._pairs = ((host[0], device[0]), (device[1], host[1]))

    def rates(
        self, directions: tuple[int, ...], count: int, beside: Callable[[], object] | None = None
    ) -> list[float]:
        """Bytes per second of each. beside: issues other work once the copies are issued."""
        torch.cuda.synchronize()
        if self._line_up is not None:
            self._line_up()
        go = torch.cuda.Event(enable_timing=True)
        go.record()
        ends = [torch.cuda.Event(enable_timing=True) for _ in directions]
        for direction in directions:
            self._lanes[direction].wait_event(go)
        for _ in range(count):  # in turn, so that neither direction is issued long before the other
            for direction in directions:
                destination, source = self._pairs[direction]
                with torch.cuda.stream(self._lanes[direction]):
                    destination.copy_(source, non_blocking=True)
        for direction, end in zip(directions, ends, strict=True):
            end.record(self._lanes[direction])
        if beside is not None:
            beside()
        torch.cuda.synchronize()
        return [count * _BYTES / (go.elapsed_time(end) * 1e-3) for end in ends]

    def rates_beside(self, beside: Callable[[], object]) -> list[float]:
        """Out and back, both at once, beside what is issued."""
        return self.rates((0, 1), _COPIES, beside)


def measure_links(line_up: Callable[[], None] | None = None, *, tiny: bool = False) -> LinkRates:
    """Block for about two seconds and return the medians. line_up: as of Copies. tiny: the stand-ins."""
    if tiny:
        return SIMULATED
    rates, copies, repeats = Copies(line_up).rates, _COPIES, _REPEATS
    rates((0, 1), 1)
    d2h = statistics.median(rates((0,), copies)[0] for _ in range(repeats))
    h2d = statistics.median(rates((1,), copies)[0] for _ in range(repeats))
    both = [rates((0, 1), copies) for _ in range(repeats)]
    return LinkRates(
        d2h=d2h,
        h2d=h2d,
        duplex_d2h=statistics.median(pair[0] for pair in both),
        duplex_h2d=statistics.median(pair[1] for pair in both),
    )
