"""The blocks of one chunk that a backward will read, in order, and the prefetch: restores of the next ones,
issued before their reader asks, within a window of bytes.

A prefetch changes time and memory within the caps, never results: nothing here is needed for a right answer.
The h2d lane can start a copy only once compute has reached the point where its buffer was allocated. So the
copies that are to run beside a layer must be queued before it, and the prefetch is called at every commit,
its hook, and after reads. Bytes on their way out that come into the window are kept: fetching them back would
cost the link twice.

One invariant: `ahead_bytes` counts every block between the reader and the fetch that had not been read when
it was looked at, wherever its bytes are. So a window over it bounds what is fetched early, and fetches
nothing while what is read next is on the device anyway. The reader is past a block with its first read: what
all layers save, such as a rotary table, is read to the end of the chunk, and as long as it counted nothing
more was fetched early (docs/benchmarks.md, "Two GPUs": 183 ms of waits in a step of 786).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from operator import attrgetter

from offload.disk.tier import DiskTier
from offload.ids import ChunkId
from offload.transfer.block import BlockState, DeviceBlock, Transfer, living
from offload.transfer.copier import Priority
from offload.transfer.engine import TransferEngine

_SPILLED, _SPILLING = BlockState.SPILLED, BlockState.SPILLING


@dataclass(slots=True, eq=False)
class ComingReads:
    """Positions `_reader <= _fetched <= len`: what is before the reader has been read, once at least; what is
    before `_fetched` has been looked at.

    chunk: whose they are. known: `expect` was called, so that fetching ahead of time makes sense.
    """

    chunk: ChunkId
    known: bool = False
    ahead_bytes: int = 0
    _blocks: Sequence[DeviceBlock] = ()
    _passes: list[int] = field(default_factory=list)
    _unread: list[int] = field(default_factory=list)  # with fewer, the reader is past it
    _sizes: list[int] = field(default_factory=list)
    _reader: int = 0
    _fetched: int = 0

    def expect(self, blocks: Sequence[DeviceBlock], after: Sequence[DeviceBlock] = ()) -> None:
        """These will be read, in this order, then those of `after` in the next pass."""
        self.known = True
        self._blocks = [*blocks, *after]
        # a block that has been read to the end will be read in a new pass
        self._passes = [block.pass_no if block.unread > 0 else block.pass_no + 1 for block in blocks]
        self._passes += [block.pass_no + 1 for block in after]
        unread = [block.unread or block.readers for block in blocks] + [block.readers for block in after]
        # several storages that stay are one block, and read one after the other: it counts to its last read
        self._unread = [
            1 if block.storages > 1 else most for block, most in zip(self._blocks, unread, strict=True)
        ]
        self._sizes = [0] * len(self._blocks)  # bytes counted in `ahead_bytes`
        self._reader = self._fetched = self.ahead_bytes = 0

    def look_back(self) -> None:
        """Look again from the first block that was fetched and dropped before it was read: nobody else would
        fetch it before its reader, who then drops the next one to make room, and so on to the end of the
        chunk."""
        for position in range(self._reader, self._fetched):
            block = self._blocks[position]
            ahead = self._passes[position] - block.pass_no
            unread = ahead > 0 or (ahead == 0 and block.unread)
            away = block.state is _SPILLED and (block.external or block.storage() is None)
            if unread and away and not block.is_freed:
                self.ahead_bytes -= sum(self._sizes[position : self._fetched])
                self._fetched = position
                return

    def unfetched(self) -> Iterator[DeviceBlock]:
        """The blocks that will be read and were not looked at yet, in that order."""
        passes = self._passes
        for position in range(self._fetched, len(self._blocks)):
            block = self._blocks[position]
            ahead = passes[position] - block.pass_no
            if not block.is_freed and (ahead > 0 or (ahead == 0 and block.unread)):
                yield block

    def look(
        self, window: int, piece_bytes: int
    ) -> tuple[list[DeviceBlock], list[DeviceBlock], list[int]] | None:
        """Move past what has been read, or will never be. Then look at the next blocks, until `window` bytes
        are ahead of the reader, or about a piece is to be fetched. Nothing is taken until `take`.

        Returns the blocks to fetch, those to keep although they are on their way out, and the bytes of each
        position that was looked at, 0 where nothing will be read any more; None if there are none.
        A block larger than the window is looked at all the same when nothing else is ahead of the reader.
        """
        blocks, passes, fetched = self._blocks, self._passes, self._fetched
        reader = self._reader
        while reader < fetched:
            block = blocks[reader]
            if not block.is_freed:
                ahead = passes[reader] - block.pass_no
                if ahead > 0 or (ahead == 0 and block.unread >= self._unread[reader]):
                    break
            self.ahead_bytes -= self._sizes[reader]
            reader += 1
        self._reader = reader
        room = window - self.ahead_bytes
        if room <= 0 or fetched == len(blocks):
            return None
        fetch: list[DeviceBlock] = []
        keep: list[DeviceBlock] = []
        sizes: list[int] = []
        nbytes = fetch_bytes = 0
        for position in range(fetched, len(blocks)):
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
            # its bytes have to come back: nothing on the device still holds them
            elif block.state is _SPILLED and (block.external or block.storage() is None):
                fetch.append(block)
                fetch_bytes += block.nbytes
                if fetch_bytes >= piece_bytes:
                    break
        return (fetch, keep, sizes) if sizes else None

    def take(self, sizes: Sequence[int]) -> None:
        """Mark what `look` showed as dealt with."""
        start, self._fetched = self._fetched, self._fetched + len(sizes)
        self._sizes[start : self._fetched] = sizes
        self.ahead_bytes += sum(sizes)


class Prefetcher:
    """Issues the prefetch. Callers hold the engine's lock.

    stride_bytes: how much is to be read before looking again is worth its host time: a piece, or a quarter of
        a small window. As of the last `pump`.
    fills_room: the window is as wide as the room that watchers of the device say is left, unless the config
        names one. Every prefetch asks for that room before each piece.
    """

    def __init__(self, transfers: TransferEngine, *, piece_bytes: int, fills_room: bool = False) -> None:
        self._fills_room = fills_room
        self._transfers = transfers
        self.piece_bytes = piece_bytes
        self.stride_bytes = min(piece_bytes, transfers.limits.max_restoring_bytes // 4)
        self._looked: tuple[int, list[ChunkId]] = (-1, [])  # where the disk looked ahead last

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
        limits = transfers.limits
        window, inputs_bytes = limits.max_restoring_bytes, limits.inputs_ahead_bytes
        if "max_restoring_bytes" not in limits.named:
            if self._fills_room:
                window = sys.maxsize
            elif inputs_bytes is not None and inputs_bytes < window:
                window = inputs_bytes
        if limits.kind_ahead_bytes is not None:
            window = min(window, limits.kind_ahead_bytes)
        self.stride_bytes = min(self.piece_bytes, window // 4)
        if not transfers.counts.spilled:
            return  # all that was saved in this step is on the device
        if transfers.disk is not None and transfers.capture is None:
            self._look_ahead(transfers.disk, chunks)
        for rank, coming in enumerate(chunks):
            if window <= 0 or not coming.known:
                return  # what is read after one that is not known is further away than a window
            while (found := coming.look(window, self.piece_bytes)) is not None:
                fetch, keep, sizes = found
                # without room what is on its way out leaves, and is looked at again
                if keep and not limits.has_room(1):
                    return
                for block in keep:
                    transfers.reclaim(block)
                if fetch:
                    if limits.watchers and not limits.has_room(sum(block.nbytes for block in fetch)):
                        return
                    later = partial(_read_later, chunks, rank, fetch[-1].touch)
                    if transfers.restore(fetch, Priority.SPECULATIVE, later) is None:
                        return
                coming.take(sizes)
                if coming.ahead_bytes >= window:
                    return
            window -= coming.ahead_bytes

    def _look_ahead(self, disk: DiskTier, chunks: Sequence[ComingReads]) -> None:
        """Have the disk's reader follow the coming reads. Not at every call: its window may be long, and is
        looked at from end to end."""
        stride_bytes = max(1, min(self.piece_bytes, disk.ahead_bytes // 4))
        known = list(takewhile(attrgetter("known"), chunks))
        looked = self._transfers.counts.restore_bytes // stride_bytes, [coming.chunk for coming in known]
        if looked != self._looked:
            self._looked = looked
            disk.look_ahead(block for coming in known for block in coming.unfetched())


def _read_later(chunks: Sequence[ComingReads], rank: int, touch: int, transfer: Transfer) -> bool:
    """Return True if the bytes of a spill in flight are read later than a block of the chunk at `rank` with
    this touch."""
    block = next(living(transfer.blocks), None)
    if block is None:
        return True  # nobody will read it
    places = {coming.chunk: place for place, coming in enumerate(chunks)}
    # one that is not among them is further away than anything that is being fetched
    place = places.get(block.group.chunk, len(chunks))
    return place > rank or (place == rank and block.touch < touch)
