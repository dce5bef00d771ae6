"""What the engine keeps of saves, from autograd's graph up. The graph keeps, instead of a saved tensor, a
`Handle` of a tensor that may leave, or a `Passed` tensor that stays. Handles of one storage at one version
share a `Record`: which bytes it has, and whether they were changed since. `SavedGroup` and `SavedChunk` are
the saves of one group, and of one forward: which blocks they have, what still waits to leave, and in which
order they will be read.

One invariant: a handle and a passed tensor hold no reference to the graph node that holds them, and a handle
keeps only device bytes that its record's block counts. A record lives as long as a handle of it. When the
last handle dies, the record dies, and its finaliser frees the block. A group and a chunk keep no saved
tensor's bytes: blocks are held strongly, and freed ones are passed over; records are held weakly.

Saves that torch unpacks for a node whose gradients, in this backward, read them not: the halves of a split
backward unpack all operands of a product, and each reads one of them. In doubt a save is read. What is not
read may be given on meta, where a read would raise.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from offload.ids import ChunkId, GroupId, SlotId
from offload.transfer.block import DeviceBlock, Transfer, ViewLayout, living
from offload.transfer.coming import ComingReads


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Record:
    """Bookkeeping that the handles of one saved storage share.

    block: its bytes. probe: a tensor without bytes that counts the versions of what was saved first; None
    where the block stays, each of whose handles has an alias of its own. version: at the saves, which are all
    of one. layout: of every save so far, None once two differ. gathered: the block holds this sparse view,
    packed.
    """

    block: DeviceBlock
    probe: torch.Tensor | None
    version: int
    layout: ViewLayout | None = None
    gathered: ViewLayout | None = None

    @property
    def label(self) -> SlotId:
        return self.block.label

    def __del__(self) -> None:
        try:
            block = self.block
        except AttributeError:  # an interrupt in its constructor
            return
        if not block.is_freed:  # `DeviceBlock.free`, without a call: every record dies once
            block.is_freed = True
            block.device_bytes = None
            block.freed_blocks.append(block)

    def __repr__(self) -> str:
        return f"Record({self.block!r})"


class Handle:
    """Stand-in for a tensor in autograd's graph: names a record, and owns no storage unless that record
    stays.

    layout and probe: how to rebuild the tensor, and a tensor without bytes that counts its versions (the
    record's own where it was the first save). Where the record stays, layout is None and the probe an alias
    of the tensor, which is all that a read needs; None once the record is released. version: at the save.
    """

    __slots__ = ("__weakref__", "layout", "pass_no", "probe", "record", "version")

    def __init__(
        self, record: Record, layout: ViewLayout | None, probe: torch.Tensor | None, version: int
    ) -> None:
        self.record = record
        self.layout = layout
        self.probe = probe
        self.version = version
        self.pass_no = record.block.pass_no - 1  # not read yet in the pass under way


class Passed:
    """A tensor that stays where it is, in the graph's own keeping, with the version that it had.

    It holds a detached alias: the tensor itself, if it is the node's own output, would keep the node alive
    for ever.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        try:
            self.version: int | None = tensor._version
        except RuntimeError:  # an inference tensor counts none
            self.version = None
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()

    def read(self) -> torch.Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise modified(self.tensor.dtype, self.tensor.size(), self.tensor._version, self.version)
        return self.tensor


def counts_with(probe: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Predicate: two tensors count versions together. Views do; `.data` and the parts of `unsafe_chunk` share
    bytes and count alone. Moves the counter for a moment: nothing else tells. A backward that another thread
    runs may see that, and raise (docs/limits.md); a read of the store, under the engine's lock, does not."""
    version = probe._version
    _count((probe,), (version + 1,))
    try:
        return tensor._version != version
    finally:
        _count((probe,), (version,))


_count = torch._C._autograd._unsafe_set_version_counter


class ModifiedError(RuntimeError):
    """A saved tensor was written in place before it was read."""


def modified(dtype: torch.dtype, size: torch.Size, found: int, expected: int) -> ModifiedError:
    """The error that autograd itself would raise."""
    return ModifiedError(
        f"a saved tensor needed for the gradient computation was modified by an inplace operation: {dtype} "
        f"{list(size)} is at version {found}, expected version {expected}; clone it before the in-place "
        "change, or save it after"
    )


_READ_FOR = {
    "AddmmBackward0": {"_raw_saved_mat2": 1, "_raw_saved_mat1": 2},
    "BaddbmmBackward0": {"_raw_saved_batch2": 1, "_raw_saved_batch1": 2},
    "BmmBackward0": {"_raw_saved_mat2": 0, "_raw_saved_self": 1},
    "GroupedMmBackward0": {"_raw_saved_mat2": 0, "_raw_saved_self": 1},
    "MmBackward0": {"_raw_saved_mat2": 0, "_raw_saved_self": 1},
    "MulBackward0": {"_raw_saved_other": 0, "_raw_saved_self": 1},
}
"""torch's nodes that read each operand for one gradient alone: the place of that one."""

_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


def is_read(packed: object, unpacks: type) -> bool:
    """False where torch itself unpacks it, for a node that computes no gradient from it in this backward.
    packed: what autograd keeps. unpacks: whose method is its hook; another's may look at what it gets."""
    node: Any = torch._C._current_autograd_node()
    for name, place in _READ_FOR.get("" if node is None else node.name(), {}).items():
        saved = getattr(node, name)
        if saved.data is packed and type(getattr(saved.unpack_hook, "__self__", None)) is unpacks:
            before = node.next_functions[place][0]
            if not _asked_by_engine():
                return True
            try:
                return before is not None and torch._C._will_engine_execute_node(before)
            except RuntimeError:  # a leaf whose gradient is asked for
                return True
    return True


def _asked_by_engine() -> bool:
    """False where Python code does that runs for the node: a hook that looks at its node's saves."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("offload."):
        frame = frame.f_back
    return frame is None or frame.f_code is _RUN_BACKWARD  # none on a thread of autograd's own


@dataclass(slots=True, eq=False)
class SavedGroup:
    """The saves of one group in one step.

    pending: blocks that wait for their piece to be full. deferred: records of partial views, which wait for
    the commit.

    leaves: whether anything of it does. stays_from: the slot from which on its blocks stay nevertheless;
    None if all leave. kept_by_plan: nothing else keeps what stays, so it may leave after all. first_kept:
    leaves and stays_from as one number. kept: the record that the next storages that stay join; its handles
    hold it, so that a group that an exception left open holds nothing.
    unwritten_until: autograd's number while an operator runs of whose saves one has no gradient: rrelu saves
    its noise, and then draws it, unseen by any version. Its saves leave with the next one, or at the
    commit. waits: nothing leaves by itself; whoever owns the group spills its blocks.
    """

    id: GroupId
    leaves: bool = field(kw_only=True)
    waits: bool = field(default=False, kw_only=True)
    stays_from: int | None = field(default=None, kw_only=True)
    kept_by_plan: bool = field(default=False, kw_only=True)
    first_kept: int = field(init=False)
    blocks: list[DeviceBlock] = field(default_factory=list)
    pending: list[DeviceBlock] = field(default_factory=list)
    pending_bytes: int = 0
    deferred: list[weakref.ref[Record]] = field(default_factory=list)
    kept: weakref.ref[Record] | None = None
    nbytes: int = 0  # eligible bytes, one count a storage: what leaves if the group does
    logical_bytes: int = 0  # the same, one count a saved tensor
    slots: int = 0
    slot_bytes: dict[int, int] = field(default_factory=dict)  # eligible bytes of each storage
    moved_bytes: int = 0  # of its blocks that left, one count a storage
    transfers: list[Transfer] = field(default_factory=list)
    unwritten_until: int = -1
    in_figures: bool = False  # the figures of a step have it

    def __post_init__(self) -> None:
        self.first_kept = (sys.maxsize if self.stays_from is None else self.stays_from) if self.leaves else 0

    def leaves_after_all(self) -> None:
        """From here on no more of it stays: this step is longer than the one that the plan was made for."""
        self.leaves, self.first_kept = True, sys.maxsize

    def keeps(self, slot: int) -> bool:
        """Return True if the plan keeps the storage of that slot."""
        return slot >= self.first_kept

    def living(self) -> Iterator[DeviceBlock]:
        return living(self.blocks)


@dataclass(slots=True, eq=False)
class SavedChunk:
    """The saves of one forward.

    readable: its forward is complete, so fetching it back ahead of time makes sense. coming: what a backward
        will read, in order. table: by storage, until the forward is complete, weakly who has saved it last: a
        record, or the handle of a storage that stays.
    noted: blocks of the latest saves, where somebody has begun a list of them, until `take_noted`.
    """

    id: ChunkId
    blocks: list[DeviceBlock] = field(default_factory=list)
    table: dict[int, weakref.ref[Record] | weakref.ref[Handle]] = field(default_factory=dict)
    touches: int = 0
    readable: bool = False
    coming: ComingReads = field(init=False)
    noted: list[DeviceBlock] | None = None

    def __post_init__(self) -> None:
        self.coming = ComingReads(self.id)

    def living(self) -> Iterator[DeviceBlock]:
        return living(self.blocks)

    def complete(self) -> None:
        """The forward is over: nothing joins any more, and the coming reads are the saves in reverse."""
        if not self.readable:
            self.readable = True
            self.table.clear()
            self.noted = None
            self.expect_reverse()

    def take_noted(self) -> list[DeviceBlock]:
        """The blocks of the noted saves, in order."""
        noted, self.noted = self.noted, None
        return list(living(noted or ()))

    def read_together(self, blocks: Sequence[DeviceBlock]) -> None:
        """Where a backward comes to the latest of these saves, it reads them all, first to last: a recompute
        reads what its forward kept in the forward's order. The coming reads are by touch, latest first, so
        the first of them gets the latest one."""
        for block in reversed(blocks):
            self.touches += 1
            block.touch = self.touches

    def ends_here(self) -> None:
        """The last pass over the graph begins: nothing stays for another one."""
        for block in self.blocks:
            block.reread_soon = False

    def expect_reverse(self, passed: Collection[DeviceBlock] = (), after: Sequence[DeviceBlock] = ()) -> None:
        """The coming reads are the saves in reverse of their latest touch: a whole backward, or an input
        half. passed: what that half does not read. after: of these, what is fetched behind its reads."""
        blocks = [block for block in self.living() if block not in passed]
        self.coming.expect(sorted(blocks, key=lambda block: -block.touch), after)

    def expect(self, reads: Iterable[tuple[int, int]]) -> None:
        """The coming reads are these (group, slot) pairs, as an earlier microbatch was seen to read them;
        none for ()."""
        self.coming.expect(self.at(reads))

    def at(self, places: Iterable[tuple[int, int]]) -> list[DeviceBlock]:
        """The living blocks at these (group, slot) pairs, in their order, each once."""
        by_place = {(block.group.place, block.slot): block for block in self.living()}
        return [by_place[place] for place in dict.fromkeys(places) if place in by_place]
