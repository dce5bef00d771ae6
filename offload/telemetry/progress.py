"""Long work shows on a terminal that it goes on.

One invariant: nothing is shown where the output is no terminal, or where the work is over in a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

_MOMENT_S = 1.0


@contextmanager
def progress(what: str, total: int, unit: str, *, least: int = 0) -> Iterator[Callable[[int], object]]:
    """A bar, while inside. Its value is called with what is done more. least: no bar for less than that."""
    if total < least:
        yield lambda more: None
        return
    with tqdm(
        desc=f"offload: {what}",
        total=total,
        unit=unit,
        unit_scale=True,
        delay=_MOMENT_S,
        leave=False,
        disable=None,  # where the output is no terminal
    ) as bar:
        yield bar.update
