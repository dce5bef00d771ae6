"""Restores issued before their reader asks: the next records in the order of the coming reads, within a
window of bytes.

One invariant: a prefetch changes time and memory within the caps, never results; nothing here is needed for a
right answer.

The h2d lane can start a copy only once compute has reached the point where its buffer was allocated, so the
copies that are to run beside a layer must be queued before it: the lane is kept supplied at every mark and
every read. The window is over coming reads, bytes that are on the device included: what is read next needs no
fetch, and what is far away would only take room. Bytes on their way out that come into the window are kept:
fetching them back would cost the link twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.ids import ChunkId
from offload.saved.chunk import SavedChunk
from offload.transfer.admission import Priority
from offload.transfer.engine import TransferEngine
from offload.transfer.record import Transfer

__all__ = ["Prefetcher"]


class Prefetcher:
    """Keeps the h2d lane supplied. Callers hold the engine's lock."""

    def __init__(self, transfers: TransferEngine, *, piece_bytes: int) -> None:
        self._transfers = transfers
        self._piece_bytes = piece_bytes

    @property
    def stride_bytes(self) -> int:
        """How much is to be read before looking again is worth its host time: a piece, or a quarter of a
        small window."""
        quarter = self._transfers.limits.max_restoring_bytes // 4
        # asked at every read: min is a call
        return quarter if quarter < self._piece_bytes else self._piece_bytes

    def look_back(self, chunk: SavedChunk) -> None:
        """Something that was fetched may have been dropped for want of room: let it be fetched again. `chunk`
        is the one that a backward
        reads: of those after it more would only be dropped again, by the next save or read that finds no
            room."""
        if chunk.id in self._transfers.dropped:
            self._transfers.dropped.discard(chunk.id)
            chunk.coming.look_back()

    def pump(self, chunks: Sequence[SavedChunk]) -> None:
        """Fetch what the coming reads want, as far as window and caps allow. Blocks the host: never.

        chunks: in the order in which backwards will read them.
        """
        transfers = self._transfers
        room = transfers.limits.max_restoring_bytes
        for rank, chunk in enumerate(chunks):
            if not chunk.readable:
                return  # what is read after it is further away than a window
            coming = chunk.coming
            coming.follow_reader()
            room -= coming.ahead_bytes
            while room > 0:
                look = coming.look(room, self._piece_bytes)
                if look is None:
                    break
                for record in look.keep:
                    transfers.reclaim(record)
                if look.fetch:
                    touch = look.fetch[-1].touch

                    def later(transfer: Transfer, rank: int = rank, touch: int = touch) -> bool:
                        return _read_after(
                            transfer, {other.id: place for place, other in enumerate(chunks)}, rank, touch
                        )

                    if transfers.restore(look.fetch, Priority.SPECULATIVE, later) is None:
                        return
                elif not look.nbytes and not look.keep:
                    coming.take(look)
                    break
                coming.take(look)
                room -= look.nbytes
            if room <= 0:
                return


def _read_after(transfer: Transfer, ranks: dict[ChunkId, int], rank: int, touch: int) -> bool:
    """Whether the bytes of a spill in flight are read later than a record of the chunk at `rank` with this
    touch."""
    for reference in transfer.records:
        record = reference()
        if record is not None:
            other = ranks.get(record.group.chunk)
            if other is None:
                return True  # its backward is further away than anything that is being fetched
            return other > rank or (other == rank and record.touch < touch)
    return True  # nobody will read it
