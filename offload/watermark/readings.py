"""When the device is asked how much is allocated, and how much would be if nothing had left.

One invariant: between two readings no more than an eighth of the room below the high mark, or a piece, is
saved, and there are at most 64 saves and reads, eight from half of the mark on. So memory that nobody saves
may grow meanwhile, and is seen soon.
"""

from __future__ import annotations

from offload.ids import GroupId
from offload.transfer.block import BlockState, DeviceBlock
from offload.watermark.budget import ActivationBudgetManager
from offload.watermark.transfer import ActivationTransfer

_SHARE = 8
"""Part of the free bytes below the mark, one in so many, that may be saved before the next reading."""

_MOST_CALLS = 64
_MOST_CALLS_ABOVE_HALF = 8
"""Saves and reads. A reading costs about as much as a save."""

_LINGERING = 16
"""Blocks that linger and are looked at for each reading."""

_STRIDE = 64
"""In a backward, the part of the high mark that may be read."""


class Readings:
    """piece_bytes: no more is saved or read between two readings."""

    def __init__(
        self, budget: ActivationBudgetManager, transfer: ActivationTransfer, piece_bytes: int
    ) -> None:
        self._budget = budget
        self._transfer = transfer
        self._piece_bytes = piece_bytes
        self._lingering: list[DeviceBlock] = []  # spilled, and something else holds their device memory
        self._unlooked = 0  # readings since those were looked at
        self.away_bytes = 0  # spilled, and their device memory is free
        self.released_bytes = 0  # in this step
        self._saved_bytes = 0  # since the last reading
        self._read_bytes = 0
        self._calls = 0
        self._next_saved_bytes = 0  # at which the next one is due

    def after_save(self, nbytes: int) -> int:
        """Bytes on the device, after a save of so many."""
        self._saved_bytes += nbytes
        self._calls += 1
        if self._saved_bytes < self._next_saved_bytes and not self._many_calls():
            return self._budget.last_bytes + self._saved_bytes
        return self.read()

    def is_due_after_read(self, nbytes: int) -> bool:
        """Whether a reading is due, after so many bytes have been read for the last time."""
        self._read_bytes += nbytes
        self._calls += 1
        due_bytes = min(self._piece_bytes, self._budget.high_bytes // _STRIDE)
        return self._read_bytes >= due_bytes or self._many_calls()

    def _many_calls(self) -> bool:
        is_above_half = 2 * self._budget.last_bytes >= self._budget.high_bytes
        return self._calls >= (_MOST_CALLS_ABOVE_HALF if is_above_half else _MOST_CALLS)

    def read(self) -> int:
        """Bytes on the device, asked now."""
        self._count_away()
        allocated = self._budget.read()
        self._saved_bytes = self._read_bytes = self._calls = 0
        room = max(0, self._budget.high_bytes - allocated)
        self._next_saved_bytes = min(self._piece_bytes, room // _SHARE)
        return allocated

    def look(self) -> int:
        """Read for whoever fetches ahead: what was read before still counts for the next reading."""
        reads = self._read_bytes, self._calls
        allocated = self.read()
        self._read_bytes, self._calls = reads
        return allocated

    def _count_away(self) -> None:
        """Bytes that would be on the device if nothing had left. Many that linger are not looked at in each
        reading."""
        away, settled = self._transfer.away, self._transfer.take_settled()
        self._unlooked += 1
        if len(self._lingering) <= _LINGERING * self._unlooked:
            settled = [*self._lingering, *settled]
            self._lingering, self._unlooked = [], 0
        for block in settled:
            if block.state is not BlockState.SPILLED or block.is_freed:
                continue
            if block.storage() is not None:
                self._lingering.append(block)
                continue
            self.released_bytes += block.nbytes
            if block.unread:
                away[block] = self
                self.away_bytes += block.nbytes

    def lingering_slots(self, group: GroupId) -> set[int]:
        """Slots of a group's blocks whose device memory something else holds."""
        held = (block for block in self._lingering if block.group is group)
        return {block.slot for block in held if block.storage() is not None}

    def end_step(self) -> int:
        """The released bytes of the step; counted anew from here."""
        found, self.released_bytes = self.released_bytes, 0
        for block in [block for block, owner in self._transfer.away.items() if owner is self]:
            del self._transfer.away[block]
        self._lingering.clear()
        self.away_bytes = self._saved_bytes = self._read_bytes = self._calls = self._next_saved_bytes = 0
        return found
