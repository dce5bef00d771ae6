"""What the two halves of a split backward read, as an earlier microbatch of the virtual stage was seen to.

torch's I runs the nodes between a stage's output and its input, and each reads what it has saved, but for
operands that it needs for a weight's gradient alone (saved/unread.py): a quarter of the bytes of a
transformer block. Its W runs once more the nodes that a weight hangs on, about two fifths of the bytes. All
nodes live until the W has ended, and so do their handles. One invariant: this is a hint. A tensor that is
read although no W was seen to read it comes back like any other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from offload.groups.group import Group
from offload.saved.chunk import SavedChunk
from offload.transfer.block import BlockState, DeviceBlock
from offload.transfer.engine import TransferEngine


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
        """Whether a W was seen."""
        return bool(self._weight)

    def passed_over(self, saved: SavedChunk) -> set[DeviceBlock]:
        """What the I of this chunk will not read, and its W will."""
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
        """What was seen first holds, until a chunk of another shape, or more than that, is read: of what a
        plan keeps, the reads of single tensors are not seen."""
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
