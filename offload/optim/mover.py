"""The optimizer's copies: every one asks the engine's door and is named in a profile, then goes to the
engine's lanes.

One invariant: nothing of the optimizer is copied past this file. The copies are REQUIRED: a step cannot leave
a bucket out, so a door that denies one is told and not obeyed, as for a tensor whose reader waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.device import CopyPair, Device
from offload.engine import OffloadEngine
from offload.ids import ChunkId, GroupId
from offload.transfer.door import Direction, Priority
from offload.transfer.ranges import transfer_range

__all__ = ["Mover"]


class Mover:
    """Copies of one bucket. place: the bucket's number, for the door."""

    __slots__ = ("_door", "device", "owner")

    def __init__(self, engine: OffloadEngine, name: str, place: int) -> None:
        self.device: Device = engine.device
        self._door = engine.transfers.door
        self.owner = GroupId(ChunkId(0, 0), place, name)

    def send(self, pairs: Sequence[CopyPair]) -> None:
        """To the host, on d2h. Blocks the host only where its side is not pinned."""
        self._door.admit(_nbytes(pairs), Direction.D2H, self.owner, Priority.REQUIRED)
        with transfer_range("send", self.owner.name):
            self.device.copy(self.device.d2h, pairs)

    def fetch(self, pairs: Sequence[CopyPair]) -> None:
        """To the device, on h2d. Blocks the host only where its side is not pinned."""
        self._door.admit(_nbytes(pairs), Direction.H2D, self.owner, Priority.REQUIRED)
        with transfer_range("fetch", self.owner.name):
            self.device.copy(self.device.h2d, pairs)


def _nbytes(pairs: Sequence[CopyPair]) -> int:
    return sum(source.numel() for _, source in pairs)
