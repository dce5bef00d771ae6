"""The limits of mode "legacy": one copy out at a time, and nothing back before it is read.

One invariant: they hold for the whole process while a model has that mode, and the limits from before come
back with the last of them: when its handle is removed, or when the model itself is collected.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from offload.config import OffloadConfig
from offload.engine import OffloadEngine

__all__ = ["OneCopyAtATime"]

_SPILLING, _RESTORING = 1, 0  # bytes: compute waits for each copy out before the next begins


class OneCopyAtATime:
    """Which models want it."""

    def __init__(self) -> None:
        self._wanted_by: set[int] = set()
        self._before: weakref.WeakKeyDictionary[OffloadEngine, OffloadConfig] = weakref.WeakKeyDictionary()

    def begin(self, model: nn.Module, engine: OffloadEngine) -> Callable[[], object]:
        """From now on for `model`, which is in no such mode. Returns what ends it; a second call of that does
        nothing. Blocks the host: never."""
        self._wanted_by.add(id(model))
        self._before.setdefault(engine, engine.config)
        engine.follow(replace(engine.config, max_spilling_bytes=_SPILLING, max_restoring_bytes=_RESTORING))
        end = weakref.finalize(model, self._end, id(model))
        end.atexit = False
        return end

    def _end(self, model: int) -> None:
        """Takes no lock: the collector may call it on any thread."""
        self._wanted_by.discard(model)
        if self._wanted_by:
            return
        for engine, before in [*self._before.items()]:
            limits = engine.config.max_spilling_bytes, engine.config.max_restoring_bytes
            if limits == (_SPILLING, _RESTORING):  # else somebody has set others since
                engine.follow(
                    replace(
                        engine.config,
                        max_spilling_bytes=before.max_spilling_bytes,
                        max_restoring_bytes=before.max_restoring_bytes,
                    )
                )
        self._before.clear()
