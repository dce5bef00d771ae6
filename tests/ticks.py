"""A clock for tests whose claim is no claim about time: mode "auto" measures what blocks take on the host,
and plans by it, so on a real clock its plans depend on what else the machine does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

_TICK_S = 2e-5
"""About what a small operator takes on the host."""


class _Ticks:
    """Goes on by one tick with each reading: what is timed takes one, and what times `n` parts takes `n`."""

    def __init__(self) -> None:
        self._readings = 0

    def __call__(self) -> float:
        self._readings += 1
        return self._readings * _TICK_S


@contextmanager
def counted_time() -> Iterator[None]:
    """`time.perf_counter()` counts its readings, for the whole process."""
    with patch.object(time, "perf_counter", _Ticks()):
        yield
