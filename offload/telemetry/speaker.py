"""Loggers whose messages say who speaks: "offload: ...", or "offload, rank 3: ..." where there are ranks;
what was said once; and a bar on a terminal that shows that long work goes on.

One invariant: a message is formatted once, and its logger has the module's name, so `logging` filters it as
any other. No bar is shown where the output is no terminal, or where the work is over in a moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from tqdm import tqdm


class _Speaker(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return f"offload{f', rank {dist.get_rank()}' if ranks else ''}: {msg}", kwargs


def speaker(name: str) -> _Speaker:
    """The logger of a module of this name."""
    return _Speaker(logging.getLogger(name))


class Once(set[tuple[object, ...]]):
    """Things that were said, each of which is said once."""

    def first(self, *what: object) -> bool:
        """Return True if `what` was not said yet; from now on it is."""
        is_first = what not in self
        self.add(what)
        return is_first


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
