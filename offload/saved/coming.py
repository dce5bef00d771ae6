"""The records that a backward will read, in order, and how far ahead of its reader a fetch has looked.

One invariant: `ahead_bytes` counts every record between the reader and the fetch that had not been read when
it was looked at, wherever its bytes are. So a window over it bounds what is fetched early, and fetches
nothing while what is read next is on the device anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from offload.transfer.record import Record, RecordState

__all__ = ["ComingReads", "Look"]


class Look(NamedTuple):
    """What lies next: records to fetch, records to keep although they are on their way out. sizes: bytes of
    each position that was looked at, 0 where nothing will be read any more; nbytes: their sum."""

    fetch: list[Record]
    keep: list[Record]
    sizes: list[int]
    nbytes: int


class ComingReads:
    """Positions `_reader <= _fetched <= len`: what is before the reader has been read, what is before
    `_fetched` has been looked at."""

    __slots__ = ("_fetched", "_passes", "_reader", "_records", "_sizes", "ahead_bytes")

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = [weakref.ref(record) for record in records]
        # a record that has been read to the end will be read in a new pass
        self._passes = [record.pass_no if record.unread > 0 else record.pass_no + 1 for record in records]
        self._sizes = [0] * len(records)  # bytes counted in `ahead_bytes`
        self._reader = 0
        self._fetched = 0
        self.ahead_bytes = 0

    def follow_reader(self) -> None:
        """Move past what has been read, or will never be."""
        while self._reader < self._fetched and self._unread(self._reader) is None:
            self.ahead_bytes -= self._sizes[self._reader]
            self._reader += 1

    def _unread(self, position: int) -> Record | None:
        """The record there, if it is still to be read."""
        record = self._records[position]()
        if record is None or record.state is RecordState.RELEASED:
            return None
        expected = self._passes[position]
        return (
            record
            if record.pass_no < expected or (record.pass_no == expected and record.unread > 0)
            else None
        )

    def look_back(self) -> None:
        """Look again from the first record that was fetched and dropped before it was read: nobody else would
        fetch it before its reader, who then drops the next one to make room, and so on to the end of the
        chunk."""
        for position in range(self._reader, self._fetched):
            record = self._unread(position)
            if record is not None and _is_away(record):
                self.ahead_bytes -= sum(self._sizes[position : self._fetched])
                self._fetched = position
                return

    def look(self, room: int, piece_bytes: int) -> Look | None:
        """The next records within `room` bytes, until about a piece is to be fetched. Nothing is taken until
        `take`. None: there are none.

        A record larger than the room is looked at all the same when nothing else is ahead of the reader.
        """
        fetch: list[Record] = []
        keep: list[Record] = []
        sizes: list[int] = []
        nbytes = fetch_bytes = 0
        position, end = self._fetched, len(self._records)
        while position < end and fetch_bytes < piece_bytes:
            # one that was read out of turn may live on, away, to the weight half
            record = self._unread(position)
            if record is None:
                sizes.append(0)
            else:
                if nbytes + record.nbytes > room and self.ahead_bytes + nbytes > 0:
                    break
                if fetch and record.capture is not fetch[-1].capture:
                    break  # a graph fetches what its own forward saved
                nbytes += record.nbytes
                sizes.append(record.nbytes)
                if record.state is RecordState.SPILLING:
                    keep.append(record)
                elif _is_away(record):
                    fetch.append(record)
                    fetch_bytes += record.nbytes
            position += 1
        return Look(fetch, keep, sizes, nbytes) if sizes else None

    def take(self, look: Look) -> None:
        """What `look` showed has been dealt with."""
        start, self._fetched = self._fetched, self._fetched + len(look.sizes)
        self._sizes[start : self._fetched] = look.sizes
        self.ahead_bytes += look.nbytes


def _is_away(record: Record) -> bool:
    """Whether its bytes have to come back: they are on the host, and nothing on the device still holds
    them."""
    return record.state is RecordState.SPILLED and (record.external or record.storage() is None)
