"""The limits of mode "legacy": one copy out at a time, and nothing back before it is read.

One invariant: they hold for the whole process while a model has that mode, whatever the config says, and end
with the last of them: when its handle is removed, or when the model itself is collected.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn

from offload.engine import OffloadEngine
from offload.transfer.limits import Contributor

__all__ = ["OneCopyAtATime"]


class OneCopyAtATime:
    """Which models want it."""

    def __init__(self) -> None:
        self._wanted_by: set[int] = set()
        self._shares: weakref.WeakKeyDictionary[OffloadEngine, Contributor] = weakref.WeakKeyDictionary()

    def begin(self, model: nn.Module, engine: OffloadEngine) -> Callable[[], object]:
        """From now on for `model`, which is in no such mode. Returns what ends it; a second call of that does
        nothing. Blocks the host: never."""
        self._wanted_by.add(id(model))
        if engine not in self._shares:
            self._shares[engine] = share = engine.limits.contributor("legacy")
            share.bound("max_spilling_bytes", 1)  # compute waits for each copy out before the next begins
            share.bound("max_restoring_bytes", 0)
            share.bound("half_room_bytes", 0)
        end = weakref.finalize(model, self._end, id(model))
        end.atexit = False
        return end

    def _end(self, model: int) -> None:
        """Takes no lock: the collector may call it on any thread."""
        self._wanted_by.discard(model)
        if not self._wanted_by:
            for share in [*self._shares.values()]:
                share.end()
            self._shares.clear()
