"""The group of the outputs that a checkpointed region keeps: the one that is open when they are made, or a
group of the region's own.

One invariant: an output that comes after the chunk was reset, or after its step, stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterable

from offload.device import Lane
from offload.groups.chunk import ChunkGroups
from offload.groups.group import OffloadTensorGroup
from offload.groups.scope import KeptScope
from offload.groups.tracker import ChunkTracker
from offload.saved.chunk import SavedChunk
from offload.transfer.block import DeviceBlock

__all__ = ["KeptGroup"]


class KeptGroup:
    """Of one run of a checkpointed function.

    handler: its chunk; None where nothing may leave. name: of the group of the region's own.
    """

    def __init__(self, manager: ChunkTracker, handler: ChunkGroups | None, name: str) -> None:
        self._manager = manager
        self._handler = handler
        self._name = name
        self._own: OffloadTensorGroup | None = None
        self._together: list[DeviceBlock] = []
        self._chunk: SavedChunk | None = None
        if handler is not None:
            self._chunk = handler.saved
            # what is saved from here to the forward itself are the checkpoint's inputs
            self._chunk.note_saves()

    def begin(self) -> None:
        """The region's forward begins."""
        self._manager.open_regions += 1
        if self._chunk is not None:
            self._together = self._chunk.take_noted()

    def scope(self, lane: Lane | None) -> KeptScope | None:
        """Where an output belongs that is made now, on `lane`; None: on the lane that is current when it
        leaves."""
        handler = self._handler
        if handler is None or handler.saved is not self._chunk:
            return None
        open_group = handler.innermost_open()
        if open_group is None:
            open_group = self._own = handler.on_group_start_forward(self._name)
            open_group.hooked = True
        return KeptScope(self._manager.engine, handler, open_group, lane)

    def left(self, blocks: Iterable[DeviceBlock]) -> None:
        """The recompute will read these, after those before."""
        self._together += blocks

    def end(self) -> None:
        """The region's forward has ended, or raised."""
        self._manager.open_regions -= 1
        together, self._together = self._together, []
        handler = self._handler
        if handler is None or handler.saved is not self._chunk:
            return
        with self._manager.engine.lock:
            if self._own is not None and not self._own.committed:
                handler.close(self._name)
                self._manager.commit(handler, self._own)
            handler.read_together(together)
