"""Restores issued before their reader asks: the next blocks in the order of the coming reads, within a window
of bytes.

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
from functools import partial

from offload.transfer.admission import Priority
from offload.transfer.block import Transfer, living
from offload.transfer.coming import ComingReads
from offload.transfer.engine import TransferEngine

__all__ = ["Prefetcher"]


class Prefetcher:
    """Keeps the h2d lane supplied. Callers hold the engine's lock.

    stride_bytes: how much is to be read before looking again is worth its host time: a piece, or a quarter of
        a small window. As of the last `pump`.
    """

    def __init__(self, transfers: TransferEngine, *, piece_bytes: int) -> None:
        self._transfers = transfers
        self.piece_bytes = piece_bytes
        self.stride_bytes = min(piece_bytes, transfers.limits.max_restoring_bytes // 4)

    def look_back(self, coming: ComingReads) -> None:
        """Something that was fetched may have been dropped for want of room: let it be fetched again.

        coming: of the chunk that a backward reads; of those after it more would only be dropped again, by the
            next save or read that finds no room.
        """
        if coming.chunk in self._transfers.dropped:
            self._transfers.dropped.discard(coming.chunk)
            coming.look_back()

    def pump(self, chunks: Sequence[ComingReads]) -> None:
        """Fetch what the coming reads want, as far as window and caps allow. Blocks the host: never.

        chunks: in the order in which backwards will read them.
        """
        transfers = self._transfers
        room = transfers.limits.max_restoring_bytes
        self.stride_bytes = min(self.piece_bytes, room // 4)
        if not transfers.counts.spilled:
            return  # all that was saved in this step is on the device
        for rank, coming in enumerate(chunks):
            if room <= 0 or not coming.known:
                return  # what is read after one that is not known is further away than a window
            coming.follow_reader()
            room -= coming.ahead_bytes
            while room > 0:
                batch = coming.look(room, self.piece_bytes)
                if batch is None:
                    break
                for block in batch.keep:
                    transfers.reclaim(block)
                if batch.fetch:
                    later = partial(_read_later, chunks, rank, batch.fetch[-1].touch)
                    if transfers.restore(batch.fetch, Priority.SPECULATIVE, later) is None:
                        return
                coming.take(batch)
                room -= batch.nbytes


def _read_later(chunks: Sequence[ComingReads], rank: int, touch: int, transfer: Transfer) -> bool:
    """Whether the bytes of a spill in flight are read later than a block of the chunk at `rank` with this
    touch."""
    block = next(living(transfer.blocks), None)
    if block is None:
        return True  # nobody will read it
    places = {coming.chunk: place for place, coming in enumerate(chunks)}
    # one that is not among them is further away than anything that is being fetched
    place = places.get(block.group.chunk, len(chunks))
    return place > rank or (place == rank and block.touch < touch)
