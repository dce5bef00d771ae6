"""Who may decide in the client's place what is fetched ahead and what leaves: a runtime of compat.

One invariant: a policy changes when bytes move, never results. Without one the client's own plan holds.
"""

from __future__ import annotations

from typing import Protocol

from offload.transfer.admission import Priority
from offload.weights.weight import BlockWeights

__all__ = ["Policy"]


class Policy(Protocol):
    """Decides for the blocks of one model, which have all the room they ask for. Called under the engine's
    lock."""

    def admit(self, block: BlockWeights, priority: Priority) -> bool:
        """Before the block is loaded: make room for it. False refuses one that is not REQUIRED."""

    def loaded(self, block: BlockWeights) -> None:
        """Its way in is issued."""

    def used(self, block: BlockWeights, found: bool) -> None:
        """The current lane is about to read it. found: it was there, or on its way. What comes next is
        fetched afterwards."""

    def dropped(self, block: BlockWeights) -> None:
        """It is off the device. `block.left` tells when what was written is back on the host."""
