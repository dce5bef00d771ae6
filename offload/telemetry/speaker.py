"""Loggers whose messages say who speaks: "offload: ...", or "offload, rank 3: ..." where there are ranks; and
what was said once.

One invariant: a message is formatted once, and its logger has the module's name, so `logging` filters it as
any other.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

import torch.distributed as dist


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
        """Whether `what` is said for the first time, which it is from now on."""
        is_first = what not in self
        self.add(what)
        return is_first
