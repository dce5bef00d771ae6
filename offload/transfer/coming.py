"""The blocks of one chunk that a backward will read, in order, and how far ahead of its reader a fetch has
looked.

One invariant: `ahead_bytes` counts every block between the reader and the fetch that had not been read when
it was looked at, wherever its bytes are. So a window over it bounds what is fetched early, and fetches
nothing while what is read next is on the device anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offload.ids import ChunkId
from offload.transfer.block import BlockState, DeviceBlock

__all__ = ["ComingReads", "PrefetchBatch"]

_SPILLED, _SPILLING = BlockState.SPILLED, BlockState.SPILLING


class PrefetchBatch(NamedTuple):
    """What lies next: blocks to fetch, blocks to keep although they are on their way out. sizes: bytes of
    each position that was looked at, 0 where nothing will be read any more; nbytes: their sum."""

    fetch: list[DeviceBlock]
    keep: list[DeviceBlock]
    sizes: list[int]
    nbytes: int


class ComingReads:
    """Positions `_reader <= _fetched <= len`: what is before the reader has been read, what is before
    `_fetched` has been looked at.

    chunk: whose they are. known: `expect` was called, so that fetching ahead of time makes sense.
    """

    __slots__ = ("_blocks", "_fetched", "_passes", "_reader", "_sizes", "ahead_bytes", "chunk", "known")

    def __init__(self, chunk: ChunkId) -> None:
        self.chunk = chunk
        self.known = False
        self.ahead_bytes = 0
        self._blocks: Sequence[DeviceBlock] = ()
        self._passes: list[int] = []
        self._sizes: list[int] = []
        self._reader = self._fetched = 0

    def expect(self, blocks: Sequence[DeviceBlock]) -> None:
        """These will be read, in this order."""
        self.known = True
        self._blocks = blocks
        # a block that has been read to the end will be read in a new pass
        self._passes = [block.pass_no if block.unread > 0 else block.pass_no + 1 for block in blocks]
        self._sizes = [0] * len(blocks)  # bytes counted in `ahead_bytes`
        self._reader = self._fetched = self.ahead_bytes = 0

    def follow_reader(self) -> None:
        """Move past what has been read, or will never be."""
        reader, fetched, passes = self._reader, self._fetched, self._passes
        while reader < fetched:
            block = self._blocks[reader]
            if not block.is_freed:
                unread = passes[reader] - block.pass_no
                if unread > 0 or (unread == 0 and block.unread > 0):
                    break
            self.ahead_bytes -= self._sizes[reader]
            reader += 1
        self._reader = reader

    def look_back(self) -> None:
        """Look again from the first block that was fetched and dropped before it was read: nobody else would
        fetch it before its reader, who then drops the next one to make room, and so on to the end of the
        chunk."""
        for position in range(self._reader, self._fetched):
            block = self._blocks[position]
            ahead = self._passes[position] - block.pass_no
            if (ahead > 0 or (ahead == 0 and block.unread)) and _is_away(block):
                self.ahead_bytes -= sum(self._sizes[position : self._fetched])
                self._fetched = position
                return

    def look(self, room: int, piece_bytes: int) -> PrefetchBatch | None:
        """The next blocks within `room` bytes, until about a piece is to be fetched. Nothing is taken until
        `take`. None: there are none.

        A block larger than the room is looked at all the same when nothing else is ahead of the reader.
        """
        blocks, passes = self._blocks, self._passes
        if self._fetched == len(blocks):
            return None
        fetch: list[DeviceBlock] = []
        keep: list[DeviceBlock] = []
        sizes: list[int] = []
        nbytes = fetch_bytes = 0
        for position in range(self._fetched, len(blocks)):
            block = blocks[position]
            ahead = passes[position] - block.pass_no
            # one that was read out of turn may live on, away, to the weight half
            if block.is_freed or ahead < 0 or (ahead == 0 and not block.unread):
                sizes.append(0)
                continue
            if nbytes + block.nbytes > room and self.ahead_bytes + nbytes > 0:
                break
            if fetch and block.capture is not fetch[-1].capture:
                break  # a graph fetches what its own forward saved
            nbytes += block.nbytes
            sizes.append(block.nbytes)
            if block.state is _SPILLING:
                keep.append(block)
            elif block.state is _SPILLED and (block.external or block.storage() is None):  # `_is_away`
                fetch.append(block)
                fetch_bytes += block.nbytes
                if fetch_bytes >= piece_bytes:
                    break
        return PrefetchBatch(fetch, keep, sizes, nbytes) if sizes else None

    def take(self, batch: PrefetchBatch) -> None:
        """What `look` showed has been dealt with."""
        start, self._fetched = self._fetched, self._fetched + len(batch.sizes)
        self._sizes[start : self._fetched] = batch.sizes
        self.ahead_bytes += batch.nbytes


def _is_away(block: DeviceBlock) -> bool:
    """Whether its bytes have to come back: they are on the host, and nothing on the device still holds
    them."""
    return not block.is_freed and block.state is _SPILLED and (block.external or block.storage() is None)
