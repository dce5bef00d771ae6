"""What the two halves of a split backward read: the input half (I) and the weight half (W) of saved tensors,
as an earlier microbatch of the virtual stage was seen to, and the W of recomputed calls, with what the I
leaves for it.

torch's I runs the nodes between a stage's output and its input, and each reads what it has saved, but for
operands that it needs for a weight's gradient alone (saved/handles.py): a quarter of the bytes of a
transformer block. Its W runs once more the nodes that a weight hangs on, about two fifths of the bytes. All
nodes live until the W has ended, and so do their handles.

What a W reads of a recomputed call are tensors that no group has saved. Either the I leaves them on the
device, where they are counted as resident until the W is done with the call; or the W computes the call
again.

One invariant: this is a hint. A tensor that is read although no W was seen to read it comes back like any
other, and a W that finds something of a recomputed call missing computes it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from offload.engine import OffloadEngine
from offload.groups.group import Group
from offload.ids import ChunkId
from offload.policy.actions import ChunkKey
from offload.saved.handles import SavedChunk
from offload.transfer.block import BlockState, DeviceBlock
from offload.transfer.engine import TransferEngine

_NOTHING: frozenset[int] = frozenset()


class _Call(Protocol):
    def let_go(self, *, ended: bool) -> bool: ...


class _Known(NamedTuple):
    """Reads that a W has made of a call: the numbers of its saves, out of so many, and their bytes.
    passed_bytes: of these, what the I did not read."""

    saves: frozenset[int]
    num_saves: int
    nbytes: int
    passed_bytes: int


_NOT_READ = _Known(_NOTHING, 0, 0, 0)


class RecomputedHalves:
    """Recomputes by the halves of split backwards, for one manager. Callers hold the engine's lock, but for
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
        """Bytes that the I of this chunk leaves of the call at `place`."""
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
    """Reads that are known of the backward of one call, for offload.checkpoint.hidden_states."""

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


class HalfReads:
    """Reads of the two halves of one virtual stage's backward.

    input_reads: whether its I reads anything, None before one was seen. On stage 0 it does not, and the W is
        the whole reverse read.
    """

    def __init__(self) -> None:
        self.input_reads: bool | None = None
        self._weight: Mapping[tuple[int, int], int] = {}
        self._slots: Mapping[int, frozenset[int]] = {}
        self._passed: frozenset[tuple[int, int]] = frozenset()  # what the W reads and the I does not
        self._shape: Sequence[int] = ()
        self._left: frozenset[int] = frozenset()
        # where the W reads of other calls what their recompute made: by those calls
        self._others: dict[frozenset[int], tuple[Any, Any, Any, Any]] = {}
        self._input: set[tuple[int, int]] = set()  # what the last I has read

    @property
    def is_known(self) -> bool:
        """Predicate: a W was seen."""
        return bool(self._weight)

    def passed_over(self, saved: SavedChunk) -> set[DeviceBlock]:
        """Blocks that the I of this chunk will not read, and its W will."""
        return set(saved.at(self._passed) if self._passed else ())

    def leave_for_weight_half(
        self, saved: SavedChunk, room_bytes: int, left: frozenset[int] = frozenset()
    ) -> bool:
        """An I begins: of what it brings back, the bytes that its W reads first, and it reads last, are to
        stay, up to `room_bytes`; those that it does not read itself come back behind its reads. Returns
        whether that is all that the W reads. left: places of the recomputed calls of which the W reads what
        their recompute made, and neither their input nor what they kept."""
        self._select(left)
        passed, after = self.passed_over(saved), list[DeviceBlock]()
        for block in saved.at(self._weight):
            room_bytes -= block.nbytes
            if room_bytes < 0:
                break
            block.reread_soon = True
            if block in passed:
                after.append(block)
        if passed:
            saved.expect_reverse(passed, after)
        return self.is_known and room_bytes >= 0

    def input_half_ended(
        self, saved: SavedChunk, transfers: TransferEngine, log: Iterable[DeviceBlock]
    ) -> None:
        """An I has ended: what it did not leave for its W is dropped, as the host has it, and the coming
        reads are those of the W. log: the block of each of its reads."""
        self.input_reads = True
        self._input = {
            (block.group.place, slot)
            for block in set(log)
            for slot in range(block.slot, block.slot + block.storages)
        }
        for block in saved.living():
            reads = self._weight.get((block.group.place, block.slot), 0)
            if block.state is BlockState.RESTORED and not block.reread_soon:
                transfers.drop(block)
            if block.holders is None and reads:
                block.readers = reads
            elif self.is_known:
                transfers.unreclaim(block)
        saved.expect(self._weight)

    def weight_half_ended(
        self, log: Iterable[DeviceBlock], groups: Sequence[Group], left: frozenset[int] = frozenset()
    ) -> None:
        """A W has ended. log: the block of each of its reads. groups: of its chunk, which learn what it
        read. left: as for its I."""
        self._select(left)
        if self.input_reads:
            self._learn(list(log), [group.total_tensor_count for group in groups])
            for place, group in enumerate(groups):
                group.half_slots = self._slots.get(place, frozenset())
                group.passed_slots = frozenset(slot for at, slot in self._passed if at == place)

    def _select(self, left: frozenset[int]) -> None:
        """Go on with what was seen where these calls were left; where nothing was, with what was seen
        last."""
        if left != self._left:
            self._others[self._left] = self._weight, self._slots, self._passed, self._shape
            self._left = left
            self._weight, self._slots, self._passed, self._shape = self._others.get(
                left, (self._weight, self._slots, self._passed, ())
            )

    def _learn(self, log: Sequence[DeviceBlock], shape: Sequence[int]) -> None:
        """Learn what a W reads: what was seen first holds, until a chunk of another shape, or more than that,
        is read, since of what a plan keeps the reads of single tensors are not seen."""
        reads = Counter((block.group.place, block.slot) for block in log if block.holders is None)
        if shape == self._shape and reads.keys() <= self._weight.keys():
            return
        for block in log:
            if block.holders is not None:
                for slot in range(block.slot, block.slot + block.storages):
                    reads.setdefault((block.group.place, slot), 1)
        slots: defaultdict[int, set[int]] = defaultdict(set)
        for place, slot in reads:
            slots[place].add(slot)
        self._weight, self._shape = reads, shape
        self._passed = frozenset(reads.keys() - self._input)
        self._slots = {place: frozenset(own) for place, own in slots.items()}
