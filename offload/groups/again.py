"""The recomputed calls of chunks whose backward is split: what the weight half (W) was seen to read of each,
and what the input half (I) leaves for it.

What a W reads of a recomputed call are tensors that no group has saved. Either the I leaves them on the
device, where they are counted as resident until the W is done with the call; or the W computes the call
again. One invariant: this is a hint. A W that finds something missing computes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple, Protocol

from offload.engine import OffloadEngine
from offload.ids import ChunkId
from offload.policy.actions import ChunkKey

_NOTHING: frozenset[int] = frozenset()


class _Call(Protocol):
    def let_go(self, *, ended: bool) -> bool: ...


class _Known(NamedTuple):
    """What a W has read of a call: the numbers of its saves, out of so many, and their bytes. passed_bytes:
    of these, what the I did not read."""

    saves: frozenset[int]
    num_saves: int
    nbytes: int
    passed_bytes: int


_NOT_READ = _Known(_NOTHING, 0, 0, 0)


class RecomputedHalves:
    """What halves of split backwards compute again, for one manager. Callers hold the engine's lock, but for
    `CallReads`."""

    def __init__(self, engine: OffloadEngine) -> None:
        self.engine = engine
        self.half = ""
        self.chunk: ChunkId | None = None  # whose half that is
        self._calls: list[_Call] = []  # that have read in it
        self._known: dict[tuple[int, int], _Known] = {}  # by stage, and place of the input's group
        self._places: defaultdict[ChunkId, list[int]] = defaultdict(list)  # of the calls of this step
        self._granted: dict[ChunkId, frozenset[int]] = {}
        self._left: dict[tuple[ChunkId, int], int] = {}  # bytes on the device

    def reads(self, chunk: ChunkId, place: int) -> CallReads:
        """Reads of the recomputed call that begins in `chunk` and whose input is the group at `place`."""
        if place in self._places[chunk]:  # the forward is run again
            self._places[chunk].clear()
        self._places[chunk].append(place)
        return CallReads(self, chunk, place)

    def begin(self, half: str, chunk: ChunkId) -> None:
        """A half of a chunk's backward begins."""
        self.half, self.chunk = half, chunk

    def leave_for_weight_half(self, chunk: ChunkId, room_bytes: float) -> frozenset[int]:
        """An I begins. Of its calls those that the W reads first leave something for it, up to `room_bytes`.
        Returns their places."""
        granted: list[int] = []
        for place in self._places.get(chunk, ()):
            known = self._known.get((chunk.stage, place))
            room_bytes -= 0 if known is None else known.nbytes
            if known is None or room_bytes < 0:
                break
            granted.append(place)
        self._granted[chunk] = frozenset(granted)
        return self._granted[chunk]

    def left(self, chunk: ChunkId) -> frozenset[int]:
        """The places of the calls of which the I of this chunk leaves something."""
        return self._granted.get(chunk, _NOTHING)

    def left_bytes(self, chunk: ChunkId, place: int) -> int:
        """What the I of this chunk leaves of the call at `place`."""
        return self._known[chunk.stage, place].nbytes if place in self.left(chunk) else 0

    def seen(self) -> dict[ChunkKey, list[tuple[int, int, bool]]]:
        """Bytes that a W was seen to read of each recomputed call, in forward order by chunk of this step,
        those of them that the I did not read, and whether the W computed nothing again; without the calls
        that were not seen."""
        return {
            chunk: [
                (known.nbytes, known.passed_bytes, known is _NOT_READ or place in self.left(chunk))
                for place in places
                if (known := self._known.get((chunk.stage, place))) is not None
            ]
            for chunk, places in self._places.items()
        }

    def end(self) -> None:
        """The half is over: its recomputes are gone, but for what an I leaves."""
        half, chunk, self.half, self.chunk = self.half, self.chunk, "", None
        calls, self._calls = self._calls, []
        for call in calls:
            call.let_go(ended=True)
        if half == "W" and chunk is not None:
            for place in self._places.get(chunk, ()):  # a block that is frozen
                self._known.setdefault((chunk.stage, place), _NOT_READ)
        self.engine.transfers.claim(0)

    def end_step(self) -> None:
        """Nothing of the step is read any more."""
        self.half, self.chunk = "", None
        self._calls.clear()
        for nbytes in self._left.values():
            self.engine.transfers.hold(-nbytes)
        self._left.clear()
        self._places.clear()
        self._granted.clear()


class CallReads:
    """What is known of the backward of one call, for offload.checkpoint.hidden_states."""

    __slots__ = ("_all", "_chunk", "_place")

    def __init__(self, every: RecomputedHalves, chunk: ChunkId, place: int) -> None:
        self._all = every
        self._chunk = chunk
        self._place = place

    @property
    def half(self) -> str:
        return self._all.half if self._all.chunk is self._chunk else ""

    def begin(self, call: _Call, num_saves: int) -> Collection[int]:
        every = self._all
        with every.engine.lock:
            if every.half == "W":
                every._calls = [other for other in every._calls if not other.let_go(ended=False)]
            every._calls.append(call)
            known = every._known.get((self._chunk.stage, self._place))
            if every.half == "I" and self._place in every.left(self._chunk) and known is not None:
                return known.saves if known.num_saves == num_saves else ()
            return ()

    def leave(self, nbytes: int) -> None:
        every, key = self._all, (self._chunk, self._place)
        with every.engine.lock:
            every.engine.transfers.hold(nbytes - every._left.get(key, 0))
            every._left[key] = nbytes

    def weight_half_read(
        self, saves: Collection[int], num_saves: int, nbytes: int, passed_bytes: int
    ) -> None:
        every, key = self._all, (self._chunk.stage, self._place)
        with every.engine.lock:
            every.engine.transfers.hold(-every._left.pop((self._chunk, self._place), 0))
            known = every._known.get(key)
            if known is None or known.num_saves != num_saves or not known.saves.issuperset(saves):
                every._known[key] = _Known(frozenset(saves), num_saves, nbytes, passed_bytes)
            elif nbytes != known.nbytes and known.saves == saves:  # of another length
                every._known[key] = known._replace(nbytes=nbytes, passed_bytes=passed_bytes)
